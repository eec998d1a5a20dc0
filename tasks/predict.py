"""Predict rows of text, in their order, as JSON lines with the fields of the served model.

    bert-tf predict --run=RUN --input=rows.csv --output=predictions.jsonl
    bert-tf predict --run=RUN --text="My invoice is wrong."

With --output_dir, several processes write shards of the predictions, also on a cluster, and an
interrupted command continues where it stopped. --run may then be a published model.

    bert-tf predict --run=RUN --input='rows-*.csv.gz' --output_dir=PREDICTIONS

With --text the prediction is printed. A task with several inputs takes --text once per input, in
their order: both texts of a pair, question and context, or prompt and each choice.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.storage import strict_json
from bert_tf.system import command
from tasks.base.task_types import check_run, check_unlabelled, task_type
from tasks.data.readers.glue import check_submission
from tasks.data.readers.rows import BadRow, Example
from tasks.graph.published import published_task, published_version
from tasks.prediction.outputs import (
    OutputSettings,
    PredictionJob,
    predict,
    predict_batch,
    submit,
    write_output_shards,
)


@dataclasses.dataclass(frozen=True)
class PredictSettings(OutputSettings):
    """Settings of bert-tf predict."""

    run: str = command.flag(
        "run directory, or another fine-tuned model: a --from of convert; with --output_dir also a "
        "published model"
    )
    input: str | None = command.flag(
        "input file, in a format of the task, with --output_dir also a glob; labels are not needed",
        None,
    )
    output: str | None = command.flag(
        "output file, .jsonl; for a test file of GLUE also .tsv, a submission", None
    )
    text: tuple[str, ...] = command.flag(
        "text to predict instead of a file, once per input of the task", (), repeated=True
    )
    checkpoint: str | None = command.flag(
        "directory in RUN/checkpoints; by default the best, else the latest", None
    )
    batch_size: int = command.flag("rows per batch", 64, bounds={">=": 1})
    overwrite: bool = command.flag("replacement of an existing output file", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.text:
            command.check_text("text", text)
        if self.text:
            if self.input or self.output or self.output_dir:
                raise UserError(
                    "--text: expected without --input, --output and --output_dir; it is printed"
                )
            return
        if not (self.input and (self.output or self.output_dir)):
            raise UserError("expected --input and --output or --output_dir, or --text")
        self.check_output(self.input, self.output, self.run, self.overwrite)
        if self.output and not self.output.endswith((".jsonl", ".tsv")):
            raise UserError(f"--output={self.output}: expected a .jsonl file")

    def check(self) -> None:
        """Check the run and the head of the input before TensorFlow is imported.

        Raises:
            UserError: If they cannot be used.
        """
        version = published_version(self.run) if self.output_dir else None
        if version:
            if self.checkpoint:
                raise UserError(f"--checkpoint: expected a run as --run, received {self.run}")
            task = published_task(version)
        elif run := check_run(self.run, self.checkpoint):
            task = run.task or {"kind": "pretrained"}
        else:
            return
        for path in self.input_files(self.input) if self.input else ():
            # A submission has a prediction for every row.
            check_unlabelled(task, path, accepts_bad=not str(self.output).endswith(".tsv"))
        if self.output and self.output.endswith(".tsv"):
            check_submission(self.output, task.get("file_format"), self.run)


def main(settings: PredictSettings) -> None:
    """Predict the input file and log the number of rows, or print the prediction of the text."""
    # Imported here, since they import TensorFlow, which flags and inputs are checked before.
    from bert_tf.storage.ownership import sole_output

    if settings.text:
        model = _load(settings)
        row = Example(model.task.row_of(settings.text), None, "--text")
        (prediction,) = predict_batch(model.serving, [row])
        if isinstance(prediction, BadRow):
            raise UserError(str(prediction))
        print(strict_json.dumps_result(prediction, settings.run))
        for line in model.serving.take_token_counts().warnings("--text", allows_unknown=True):
            command.log(f"warning: {line}")
        return
    assert settings.input
    if settings.output_dir:
        _predict_shards(settings)
        return
    assert settings.output
    with sole_output(settings.output, settings.overwrite):
        model = _load(settings)
        arguments = (model, settings.input, settings.output, settings.batch_size, command.log)
        if settings.output.endswith(".tsv"):
            command.log(f"{settings.output}: submission of {submit(*arguments)} rows")
            return
        count, bad = predict(*arguments)
    _log_rows(settings.output, count, bad)


def _log_rows(path, count, bad):
    wrong = f", {bad} of them bad, with an error instead of a prediction" if bad else ""
    command.log(f"{path}: {count} rows{wrong}")


def _predict_shards(settings):
    common = {"batch_size": settings.batch_size, "file_format": settings.file_format}
    if version := published_version(settings.run):
        job = PredictionJob(model=version, task=published_task(version), **common)
    else:
        command.import_tensorflow()
        task, name = _task_and_checkpoint(settings)
        job = PredictionJob(model=settings.run, task=task, checkpoint=name, **common)
    # Workers import this command, not a script that adds a type and calls it.
    job = dataclasses.replace(job, task_type=task_type(job.task["kind"]))
    counts = write_output_shards(job, settings, settings.input, common, command.log)
    _log_rows(settings.output_dir, *counts)


def _task_and_checkpoint(settings):
    """Return the task of a run and the name of its checkpoint; of other weights, `None`."""
    from tasks.graph.run_checkpoint import RunCheckpoint
    from tasks.model.loading import read_fine_tuned

    if settings.checkpoint is None and not Run.exists(settings.run):
        pretrained, task = read_fine_tuned(settings.run)
        command.log(pretrained.origin)
        return task.to_dict(), None
    source = RunCheckpoint.open(settings.run, settings.checkpoint)
    _check_tuned(source)
    return source.run.task or {"kind": "pretrained"}, os.path.basename(source.path)


def _load(settings):
    from bert_tf.train.distribution import use_precision
    from tasks.model.loading import load_model

    use_precision("float32")
    model = load_model(settings.run, checkpoint=settings.checkpoint)
    if model.source:
        _check_tuned(model.source)
    else:
        command.log(model.record["origin"])
    return model


def _check_tuned(source):
    if source.untuned:
        if task_type(source.task.kind).needs_dev:
            raise UserError(source.untuned)
        command.log(f"warning: {source.untuned}")


if __name__ == "__main__":
    command.run_main(main, PredictSettings, __doc__)
