"""Counts, warnings and errors of what a vocabulary and a maximum length lose of texts."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.data import jobs
from bert_tf.text.encoder_inputs import pack
from bert_tf.text.token_counts import TokenCounts
from bert_tf.text.tokenizer import Tokens
from tasks import TextClassifier, TextEmbedder
from tasks.data.windows import TokenCounter, one_window_each, pack_texts, pack_windows
from tasks.evaluate import EvaluateSettings
from tasks.evaluate import main as evaluate
from tasks.finetuning.recipe import dry_run, finetune
from tasks.graph.pipeline import Pipeline
from tasks.prediction.outputs import OutputSettings, VectorJob, predict, write_output_shards
from tasks.prediction.retrieval import vectors_in_blocks
from tests import small
from tests.corpus import run_here
from tests.shared_graphs import tokenizer_of

UNKNOWN = "\u1780\u1781\u1782" * 12  # A word of Khmer, which no entry begins with.
WORDS = ["the", "bill", "is", "too", "high"]
LONG = " ".join(WORDS * 600)
ALL_UNKNOWN = r": all 40 tokens are \[UNK\]: the vocabulary has no entries for the language"
# Of 40 rows, and what is said about them.
LOSSES = {
    "long": ([LONG] * 40, "40 of 40 texts are longer than the maximum length"),
    "empty": (["", *["the bill"] * 3] * 10, "10 of 40 texts are empty"),
    "unknown": ([f"the bill is {UNKNOWN}"] * 40, "25.0% of 160 tokens are [UNK]"),
    "nothing": (["the bill is too high"] * 40, None),
}


def counts_of(vocabulary, *windows):
    counter = TokenCounter(vocabulary)
    for of in windows:
        counter.add(of)
    return counter.take()


def write(path, texts):
    return small.write_rows(path, [(text, "ab"[number % 2]) for number, text in enumerate(texts)])


@pytest.fixture
def unknown_file(tmp_path):
    return write(tmp_path / "khmer.csv", [UNKNOWN] * 40)


@pytest.fixture
def model(huggingface_dir):
    return TextClassifier.from_pretrained(huggingface_dir, labels=["a", "b"], max_seq_length=16)


def test_tokens_of_texts_and_pairs_are_counted(vocabulary):
    tokenize = tokenizer_of(vocabulary, True).tokenize
    first = tf.constant(["the bill is too high", "the \u1780", "", "the bill"])
    second = tf.constant(["", "my app does not open", "", UNKNOWN])
    alone, pairs = (
        one_window_each(pack_texts(texts, tokenize, vocabulary, 7))
        for texts in ([first], [first, second])
    )
    assert counts_of(vocabulary, alone) == TokenCounts(4, 1, 0, 9, 1, 0)
    # Pairs have 4 tokens: "the bill is too" and "the [UNK] my app" remain of the first two.
    assert counts_of(vocabulary, pairs) == TokenCounts(4, 1, 2, 11, 2, 4)
    assert counts_of(vocabulary, alone, pairs) == TokenCounts(8, 2, 2, 20, 3, 4)


@pytest.mark.parametrize("truncation", ["head", "tail", "head_tail"])
def test_tokens_of_the_part_that_is_not_read_are_estimated(vocabulary, truncation):
    tokenize = tokenizer_of(vocabulary, True).tokenize
    texts = tf.constant([LONG, LONG[:200], "the"])
    packed = pack_texts([texts], tokenize, vocabulary, 16, truncation)
    complete = pack([tokenize(texts)], vocabulary, 16, truncation)
    assert complete.lost.numpy().tolist() == [3000 - 14, len(LONG[:200].split()) - 14, 0]
    np.testing.assert_allclose(packed.lost, complete.lost, rtol=0.05)


def test_a_long_text_of_several_windows_counts_once(vocabulary):
    ragged = tf.RaggedTensor.from_row_lengths
    question = Tokens(ragged(tf.constant([5, 6, 7, 5]), [3, 1]))
    text = Tokens(ragged(tf.constant([*range(5, 14), 1], tf.int32), [10, 0]))
    windows = pack_windows(question, text, vocabulary, 8, 3, max_first=2)
    assert windows.example_W.numpy().tolist() == [0, 0, 0, 0, 1]
    # Each window has 2 tokens of the question, of which 1 is lost, and 3 of the text or less.
    assert counts_of(vocabulary, windows) == TokenCounts(2, 0, 1, 19, 1, 1)


def test_a_warning_begins_at_a_twentieth():
    assert TokenCounts(texts=100, truncated=4, tokens=100, unknown=4).warnings("x") == []
    lines = TokenCounts(100, 1, 5, 100, 5, 300).warnings("x.csv")
    assert [line.split(":")[1] for line in lines] == [
        " 5.0% of 100 tokens are [UNK]",
        " 5 of 100 texts are longer than the maximum length",
        " 1 of 100 texts are empty",
    ]
    assert "about 300 of 400 tokens are cut off" in lines[1]
    assert TokenCounts(texts=2, empty=2).warnings("x") == [
        "x: 2 of 2 texts are empty: they have no tokens"
    ]


def test_no_known_token_is_an_error_but_of_predictions():
    counts = TokenCounts(texts=1, tokens=1, unknown=1)
    with pytest.raises(UserError, match=r"x: all 1 tokens are \[UNK\]"):
        counts.warnings("x")
    (line,) = counts.warnings("x", allows_unknown=True)
    assert line.startswith("x: 100.0% of 1 tokens are [UNK]")


def test_counts_in_the_entry_of_a_shard_are_checked():
    counts = TokenCounts(1, 2, 3, 4, 5, 6)
    assert TokenCounts.from_entry(json.loads(json.dumps(counts.to_entry())), "m") == counts
    assert TokenCounts.from_entry({}, "m") == TokenCounts()
    for entry in ({"token_counts": 3}, {"token_counts": {**vars(counts), "lost": "6"}}):
        with pytest.raises(UserError, match="m: "):
            TokenCounts.from_entry(entry, "m")


@pytest.mark.parametrize("name", LOSSES)
def test_a_dry_run_of_training_warns_once(huggingface_dir, tmp_path, name):
    texts, expected = LOSSES[name]
    train, dev = write(tmp_path / "train.csv", texts), write(tmp_path / "dev.csv", ["the"] * 4)
    settings = small.settings(huggingface_dir, {"train": train, "dev": dev}, tmp_path / "run")
    settings = dataclasses.replace(settings, max_seq_length=16, epochs=1)
    lines = []
    dry_run(dataclasses.replace(settings, dry_run=True, device="t4"), lines.append)
    found = [line for line in lines if "texts are" in line or "UNK" in line]
    assert len(found) == (expected is not None)
    if expected:
        assert found[0].startswith(f"warning: {train}: {expected}")


def test_training_refuses_texts_without_a_known_token(huggingface_dir, unknown_file, tmp_path):
    dev = write(tmp_path / "dev.csv", WORDS)
    data = {"train": unknown_file, "dev": dev}
    settings = small.settings(huggingface_dir, data, tmp_path / "run")
    with pytest.raises(UserError, match=f"khmer.csv{ALL_UNKNOWN}"):
        finetune(settings)
    data = {"train": dev, "dev": unknown_file}
    settings = small.settings(huggingface_dir, data, tmp_path / "run", dry_run=True, device="t4")
    with pytest.raises(UserError, match=f"khmer.csv{ALL_UNKNOWN}"):
        dry_run(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("of_rows", "of_dev"), [("long", "nothing"), ("nothing", "empty")])
def test_fit_warns_of_rows_and_validation_rows(model, of_rows, of_dev):
    labels = ["a", "b"] * 20
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            *(LOSSES[of_rows][0], labels),
            validation_data=(LOSSES[of_dev][0], labels),
            epochs=1,
            batch_size=40,
            verbose=0,
        )
    (found,) = (str(one.message) for one in caught if "texts are" in str(one.message))
    names = {"x": of_rows, "validation rows": of_dev}
    (expected,) = (f"{name}: {LOSSES[of][1]}" for name, of in names.items() if LOSSES[of][1])
    assert found.startswith(expected)


def test_fit_refuses_rows_without_a_known_token(model):
    rows = [UNKNOWN] * 40, ["a", "b"] * 20
    with pytest.raises(UserError, match=f"^x{ALL_UNKNOWN}"):
        model.fit(*rows)
    with pytest.raises(UserError, match=f"^validation rows{ALL_UNKNOWN}"):
        model.fit(["the", "bill"], ["a", "b"], validation_data=rows)
    assert int(model.optimizer.iterations) == 0


def test_fit_refuses_batches_of_a_dataset_without_a_known_token(model):
    dataset = tf.data.Dataset.from_tensor_slices(([UNKNOWN] * 200, ["a", "b"] * 100)).batch(100)
    with pytest.raises(UserError, match=r"^x: all tokens of a batch are \[UNK\]; expected texts"):
        model.fit(dataset, epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_vectors_of_unknown_texts_are_refused(huggingface_dir, unknown_file, tmp_path):
    embedder = TextEmbedder.from_pretrained(huggingface_dir, max_seq_length=16)
    for suffix, per_token in (("npy", False), ("jsonl", False), ("jsonl", True)):
        job = VectorJob(model="", batch_size=16, file_format=suffix, per_token=per_token)
        output, lines = tmp_path / f"out-{per_token}.{suffix}", []
        with pytest.raises(UserError, match=f"khmer.csv{ALL_UNKNOWN}"):
            job.extract(embedder, unknown_file, output, list)
        assert not output.exists()
        rows = write(tmp_path / "rows.csv", [LONG] * 40)
        # Counts are those of this call alone.
        assert job.extract(embedder, rows, output, lines.append) == (40, 0)
        assert sum("40 of 40 texts are longer" in line for line in lines) == 1


def test_shards_of_vectors_record_and_check_the_counts(
    huggingface_dir, unknown_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(jobs, "run", run_here)

    def extract(path, name):
        settings = OutputSettings(output_dir=str(tmp_path / name), num_shards=3)
        job = VectorJob(
            model=str(huggingface_dir), batch_size=16, file_format="jsonl", max_seq_length=16
        )
        lines = []
        write_output_shards(job, settings, str(path), {}, lines.append)
        return [line for line in lines if line.startswith("warning")]

    (line,) = extract(write(tmp_path / "rows.csv", LOSSES["empty"][0]), "empty")
    assert "rows.csv: 10 of 40 texts are empty" in line
    manifest = json.loads((tmp_path / "empty" / "manifest.json").read_text())
    assert [entry["token_counts"]["tokens"] for entry in manifest["shards"]] == [18, 20, 22]
    for _ in range(2):  # Also if all shards are complete.
        with pytest.raises(UserError, match=f"khmer.csv{ALL_UNKNOWN}"):
            extract(unknown_file, "unknown")


def test_predictions_and_metrics_of_unknown_texts_are_only_warned_of(
    model, unknown_file, tmp_path, capsys
):
    model.save_run(tmp_path / "run")
    lines = []
    output = tmp_path / "out.jsonl"
    assert predict(model, str(unknown_file), str(output), 16, lines.append) == (40, 0)
    assert "khmer.csv: 100.0% of 40 tokens are [UNK]" in lines[-1]
    evaluate(EvaluateSettings(run=str(tmp_path / "run"), data=str(unknown_file)))
    assert "khmer.csv: 100.0% of 40 tokens are [UNK]" in capsys.readouterr().err
    assert len(model.predict([UNKNOWN])["label"]) == 1


def test_a_search_warns_of_its_texts(huggingface_dir):
    embedder = TextEmbedder.from_pretrained(
        huggingface_dir, max_seq_length=16, prompts={"query": "the "}
    )
    lines = []
    for prompts in ((), ("query",)):
        list(vectors_in_blocks(embedder, [UNKNOWN] * 4, 4, "documents", lines.append, prompts))
    found = [line.split(" are")[0] for line in lines if "UNK" in line]
    assert found == [
        "warning: documents: 100.0% of 4 tokens",
        "warning: documents: 50.0% of 8 tokens",
    ]


def test_a_graph_to_save_does_not_count(model):
    assert model.serving.pipeline.token_counter is model.serving.token_counter
    assert Pipeline(model.task, model.preprocessor.tokenizer, model.network).token_counter is None
