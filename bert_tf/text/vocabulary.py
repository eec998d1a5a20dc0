"""Vocabulary: a vocab.txt with one entry per line. An entry's id is its 0-based line number."""

import hashlib
import os
import re
import warnings
from collections.abc import Iterable

from bert_tf.errors import UserError
from bert_tf.storage import files

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNUSED = re.compile(r"\[unused\d+\]")  # Entries that are kept for words to come.
MAX_BYTES = 64 << 20  # The largest released vocabulary (multilingual) has 1 MB.
MAX_PADDING = 128  # Rows of an embedding table without an entry.
MAX_ENTRIES = 2_000_000  # The largest released vocabulary of WordPiece has 501,153.


class Vocabulary:
    r"""Entries of a vocab.txt, in order.

    White space around an entry is not part of it, as in google-research/bert. The released Chinese
    vocabulary contains U+2028 inside lines; their entries become "" and "##" when stripped, keep
    their ids and never match.

    Args:
        lines: Lines of the file without line ends.
        where: Name of the source, for error messages.

    Attributes:
        lines: The lines as they are saved: the entries, so that all programs read the same ones.
            Only lines whose entry is "" or "##" are unchanged.
        entries: The lines without surrounding whitespace.

    Raises:
        UserError: A line is empty or repeated, or a special token is missing.
    """

    def __init__(self, lines: Iterable[str], where: str = "vocabulary") -> None:
        lines = tuple(lines)
        self.entries = tuple(line.strip() for line in lines)
        self.lines = tuple(
            line if entry in ("", "##") else entry
            for line, entry in zip(lines, self.entries, strict=True)
        )
        self._ids: dict[str, int] = {}
        for number, (line, entry) in enumerate(zip(self.lines, self.entries, strict=True), start=1):
            if not line:
                raise UserError(
                    f"{where}: line {number} is empty; expected one entry per line, because the "
                    "line number is the entry's id"
                )
            if entry in self._ids:
                raise UserError(
                    f"{where}: line {number} repeats {entry!r:.80} of line {self._ids[entry] + 1}"
                )
            self._ids[entry] = number - 1
        missing = [special for special in SPECIALS if special not in self._ids]
        if missing:
            raise UserError(
                f"{where}: {len(self.entries)} entries without {', '.join(missing)}; is this a "
                "BERT vocab.txt?"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Read a vocab.txt.

        Args:
            path: Local or remote path.

        Raises:
            UserError: The file is missing, too large, not UTF-8 or not a valid vocabulary.
        """
        return cls(read_lines(path, "a vocab.txt with one entry per line"), where=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary to a vocab.txt atomically."""
        files.atomic_write_bytes(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the vocab.txt, in UTF-8."""
        return "".join(line + "\n" for line in self.lines).encode("utf-8")

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the content as hexadecimal digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, entry: str) -> int:
        """Return the id of an entry.

        Raises:
            KeyError: There is no such entry.
        """
        return self._ids[entry]

    def padded(self, vocab_size: int, where: str) -> "Vocabulary":
        """Return the vocabulary with placeholders for the further rows of an embedding table.

        Tables are often padded, for example to a multiple of 64 rows; there is a warning if it is
        more than `MAX_PADDING` rows. The placeholders are named like the unused entries of released
        vocabularies. Brackets are split from words, so that no text contains them.

        Args:
            vocab_size: Number of rows.
            where: Name of the source, for the error message.

        Raises:
            UserError: The vocabulary has more entries than `vocab_size`.
        """
        if not len(self) < vocab_size <= MAX_ENTRIES:
            self.check_size(vocab_size, where)
            return self
        if vocab_size - len(self) > MAX_PADDING:
            warnings.warn(
                f"{where}: {len(self):,} entries, but the model's embedding has {vocab_size:,} "
                "rows; check that the vocabulary is that of the weights",
                stacklevel=2,
            )
        more = (placeholder(index) for index in range(len(self), vocab_size))
        return Vocabulary([*self.lines, *more], where)

    @property
    def words(self) -> list[str]:
        """The entries but those in brackets, such as [CLS]."""
        return [
            entry for entry in self.entries if not (entry.startswith("[") and entry.endswith("]"))
        ]

    def count_changed(self, do_lower_case: bool, strip_accents: bool) -> int:
        """Return the number of words that normalization changes, and that no text can contain."""
        from bert_tf.text import unicode_tables  # Clients of a server need no numpy.

        return sum(
            unicode_tables.normalize(word, do_lower_case, strip_accents) != word
            for word in self.words
        )

    def looks_cased(self) -> bool:
        """Return True if more than 1% of the words contain an upper-case letter."""
        return self.count_changed(True, False) > 0.01 * len(self.words)

    def normalization(self) -> dict[str, bool | None]:
        """Return `do_lower_case` and `strip_accents` of the text that the vocabulary is for.

        Accents are kept in cased text, and if more than 1% of the words have some. `strip_accents`
        is `None` where that is the default.
        """
        lower = not self.looks_cased()
        has_accents = self.count_changed(False, True) > 0.01 * len(self.words)
        return {"do_lower_case": lower, "strip_accents": False if lower and has_accents else None}

    def check_size(self, vocab_size: int, where: str) -> None:
        """Check the number of entries against a configuration.

        Args:
            vocab_size: Expected number of entries.
            where: Name of the source, for the error message.

        Raises:
            UserError: The numbers differ.
        """
        if len(self) != vocab_size:
            raise UserError(
                f"{where}: {len(self)} entries, but the configuration's vocab_size is "
                f"{vocab_size}; use the vocabulary that the weights were trained with"
            )


def placeholder(index: int) -> str:
    """Return an entry for an id that no text has."""
    return f"[unused{index}]"


def read_lines(path: str | os.PathLike[str], expected: str) -> list[str]:
    """Return the lines of a text file; `expected` describes it in messages.

    Raises:
        UserError: The file is missing, too large or not UTF-8.
    """
    size = files.size(path)
    if size is None or size > MAX_BYTES:
        found = "no such file" if size is None else f"{size} bytes"
        raise UserError(f"{path}: {found}; expected {expected}, at most {MAX_BYTES} bytes")
    try:
        text = files.read_text(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    # Not splitlines, which would also split at U+2028.
    return text.removesuffix("\n").split("\n")
