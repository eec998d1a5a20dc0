"""A fine-tuned run, opened for use."""

import dataclasses
import os

from bert_tf import checkpoints
from bert_tf.errors import UserError
from bert_tf.run import Run
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.weights import names
from tasks.catalog import task_from_dict
from tasks.pipeline import Pipeline
from tasks.pretrained import Pretrained, PretrainedPipeline


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run with its task, and the pipeline of its model under the chosen checkpoint's weights."""

    run: Run
    task: object
    pipeline: Pipeline
    checkpoint: str

    @classmethod
    def open(cls, path, checkpoint=None):
        """Opens a run; `checkpoint`, a folder's name, overrides best or newest.

        One without a task, which was only pretrained, is Pretrained: it has the pretraining heads.
        Raises UserError if it is no run.
        """
        run = Run.open(path)
        if run.task is None:
            task = Pretrained(max_seq_length=run.config.max_position_embeddings)
            make_pipeline = PretrainedPipeline
        else:
            task, make_pipeline = task_from_dict(run.task), Pipeline
        folder = (
            os.path.join(run.checkpoints.directory, checkpoint)
            if checkpoint
            else run.checkpoints.folder(run.checkpoints.chosen_step())
        )
        values = checkpoints.read(folder)
        # Before a model of another size is built, which might not fit into memory.
        checkpoints.check_shapes(names.shapes(run.config), values, folder)
        if task.max_seq_length > run.config.max_position_embeddings:
            raise UserError(
                f"{run.path}: task.json has max_seq_length {task.max_seq_length}, config.json "
                f"{run.config.max_position_embeddings} positions"
            )
        model = task.build_model(run.config)
        if run.task is None and not any(name.startswith("masked_lm/") for name in values):
            raise UserError(
                f"{run.path}: neither fine-tuned for a task nor with the heads of pretraining; run "
                f"tasks.finetune --init_from={run.path}"
            )
        checkpoints.assign(
            checkpoints.model_variables(model), values, folder, ignore=checkpoints.TRAINING_ONLY
        )
        tokenizer = Tokenizer(run.vocabulary, run.config.do_lower_case, run.config.strip_accents)
        return cls(run, task, make_pipeline(task, tokenizer, model), folder)

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
