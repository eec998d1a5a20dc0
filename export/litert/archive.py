"""File of a LiteRT model: the model, and a zip archive with what its ids and outputs mean.

The archive is appended to the model, as LiteRT's tools attach associated files: the interpreter
ignores it, and zip tools list and extract it. TensorFlow is not imported.
"""

import dataclasses
import importlib.util
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any, Self

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.storage import format_versions, strict_json
from bert_tf.text.vocabulary import Vocabulary

IDENTIFIER = b"TFL3"  # Bytes 4 to 8 of a LiteRT model.
INPUTS = ("input_ids", "input_mask", "segment_ids")  # Of each signature.


@dataclasses.dataclass(frozen=True)
class Contents:
    """The archive of a LiteRT file.

    Attributes:
        config: Configuration of the encoder and the tokenizer.
        task: Values of task.json, with labels and thresholds.
        vocabulary: The vocabulary.
    """

    config: BertConfig
    task: dict[str, Any]
    vocabulary: Vocabulary

    @classmethod
    def read(cls, path: str | os.PathLike) -> Self:
        """Read the archive of a file.

        Raises:
            UserError: If the file is not a LiteRT model of this project, or is damaged.
        """
        try:
            with open(path, "rb") as file:
                if file.read(8)[4:] != IDENTIFIER:
                    raise ValueError("not a LiteRT model")
            with zipfile.ZipFile(path) as archive:
                texts = {
                    name: archive.read(name).decode("utf-8")
                    for name in ("config.json", "task.json", "vocab.txt")
                }
            task = format_versions.without_version(
                strict_json.parse_object(texts["task.json"]), f"{path}: task.json"
            )
            config = BertConfig.from_dict(strict_json.parse_object(texts["config.json"]))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path}: not a file of bert-tf export_litert: {getattr(error, 'strerror', error)}"
            ) from None
        vocabulary = Vocabulary(texts["vocab.txt"].removesuffix("\n").split("\n"), f"{path}")
        vocabulary.check_size(config.vocab_size, where=f"{path}: vocab.txt")
        return cls(config, task, vocabulary)

    def append_to(self, path: str | os.PathLike) -> None:
        """Append the archive to a file."""
        append(
            path,
            {
                "config.json": as_json(self.config.to_dict()),
                "task.json": as_json(format_versions.with_version(self.task)),
                "vocab.txt": self.vocabulary.to_bytes(),
            },
        )


def append(path: str | os.PathLike, contents: Mapping[str, bytes]) -> None:
    """Add files to the archive of a LiteRT file, which is created if there is none."""
    with zipfile.ZipFile(path, "a") as archive:
        for name, content in contents.items():
            # Stored, since LiteRT's own reader of associated files does not decompress; and without
            # the date of the export.
            archive.writestr(zipfile.ZipInfo(name), content)


def check_runtime(flag: str) -> None:
    """Raise UserError, which names a flag, if the interpreter is not installed."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise UserError(f"{flag}: ai_edge_litert is missing; run pip install 'bert_tf[litert]'")


def as_json(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file of the archive."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
