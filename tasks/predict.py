"""Predict rows of text, in their order, as JSON lines with the fields of the served model.

    python -m tasks.predict --run=RUN --input=rows.csv --output=predictions.jsonl
    python -m tasks.predict --run=RUN --text="My invoice is wrong."

With --text the prediction is printed. A task with several inputs takes --text once per input, in
their order: both texts of a pair, question and context, or prompt and each choice.
"""

import dataclasses
import json

from bert_tf import command, paths
from bert_tf.errors import UserError
from tasks import inputs
from tasks.readers.glue import check_submission


@dataclasses.dataclass(frozen=True)
class PredictSettings:
    """Settings of tasks.predict."""

    run: str = command.flag("run directory")
    input: str | None = command.flag(
        "input file, in a format of the task; labels are not needed", None
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
    batch_size: int = command.flag("rows per batch", 64, former_name="global_batch_size")
    overwrite: bool = command.flag("replacement of an existing output file", False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"--batch_size={self.batch_size}: expected an integer >= 1")
        if self.text:
            if self.input or self.output:
                raise UserError("--text: expected without --input and --output; it is printed")
            return
        if not (self.input and self.output):
            raise UserError("expected --input and --output, or --text")
        paths.check_local_file("input", self.input)
        paths.check_output(self.output, [self.input, self.run], self.overwrite)

    def check(self) -> None:
        """Check the run and the head of the input before TensorFlow is imported.

        Raises:
            UserError: If they cannot be used.
        """
        run = inputs.check_run(self.run, self.checkpoint)
        if run and self.input and self.output:
            inputs.check_rows(run.task, self.input, labelled=False, first_only=True)
            file_format = (run.task or {}).get("file_format")
            if self.output.endswith(".tsv"):
                check_submission(self.output, file_format, self.run)


def main(settings: PredictSettings) -> None:
    """Predict the input file and log the number of rows, or print the prediction of the text."""
    # Imported here, since they import TensorFlow, which flags and inputs are checked before.
    from bert_tf.ownership import sole_output
    from tasks.prediction import predict, submit

    if settings.text:
        model = _load(settings)
        row = model.task.reader.row_of(settings.text)
        (prediction,) = model.predict_rows({name: [value] for name, value in row.items()})
        print(json.dumps(prediction, ensure_ascii=False))
        return
    assert settings.input and settings.output
    with sole_output(settings.output, settings.overwrite):
        model = _load(settings)
        arguments = (model, settings.input, settings.output, settings.batch_size, command.log)
        if settings.output.endswith(".tsv"):
            command.log(f"{settings.output}: submission of {submit(*arguments)} rows")
            return
        count, bad = predict(*arguments)
    wrong = f", {bad} of them bad, with an error instead of a prediction" if bad else ""
    command.log(f"{settings.output}: {count} rows{wrong}")


def _load(settings):
    from tasks.loading import load_model

    model = load_model(settings.run, checkpoint=settings.checkpoint)
    assert model.source is not None  # Of a run.
    if untuned := model.source.untuned:
        if not model.task.predicts_untuned:
            raise UserError(untuned)
        command.log(f"warning: {untuned}")
    return model


if __name__ == "__main__":
    command.run_main(main, PredictSettings, __doc__)
