"""Settings of write_shards, one field per flag. TensorFlow is not imported."""

import dataclasses
from typing import Any

from bert_tf.config import MAX_WORD_CHARACTERS
from bert_tf.data.documents import FORMATS
from bert_tf.data.jobs import RunnerSettings
from bert_tf.errors import UserError
from bert_tf.system.command import check_text, defaults, flag

# Settings that do not affect the content of a shard, or are in the manifest in resolved form.
FREE = frozenset(
    """
    input vocab do_lower_case strip_accents max_input_chars_per_word output_dir num_workers runner
    beam_args
    """.split()
)
# Settings that the masks of an example depend on; arguments of `MaskGenerator`.
MASK_SETTINGS = (
    *("masked_lm_prob", "max_predictions_per_seq", "whole_word_mask", "replace_with_any"),
)


@dataclasses.dataclass(frozen=True)
class WriteShardsSettings(RunnerSettings):
    """Settings of bert-tf write_shards, one per flag; UserErrors name the flag."""

    input: tuple[str, ...] = flag("globs of text files, plain or .gz, local or remote (gs://)")
    vocab: str = flag("vocab.txt")
    output_dir: str = flag("directory of the shards, to create or to complete")
    input_format: str = flag(
        "lines: one sentence per line, blank lines between documents; text: one document per file; "
        "jsonl: one JSON object per line and document; without next sentences also lines: one text "
        "per line, if there are no blank lines",
        "lines",
        choices=FORMATS,
    )
    text_field: str = flag("key of the text in JSON objects", "text")
    num_shards: int = flag("number of files", 64, bounds={">=": 1, "<=": 99_999})
    max_seq_length: int = flag(
        "tokens per example, with [CLS] and [SEP]", 128, bounds={">=": 5, "<=": 1 << 16}
    )
    max_predictions_per_seq: int = flag(
        "maximum number of predicted tokens per example", 20, bounds={">=": 1}
    )
    masked_lm_prob: float = flag("fraction of tokens to predict", 0.15, bounds={">=": 0, "<=": 1})
    next_sentence: bool = flag(
        "pairs of segments for next sentence prediction; false: an example is [CLS] tokens [SEP] "
        "of one text, for masked language modeling alone",
        True,
    )
    short_seq_prob: float = flag(
        "fraction of documents with shorter pairs", 0.1, bounds={">=": 0, "<=": 1}
    )
    dupe_factor: int = flag(
        "passes over the text, each with other pairs and masks",
        1,
        bounds={">=": 1, "<=": 1000},
    )
    whole_word_mask: bool = flag("masking of whole words instead of single pieces", False)
    masking: str = flag(
        "static: masks in the shards; dynamic: new masks in each training epoch",
        "static",
        choices=("static", "dynamic"),
    )
    same_document_next: bool = flag(
        "random next segments also from the same document, as in google-research/bert", False
    )
    replace_with_any: bool = flag(
        "random replacements also by special tokens and [unused] entries, as in "
        "google-research/bert",
        False,
    )
    do_lower_case: bool | None = flag(
        "lower-casing of text; default: inferred from the vocabulary", None
    )
    strip_accents: bool | None = flag(
        "removal of accents; default: inferred from the vocabulary", None
    )
    max_input_chars_per_word: int = flag(
        "maximum number of characters of a word, beyond which it is [UNK]: 200 as in "
        "google-research/bert, 100 for models of Hugging Face",
        200,
        bounds={">=": 1, "<=": MAX_WORD_CHARACTERS},
    )
    seed: int = flag("random seed", 12345, bounds={">=": 0, "<": 1 << 32})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.input):
            raise UserError("--input: expected text files or globs")
        for pattern in self.input:
            check_text("input", pattern)
        for name in ("short_seq_prob", "same_document_next"):
            value = getattr(self, name)
            if not self.next_sentence and value != defaults(WriteShardsSettings)[name]:
                raise UserError(
                    f"--{name}={value}: only for pairs of segments; omit it with "
                    "--next_sentence=false"
                )
        if self.max_predictions_per_seq > self.max_seq_length:
            raise UserError(
                f"--max_predictions_per_seq={self.max_predictions_per_seq}: expected an integer <= "
                f"--max_seq_length={self.max_seq_length}"
            )

    def recorded(self) -> dict[str, Any]:
        """Return the settings that determine the content of the shards, by name."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in FREE}
