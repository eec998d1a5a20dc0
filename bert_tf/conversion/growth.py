"""Growth of a model for another domain: more vocabulary entries and more positions.

Shape suffixes: N added entries.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from bert_tf.errors import UserError
from bert_tf.text.vocabulary import UNUSED, Vocabulary, read_lines
from bert_tf.weights.sources import PretrainedWeights

_WORDS = "bert/embeddings/word_embeddings"
_POSITIONS = "bert/embeddings/position_embeddings"
_OUTPUT_BIAS = "masked_lm/output_bias"


def read_words(path: str | os.PathLike[str]) -> list[str]:
    """Read a file of one word per line. Blank lines are skipped.

    Raises:
        UserError: The file is missing, too large, not UTF-8 or without words.
    """
    lines = read_lines(path, "a file with one word per line")
    words = [line.strip() for line in lines if line.strip()]
    if not words:
        raise UserError(f"{path}: no words; expected one word per line")
    return words


def add_tokens(
    pretrained: PretrainedWeights, words: Sequence[str], where: str = "words"
) -> tuple[PretrainedWeights, str]:
    """Add words that are no entries yet to the vocabulary, [unused] entries first.

    The words are as the tokenizer normalizes them. The embedding and the output bias of a word are
    the means over the pieces of which it consisted before. `where` is the file, for messages.

    Returns:
        The model with the larger vocabulary, and the numbers of words as text.

    Raises:
        UserError: The tokenizer can never produce a word, because of case, accents or punctuation,
            or cannot hold it.
    """
    from bert_tf.text.tokenizer import Tokenizer

    config, vocabulary = pretrained.config, pretrained.vocabulary
    there = set(vocabulary.entries)
    added = [word for word in dict.fromkeys(words) if word not in there]
    pieces_N = _pieces(pretrained, added, where) if added else []
    lines = list(vocabulary.lines)
    free = [number for number, line in enumerate(lines) if UNUSED.fullmatch(line)][: len(added)]
    ids_N = [*free, *range(len(lines), len(lines) + len(added) - len(free))]
    lines += [""] * (len(added) - len(free))
    for word, id in zip(added, ids_N, strict=True):
        lines[id] = word
    grown = Vocabulary(lines, where)
    weights = dict(pretrained.weights)
    for name in {_WORDS, _OUTPUT_BIAS} & weights.keys():
        before = weights[name]
        after = np.concatenate([before, np.zeros((len(grown) - len(before), *before.shape[1:]))])
        for id, pieces in zip(ids_N, pieces_N, strict=True):
            after[id] = before[pieces].mean(axis=0, dtype=np.float64)
        weights[name] = after.astype(np.float32)
    result = dataclasses.replace(
        pretrained,
        config=dataclasses.replace(config, vocab_size=len(grown)),
        vocabulary=grown,
        weights=weights,
        source=f"{pretrained.source} with {len(added)} added words",
    )
    Tokenizer.from_config(result.config, grown)  # Raises for a word of over 256 bytes.
    unknown = sum(vocabulary["[UNK]"] in pieces for pieces in pieces_N)
    return result, (
        f"{len(added)} words added ({len(free)} in place of [unused] entries, "
        f"{len(added) - len(free)} appended, {unknown} of them [UNK] before), "
        f"{len(words) - len(added)} already present"
    )


def extend_positions(pretrained: PretrainedWeights, count: int) -> PretrainedWeights:
    """Extend the position embeddings to `count` rows, more than before.

    The new rows repeat the existing ones from the first on, as in Longformer (Beltagy et al. 2020,
    5): a starting point for further training.
    """
    before = pretrained.weights[_POSITIONS]
    if count <= len(before):
        raise UserError(
            f"--extend_positions={count}: the model has {len(before)} positions; expected a larger "
            "number"
        )
    weights = {**pretrained.weights, _POSITIONS: before[np.arange(count) % len(before)]}
    return dataclasses.replace(
        pretrained,
        config=dataclasses.replace(pretrained.config, max_position_embeddings=count),
        weights=weights,
        source=f"{pretrained.source} with {count} positions",
    )


def _pieces(pretrained, words, where):
    """Return the ids of each word's pieces.

    Raise UserError if the tokenizer changes, splits or skips a word before it looks up entries.
    """
    from bert_tf.text.normalizer import Normalizer
    from bert_tf.text.tokenizer import Tokenizer

    config = pretrained.config
    normalized = Normalizer(**config.tokenizer_settings).words(list(words))
    texts = [text.decode() for text in normalized.words.numpy()]
    splits = normalized.row_splits.numpy()
    for word, begin, end in zip(words, splits[:-1], splits[1:], strict=True):
        found = texts[begin:end]
        if found != [word]:
            raise UserError(
                f"{where}: {word!r:.80} is never a token: the tokenizer reads "
                f"{' '.join(map(repr, found)) or 'nothing':.200}; expected words without spaces "
                f"and punctuation, of at most {config.max_input_chars_per_word} characters, with "
                "the case and accents that the tokenizer keeps"
            )
    return Tokenizer.from_config(config, pretrained.vocabulary).tokenize(words).ids.to_list()
