"""A fine-tuned run, opened for use."""

import dataclasses
import os

from bert_tf import checkpoints
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from tasks.catalog import task_from_dict
from tasks.pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run with its task, and the pipeline of its model under the chosen checkpoint's weights."""

    run: Run
    task: object
    pipeline: Pipeline
    checkpoint: str

    @classmethod
    def open(cls, path, checkpoint=None):
        """Opens a fine-tuned run; `checkpoint`, a folder's name, overrides best or newest.

        Raises UserError if it is no run, or one without a task.
        """
        run = Run.open(path)
        if run.task is None:
            raise UserError(
                f"{run.path}: pretrained, but not fine-tuned for a task; run tasks.finetune "
                f"--init_from={run.path}"
            )
        task = task_from_dict(run.task)
        folder = (
            os.path.join(run.checkpoints.directory, checkpoint)
            if checkpoint
            else run.checkpoints.folder(run.checkpoints.chosen_step())
        )
        model = task.build_model(run.config)
        checkpoints.assign(
            checkpoints.model_variables(model),
            checkpoints.read(folder),
            folder,
            ignore=checkpoints.TRAINING_ONLY,
        )
        tokenizer = Tokenizer(run.vocabulary, run.config.do_lower_case, run.config.strip_accents)
        return cls(run, task, Pipeline(task, tokenizer, model), folder)

    @classmethod
    def create(cls, path, pretrained, task, model):
        """Writes a model trained elsewhere, under `fit` say, as a run directory, and opens it.

        `pretrained` is the Pretrained that it began with: configuration, vocabulary and origin come
        from there.
        """
        run = Run.create(
            path,
            pretrained.config,
            pretrained.vocabulary,
            train={"origin": pretrained.origin_in(model)},
            task=task.to_dict(),
        )
        run.checkpoints.save(0, checkpoints.model_variables(model))
        return cls.open(path)
