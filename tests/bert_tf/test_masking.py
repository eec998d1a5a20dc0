"""Masks: eligible tokens, their number, replacements, whole words and seeds."""

import random

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, Vocabulary
from bert_tf.data.instances import make_instances, to_examples, tokenize_documents
from bert_tf.data.masking import MaskGenerator, keys, random_int63
from tests.google_instances import masked_positions

PAD, UNK, CLS, SEP, MASK = range(5)
ENTRIES = "[PAD] [UNK] [CLS] [SEP] [MASK] [unused0] a b c d ##e ##f".split()
FIRST, WORDS = 6, [6, 7, 8, 9, 10, 11]  # Entries that may replace a token.


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(ENTRIES)


def examples(num_rows, lengths, seed=0, length=24):
    """Return input_ids and input_mask for rows [CLS] ... [SEP] ... [SEP] of random words."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(WORDS, (num_rows, length)).astype(np.int32)
    row_lengths = np.resize(lengths, num_rows)
    columns = np.arange(length)
    ids[:, 0] = CLS
    ids[columns == row_lengths[:, np.newaxis] // 2] = SEP
    ids[columns == row_lengths[:, np.newaxis] - 1] = SEP
    is_token = columns < row_lengths[:, np.newaxis]
    return {"input_ids": np.where(is_token, ids, PAD), "input_mask": is_token.astype(np.int32)}


def masked(masking, given, seed=0, stream=0, graph=True):
    numbers = np.arange(len(given["input_ids"]))
    call = tf.function(masking, autograph=False) if graph else masking
    called = call(given, keys(seed, stream, numbers))
    return {name: np.asarray(value) for name, value in called.items()}


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_masks_cover_words_only_and_the_labels_restore_the_text(vocabulary, whole_word_mask):
    given = examples(3000, [4, 5, 9, 16, 24])
    masking = MaskGenerator(
        vocabulary,
        masked_lm_prob=0.15,
        max_predictions_per_seq=3,
        whole_word_mask=whole_word_mask,
    )
    found = masked(masking, given)
    restored = found["input_ids"].copy()
    positions, weights = found["masked_lm_positions"], found["masked_lm_weights"]
    for row in range(len(restored)):
        count = int(weights[row].sum())
        assert weights[row].tolist() == [1.0] * count + [0.0] * (3 - count)
        assert (np.diff(positions[row, :count]) > 0).all()
        assert not positions[row, count:].any() and not found["masked_lm_ids"][row, count:].any()
        restored[row, positions[row, :count]] = found["masked_lm_ids"][row, :count]
    assert (restored == given["input_ids"]).all()
    hit = np.take_along_axis(given["input_ids"], positions, axis=1)[weights > 0]
    assert set(hit) == set(WORDS)  # Never [CLS], [SEP] or padding.
    counts = weights.sum(axis=1).reshape(-1, 5)
    expected = [min(3, max(1, round(length * 0.15))) for length in (4, 5, 9, 16, 24)]
    if whole_word_mask:
        assert (counts <= expected).all()
    else:
        assert (counts == expected).all()
    assert found["masked_lm_weights"].dtype == np.float32


def test_the_number_of_masks_rounds_like_python_and_is_limited_by_short_examples(vocabulary):
    given = examples(4, [10, 3, 30, 24], length=30)  # 10 * 0.25 = 2.5, which rounds to 2.
    masking = MaskGenerator(vocabulary, masked_lm_prob=0.25, max_predictions_per_seq=40)
    counts = masked(masking, given)["masked_lm_weights"].sum(axis=1)
    # The second is [CLS] [SEP] [SEP], which has no eligible token.
    assert counts.tolist() == [2, 0, 8, 6] and round(30 * 0.25) == 8
    everything = MaskGenerator(vocabulary, masked_lm_prob=1.0, max_predictions_per_seq=40)
    assert masked(everything, given)["masked_lm_weights"].sum(axis=1).tolist() == [7, 0, 27, 21]


def test_mask_actions_and_positions_have_the_released_distribution(vocabulary):
    num_rows, length = 40_000, 24
    given = examples(num_rows, [length])
    masking = MaskGenerator(vocabulary, masked_lm_prob=0.15, max_predictions_per_seq=20)
    found = masked(masking, given)
    positions = found["masked_lm_positions"][:, :4]  # round(24 * 0.15)
    assert found["masked_lm_weights"].sum() == 4 * num_rows
    answers = found["masked_lm_ids"][:, :4]
    seen = np.take_along_axis(found["input_ids"], positions, axis=1)
    total = seen.size

    def near(count, fraction):
        return abs(count - fraction * total) < 5 * (fraction * (1 - fraction) * total) ** 0.5

    assert near((seen == MASK).sum(), 0.8)
    # A random replacement equals the original token once in len(WORDS) times.
    assert near((seen == answers).sum(), 0.1 + 0.1 / len(WORDS))
    for word in WORDS:
        replaced = ((seen == word) & (answers != word)).sum()
        assert near(replaced, 0.1 / len(WORDS) * (1 - 1 / len(WORDS))), word
    assert not np.isin(seen, [PAD, UNK, CLS, SEP, 5]).any()
    # Positions: uniform over the 21 words; actions: the same at every position.
    words = np.setdiff1d(np.arange(length), [0, 12, 23])
    hits = np.bincount(positions.ravel(), minlength=length)
    assert hits[[0, 12, 23]].sum() == 0
    assert all(near(hits[word], 1 / len(words)) for word in words)
    masks = np.bincount(positions[seen == MASK], minlength=length)[words] / hits[words]
    assert np.abs(masks - 0.8).max() < 5 * (0.16 / hits[words].min()) ** 0.5


def test_any_entry_may_replace_a_token_if_configured(vocabulary):
    given = examples(20_000, [24])
    masking = MaskGenerator(
        vocabulary, masked_lm_prob=0.15, max_predictions_per_seq=4, replace_with_any=True
    )
    found = masked(masking, given)
    seen = np.take_along_axis(found["input_ids"], found["masked_lm_positions"], axis=1)
    counts = np.bincount(seen.ravel(), minlength=len(ENTRIES))
    expected = seen.size * 0.1 / len(ENTRIES)
    for entry in (PAD, UNK, CLS, SEP, 5):
        assert abs(counts[entry] - expected) < 5 * expected**0.5


def test_whole_words_are_masked_completely_and_at_the_released_rate(vocabulary):
    given = examples(30_000, [10, 24], seed=4)
    masking = MaskGenerator(
        vocabulary, masked_lm_prob=0.3, max_predictions_per_seq=5, whole_word_mask=True
    )
    found = masked(masking, given)
    counts = found["masked_lm_weights"].sum(axis=1).astype(int)
    rng, expected = random.Random(0), []
    for row in range(len(counts)):
        length = (10, 24)[row % 2]
        tokens = [ENTRIES[token] for token in given["input_ids"][row, :length]]
        chosen = set(found["masked_lm_positions"][row, : counts[row]])
        expected.append(len(masked_positions(tokens, 0.3, 5, rng, whole_words=True)))
        head, words = None, {}
        for position, token in enumerate(tokens):
            if token in ("[CLS]", "[SEP]"):
                continue
            if head is None or not token.startswith("##"):
                head = position
            words.setdefault(head, set()).add(position)
        assert all(word <= chosen or not word & chosen for word in words.values())
    for length in (0, 1):
        ours = np.bincount(counts[length::2], minlength=6)
        theirs = np.bincount(expected[length::2], minlength=6)
        assert (np.abs(ours - theirs) <= 5 * np.sqrt(2 * np.maximum(ours, 1))).all()


def test_masks_depend_on_seed_stream_and_number_only(vocabulary):
    given = examples(64, [24])
    masking = MaskGenerator(vocabulary, masked_lm_prob=0.15, max_predictions_per_seq=4)
    complete = masked(masking, given)["masked_lm_positions"]
    assert (masked(masking, given, graph=False)["masked_lm_positions"] == complete).all()
    part = {name: values[40:] for name, values in given.items()}
    again = masking(part, keys(0, 0, np.arange(40, 64)))["masked_lm_positions"].numpy()
    assert (again == complete[40:]).all()  # The batch of an example does not matter.
    for seed, stream in ((1, 0), (0, 1)):
        other = masked(masking, given, seed, stream)["masked_lm_positions"]
        assert (other != complete).any(axis=1).mean() > 0.9


def test_draws_equal_splitmix64_and_are_uncorrelated():
    def splitmix(state, count):
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            yield (mixed ^ mixed >> 31) >> 1

    for state in (0, 1, 2**64 - 1, 0x1234_5678_9ABC_DEF0):
        drawn = random_int63(tf.constant([state], tf.uint64), 5)
        assert drawn.numpy().tolist() == [list(splitmix(state, 5))]
    # Adjacent numbers, streams and seeds yield unrelated draws.
    rows = [keys(seed, stream, np.arange(20_000)) for seed, stream in ((0, 0), (0, 1), (1, 0))]
    drawn = [random_int63(row, 2).numpy() / 2.0**63 for row in rows]
    columns = np.concatenate([*drawn, drawn[0][np.r_[1:20_000, 0]]], axis=1)
    assert np.abs(np.corrcoef(columns.T) - np.eye(8)).max() < 5 / 20_000**0.5
    assert np.abs(columns.mean(axis=0) - 0.5).max() < 5 * (1 / 12 / 20_000) ** 0.5


@pytest.mark.medium
@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_masks_of_real_text_follow_the_rules(data_dir, tmp_path, whole_word_mask):
    """Check the number of masks exactly, and actions and positions within five deviations."""
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    path = tmp_path / "text"
    path.write_bytes((data_dir / "text" / "books.txt").read_bytes()[:1_500_000])
    spans = [(str(path), begin, 50_000) for begin in range(0, 1_500_000, 50_000)]
    tokenized = tokenize_documents(spans, "lines", "text", Tokenizer(vocabulary, True))
    rules = {"max_seq_length": 128, "short_seq_prob": 0.1, "dupe_factor": 2, "seed": 1}
    made = make_instances(tokenized, **rules)
    given = to_examples(made, tokenized.ids, vocabulary, 128)
    masking = MaskGenerator(
        vocabulary,
        masked_lm_prob=0.15,
        max_predictions_per_seq=20,
        whole_word_mask=whole_word_mask,
    )
    found = masked(masking, given)
    counts = found["masked_lm_weights"].sum(axis=1)
    reference = np.array([min(20, max(1, round(length * 0.15))) for length in made.num_tokens])
    if whole_word_mask:
        assert (counts <= reference).all() and counts.sum() > 0.98 * reference.sum()
    else:
        assert (counts == reference).all()
    is_one = found["masked_lm_weights"] > 0
    answers = found["masked_lm_ids"][is_one]
    seen = np.take_along_axis(found["input_ids"], found["masked_lm_positions"], 1)[is_one]
    mask_id, total = vocabulary["[MASK]"], len(answers)
    assert total > 50_000
    for count, fraction in (
        ((seen == mask_id).sum(), 0.8),
        ((seen == answers).sum(), 0.1),
        (((seen != answers) & (seen != mask_id)).sum(), 0.1),
    ):
        assert abs(count - fraction * total) < 5 * (fraction * (1 - fraction) * total) ** 0.5
    entries = np.array(vocabulary.entries)
    replaced = entries[seen[(seen != answers) & (seen != mask_id)]]
    assert not any(entry.startswith("[") and entry.endswith("]") for entry in replaced)
    # In full examples, every position except [CLS] and [SEP] is equally likely.
    full = made.num_tokens == 128
    hits = np.bincount(found["masked_lm_positions"][full][is_one[full]], minlength=128)
    special_tokens = np.isin(given["input_ids"][full], [vocabulary["[CLS]"], vocabulary["[SEP]"]])
    fraction = hits.sum() / (~special_tokens).sum()
    expected = fraction * (~special_tokens).sum(axis=0)
    if not whole_word_mask:
        assert (np.abs(hits - expected) <= 5 * np.sqrt(expected + 1)).all()
