"""What the tokenizer knows of each code point: the tables, and how they follow from Unicode.

    python -m bert_tf.text.make_tables        writes unicode_tables.npz beside this file

The rules are those of google-research/bert, tokenization.py, in its order: characters are dropped
or become spaces, CJK stands alone, a word is lower-cased, decomposed and freed of its marks, and
punctuation is what the *result* says it is. A code point's fate depends on nothing else, but for
three kinds, which the tokenizer resolves where they occur.
"""

import hashlib
import io
import pathlib
import unicodedata
from typing import NamedTuple

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
NUM_CODE_POINTS = 0x110000
PAGE = 256
KIND_BITS = 4

# What becomes of a code point. Those before ALONE leave no character behind.
DROPPED = 0  # Controls, format characters, U+0000, U+FFFD.
MARK = 1  # A combining mark that is stripped.
MARK_STARTER = 2  # The same, of combining class 0: nothing is reordered across it.
SPACE = 3
ALONE = 4  # One character that is a word by itself: CJK, punctuation.
TEXT = 5  # One character of a word.
SEVERAL = 6  # Up to three characters of a word: Hangul, and a few that decompose.
SIGMA = 7  # U+03A3: its lower case depends on what stands around it.
REORDERED = 8  # Not stripped, yet of a combining class: normal form puts such in order.

# For U+03A3: does a code point count as a letter with case, is it looked through, or neither?
UNCASED, CASED, CASE_IGNORABLE = range(3)
CAPITAL_SIGMA, FINAL_SIGMA = 0x3A3, 0x3C2

_CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class Tables(NamedTuple):
    """Tables of one normalization. A code point c has its entry at pages[index[c // 256] + c %
    256].

    An entry is kind | payload << 4; the payload is what to add to c for its character, or for
    SEVERAL the row of `several`, int32 [M, 3], filled up with 0. `case_*` is laid out alike and
    holds CASED and so on. `classes` are the code points that are REORDERED or part of SEVERAL, and
    their class.
    """

    index: np.ndarray
    pages: np.ndarray
    several: np.ndarray
    case_index: np.ndarray
    case_pages: np.ndarray
    classes: np.ndarray


def is_punctuation(character):
    code = ord(character)
    is_ascii = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return is_ascii or unicodedata.category(character).startswith("P")


def is_space(character):
    """What becomes a space, and what str.split takes for one later."""
    return character in " \t\n\r" or unicodedata.category(character) == "Zs" or character.isspace()


def is_dropped(character):
    if character in "\t\n\r":
        return False
    return ord(character) in (0, 0xFFFD) or unicodedata.category(character) in ("Cc", "Cf", "Cs")


def normalize(word, do_lower_case, strip_accents):
    """A word lower-cased, and decomposed and freed of its marks, as asked for."""
    if do_lower_case:
        word = word.lower()
    if strip_accents:
        word = unicodedata.normalize("NFD", word)
        word = "".join(character for character in word if unicodedata.category(character) != "Mn")
    return word


def _kind(code, result, do_lower_case, strip_accents):
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
    """By what str.lower makes of a capital sigma behind it."""
    character = chr(code)
    if (character + "\u03a3").lower().endswith("\u03c2"):
        return CASED
    return CASE_IGNORABLE if ("A" + character + "\u03a3").lower().endswith("\u03c2") else UNCASED


def compute(do_lower_case, strip_accents):
    """The Tables by the Unicode version of this Python."""
    entries, several = np.zeros(NUM_CODE_POINTS, np.int32), []
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
    return Tables(
        *_paged(entries),
        np.array(several, np.int32).reshape(-1, 3),
        *_paged(case),
        np.array(classes, np.int32),
    )


def _paged(values):
    pages, index = np.unique(values.reshape(-1, PAGE), axis=0, return_inverse=True)
    return (index.reshape(-1) * PAGE).astype(np.int32), pages.reshape(-1)


def expand(index, pages):
    """The value of every code point, [0x110000]."""
    return pages.reshape(-1, PAGE)[index // PAGE].reshape(-1)


def load(do_lower_case, strip_accents):
    """The Tables of the package's file."""
    with np.load(PATH, allow_pickle=False) as file:
        prefix = _prefix(do_lower_case, strip_accents)
        return Tables(*(file[prefix + name] for name in Tables._fields))


def unicode_version():
    """The Unicode version that the package's file was made with."""
    with np.load(PATH, allow_pickle=False) as file:
        return str(file["unicode_version"])


def sha256():
    """The hash of the package's file."""
    return hashlib.sha256(PATH.read_bytes()).hexdigest()


def save(path):
    """Computes the tables of all four normalizations and writes them."""
    arrays = {"unicode_version": np.array(unicodedata.unidata_version)}
    for do_lower_case in (True, False):
        for strip_accents in (True, False):
            prefix = _prefix(do_lower_case, strip_accents)
            tables = compute(do_lower_case, strip_accents)._asdict()
            arrays.update({prefix + name: array for name, array in tables.items()})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    pathlib.Path(path).write_bytes(buffer.getvalue())


def _prefix(do_lower_case, strip_accents):
    return f"{'lower' if do_lower_case else 'keep'}_{'strip' if strip_accents else 'keep'}_"
