"""The settings of write_shards, a field a flag. Free of TensorFlow."""

import dataclasses
import os

from bert_tf.command import flag
from bert_tf.data.documents import FORMATS
from bert_tf.errors import UserError

# Settings that decide no byte of a shard, or that are in the manifest as what they come to.
FREE = frozenset(
    """
    input vocab do_lower_case strip_accents output_dir num_workers runner beam_args
    """.split()
)


@dataclasses.dataclass(frozen=True)
class WriteShardsSettings:
    """What bert_tf.write_shards does. Raises UserError, naming the flag, on an impossible value."""

    input: tuple[str, ...] = flag("globs of text files, plain or .gz, here or at gs:// and such")
    vocab: str = flag("vocab.txt")
    output_dir: str = flag("folder of the shards, to make or to complete")
    input_format: str = flag(
        "a sentence a line and blank lines between documents; text, a document a file; or JSON "
        "objects, a document a line",
        "lines",
        choices=FORMATS,
    )
    text_field: str = flag("key of the text in JSON objects", "text")
    num_shards: int = flag("files to make", 64)
    max_seq_length: int = flag("tokens of an example, with [CLS] and twice [SEP]", 128)
    max_predictions_per_seq: int = flag("most tokens to predict in an example", 20)
    masked_lm_prob: float = flag("share of an example's tokens to predict", 0.15)
    short_seq_prob: float = flag("share of documents cut into shorter examples", 0.1)
    dupe_factor: int = flag("times that the text is gone through, masked anew", 1)
    whole_word_mask: bool = flag("mask all pieces of a word or none", False)
    masking: str = flag(
        "masks in the shards, or dynamic: drawn anew in each epoch of training",
        "static",
        choices=("static", "dynamic"),
    )
    same_document_next: bool = flag(
        "let a random next segment be of the same document where chance says so, as released", False
    )
    replace_with_any: bool = flag(
        "let specials and [unused] entries be random replacements, as released", False
    )
    do_lower_case: bool | None = flag(
        "lower-case the text; by default what the vocabulary shows", None
    )
    strip_accents: bool | None = flag("strip accents; by default as the case", None)
    seed: int = flag("seed of everything that is drawn", 12345)
    num_workers: int | None = flag("processes; by default one a processor", None)
    runner: str = flag(
        "processes of this machine, or Apache Beam", "local", choices=("local", "beam")
    )
    beam_args: str = flag("Beam's own options, as on its command line", "")

    def __post_init__(self):
        if not any(self.input):
            raise UserError("--input: wanted files of text, or globs of them")
        for name, minimum, maximum in (
            ("num_shards", 1, 99_999),
            ("max_seq_length", 5, 1 << 16),
            ("max_predictions_per_seq", 1, self.max_seq_length),
            ("dupe_factor", 1, 1000),
            ("seed", 0, (1 << 32) - 1),
        ):
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise UserError(f"--{name}={value}: wanted {minimum} to {maximum}")
        for name in ("masked_lm_prob", "short_seq_prob"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"--{name}={value}: wanted a share from 0 to 1")
        if self.num_workers is not None and self.num_workers < 1:
            raise UserError(f"--num_workers={self.num_workers}: wanted at least 1")
        if self.beam_args and self.runner != "beam":
            raise UserError(f"--beam_args={self.beam_args}: is for --runner=beam")

    @property
    def workers(self):
        return self.num_workers or len(os.sched_getaffinity(0))

    def recorded(self):
        """The settings that decide the shards' bytes, {name: value}."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in FREE}
