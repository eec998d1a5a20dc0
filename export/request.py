"""Asks a published model and prints its answer as JSON.

    python -m export.request --model_dir=MODELS/name --input text="My invoice is wrong."
    python -m export.request --url=http://localhost:8501/v1/models/name --input text="..."
    python -m export.request --grpc=localhost:8500 --model=name --input text="..."

From its directory, or a TF Serving's REST or gRPC API. An --input may be given several times: for
several names, or for several texts of one. Where a name takes a list a row, as the choices of a
question, they are the list of one.
"""

import dataclasses
import json
import os

from bert_tf import command, paths
from bert_tf.errors import UserError


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    input: tuple[str, ...] = command.flag("NAME=VALUE", repeated=True)
    model_dir: str | None = command.flag(
        "directory of versions (the newest is used), or of one version", None
    )
    url: str | None = command.flag("http://HOST:PORT/v1/models/NAME[/versions/N]", None)
    grpc: str | None = command.flag("HOST:PORT", None)
    model: str | None = command.flag("which model of --grpc", None)
    signature: str = command.flag("which signature", "serving_default")
    timeout: float = command.flag("how many seconds a server may take", 60.0)

    def __post_init__(self):
        if len([target for target in (self.model_dir, self.url, self.grpc) if target]) != 1:
            raise UserError("wanted one of --model_dir, --url and --grpc")
        if self.model_dir:
            paths.check_local("model_dir", self.model_dir)
        if bool(self.grpc) != bool(self.model):
            raise UserError("--grpc and --model go together")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"--timeout={self.timeout:g}: wanted a number above 0")
        for pair in self.input:
            if not pair.partition("=")[0] or "=" not in pair:
                raise UserError(f"--input={pair}: wanted NAME=VALUE")

    def check(self):
        """Raises UserError at what files show, without TensorFlow."""
        if self.model_dir and not os.path.isdir(self.model_dir):
            raise UserError(f"--model_dir={self.model_dir}: no such directory")

    def inputs(self):
        """{name: its values in order}, bytes as they were typed."""
        result = {}
        for pair in self.input:
            name, _, value = pair.partition("=")
            result.setdefault(name, []).append(os.fsencode(value))
        return result


def main(settings):
    outputs = opened(settings).predict(settings.inputs(), settings.signature)
    print(json.dumps(outputs, ensure_ascii=False, indent=2))


def opened(settings):
    """The one model that the settings say; --url does without TensorFlow."""
    if settings.url:
        from export.rest_client import RestClient

        return RestClient(settings.url, settings.timeout)
    if settings.grpc:
        from export.grpc_client import GrpcClient

        return GrpcClient(settings.grpc, settings.model, settings.timeout)
    from export.local_client import LocalClient

    return LocalClient(settings.model_dir)


if __name__ == "__main__":
    command.run_main(
        main, RequestSettings, __doc__, imports_tensorflow=lambda settings: not settings.url
    )
