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

from bert_tf import command
from bert_tf.errors import UserError


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    input: tuple[str, ...] = command.setting("NAME=VALUE", repeated=True)
    model_dir: str | None = command.setting(
        "directory of versions, of which the newest is asked, or one version", None
    )
    url: str | None = command.setting("http://HOST:PORT/v1/models/NAME[/versions/N]", None)
    grpc: str | None = command.setting("HOST:PORT", None)
    model: str | None = command.setting("which model of --grpc", None)
    signature: str = command.setting("which signature", "serving_default")
    timeout: float = command.setting("how many seconds a server may take", 60.0)

    def __post_init__(self):
        if len([target for target in (self.model_dir, self.url, self.grpc) if target]) != 1:
            raise UserError("wanted one of --model_dir, --url and --grpc")
        if bool(self.grpc) != bool(self.model):
            raise UserError("--grpc and --model go together")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"--timeout={self.timeout:g}: wanted a number above 0")
        for pair in self.input:
            if not pair.partition("=")[0] or "=" not in pair:
                raise UserError(f"--input={pair}: wanted NAME=VALUE")

    def inputs(self):
        """{name: its values in order}, bytes as they were typed."""
        result = {}
        for pair in self.input:
            name, _, value = pair.partition("=")
            result.setdefault(name, []).append(os.fsencode(value))
        return result


def main(settings):
    answer = opened(settings).ask(settings.inputs(), settings.signature)
    print(json.dumps(answer, ensure_ascii=False, indent=2))


def opened(settings):
    """The one model that the settings say; --url does without TensorFlow."""
    if settings.url:
        from export.served_rest import ServedRest

        return ServedRest(settings.url, settings.timeout)
    if settings.grpc:
        from export.served_grpc import ServedGrpc

        return ServedGrpc(settings.grpc, settings.model, settings.timeout)
    from export.served import ServedDirectory

    return ServedDirectory(settings.model_dir)


if __name__ == "__main__":
    command.start(
        main, RequestSettings, __doc__, imports_tensorflow=lambda settings: not settings.url
    )
