"""Fine-tuned runs, opened for use."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

from bert_tf import checkpoints
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import use_precision
from bert_tf.weights import name_map
from tasks.masked_lm import MaskedLmPipeline, MaskedLmTask
from tasks.pipeline import Pipeline
from tasks.tuning import task_at, tuned_at

if TYPE_CHECKING:
    from tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A run with its task and the pipeline of one checkpoint.

    Attributes:
        run: The run.
        task: The task, with the values that were tuned for this checkpoint.
        pipeline: The pipeline of the model with the checkpoint's weights.
        checkpoint: Path of the checkpoint.
        tuned: What was tuned (tasks/tuning.py), or `None`.
    """

    run: Run
    task: Task
    pipeline: Pipeline
    checkpoint: str
    tuned: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: str, checkpoint: str | None = None) -> Self:
        """Open a run. A run that was only pretrained becomes a `MaskedLmTask` task.

        Args:
            path: Run directory.
            checkpoint: Name of a directory in its checkpoints; by default the best, else the
                latest.

        Raises:
            UserError: If it is not a run, or cannot be used with its checkpoint.
        """
        run = Run.open(path)
        step = (
            run.checkpoints.step_of(checkpoint)
            if checkpoint
            else run.checkpoints.best_or_latest_step()
        )
        task: Task
        if run.task is None:
            task, tuned = MaskedLmTask(max_seq_length=run.config.max_position_embeddings), None
        else:
            task, tuned = task_at(run, step), tuned_at(run, step)
        pipeline = MaskedLmPipeline if isinstance(task, MaskedLmTask) else Pipeline
        directory = run.checkpoints.path(step)
        values = checkpoints.read(directory)
        # Checked before the model is built, since one of another size might not fit into memory.
        checkpoints.check_shapes(name_map.weight_shapes(run.config), values, directory)
        if task.max_seq_length > run.config.max_position_embeddings:
            raise UserError(
                f"{run.path}: task.json: expected max_seq_length of at most "
                f"{run.config.max_position_embeddings}, the number of positions in config.json, "
                f"received {task.max_seq_length}"
            )
        model = task.build_model(run.config, use_precision("float32"))
        # A run without a task may be a converted checkpoint that has no pretraining heads.
        if run.task is None and not any(name.startswith("masked_lm/") for name in values):
            raise UserError(
                f"{run.path}: expected a fine-tuned run or one with pretraining heads, received "
                f"neither; run tasks.finetune --init_from={run.path}"
            )
        variables = checkpoints.model_variables(model)
        # Converted weights have no dropout state, which predictions do not use.
        dropout_state = {name for name in variables if name.startswith("dropout_seed/")}
        checkpoints.assign(
            {
                name: variable
                for name, variable in variables.items()
                if name in values or name not in dropout_state
            },
            values,
            directory,
            ignore=checkpoints.OPTIMIZER_STATE,
        )
        tokenizer = Tokenizer.from_config(run.config, run.vocabulary)
        return cls(run, task, pipeline(task, tokenizer, model), directory, tuned)

    @property
    def untuned(self) -> str | None:
        """One line naming requested fields that are not tuned here, and the remedy; or `None`."""
        if not self.task.untuned_fields or not self._asks_for_tuning():
            return None
        names, best = (
            ", ".join(self.task.untuned_fields),
            self.run.checkpoints.best_or_latest_step(),
        )
        if tuned_at(self.run, best):
            directory = os.path.basename(self.run.checkpoints.path(best))
            remedy = f"was fitted to {directory} only; omit --checkpoint to use that checkpoint"
        elif "settings" in self.run.train:
            remedy = (
                "was never fitted, since the run stopped earlier; run the same tasks.finetune "
                f"command again (its flags are in {self.run.file('train.json')}) to tune the best "
                "checkpoint"
            )
        else:
            remedy = "was never fitted; call tune(x, y) of the model"
        return f"{self.checkpoint}: untuned: {names} {remedy}"

    def _asks_for_tuning(self):
        # Without a dev file, values that are only tuned because there is one were never requested.
        has_dev = bool(self.run.train.get("settings", {}).get("dev"))
        return has_dev or not self.task.tunes_without_request
