"""Learn a WordPiece vocabulary: count words, merge pieces, evaluate on held-out text.

Words come from `bert_tf.text.normalizer` and are counted in a stream. The trainer of the Rust
library `tokenizers` merges pieces; it receives only words and counts. The same text gives the same
entries in the same order, in any process.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf
import tokenizers

from bert_tf.data import documents
from bert_tf.errors import UserError
from bert_tf.storage import files
from bert_tf.system.processes import count_processors
from bert_tf.system.progress import Progress
from bert_tf.text.normalizer import NEVER, Normalizer
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.text.vocabulary import SPECIALS, Vocabulary

MAX_WORDS = 5_000_000  # Distinct words in memory while counting: about 1 GB.
HOLD_OUT_EVERY = 100
MAX_HELD_OUT_LINES, MAX_HELD_OUT_BYTES = 10_000, 64 << 20
BATCH_BYTES = 500_000
MIN_ALPHABET = 256  # Pieces of characters to begin with, also in a small vocabulary.
MAX_ENTRY_CHARACTERS = 64  # Exclusive: 63 are at most 252 bytes, the tokenizer's limit is 256.


def learn(
    paths: Sequence[str],
    input_format: str,
    text_field: str,
    vocab_size: int,
    do_lower_case: bool,
    strip_accents: bool | None,
    log: Callable[[str], None],
) -> Vocabulary:
    """Learn a vocabulary of exactly `vocab_size` entries from UTF-8 files, plain or gzip.

    The format is as in `documents.spans`. If `strip_accents` is `None`, accents are removed if text
    is lower-cased.

    Raises:
        UserError: If there is no text, or too little for `vocab_size` entries, or if the entries
            are in none of the held-out lines.
    """
    unique_words = make_unique_words(do_lower_case, strip_accents)
    held_out: list[bytes] = []
    lines = hold_out(read_lines(paths, input_format, text_field), held_out)
    counts = count_words(lines, unique_words, log)
    if not counts:
        raise UserError(f"--input: no text in {len(paths)} files, the first is {paths[0]}")
    log(f"merging: {len(counts):,} distinct words")
    vocabulary = Vocabulary(train(counts, vocab_size), where="learned vocabulary")
    tokenizer = Tokenizer(vocabulary, do_lower_case, strip_accents)
    num_words, token_counts = try_out(tokenizer, held_out, unique_words)
    log(
        f"{len(vocabulary):,} entries, {'uncased' if do_lower_case else 'cased'}; "
        f"{len(counts):,} distinct words; {_quality(num_words, token_counts)}"
    )
    for line in token_counts.warnings("--input: held-out lines"):
        log(f"warning: {line}")
    return vocabulary


def read_lines(paths: Iterable[str], input_format: str, text_field: str) -> Iterator[bytes]:
    """Yield the nonblank lines of all files, or of the texts in "jsonl" files, as UTF-8."""
    is_json = input_format == "jsonl"
    max_bytes = documents.MAX_JSON_LINE_BYTES if is_json else documents.MAX_LINE_BYTES
    for path in paths:
        with files.TextFile(path) as stream:
            for number, (_, line, text) in enumerate(documents.lines(stream, max_bytes), start=1):
                if is_json and text.strip():
                    text = documents.json_text(text, text_field, f"{path}: line {number}")
                    for part in filter(str.strip, text.split("\n")):
                        yield part.encode()
                elif text.strip():
                    yield line


def hold_out(lines: Iterable[bytes], held_out: list[bytes]) -> Iterator[bytes]:
    """Yield lines except for every 100th, which is appended to `held_out`.

    When there are too many held-out lines, every second one is yielded after all, and the interval
    is doubled. The held-out lines are therefore from all of the text, however long it is.
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


def make_unique_words(do_lower_case: bool, strip_accents: bool | None = None) -> Callable:
    """Return a `tf.function` from a string tensor `(B,)` to its distinct words and their counts.

    The result has the fields `y`, string `(W,)`, and `count`, int64 `(W,)`.
    """
    normalizer = Normalizer(do_lower_case, strip_accents)

    def unique_words(texts):
        return tf.unique_with_counts(normalizer.words(texts).words, tf.int64)

    signature = [tf.TensorSpec([None], tf.string)]
    return tf.function(unique_words, input_signature=signature, autograph=False)


def count_words(
    lines: Iterable[bytes], unique_words: Callable, log: Callable[[str], None]
) -> dict[str, int]:
    """Return the counts of the words of UTF-8 text, by word.

    The rarest are dropped when there are more than `MAX_WORDS` distinct ones.
    """
    counts: dict[bytes, int] = {}
    num_bytes = dropped_up_to = 0
    with Progress(log, "MB") as progress:
        for size, words, numbers in _in_threads(lines, unique_words):
            num_bytes += size
            for word, number in zip(words, numbers, strict=True):
                counts[word] = counts.get(word, 0) + number
            if len(counts) > MAX_WORDS:
                limit = _count_of_the_rarest(counts)
                counts = {word: number for word, number in counts.items() if number > limit}
                dropped_up_to = max(dropped_up_to, limit)
            progress.update(num_bytes // 10**6)
    log(f"counted {num_bytes / 1e6:,.1f} MB, {len(counts):,} distinct words")
    if dropped_up_to:
        seen = f"seen up to {dropped_up_to:,} times by then"
        log(f"over {MAX_WORDS:,} distinct words: dropped the rarest, {seen}")
    counts.pop(NEVER.encode(), None)  # Too long for any vocabulary.
    return {word.decode(): number for word, number in counts.items()}


def _in_threads(lines, unique_words):
    """Yield bytes, words and counts of each batch, in order.

    Threads are sufficient, since TensorFlow releases the global interpreter lock.
    """

    def work(batch):
        unique = unique_words(tf.constant(batch))
        return sum(map(len, batch)), unique.y.numpy().tolist(), unique.count.numpy().tolist()

    num_threads = min(count_processors(), 8)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        pending = collections.deque()
        for batch in _batches(lines):
            pending.append(pool.submit(work, batch))
            if len(pending) > num_threads:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def _count_of_the_rarest(counts):
    """Return the lowest count that at most MAX_WORDS / 2 words exceed.

    A limit on the count, unlike one on the rank, does not depend on the order of words.
    """
    frequencies, kept = collections.Counter(counts.values()), len(counts)
    for limit in sorted(frequencies):
        kept -= frequencies[limit]
        if kept <= MAX_WORDS // 2:
            return limit


def alphabet(counts: Mapping[str, int], max_pieces: int) -> list[str]:
    """Return the most frequent characters as at most `max_pieces` pieces.

    Returns:
        All "c", sorted, then all "##c", sorted.
    """
    totals: collections.Counter[str] = collections.Counter()
    continuing: set[str] = set()
    for word, number in counts.items():
        for character in word:
            totals[character] += number
        continuing.update(word[1:])
    chosen = []
    for character in sorted(totals, key=lambda character: (-totals[character], character)):
        max_pieces -= 1 + (character in continuing)
        if max_pieces < 0:
            break
        chosen.append(character)
    return sorted(chosen) + [f"##{character}" for character in sorted(continuing & {*chosen})]


def train(counts: Mapping[str, int], vocab_size: int) -> list[str]:
    """Return exactly `vocab_size` entries for words; raises UserError if they give fewer."""
    num_pieces = max(vocab_size // 4, MIN_ALPHABET)
    entries = merge(counts, vocab_size, num_pieces)
    if len(entries) < vocab_size:
        # Few words have several characters, as in Chinese, so the alphabet gets what merges leave.
        max_pieces = len(alphabet(counts, vocab_size - len(SPECIALS)))
        while len(entries) < vocab_size and num_pieces < max_pieces:
            num_pieces = min(num_pieces + vocab_size - len(entries), max_pieces)
            entries = merge(counts, vocab_size, num_pieces)
    if len(entries) < vocab_size:
        raise UserError(
            f"--vocab_size={vocab_size}: the text only gives {len(entries)} entries; use at most "
            "that many, or more text"
        )
    return entries


def merge(counts: Mapping[str, int], vocab_size: int, max_pieces: int) -> list[str]:
    """Return special tokens, alphabet and merged pieces in merge order, at most `vocab_size`.

    Words with a character outside the alphabet are ignored, since they will be [UNK].

    Raises:
        UserError: If special tokens and alphabet exceed `vocab_size`.
    """
    # Characters are passed as special tokens. Otherwise the trainer numbers them in the order of a
    # hash map, which differs between processes, and breaks ties by these numbers.
    fixed = [*SPECIALS, *alphabet(counts, max_pieces)]
    if vocab_size < len(fixed):
        raise UserError(
            f"--vocab_size={vocab_size}: special tokens and characters of the text alone are "
            f"{len(fixed)} entries; use --vocab_size={len(fixed)} or more"
        )
    # WordPieceTrainer wraps this trainer, but cannot limit the length of an entry.
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
    return sorted(ids, key=ids.__getitem__)


def _feed(counts, characters):
    """Yield each word of these characters `count` times, since the trainer accepts no counts."""
    for word in sorted(filter(characters.issuperset, counts)):
        for left in range(counts[word], 0, -10_000):
            yield f"{word} " * min(left, 10_000)


def try_out(
    tokenizer: Tokenizer, lines: Iterable[bytes], unique_words: Callable
) -> tuple[int, TokenCounts]:
    """Return the number of words, and the counts of the tokens, of held-out lines."""
    words, counts = 0, TokenCounts()
    for batch in _batches(lines):
        texts = tf.constant(batch)
        ids = tokenizer.tokenize(texts).ids.flat_values
        words += int(tf.reduce_sum(unique_words(texts).count))
        unknown = int(tf.math.count_nonzero(ids == tokenizer.vocabulary["[UNK]"]))
        counts += TokenCounts(texts=len(batch), tokens=int(tf.size(ids)), unknown=unknown)
    return words, counts


def _quality(num_words, counts):
    """Return pieces per word and the fraction of [UNK], as text."""
    if not num_words:
        return f"pieces per word and [UNK] not measured: under {HOLD_OUT_EVERY} lines"
    pieces, fraction = counts.tokens / num_words, counts.unknown / counts.tokens
    return f"{pieces:.3f} pieces per word and {fraction:.3%} [UNK] on {num_words:,} held-out words"


def _batches(lines):
    """Yield lists of lines with about `BATCH_BYTES` in total."""
    batch, size = [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
