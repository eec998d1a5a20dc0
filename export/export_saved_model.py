"""Publish a trained run as the next version of a SavedModel that maps strings to predictions.

    bert-tf export_saved_model --run=RUN --output_dir=MODELS/name

It is published only if its predictions, in a clean process without this project, match those of the
trained model.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.system import command
from export.checks import options
from tasks.base.task_types import check_run


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """Flags of this command."""

    run: str = command.flag("run directory, or another fine-tuned model: a --from of convert")
    output_dir: str = command.flag("directory of versions, for the next version number")
    precision: str = command.flag(
        "float32; bfloat16 for processors with AVX512-BF16 or AMX and for GPUs since A100; float16 "
        "for GPUs; or int8 for processors with VNNI or AMX; outputs stay float32",
        "float32",
        choices=options.PRECISIONS,
    )
    portable: bool = command.flag(
        "standard operations only, for other processors than x86-64; single short texts take "
        "longer",
        False,
    )
    device: str = command.flag(
        "cpu; or gpu for the model on a GPU of the server, in standard operations",
        "cpu",
        choices=options.DEVICES,
    )
    dev: str | None = command.flag(
        "labelled rows on which int8 is evaluated; default: the run's first dev file", None
    )
    max_metric_drop: float = command.flag(
        "int8 is not published if the task's metric is lower by more points of 100",
        options.MAX_METRIC_DROP,
    )
    checkpoint: str | None = command.flag(
        "name of a directory in RUN/checkpoints; default: the best, else the newest", None
    )

    def __post_init__(self):
        if os.path.realpath(self.output_dir) == os.path.realpath(self.run):
            raise UserError(
                f"--output_dir={self.output_dir}: is the run directory; choose another directory"
            )
        options.check(
            self.output_dir,
            self.precision,
            self.portable,
            self.device,
            self.dev,
            self.max_metric_drop,
        )

    def check(self) -> None:
        """Check the files without TensorFlow.

        Raises:
            UserError: If the run or the checkpoint does not exist.
        """
        check_run(self.run, self.checkpoint)


def main(settings: ExportSettings) -> None:
    """Publish the run and print the directory of the version."""
    from export.publishing import publish

    arguments = dataclasses.asdict(settings)  # They are those of `publish`.
    print(publish(arguments.pop("run"), log=command.log, **arguments))


if __name__ == "__main__":
    command.run_main(main, ExportSettings, __doc__)
