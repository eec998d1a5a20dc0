"""Evaluate a fine-tuned run on labelled rows; the last line of stdout is a JSON object of metrics.

python -m tasks.evaluate --run=RUN --data=dev.csv
"""

import dataclasses
import json

from bert_tf import command, paths
from tasks import inputs


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """Flags of the command."""

    run: str = command.flag("run directory")
    data: str = command.flag("labelled rows in the format of the training file")
    checkpoint: str | None = command.flag(
        "directory name in RUN/checkpoints; by default the best, else the latest", None
    )

    def __post_init__(self):
        paths.check_local_file("data", self.data)

    def check(self) -> None:
        """Check the run and the data file without TensorFlow; raises UserError."""
        if run := inputs.check_run(self.run, self.checkpoint):
            if run.task is not None:
                inputs.check_rows(run.task, self.data, labelled=True)


def main(settings: EvaluateSettings) -> None:
    """Print the metrics and tables of the run on the data."""
    from bert_tf.train.distribution import choose_layout, make_strategy
    from tasks.evaluation import Evaluator
    from tasks.examples import EncodedExamples
    from tasks.trained_model import TrainedModel

    trained = TrainedModel.open(settings.run, settings.checkpoint)
    command.log(f"{trained.checkpoint}: evaluating on {settings.data}")
    if trained.untuned:
        command.log(f"warning: {trained.untuned}")
    strategy = make_strategy("none")
    examples = trained.task.reader.load_examples(settings.data)
    if examples.skipped_rows:
        command.log(examples.skipped_rows_message())
    encoded = EncodedExamples.encode(examples, trained.pipeline, choose_layout(strategy))
    for line in trained.task.label_warnings(encoded):
        command.log(f"{settings.data}: {line}")
    evaluator = Evaluator(trained.task, trained.pipeline.model, strategy)
    report = evaluator.report(encoded)
    warning = trained.task.postprocessor.warning(report)
    if warning:
        command.log(f"warning: {warning}")
    print(json.dumps(report))


if __name__ == "__main__":
    command.run_main(main, EvaluateSettings, __doc__)
