"""Reader of Hugging Face tokenizers: vocab.txt or tokenizer.json, and their settings.

A setting that changes token ids is honoured or rejected by name. As in transformers, the settings
of tokenizer_config.json override those of tokenizer.json, unless its tokenizer_class says that
tokenizer.json is complete.
"""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from bert_tf.config import TOKENIZER_SETTINGS, read_json_object
from bert_tf.errors import UserError
from bert_tf.storage.strict_json import field
from bert_tf.text.vocabulary import SPECIALS, Vocabulary, placeholder

_BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Key of each special token in tokenizer_config.json and special_tokens_map.json.
SPECIAL_TOKENS = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
# Settings of these files, accepted only with the values that we implement.
_REQUIRED_SETTINGS = {
    "auto_map": {},
    "clean_text": True,
    "do_basic_tokenize": True,
    "do_subword_tokenize": True,
    "never_split": [],
    "subword_tokenizer_type": "wordpiece",
    "tokenize_chinese_chars": True,
    "truncation_side": "right",
    "word_tokenizer_type": "basic",
    "wordpieces_prefix": "##",
    **SPECIAL_TOKENS,
}
# Parts of tokenizer.json and the values that we implement; some are absent from old files.
_REQUIRED_PARTS: dict[str, dict[str, Any]] = {
    "normalizer": {"type": "BertNormalizer", "clean_text": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
    },
}
# Names and segments of what a sequence consists of, in its post-processor.
_SINGLE = (("[CLS]", 0), ("A", 0), ("[SEP]", 0))
_PAIR = (*_SINGLE, ("B", 1), ("[SEP]", 1))
# Of BertTokenizer of transformers, whatever files say, and of old files that do not say it.
MAX_INPUT_CHARS_PER_WORD = 100


def read(
    directory: pathlib.Path, vocab_size: int, tokenizer_class: Any = None
) -> tuple[Vocabulary, dict[str, Any]]:
    """Read the tokenizer of a model: its vocabulary, and its settings as in `BertConfig`.

    Rows of the word embeddings, `vocab_size` in number, without an entry get a placeholder.
    `tokenizer_class` is that of config.json, if any.

    Raises:
        UserError: A file is missing or invalid, or a setting is not supported.
    """
    text_path, json_path = directory / "vocab.txt", directory / "tokenizer.json"
    settings = _settings(directory, tokenizer_class)
    has_json = json_path.is_file()
    if settings.get("tokenizer_class") in _GENERIC_CLASSES and not has_json:
        raise UserError(
            f"{json_path}: no such file; expected it, because tokenizer_class is "
            f"{settings['tokenizer_class']}"
        )
    values = _flattened(object_in(json_path))
    if has_json:
        _check_parts(values, json_path)
        _check_post_processor(values, json_path)
    if text_path.is_file():
        vocabulary = Vocabulary.load(text_path).padded(vocab_size, str(text_path))
        if has_json:
            _check_equal(vocabulary, _vocabulary(values, vocab_size, json_path), json_path)
    elif has_json:
        vocabulary = _vocabulary(values, vocab_size, json_path)
    else:
        raise UserError(f"{text_path}: no such file; expected vocab.txt or tokenizer.json")
    _check_added_tokens(directory, settings, values, vocabulary)
    lower, strips = _case(directory, settings, values, vocabulary)
    limit = values.get("model", {}).get("max_input_chars_per_word", MAX_INPUT_CHARS_PER_WORD)
    return vocabulary, dict(zip(TOKENIZER_SETTINGS, (lower, strips, limit), strict=True))


def _settings(directory, default_class):
    """Return the settings of tokenizer_config.json, checked, with a default for its class."""
    settings = object_in(directory / "tokenizer_config.json")
    name = settings.get("tokenizer_class")
    if name is None:
        name = settings["tokenizer_class"] = default_class
    if name not in (None, *_BERT_CLASSES, *_GENERIC_CLASSES):
        raise UserError(
            f"{directory}: tokenizer_class is {name!r:.80}, in tokenizer_config.json or "
            "config.json; expected one of "
            f"{', '.join((*_BERT_CLASSES, *_GENERIC_CLASSES))}"
        )
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        check_settings(object_in(directory / file), _REQUIRED_SETTINGS, directory / file)
    return settings


def _flattened(values):
    """Return tokenizer.json with lower-casing before BERT's normalizer as a setting of it.

    sentence-transformers writes both as a sequence. Accents stay unless they are stripped anyway.
    """
    try:
        first, second = values["normalizer"]["normalizers"]
        if (first["type"], second["type"]) != ("Lowercase", "BertNormalizer"):
            return values
    except (KeyError, TypeError, ValueError):
        return values
    strips = second.get("strip_accents")
    if not second.get("lowercase"):
        second = {**second, "lowercase": True, "strip_accents": bool(strips)}
    return {**values, "normalizer": second}


def _check_parts(values, path):
    """Check that tokenizer.json describes BERT's tokenizer."""
    for part, expected in _REQUIRED_PARTS.items():
        check_settings(field(values, part, dict, path), expected, path, prefix=f"{part}.")


def _check_post_processor(values, path):
    """Check that [CLS] A [SEP] B [SEP] is put together as usual, with segments 0 and 1."""
    processor = field(values, "post_processor", dict, path)
    if processor.get("type") == "BertProcessing":
        is_usual = all(
            isinstance(pair, list) and pair[:1] == [special]
            for pair, special in ((processor.get("sep"), "[SEP]"), (processor.get("cls"), "[CLS]"))
        )
    else:
        is_usual = (
            processor.get("type") == "TemplateProcessing"
            and _pieces(processor.get("single")) == _SINGLE
            and _pieces(processor.get("pair")) == _PAIR
        )
    if not is_usual:
        raise UserError(
            f"{path}: post_processor {processor.get('type')!r:.80} is not supported; expected "
            "[CLS] A [SEP] B [SEP] with segments 0 and 1"
        )


def _pieces(template):
    """Return (name, segment) of each piece of a template, or `None` if it is malformed."""
    try:
        pieces = [next(iter(piece.values())) for piece in template]
        return tuple((piece["id"], piece["type_id"]) for piece in pieces)
    except (AttributeError, KeyError, StopIteration, TypeError):
        return None


def _vocabulary(values, vocab_size, path):
    """Return the vocabulary of tokenizer.json, with placeholders for ids without an entry."""
    entries: dict[Any, str] = {}
    for entry, index in field(values["model"], "vocab", dict, f"{path}: model").items():
        if type(index) is not int or not 0 <= index < vocab_size:
            raise UserError(
                f"{path}: model.vocab: {entry!r:.80} has the id {index!r:.40}; expected 0 to "
                f"{vocab_size - 1}, because vocab_size in the configuration is {vocab_size}"
            )
        if index in entries:
            raise UserError(
                f"{path}: model.vocab: {entry!r:.80} and {entries[index]!r:.80} have "
                f"the same id {index}"
            )
        entries[index] = entry
    for index, special in _added_specials(values) if entries else ():
        if special not in entries.values() and 0 <= index < vocab_size:
            entries.setdefault(index, special)
    lines = []
    for index in range(max(entries, default=-1) + 1):
        entry = entries.get(index, "")
        # These can be in no line of a vocab.txt, and match no text either.
        lines.append(placeholder(index) if not entry or "\n" in entry else entry)
    return Vocabulary(lines, f"{path}: model.vocab").padded(vocab_size, str(path))


def _added_specials(values):
    """Yield (id, token) of the special tokens among the added ones, which are checked elsewhere.

    Those that a vocabulary was trained without are only there.
    """
    tokens = values.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        is_special = isinstance(token, dict) and token.get("content") in SPECIALS
        if is_special and type(token.get("id")) is int:
            yield token["id"], token["content"]


def _check_equal(vocabulary, other, path):
    """Check that vocab.txt and tokenizer.json have the same entries."""
    for index, (entry, theirs) in enumerate(zip(vocabulary.entries, other.entries, strict=True)):
        if entry != theirs:
            raise UserError(
                f"{path}: entry {index} is {theirs!r:.80}, but {entry!r:.80} in vocab.txt; remove "
                "the file that does not belong to the weights"
            )


def _check_added_tokens(directory, settings, values, vocabulary):
    """Raise UserError if tokens but the five special ones, with their ids, are matched in text."""
    try:
        tokens = list(_added_tokens(directory, settings, values))
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{directory}: malformed added tokens in tokenizer.json, tokenizer_config.json, "
            "special_tokens_map.json or added_tokens.json"
        ) from None
    for name, token, index in tokens:
        if token not in SPECIALS or index not in (None, vocabulary[token]):
            raise UserError(
                f"{directory / name}: the added token {token!r:.80} with id {index!r:.40} is not "
                f"supported; expected none but {', '.join(SPECIALS)} with the ids of their entries"
            )


def _added_tokens(directory, settings, values):
    """Yield (file name, token, id or None if not given) of each added token."""
    for token in values.get("added_tokens") or []:
        yield "tokenizer.json", token["content"], token["id"]
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        yield "tokenizer_config.json", token["content"], int(index)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = object_in(directory / name).get(key) or []
            for token in tokens.values() if isinstance(tokens, dict) else tokens:
                yield name, token["content"] if isinstance(token, dict) else token, None
    for token, index in object_in(directory / "added_tokens.json").items():
        yield "added_tokens.json", token, index


def object_in(path: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def check_settings(
    values: Mapping[str, Any],
    required: Mapping[str, Any],
    where: pathlib.Path,
    changed: str = "token ids",
    prefix: str = "",
) -> None:
    """Raise UserError if a setting of a file is neither absent nor null nor the one value here."""
    for name, expected in required.items():
        value = values.get(name)
        if isinstance(value, dict) and "content" in value:
            value = value["content"]  # Special tokens may be objects.
        if value is not None and value != expected:
            raise UserError(
                f"{where}: {prefix}{name}={value!r:.80} is not supported, because it changes "
                f"{changed}; expected {expected!r}"
            )


def _case(directory, settings, values, vocabulary):
    """Return `do_lower_case` and `strip_accents`.

    The normalizer of tokenizer.json counts for the generic classes only: the others override it,
    also by their defaults. If there is only a vocab.txt and no setting, the vocabulary shows the
    case.
    """
    normalizer = values.get("normalizer", {})
    is_generic = settings.get("tokenizer_class") in _GENERIC_CLASSES
    is_overridden = not is_generic and settings.get("tokenize_chinese_chars") is not None
    if not is_overridden:
        required = {"handle_chinese_chars": True}
        check_settings(normalizer, required, directory / "tokenizer.json", prefix="normalizer.")
    if is_generic:
        lower, strip = normalizer.get("lowercase"), normalizer.get("strip_accents")
    else:
        lower = settings.get("do_lower_case", True if values else None)
        strip = settings.get("strip_accents")
    if lower is None and vocabulary.looks_cased():
        lower = False
        warnings.warn(
            f"{directory}: text keeps its case, unless do_lower_case is given, since the "
            "vocabulary has upper case; transformers lower-cases it, since no "
            "tokenizer_config.json has do_lower_case",
            stacklevel=2,
        )
    lower = True if lower is None else lower
    if object_in(directory / "sentence_bert_config.json").get("do_lower_case") and lower is False:
        # sentence-transformers lower-cases the text before the tokenizer, which keeps accents.
        return True, bool(strip)
    return lower, strip
