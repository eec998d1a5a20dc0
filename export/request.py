"""Asks a published model and prints its answer as JSON.

    python -m export.request --model_dir=MODELS/name --input text="My invoice is wrong."

An --input may be given several times: for several names, or for several texts of one. Where a name
takes a list a row, as the choices of a question, they are the list of one.
"""

import dataclasses
import json
import os

from bert_tf import command
from bert_tf.errors import UserError


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    model_dir: str = command.setting("directory of versions; the newest is asked")
    input: tuple[str, ...] = command.setting("NAME=VALUE", repeated=True)
    signature: str = command.setting("which signature", "serving_default")

    def __post_init__(self):
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
    from export.served import ServedDirectory

    inputs = settings.inputs()
    print(
        json.dumps(
            ServedDirectory(settings.model_dir).ask(inputs, settings.signature),
            ensure_ascii=False,
            indent=2,
        )
    )


if __name__ == "__main__":
    command.start(main, RequestSettings, __doc__)
