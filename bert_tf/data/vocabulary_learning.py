"""Learns a vocabulary: lines -> counted words -> WordPiece entries, and what they do to other text.

Words are our normalizer's. They are counted in a stream, then the pieces are merged by the trainer
of the Rust library `tokenizers`, which never sees anything but words and counts. The same text
gives the same entries in the same order, in any process.
"""

import collections
import concurrent.futures
import os
import time

import tensorflow as tf
import tokenizers

from bert_tf.data import documents
from bert_tf.errors import UserError
from bert_tf.text.normalizer import NEVER, Normalizer
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.text.vocabulary import SPECIALS, Vocabulary

MAX_WORDS = 5_000_000  # Distinct ones held while counting: about 1 GB.
HOLD_OUT_EVERY = 100
MAX_HELD_OUT_LINES, MAX_HELD_OUT_BYTES = 10_000, 64 << 20
BATCH_BYTES = 500_000
MIN_ALPHABET = 256  # So that a small vocabulary too has room for an alphabet's letters.
MAX_ENTRY_CHARACTERS = 64  # Excluded. 63 are at most 252 bytes; the tokenizer takes 256.
SECONDS_BETWEEN_LINES = 5


def learn(paths, input_format, text_field, vocab_size, do_lower_case, strip_accents, log):
    """Files -> Vocabulary of exactly `vocab_size` entries, which our Tokenizer has been tried with.

    Raises UserError if the text does not give as many.
    """
    unique_words = make_unique_words(do_lower_case, strip_accents)
    held_out = []
    lines = hold_out(read_lines(paths, input_format, text_field), held_out)
    counts = count_words(lines, unique_words, log)
    if not counts:
        raise UserError(f"--input: no text in {len(paths)} files, the first is {paths[0]}")
    log(f"merging pieces of {len(counts):,} distinct words")
    vocabulary = Vocabulary(train(counts, vocab_size), where="learned vocabulary")
    tokenizer = Tokenizer(vocabulary, do_lower_case, strip_accents)
    log(
        f"{len(vocabulary):,} entries, {'uncased' if do_lower_case else 'cased'}; "
        f"{len(counts):,} distinct words; {try_out(tokenizer, held_out, unique_words)}"
    )
    return vocabulary


def read_lines(paths, input_format, text_field):
    """The lines of all files that are not blank, as UTF-8; of JSON, those of each text."""
    is_json = input_format == "jsonl"
    max_bytes = documents.MAX_JSON_LINE_BYTES if is_json else documents.MAX_LINE_BYTES
    for path in paths:
        for number, (_, line, text) in enumerate(documents.lines(path, max_bytes), start=1):
            if is_json and text.strip():
                text = documents.json_text(text.strip(), text_field, f"{path}: line {number}")
                for part in filter(str.strip, text.split("\n")):
                    yield part.encode()
            elif text.strip():
                yield line


def hold_out(lines, held_out):
    """Passes the lines on but for every 100th, which go to the list `held_out`.

    When they are too many, every other one is passed on after all and from then on twice as few are
    held out: however long the text, they are from all of it.
    """
    step, num_bytes = HOLD_OUT_EVERY, 0
    for number, line in enumerate(lines, start=1):
        if number % step:
            yield line
            continue
        held_out.append(line)
        num_bytes += len(line)
        if len(held_out) > MAX_HELD_OUT_LINES or num_bytes > MAX_HELD_OUT_BYTES:
            yield from held_out[::2]
            del held_out[::2]
            step, num_bytes = 2 * step, sum(map(len, held_out))


def make_unique_words(do_lower_case, strip_accents=None):
    """A function [B] string -> the different words of all texts, and how often each occurs."""
    normalizer = Normalizer(do_lower_case, strip_accents)

    def unique_words(texts):
        return tf.unique_with_counts(normalizer.words(texts).words, tf.int64)

    signature = [tf.TensorSpec([None], tf.string)]
    return tf.function(unique_words, input_signature=signature, autograph=False)


def count_words(lines, unique_words, log):
    """Lines -> {word: count}, of at most about MAX_WORDS words."""
    counts, num_bytes, dropped_up_to = {}, 0, 0
    start = shown = time.monotonic()

    def log_progress():
        megabytes, seconds = num_bytes / 1e6, max(time.monotonic() - start, 1e-3)
        rate = f"{megabytes / seconds:.1f} MB/s"
        log(f"counted {megabytes:,.1f} MB, {len(counts):,} distinct words, {rate}")

    for size, words, numbers in _in_threads(lines, unique_words):
        num_bytes += size
        for word, number in zip(words, numbers, strict=True):
            counts[word] = counts.get(word, 0) + number
        if len(counts) > MAX_WORDS:
            limit = _count_of_the_rarest(counts)
            counts = {word: number for word, number in counts.items() if number > limit}
            dropped_up_to = max(dropped_up_to, limit)
        if time.monotonic() - shown >= SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            log_progress()
    log_progress()
    if dropped_up_to:
        seen = f"seen up to {dropped_up_to:,} times by then"
        log(f"over {MAX_WORDS:,} distinct words: the rarest, {seen}, were dropped")
    counts.pop(NEVER.encode(), None)  # Too long for any vocabulary.
    return {word.decode(): number for word, number in counts.items()}


def _in_threads(lines, unique_words):
    """Lines -> (bytes, words, counts) of each batch in order; TensorFlow leaves Python's lock."""

    def work(batch):
        unique = unique_words(tf.constant(batch))
        return sum(map(len, batch)), unique.y.numpy().tolist(), unique.count.numpy().tolist()

    num_threads = min(os.cpu_count(), 8)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        pending = collections.deque()
        for batch in _batches(lines):
            pending.append(pool.submit(work, batch))
            if len(pending) > num_threads:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def _count_of_the_rarest(counts):
    """The least count so that at most half of MAX_WORDS have more: no order of words has a say."""
    frequencies, kept = collections.Counter(counts.values()), len(counts)
    for limit in sorted(frequencies):
        kept -= frequencies[limit]
        if kept <= MAX_WORDS // 2:
            return limit


def alphabet(counts, vocab_size):
    """The most frequent characters as pieces, sorted: each "c" that there is, then each "##c".

    They take at most a quarter of the vocabulary. Raises UserError if there is no room for them.
    """
    totals, continuing = collections.Counter(), set()
    for word, number in counts.items():
        for character in word:
            totals[character] += number
        continuing.update(word[1:])
    remaining = max(vocab_size // 4, MIN_ALPHABET)
    chosen = []
    for character in sorted(totals, key=lambda character: (-totals[character], character)):
        remaining -= 1 + (character in continuing)
        if remaining < 0:
            break
        chosen.append(character)
    pieces = sorted(chosen) + [f"##{character}" for character in sorted(continuing & {*chosen})]
    min_size = len(SPECIALS) + len(pieces)
    if vocab_size < min_size:
        raise UserError(
            f"--vocab_size={vocab_size}: the special tokens and the characters of the text alone "
            f"take {min_size} entries; use --vocab_size={min_size} or more"
        )
    return pieces


def train(counts, vocab_size):
    """{word: count} -> `vocab_size` entries. Raises UserError if the words do not give as many."""
    entries = merge(counts, vocab_size)
    if len(entries) == vocab_size:
        return entries
    max_size = len(entries)
    # A smaller vocabulary has a smaller alphabet, hence maybe fewer words to merge pieces of.
    while (found := len(merge(counts, max_size))) < max_size:
        max_size = found
    raise UserError(
        f"--vocab_size={vocab_size}: the text gives only {max_size} entries; use "
        f"--vocab_size={max_size} or more text"
    )


def merge(counts, vocab_size):
    """{word: count} -> special tokens, alphabet, then merged pieces in the order they were made.

    Words with a character outside the alphabet have no part in it: they will be [UNK].
    """
    # All characters are "special" to the trainer, which otherwise numbers them in the order of a
    # hash map, different in each process, and decides ties by these numbers.
    fixed = [*SPECIALS, *alphabet(counts, vocab_size)]
    # What WordPieceTrainer is inside; that one has no limit for the length of an entry.
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        continuing_subword_prefix="##",
        max_token_length=MAX_ENTRY_CHARACTERS,
        show_progress=False,
    )
    learner = tokenizers.Tokenizer(tokenizers.models.BPE(continuing_subword_prefix="##"))
    learner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(_feed(counts, {*fixed}), trainer)
    ids = learner.get_vocab()
    return sorted(ids, key=ids.get)


def _feed(counts, characters):
    """Each word of these characters as often as it counts: the trainer takes no counts."""
    for word in sorted(filter(characters.issuperset, counts)):
        for left in range(counts[word], 0, -10_000):
            yield f"{word} " * min(left, 10_000)


def try_out(tokenizer, lines, unique_words):
    """Says how a vocabulary does on lines that it was not learned from."""
    words = tokens = unknown = 0
    for batch in _batches(lines):
        texts = tf.constant(batch)
        ids = tokenizer.tokenize(texts).ids.flat_values
        words += int(tf.reduce_sum(unique_words(texts).count))
        tokens += int(tf.size(ids))
        unknown += int(tf.math.count_nonzero(ids == tokenizer.vocabulary["[UNK]"]))
    if not words:
        return f"pieces a word and [UNK] unknown: under {HOLD_OUT_EVERY} lines, none held out"
    pieces, fraction = tokens / words, unknown / tokens
    return f"{pieces:.3f} pieces a word and {fraction:.3%} [UNK] on {words:,} held-out words"


def _batches(lines):
    """Lists of lines of about BATCH_BYTES."""
    batch, size = [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
