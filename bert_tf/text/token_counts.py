"""Counts of tokens, and of what a vocabulary and a maximum length lose of texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from bert_tf.errors import UserError
from bert_tf.storage.strict_json import field

MIN_FRACTION = 0.05  # Of the tokens or texts; from it on there is a warning.
_REMEDY = (
    "the vocabulary has no entries for the language or script of these texts, or blanks between "
    "words are missing; use another vocabulary or model"
)


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Sums over texts, or pairs of texts.

    Attributes:
        texts: Texts.
        empty: Texts without a token.
        truncated: Texts that were longer than allowed.
        tokens: Tokens, without special tokens.
        unknown: [UNK] among them.
        lost: Tokens that were cut off; an estimate for the part of a long text that is not read.
    """

    texts: int = 0
    empty: int = 0
    truncated: int = 0
    tokens: int = 0
    unknown: int = 0
    lost: int = 0

    def __add__(self, other: Self) -> "TokenCounts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return TokenCounts(*map(sum, pairs))

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], location: str) -> Self:
        """Return the counts in the entry of a shard; zeros if they are not recorded.

        Raises:
            UserError: If one is missing or no integer; the message begins with `location`.
        """
        if "token_counts" not in entry:
            return cls()
        counts = field(entry, "token_counts", dict, location)
        names = [of.name for of in dataclasses.fields(cls)]
        return cls(*(field(counts, name, int, f"{location}: token_counts") for name in names))

    def to_entry(self) -> dict[str, Any]:
        """Return the counts as a part of the entry of a shard."""
        return {"token_counts": dataclasses.asdict(self)}

    def warnings(self, where: str, allows_unknown: bool = False) -> list[str]:
        """Return one line per kind of loss.

        Args:
            where: The texts, with which each line begins.
            allows_unknown: Whether all tokens may be [UNK], as those of a short text to predict.

        Raises:
            UserError: If all tokens are [UNK] and may not be.
        """
        if self.tokens and self.unknown == self.tokens and not allows_unknown:
            raise UserError(f"{where}: all {self.tokens:,} tokens are [UNK]: {_REMEDY}")
        found = []
        if self.unknown and self.unknown >= MIN_FRACTION * self.tokens:
            fraction = self.unknown / self.tokens
            found.append(f"{fraction:.1%} of {self.tokens:,} tokens are [UNK]: {_REMEDY}")
        if self.truncated and self.truncated >= MIN_FRACTION * self.texts:
            found.append(
                f"{self.truncated:,} of {self.texts:,} texts are longer than the maximum length: "
                f"about {self.lost:,} of {self.tokens + self.lost:,} tokens are cut off"
            )
        if self.empty:
            found.append(f"{self.empty:,} of {self.texts:,} texts are empty: they have no tokens")
        return [f"{where}: {line}" for line in found]
