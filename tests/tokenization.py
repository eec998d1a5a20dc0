"""The released tokenizer (google-research/bert, tokenization.py) in plain Python."""

import unicodedata

CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
ASCII_PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def words(text, do_lower_case):
    """Split like BasicTokenizer: clean, separate CJK and punctuation, lower, strip accents."""
    cleaned = []
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned.append(" ")
        elif character not in "\0\ufffd" and category not in ("Cc", "Cf"):
            is_cjk = any(first <= ord(character) <= last for first, last in CJK)
            cleaned.append(f" {character} " if is_cjk else character)
    result = []
    for word in "".join(cleaned).split():
        if do_lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        spaced = "".join(f" {c} " if is_punctuation(c) else c for c in word)
        result += spaced.split(" ")
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
