"""Export a trained run as a LiteRT (TensorFlow Lite) file, for phones and small devices.

    bert-tf export_litert --run=RUN --output=model.tflite
    bert-tf request --litert=model.tflite --input text="My invoice is wrong."

The model maps token ids to the outputs of its head. The file also contains vocab.txt, config.json
and task.json, which zip tools extract. It is written only if its predictions match those of the
trained model.
"""

import dataclasses
import os

from bert_tf.storage import paths
from bert_tf.system import command
from export.litert import archive
from tasks.base.task_types import check_run


@dataclasses.dataclass(frozen=True)
class ExportLiteRTSettings:
    """Flags of this command."""

    run: str = command.flag("run directory, or another fine-tuned model: a --from of convert")
    output: str = command.flag("file to write, .tflite")
    quantize: str = command.flag(
        "weights: none for float32, float16, or dynamic for int8 matrices",
        "none",
        choices=("none", "float16", "dynamic"),
    )
    checkpoint: str | None = command.flag(
        "name of a directory in RUN/checkpoints; default: the best, else the newest", None
    )
    overwrite: bool = command.flag("replacement of an existing --output file", False)

    def __post_init__(self):
        paths.check_local("output", self.output)
        paths.check_output(self.output, [self.run], self.overwrite)

    def check(self) -> None:
        """Check the files and the installation without TensorFlow.

        Raises:
            UserError: If the run or the checkpoint does not exist, or ai-edge-litert is missing.
        """
        check_run(self.run, self.checkpoint)
        archive.check_runtime(f"--output={self.output}")


def main(settings: ExportLiteRTSettings) -> None:
    """Write the file and print its size and parity."""
    from export.litert.writer import write_litert

    agreement = write_litert(
        settings.run,
        settings.output,
        quantize=settings.quantize,
        checkpoint=settings.checkpoint,
        overwrite=settings.overwrite,
        log=command.log,
    )
    print(
        f"{settings.output}: {os.path.getsize(settings.output):,} bytes, "
        f"quantize={settings.quantize}, {agreement.equal} of {agreement.rows} test rows as the "
        "trained model"
    )


if __name__ == "__main__":
    command.run_main(main, ExportLiteRTSettings, __doc__)
