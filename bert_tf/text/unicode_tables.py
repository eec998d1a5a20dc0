"""Tables of what the tokenizer does with each code point, and their computation from Unicode.

    python -m bert_tf.text.make_tables        writes unicode_tables.npz next to this module

The rules and their order are those of google-research/bert, tokenization.py: characters are dropped
or become spaces, CJK characters become words, words are lower-cased, decomposed and stripped of
their marks, and punctuation is decided on the *result*. This depends on the code point alone,
except for three kinds that the tokenizer resolves in context.
"""

import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import unicodedata
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
NUM_CODE_POINTS = 0x110000
PAGE = 256
KIND_BITS = 4

# Kinds of code points. Those before ALONE produce no character.
DROPPED = 0  # Controls, format characters, U+0000, U+FFFD.
MARK = 1  # A combining mark that is stripped.
MARK_STARTER = 2  # MARK of combining class 0: nothing is reordered across it.
SPACE = 3
ALONE = 4  # One character that is a word by itself: CJK, punctuation.
TEXT = 5  # One character of a word.
SEVERAL = 6  # Up to three characters of a word: Hangul, and a few that decompose.
SIGMA = 7  # U+03A3: its lower case depends on its neighbors.
REORDERED = 8  # Kept, of a combining class above 0: NFD reorders it.

# Role of a code point next to U+03A3: no letter with case, one, or skipped (Final_Sigma).
UNCASED, CASED, CASE_IGNORABLE = range(3)
CAPITAL_SIGMA, FINAL_SIGMA = 0x3A3, 0x3C2

_CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of one normalization.

    The entry of code point c is pages[index[c // 256] + c % 256], equal to kind | payload << 4. The
    payload is the difference between c and its character, or, for SEVERAL, a row of `several`.

    Attributes:
        index: int32 `(4352,)`, the offset of each page of 256 code points.
        pages: int32, the distinct pages, concatenated.
        several: int32 `(M, 3)`, the characters of an expansion, padded with 0.
        case_index: As `index`, for `case_pages`.
        case_pages: As `pages`, holding UNCASED, CASED or CASE_IGNORABLE.
        classes: int32 `(C, 2)`, code points that are REORDERED or part of SEVERAL, and their
            combining classes, sorted by code point.
    """

    index: np.ndarray
    pages: np.ndarray
    several: np.ndarray
    case_index: np.ndarray
    case_pages: np.ndarray
    classes: np.ndarray


def is_punctuation(character: str) -> bool:
    """Return True for ASCII punctuation and symbols and for Unicode categories P*."""
    code = ord(character)
    is_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return is_ascii or unicodedata.category(character).startswith("P")


def is_space(character: str) -> bool:
    """Return True for characters that become a space or that `str.split` splits at."""
    return character in " \t\n\r" or unicodedata.category(character) == "Zs" or character.isspace()


def is_dropped(character: str) -> bool:
    """Return True for characters that cleaning removes: controls, U+0000 and U+FFFD."""
    if character in "\t\n\r":
        return False
    return ord(character) in (0, 0xFFFD) or unicodedata.category(character) in ("Cc", "Cf", "Cs")


def normalize(word: str, do_lower_case: bool, strip_accents: bool) -> str:
    """Apply `str.lower` to a word, then decompose it to NFD and drop nonspacing marks (Mn)."""
    if do_lower_case:
        word = word.lower()
    if strip_accents:
        word = unicodedata.normalize("NFD", word)
        word = "".join(character for character in word if unicodedata.category(character) != "Mn")
    return word


def _kind(code, result, do_lower_case, strip_accents):
    """Return the kind of a code point whose normalization is `result`."""
    character = chr(code)
    if is_dropped(character):
        return DROPPED
    if is_space(character):
        return SPACE
    if not result:
        return MARK if unicodedata.combining(character) else MARK_STARTER
    if len(result) > 1:
        return SEVERAL
    if any(first <= code <= last for first, last in _CJK) or is_punctuation(result):
        return ALONE
    if do_lower_case and code == CAPITAL_SIGMA:
        return SIGMA
    if strip_accents and unicodedata.combining(result):
        return REORDERED
    return TEXT


def _case(code):
    """Return the case role of a code point, derived from `str.lower` of a following sigma."""
    character = chr(code)
    if (character + "\u03a3").lower().endswith("\u03c2"):
        return CASED
    return CASE_IGNORABLE if ("A" + character + "\u03a3").lower().endswith("\u03c2") else UNCASED


def compute(do_lower_case: bool, strip_accents: bool) -> Tables:
    """Compute the tables for the Unicode version of the running Python."""
    entries = np.zeros(NUM_CODE_POINTS, np.int32)
    several: list[list[int]] = []
    for code in range(NUM_CODE_POINTS):
        result = normalize(chr(code), do_lower_case, strip_accents)
        kind = _kind(code, result, do_lower_case, strip_accents)
        payload = 0
        if kind == SEVERAL:
            payload = len(several)
            several.append([*map(ord, result), *[0] * (3 - len(result))])
        elif kind >= ALONE:
            payload = ord(result) - code
        entries[code] = kind | payload << KIND_BITS
    case = np.fromiter(map(_case, range(NUM_CODE_POINTS)), np.int32)
    classes = [(code, unicodedata.combining(chr(code))) for code in range(NUM_CODE_POINTS)]
    classes = [pair for pair in classes if pair[1] and unicodedata.category(chr(pair[0])) != "Mn"]
    index, pages = _paged(entries)
    case_index, case_pages = _paged(case)
    return Tables(
        index,
        pages,
        np.array(several, np.int32).reshape(-1, 3),
        case_index,
        case_pages,
        np.array(classes, np.int32),
    )


def _paged(values):
    """Deduplicate pages of 256 values; return the index and the distinct pages."""
    pages, index = np.unique(values.reshape(-1, PAGE), axis=0, return_inverse=True)
    return (index.reshape(-1) * PAGE).astype(np.int32), pages.reshape(-1)


def expand(index: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Return the value of every code point, `(0x110000,)`."""
    return pages.reshape(-1, PAGE)[index // PAGE].reshape(-1)


def load(do_lower_case: bool, strip_accents: bool) -> Tables:
    """Load the tables of one normalization from the package."""
    with np.load(PATH, allow_pickle=False) as file:
        prefix = _prefix(do_lower_case, strip_accents)
        names = [field.name for field in dataclasses.fields(Tables)]
        return Tables(**{name: file[prefix + name] for name in names})


def has_text(text: str) -> bool:
    """Return True if a text has a character that is neither dropped nor a space."""
    is_text = _is_text()
    return any(is_text[ord(character)] for character in text)


@functools.lru_cache
def _is_text():
    """Return per code point whether it is neither dropped nor a space."""
    tables = load(do_lower_case=False, strip_accents=False)
    kinds = expand(tables.index, tables.pages) & (1 << KIND_BITS) - 1
    return ~np.isin(kinds, (DROPPED, SPACE))


def unicode_version() -> str:
    """Return the Unicode version of the package's tables."""
    with np.load(PATH, allow_pickle=False) as file:
        return str(file["unicode_version"])


def sha256() -> str:
    """Return the SHA-256 of the package's tables as hexadecimal digits."""
    return hashlib.sha256(PATH.read_bytes()).hexdigest()


def save(path: str | os.PathLike[str]) -> None:
    """Compute the tables of all four normalizations and write them to a .npz file."""
    arrays: dict[str, Any] = {"unicode_version": np.array(unicodedata.unidata_version)}
    for do_lower_case in (True, False):
        for strip_accents in (True, False):
            prefix = _prefix(do_lower_case, strip_accents)
            tables = vars(compute(do_lower_case, strip_accents))
            arrays.update({prefix + name: array for name, array in tables.items()})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    pathlib.Path(path).write_bytes(buffer.getvalue())


def _prefix(do_lower_case, strip_accents):
    """Return the prefix of a normalization's arrays in the .npz file."""
    return f"{'lower' if do_lower_case else 'keep'}_{'strip' if strip_accents else 'keep'}_"
