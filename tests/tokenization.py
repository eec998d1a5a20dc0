"""The released tokenizer (google-research/bert, tokenization.py) in plain Python."""

import unicodedata

CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
# Code points that Unicode 15.0 and 15.1 added (Python 3.12 and 3.13). The package's tables are made
# from 14.0, of which these versions changed no character.
ADDED = """
    CF3-CF3 ECE-ECE 2FFC-2FFF 31EF-31EF 10EFD-10EFF 1123F-11241 11B00-11B09 11F00-11F10
    11F12-11F3A 11F3E-11F59 1342F-1342F 13439-13455 1B132-1B132 1B155-1B155 1D2C0-1D2D3
    1DF25-1DF2A 1E030-1E06D 1E08F-1E08F 1E4D0-1E4F9 1F6DC-1F6DC 1F774-1F776 1F77B-1F77F
    1F7D9-1F7D9 1FA75-1FA77 1FA87-1FA88 1FAAD-1FAAF 1FABB-1FABD 1FABF-1FABF 1FACE-1FACF
    1FADA-1FADB 1FAE8-1FAE8 1FAF7-1FAF8 2B739-2B739 2EBF0-2EE5D 31350-323AF
"""
ADDED_RANGES = [[int(code, 16) for code in pair.split("-")] for pair in ADDED.split()]
ASCII_PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class _Table(dict):
    """Table of `str.translate` that is filled as characters occur, which take long to classify."""

    def __init__(self, replace):
        self._replace = replace

    def __missing__(self, code):
        self[code] = replaced = self._replace(chr(code))
        return replaced


def _clean(character):
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character in "\0\ufffd" or category in ("Cc", "Cf"):
        return ""
    is_cjk = any(first <= ord(character) <= last for first, last in CJK)
    return f" {character} " if is_cjk else character


def _strip(character):
    return "" if unicodedata.category(character) == "Mn" else character


def _separate(character):
    return f" {character} " if is_punctuation(character) else character


_CLEANED, _STRIPPED, _SEPARATED = _Table(_clean), _Table(_strip), _Table(_separate)


def words(text, do_lower_case):
    """Split like BasicTokenizer: clean, separate CJK and punctuation, lower, strip accents."""
    result = []
    for word in text.translate(_CLEANED).split():
        if do_lower_case:
            word = unicodedata.normalize("NFD", word.lower()).translate(_STRIPPED)
        result += word.translate(_SEPARATED).split(" ")
    return " ".join(result).split()


def is_punctuation(character):
    return character in ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")


def tokenize(text, ids, do_lower_case):
    """Return ids like FullTokenizer; `ids` is {entry: id}."""
    return [token for word in words(text, do_lower_case) for token in wordpiece(word, ids)]


def wordpiece(word, ids):
    """Match greedily, longest first; [UNK] if a piece is missing or for over 200 characters."""
    if len(word) > 200:
        return [ids["[UNK]"]]
    pieces, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ids.get(word[start:end] if start == 0 else "##" + word[start:end])
            if piece is not None:
                break
        else:
            return [ids["[UNK]"]]
        pieces.append(piece)
        start = end
    return pieces


def is_assigned(character):
    """Return whether the tables' Unicode version assigns a character, in any Python."""
    is_added = any(first <= ord(character) <= last for first, last in ADDED_RANGES)
    return not is_added and unicodedata.category(character) not in ("Cn", "Cs")
