"""Send a request to a published model and print the response as JSON.

    bert-tf request --model_dir=MODELS/name --input text="My invoice is wrong."
    bert-tf request --url=http://localhost:8501/v1/models/name --input text="..."
    bert-tf request --grpc=localhost:8500 --model=name --input text="..."
    bert-tf request --litert=model.tflite --input text="..."

The model is loaded from a directory or a LiteRT file, or served by the REST or gRPC API of
TensorFlow Serving. The flag --input may be repeated, for several names or for several rows of one
name. If a name takes a list per row, such as choices, its values form the list of a single row.
"""

import dataclasses
import os

from bert_tf.errors import UserError
from bert_tf.storage import paths, strict_json
from bert_tf.system import command
from export.clients.client import ModelClient, check_timeout
from export.litert import archive


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """Flags of this command."""

    input: tuple[str, ...] = command.flag("input as NAME=VALUE", repeated=True)
    model_dir: str | None = command.flag(
        "directory of versions, of which the newest is used, or of one version", None
    )
    url: str | None = command.flag(
        "REST API of a model: http://HOST:PORT/v1/models/NAME[/versions/N]", None
    )
    grpc: str | None = command.flag("gRPC API of a server: HOST:PORT", None)
    model: str | None = command.flag("name of the model on the server of --grpc", None)
    litert: str | None = command.flag("file of bert-tf export_litert", None)
    signature: str = command.flag("name of the signature", "serving_default")
    timeout: float = command.flag("time limit of a server's response, in seconds", 60.0)

    def __post_init__(self):
        targets = (self.model_dir, self.url, self.grpc, self.litert)
        if len([target for target in targets if target]) != 1:
            raise UserError("expected exactly one of --model_dir, --url, --grpc and --litert")
        if self.litert:
            paths.check_local_file("litert", self.litert)
        if self.model_dir:
            paths.check_local("model_dir", self.model_dir)
        if bool(self.grpc) != bool(self.model):
            raise UserError("--grpc, --model: expected both or neither")
        check_timeout(self.timeout)
        for pair in self.input:
            if not pair.partition("=")[0] or "=" not in pair:
                raise UserError(f"--input={pair}: expected NAME=VALUE")

    def check(self) -> None:
        """Check the files without TensorFlow.

        Raises:
            UserError: If `model_dir` is not a directory, or `litert` not a LiteRT file.
        """
        if self.model_dir and not os.path.isdir(self.model_dir):
            raise UserError(f"--model_dir={self.model_dir}: no such directory")
        if self.litert:
            archive.Contents.read(self.litert)
            archive.check_runtime(f"--litert={self.litert}")

    def inputs(self) -> dict[str, list[bytes]]:
        """Return the values of each input name in order, as the bytes of the command line."""
        result: dict[str, list[bytes]] = {}
        for pair in self.input:
            name, _, value = pair.partition("=")
            result.setdefault(name, []).append(os.fsencode(value))
        return result


def main(settings: RequestSettings) -> None:
    """Send the request and print the response as JSON."""
    outputs = opened(settings).predict(settings.inputs(), settings.signature)
    print(strict_json.dumps_result(outputs, f"--signature={settings.signature}", indent=2))


def opened(settings: RequestSettings) -> ModelClient:
    """Return the client of the model that the settings name. --url does not import TensorFlow."""
    if settings.url:
        from export.clients.rest_client import RestClient

        return RestClient(settings.url, settings.timeout)
    if settings.grpc and settings.model:
        from export.clients.grpc_client import GrpcClient

        return GrpcClient(settings.grpc, settings.model, settings.timeout)
    if settings.litert:
        from export.litert.client import LiteRTClient

        return LiteRTClient(settings.litert)
    from export.clients.local_client import LocalClient

    assert settings.model_dir  # Since exactly one of the four is set.
    return LocalClient(settings.model_dir)


if __name__ == "__main__":
    command.run_main(
        main, RequestSettings, __doc__, imports_tensorflow=lambda settings: not settings.url
    )
