"""Masked language model: masks of texts, and training and evaluation on texts."""

import json
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf import BertConfig, UserError, Vocabulary, read_pretrained
from bert_tf.data.masking import keys
from bert_tf.runs.checkpoints import model_variables
from bert_tf.text.encoder_inputs import Packed, PackedShape, to_flat, to_packed, to_padded
from bert_tf.train.signals import Interrupted
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights
from tasks.types.masked_lm import MaskedLmTask
from tests import small
from tests.bert_tf.test_conversion import converted
from tests.bert_tf.test_without_next_sentence import TRAINER
from tests.pretraining import assert_same_bits, stop_at, weights_of

WORDS = "the bill is too high screen broken app does not open".split()
TEXTS = [" ".join(np.roll(WORDS, row)[: 3 + row % 8]) for row in range(20)]
MASK = 4
BOTH = ("bert", "masked_lm", "next_sentence")
SETTINGS = {"global_batch_size": 4, "epochs": 2}


@pytest.fixture
def create(tmp_path, config, vocabulary):
    """Return a function that creates the same model with each call."""
    weights = small.random_weights(config, parts=BOTH)
    PretrainedWeights(config, vocabulary, weights, "random").save(tmp_path / "start")

    def create(**options):
        return tasks.MaskedLanguageModel.from_pretrained(tmp_path / "start", seed=7, **options)

    return create


def draw_of(vocabulary, length=16, **options):
    return MaskedLmTask(max_seq_length=length, **options).draw(vocabulary, length)


def batch_of(create, epoch=0, **options):
    """Return a batch of all texts in order, as arrays."""
    model = create(**options)
    model._epoch.assign(epoch)
    (batch,) = model.dataset(TEXTS, batch_size=len(TEXTS), shuffle=False)
    return tf.nest.map_structure(np.asarray, batch)


def test_masks_are_those_of_pretraining(create, vocabulary):
    """MASKED was computed by hand, with SplitMix64 in Python's integers."""
    inputs, labels, weights = batch_of(create)
    splits, counts = inputs["row_splits"], weights["masked_lm"].sum(axis=1).astype(int)
    # 15% of all tokens, rounded, but at least one.
    assert counts.tolist() == [max(1, round(0.15 * n)) for n in np.diff(splits)]
    found = []
    for row, count in enumerate(counts):
        positions = inputs["masked_lm_positions"][row, :count] - splits[row]
        tokens = inputs["input_ids"][splits[row] : splits[row + 1]]
        found.append(
            (
                " ".join(vocabulary.entries[token] for token in tokens[1:-1]),
                [vocabulary.entries[token] for token in labels["masked_lm"][row, :count]],
                positions.tolist(),
            )
        )
    assert {row: found[row] for row in MASKED} == MASKED


# Of row 0 another token took the place of "is", of row 7 that of "app".
MASKED = {
    0: ("the bill open", ["is"], [3]),
    1: ("[MASK] the bill is", ["open"], [1]),
    2: ("not open [MASK] bill is", ["the"], [3]),
    3: ("does [MASK] open the bill is", ["not"], [2]),
    7: ("high screen broken a does not open [MASK] bill is", ["app", "the"], [4, 8]),
    15: ("app [MASK] not [MASK] the bill is too high screen", ["does", "open"], [2, 4]),
}


def test_masks_are_a_function_of_seed_epoch_and_row(create):
    first, again = (batch_of(create) for _ in range(2))
    tf.nest.map_structure(np.testing.assert_array_equal, first, again)
    for other in (batch_of(create, epoch=1), batch_of(create, whole_word_mask=True)):
        assert (first[0]["input_ids"] != other[0]["input_ids"]).any()
    # Rows in the order of `fit` have the masks of their rows.
    model = create()
    (batch,) = model.dataset(TEXTS, batch_size=len(TEXTS))
    order = np.random.default_rng([7, 0]).permutation(len(TEXTS))
    np.testing.assert_array_equal(batch[1]["masked_lm"], first[1]["masked_lm"][order])


def test_of_many_masks_80_percent_are_masked_and_10_percent_kept(vocabulary):
    ids = np.full((4000, 20), 9, np.int32)
    ids[:, 0], ids[:, -1] = 2, 3
    x = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    inputs, labels, weights = draw_of(vocabulary, 20)(x, keys(1, 0, np.arange(4000)))
    rows = np.arange(4000)[:, np.newaxis]
    new = inputs["input_ids"].numpy()[rows, inputs["masked_lm_positions"]]
    assert weights["masked_lm"].numpy().sum() == 4000 * 3
    assert (labels["masked_lm"].numpy() == 9).all() and (new > 3).all()
    # One of the entries that replace a token is the token itself.
    random = 0.1 / (len(vocabulary) - 5)
    assert np.mean(new == MASK) == pytest.approx(0.8, abs=0.01)
    assert np.mean(new == 9) == pytest.approx(0.1 + random, abs=0.01)
    assert len(np.unique(new)) == len(vocabulary) - 4


def test_whole_words_are_masked_together(vocabulary):
    un, aff, able, the = (vocabulary[entry] for entry in ("un", "##aff", "##able", "the"))
    row = np.array([2, the, un, aff, able, the, un, aff, able, *[the] * 10, 3], np.int32)
    ids = np.tile(row, (500, 1))
    x = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    seen = set()
    for whole in (False, True):
        draw = draw_of(vocabulary, 20, whole_word_mask=whole)
        _, labels, _ = draw(x, keys(0, 0, np.arange(500)))
        of_words = np.isin(labels["masked_lm"].numpy(), [un, aff, able]).sum(axis=1)
        seen.add((whole, *np.unique(of_words).tolist()))
    assert seen == {(False, 0, 1, 2, 3), (True, 0, 3)}


@pytest.mark.parametrize("layout", [to_flat, to_packed])
def test_masks_are_equal_in_every_layout(vocabulary, layout):
    rows = tf.ragged.constant([[2, 9, 8, 7, 6, 5, 3], [2, 5, 3], [2, *range(5, 17), 3]], tf.int32)
    packed, keys_B = Packed(rows, tf.zeros_like(rows)), keys(3, 1, np.arange(3))
    draw = draw_of(vocabulary)
    padded = draw(to_padded(packed, vocabulary), keys_B)
    more = (PackedShape.of_unknown_lengths(3, 16),) if layout is to_packed else ()
    inputs, *others = draw(layout(packed, vocabulary, *more), keys_B)
    tf.nest.map_structure(np.testing.assert_array_equal, padded[1:], tuple(others))
    used = others[1]["masked_lm"].numpy() > 0
    flat = inputs["input_ids"].numpy().reshape(-1)[inputs["masked_lm_positions"]]
    in_rows = np.take_along_axis(
        padded[0]["input_ids"].numpy(), padded[0]["masked_lm_positions"].numpy(), axis=1
    )
    assert used.sum() == 4
    np.testing.assert_array_equal(flat[used], in_rows[used])


def test_a_dataset_of_texts_is_masked_by_text_and_epoch(create):
    model = create()
    texts = tf.constant(TEXTS)
    first, second = model.preprocess(texts), model.preprocess(texts[::-1])
    np.testing.assert_array_equal(first[1]["masked_lm"], second[1]["masked_lm"][::-1])
    model._epoch.assign(1)
    assert (first[1]["masked_lm"] != model.preprocess(texts)[1]["masked_lm"]).numpy().any()
    seen = []
    dataset = tf.data.Dataset.from_tensor_slices(TEXTS).batch(4)
    recorded = dataset.map(model.preprocess).map(lambda x, y, w: y["masked_lm"])
    for epoch in (0, 0, 1):
        model._epoch.assign(epoch)
        seen.append(np.concatenate(list(recorded.as_numpy_iterator())))
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()
    before = weights_by_name(model)["masked_lm/output_bias"]
    assert set(model.fit(dataset, epochs=1, verbose=0).history) == {"accuracy", "loss"}
    assert (before != weights_by_name(model)["masked_lm/output_bias"]).any()


def weights_by_name(model):
    return {name: np.array(value) for name, value in model_variables(model.network).items()}


def test_evaluation_has_fixed_masks(create, vocabulary):
    model = create()
    found = model.evaluate(TEXTS, verbose=0)
    inputs = model.tokenize(TEXTS)
    inputs = {name: inputs[name] for name in ("input_ids", "input_mask", "segment_ids")}
    masked, labels, weights = draw_of(vocabulary)(inputs, keys(0, 0, np.arange(len(TEXTS))))
    logits = model.network(masked)["masked_lm"].numpy()
    used = weights["masked_lm"].numpy() > 0
    logits, labels = logits[used], labels["masked_lm"].numpy()[used]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    assert found == pytest.approx(
        {
            "accuracy": np.mean(logits.argmax(axis=1) == labels),
            "loss": losses.mean(),
            "perplexity": np.exp(losses.mean()),
        },
        rel=1e-5,
    )
    # Each text has its own masks, whatever the batch.
    assert model.evaluate(TEXTS, batch_size=3, verbose=0) == pytest.approx(found, rel=1e-5)


def test_fit_and_train_are_equal_and_leave_the_next_sentence_head(create, tmp_path):
    """With dropout; weights and metrics of the dev texts are those of the same steps."""
    fitted, trained, before = create(), create(), weights_by_name(create())
    history = fitted.fit(TEXTS, batch_size=4, epochs=2, validation_data=TEXTS[:6], verbose=0)
    trained.train(TEXTS, dev=TEXTS[:6], output_dir=tmp_path / "run", **SETTINGS)
    after = weights_by_name(fitted)
    source = trained.source
    assert source.is_that_of(trained.task, trained.network)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["dev_loss"] for line in lines if "dev_loss" in line]
    np.testing.assert_allclose(history.history["val_loss"], losses, rtol=1e-6)
    last = weights_of(source.run)
    for name, values in before.items():
        kept = name.startswith(("bert/pooler", "next_sentence"))
        if not name.startswith("dropout"):
            assert np.array_equal(after[name], values) == kept, name
            np.testing.assert_allclose(after[name], last[name], rtol=0, atol=1e-6, err_msg=name)
    assert set(history.history) == {
        *("loss", "accuracy", "val_loss", "val_accuracy", "val_perplexity")
    }
    loaded = tasks.load_model(tmp_path / "run")
    assert loaded.task == trained.task and not (tmp_path / "run" / "task.json").exists()
    assert loaded.evaluate(TEXTS[:6], verbose=0)["loss"] == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_masks_and_losses(create):
    model, compiled = create(), create()
    compiled.compile(jit_compile=True)
    expected, found = (one.evaluate(TEXTS, verbose=0) for one in (model, compiled))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    kernel = compiled.encoder.pooler.kernel.numpy()
    assert np.isfinite(compiled.fit(TEXTS, batch_size=4, epochs=1, verbose=0).history["loss"][0])
    np.testing.assert_array_equal(compiled.encoder.pooler.kernel, kernel)


@pytest.mark.medium
def test_train_resumes_with_the_same_bits_and_only_with_the_same_options(
    create, tmp_path, monkeypatch
):
    create().train(TEXTS, output_dir=tmp_path / "complete", **SETTINGS)
    settings = {**SETTINGS, "output_dir": tmp_path / "run", "save_every": 2}
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Interrupted):
            create().train(TEXTS, **settings)
    with pytest.raises(UserError, match="whole_word_mask: was False when .* is now True"):
        create(whole_word_mask=True).train(TEXTS, **settings)
    lines = []
    model = create()
    model.train(TEXTS, log=lines.append, **settings)
    assert "resuming at step 7 of 10" in lines
    complete = tasks.load_model(tmp_path / "complete").source.run
    assert_same_bits(weights_of(model.source.run), weights_of(complete))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("parts", "architecture"), [(BOTH, "BertForPreTraining"), (BOTH[:2], "BertForMaskedLM")]
)
def test_a_run_is_converted_with_the_heads_of_its_start(
    tmp_path, config, vocabulary, parts, architecture
):
    weights = small.random_weights(config, parts=parts)
    start = PretrainedWeights(
        config, vocabulary, weights, "random", has_trained_pooler=parts == BOTH
    )
    start.save(tmp_path / "start")
    model = tasks.MaskedLanguageModel.from_pretrained(tmp_path / "start", max_seq_length=12)
    model.train(TEXTS, output_dir=tmp_path / "run", global_batch_size=10, epochs=1)
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    assert json.loads((path / "config.json").read_text())["architectures"] == [architecture]
    found = tasks.load_model(path).fill_masks("the [MASK] is high", top_k=2)
    assert found[0]["token"] == model.fill_masks("the [MASK] is high", top_k=2)[0]["token"]
    assert tasks.load_model(tmp_path / "run").task.max_seq_length == 12
    assert read_pretrained(tmp_path / "run").has_trained_pooler == (parts == BOTH)


def test_labels_and_batches_of_other_heads_are_refused_in_one_line(create):
    model, both = create(), create(next_sentence=True)
    with pytest.raises(UserError, match=r"^y\[0\]: 'a': expected no labels, since the labels are"):
        model.fit(["the bill"], ["a"])
    labelled = tf.data.Dataset.from_tensor_slices((TEXTS, TEXTS)).batch(4)
    with pytest.raises(UserError, match="^x: expected a dataset of texts without labels"):
        model.fit(labelled)
    with pytest.raises(UserError, match="^x: received texts, which have no next sentences; "):
        both.evaluate(TEXTS)
    inputs, labels, weights = batch_of(create)
    batches = tf.data.Dataset.from_tensors((inputs, labels, weights))
    assert "accuracy" in model.fit(batches, verbose=0).history
    with pytest.raises(UserError, match="labels of masked_lm; expected those of masked_lm, next_"):
        both.fit(batches)
    pairs = labels | {"next_sentence": np.zeros(len(TEXTS), np.int32)}
    with pytest.raises(UserError, match="labels of masked_lm, next_sentence; expected those of ma"):
        model.evaluate(tf.data.Dataset.from_tensors((inputs, pairs)))


@pytest.mark.slow
@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_losses_of_20_steps_equal_transformers(
    tmp_path, data_dir, transformers_python, whole_word_mask
):
    """`fit` of texts; losses and weights are those of a plain loop of PyTorch."""
    vocabulary = Vocabulary.load(data_dir / "vocab" / "uncased" / "vocab.txt")
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_input_chars_per_word=100,
    )
    weights = small.random_weights(config, scale=0.05, parts=("bert", "masked_lm"))
    PretrainedWeights(config, vocabulary, weights, "random").save(tmp_path / "start")
    converted(tmp_path / "start", tmp_path / "hf", format="huggingface")
    lines = (data_dir / "text" / "books.txt").read_text()[:200_000].split("\n")
    texts = [line for line in lines if line.strip()][:160]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    model = tasks.MaskedLanguageModel.from_pretrained(
        tmp_path / "start", whole_word_mask=whole_word_mask
    )
    model.compile(learning_rate=1e-3, warmup_proportion=0.2, schedule="continuous")
    arrays, losses, sums = [], [], [0.0, 0.0]
    for epoch in range(2):
        model._epoch.assign(epoch)
        for inputs, labels, weights_of_batch in model.dataset(texts, batch_size=16):
            splits = inputs["row_splits"].numpy()
            ids = tf.RaggedTensor.from_row_splits(inputs["input_ids"][: splits[-1]], splits)
            arrays.append(
                {
                    **to_padded(Packed(ids, tf.zeros_like(ids)), vocabulary, 24),
                    "masked_lm_positions": inputs["masked_lm_positions"] - splits[:-1, np.newaxis],
                    "masked_lm_ids": labels["masked_lm"],
                    "masked_lm_weights": weights_of_batch["masked_lm"],
                }
            )
    np.savez(
        tmp_path / "batches.npz",
        **{name: np.stack([batch[name] for batch in arrays]) for name in arrays[0]},
    )

    class Losses(keras.callbacks.Callback):
        """Undo the means over the epoch so far."""

        def on_train_batch_end(self, batch, logs):
            weight = float(arrays[len(losses)]["masked_lm_weights"].numpy().sum())
            if batch == 0:
                sums[:] = 0.0, 0.0
            total = logs["loss"] * (sums[1] + weight)
            losses.append((total - sums[0]) / weight)
            sums[:] = total, sums[1] + weight

    model.fit(texts, batch_size=16, epochs=2, callbacks=[Losses()], verbose=0)
    options = {"rate": 1e-3, "warmup": 4, "decay": 0.01, "length": 24}
    command = [transformers_python, "-I", TRAINER, tmp_path, json.dumps(options)]
    subprocess.run(command, check=True)
    theirs = np.load(tmp_path / "transformers.npz")
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, theirs["losses"], rtol=1e-4)
    after = weights_by_name(model)
    for row in name_map.table(config):
        if row.ours not in name_map.POOLER:
            expected = theirs["bert." + row.huggingface]
            expected = expected.T if row.ours.endswith("/kernel") else expected
            np.testing.assert_allclose(after[row.ours], expected, rtol=0, atol=1e-4)
