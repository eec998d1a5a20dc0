"""A fine-tuned run, opened for use."""

import dataclasses
import os

from bert_tf import checkpoints
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import use_precision
from bert_tf.weights import name_map
from tasks.masked_lm import MaskedLm, MaskedLmPipeline
from tasks.pipeline import Pipeline
from tasks.tuning import task_at, tuned_at


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A run with its task, and the pipeline of its model under the chosen checkpoint's weights.

    `task` has the values that were tuned for this checkpoint, of which `tuned` tells the rest
    (tasks/tuning.py), or None.
    """

    run: Run
    task: object
    pipeline: Pipeline
    checkpoint: str
    tuned: dict | None = None

    @classmethod
    def open(cls, path, checkpoint=None):
        """Opens a run; `checkpoint`, a folder's name, overrides best or newest.

        One without a task, which was only pretrained, is MaskedLm: it has the pretraining heads.
        Raises UserError if it is no run.
        """
        run = Run.open(path)
        step = (
            run.checkpoints.step_of(checkpoint)
            if checkpoint
            else run.checkpoints.best_or_latest_step()
        )
        tuned = None
        if run.task is None:
            task = MaskedLm(max_seq_length=run.config.max_position_embeddings)
            make_pipeline = MaskedLmPipeline
        else:
            task, tuned, make_pipeline = task_at(run, step), tuned_at(run, step), Pipeline
        directory = run.checkpoints.path(step)
        values = checkpoints.read(directory)
        # Before a model of another size is built, which might not fit into memory.
        checkpoints.check_shapes(name_map.weight_shapes(run.config), values, directory)
        if task.max_seq_length > run.config.max_position_embeddings:
            raise UserError(
                f"{run.path}: task.json has max_seq_length {task.max_seq_length}, config.json "
                f"{run.config.max_position_embeddings} positions"
            )
        model = task.build_model(run.config, use_precision("float32"))
        if run.task is None and not any(name.startswith("masked_lm/") for name in values):
            raise UserError(
                f"{run.path}: neither fine-tuned for a task nor with the heads of pretraining; run "
                f"tasks.finetune --init_from={run.path}"
            )
        checkpoints.assign(
            checkpoints.model_variables(model),
            values,
            directory,
            ignore=checkpoints.OPTIMIZER_STATE,
        )
        tokenizer = Tokenizer(run.vocabulary, run.config.do_lower_case, run.config.strip_accents)
        return cls(run, task, make_pipeline(task, tokenizer, model), directory, tuned)

    @classmethod
    def create(cls, path, pretrained, task, model):
        """Writes a model trained elsewhere, under `fit` say, as a run directory, and opens it.

        `pretrained` is the PretrainedWeights that it began with: configuration, vocabulary and
        origin come from there.
        """
        with Run.writing(path):
            run = Run.create(
                path,
                pretrained.config,
                pretrained.vocabulary,
                train={"origin": pretrained.origin_in(model)},
                task=task.with_tuned({}).to_dict(),
            )
            run.checkpoints.save(0, checkpoints.model_variables(model))
            if task.tunable_fields and not task.untuned_fields:
                values = {name: getattr(task, name) for name in task.tunable_fields}
                run.checkpoints.set_tuned(0, {"values": values, "metrics": {}})
        return cls.open(path)

    @property
    def untuned(self) -> str | None:
        """What was to be tuned and is not for this checkpoint, and what to do, as a line."""
        if not self.task.untuned_fields or not self._asks_for_tuning():
            return None
        names, best = (
            ", ".join(self.task.untuned_fields),
            self.run.checkpoints.best_or_latest_step(),
        )
        if tuned_at(self.run, best):
            directory = os.path.basename(self.run.checkpoints.path(best))
            remedy = f"was fitted to {directory} only; leave out --checkpoint to use that"
        elif "settings" in self.run.train:
            remedy = (
                "was never fitted, since the run stopped before; the same tasks.finetune command "
                f"(its flags are in {self.run.file('train.json')}) tunes the best checkpoint"
            )
        else:
            remedy = "was never fitted; call Task.tune before TrainedModel.create"
        return f"{self.checkpoint}: untuned: {names} {remedy}"

    def _asks_for_tuning(self):
        has_dev = bool(self.run.train.get("settings", {}).get("dev"))
        return has_dev or not self.task.tunes_without_request
