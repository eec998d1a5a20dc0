"""Answers rows of text, in their order, as JSON lines whose fields are those of the served model.

python -m tasks.predict --run=RUN --input=rows.csv --output=answers.jsonl
"""

import dataclasses

from bert_tf import command, paths
from bert_tf.errors import UserError
from tasks import inputs
from tasks.readers.glue import check_submission


@dataclasses.dataclass(frozen=True)
class PredictSettings:
    run: str = command.flag("run directory")
    input: str = command.flag("rows in the form of the training; labels are not needed")
    output: str = command.flag(
        ".jsonl file to write; of a test file of GLUE also .tsv, a submission"
    )
    checkpoint: str | None = command.flag(
        "a folder of RUN/checkpoints; by default the best, else the newest", None
    )
    batch_size: int = command.flag("rows answered at a time", 64, former_name="global_batch_size")
    overwrite: bool = command.flag("replace the file of --output", False)

    def __post_init__(self):
        if self.batch_size < 1:
            raise UserError(f"--batch_size={self.batch_size}: wanted at least 1")
        paths.check_local_file("input", self.input)
        paths.check_output(self.output, [self.input, self.run], self.overwrite)

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        if run := inputs.check_run(self.run, self.checkpoint):
            inputs.check_rows(run.task, self.input, labelled=False, first_only=True)
            file_format = (run.task or {}).get("file_format")
            if self.output.endswith(".tsv"):
                check_submission(self.output, file_format, self.run)


def main(settings):
    from bert_tf.ownership import sole_output
    from tasks.prediction import predict, submit
    from tasks.trained_model import TrainedModel

    with sole_output(settings.output, settings.overwrite):
        trained = TrainedModel.open(settings.run, settings.checkpoint)
        if trained.untuned:
            if not trained.task.predicts_untuned:
                raise UserError(trained.untuned)
            command.log(f"warning: {trained.untuned}")
        arguments = (
            trained,
            settings.input,
            settings.output,
            settings.batch_size,
            command.log,
        )
        if settings.output.endswith(".tsv"):
            command.log(f"{settings.output}: {submit(*arguments)} rows to send in")
            return
        count, bad = predict(*arguments)
    wrong = f", {bad} of them bad, answered with their error" if bad else ""
    command.log(f"{settings.output}: {count} rows{wrong}")


if __name__ == "__main__":
    command.run_main(main, PredictSettings, __doc__)
