"""Heads of classifiers on the pooled [CLS] vector or on the mean of the tokens."""

import json
import logging

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, read_pretrained
from bert_tf.text.encoder_inputs import to_flat, to_padded
from tasks import TextClassifier, TextEmbedder, load_model
from tasks.base.task import task_from_dict
from tasks.finetuning.recipe import finetune
from tasks.graph.heads import SequenceClassifier
from tasks.types.classification.text_classifier import ClassificationTask
from tests import sentence_transformers_files, small
from tests.bert_tf.test_conversion import converted
from tests.bert_tf.test_weights import edit
from tests.tasks.test_pooling import flat, packed, padded

LABELS = ["billing", "hardware", "software"]
ROWS = [(text, label) for label, texts in small.TEXTS.items() for text in texts]
TEXTS = [text for text, _ in ROWS]
POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")


@pytest.fixture
def embedder(tmp_path, config, vocabulary):
    """Return a sentence-transformers directory."""
    return sentence_transformers_files.write(tmp_path / "embedder", config, vocabulary)


def classifier(path, **options):
    return TextClassifier.from_pretrained(path, **{"labels": LABELS, "max_seq_length": 8} | options)


@pytest.mark.parametrize("layout", [padded, flat, packed])
def test_scores_are_those_of_the_mean_by_hand(config, layout):
    values, inputs = layout()
    inputs = {key: tf.constant(value) for key, value in inputs.items()}

    class Fixed:  # Token vectors (1, 8), (3, -2), (5, 0) of the first text, (7, 1) of the second.
        def dropout_seed(self, training, seed):
            return None

        def __call__(self, inputs, **options):
            return {"sequence": tf.constant(values)}

    model = SequenceClassifier(config, 2, pooling="mean")
    object.__setattr__(model, "encoder", Fixed())
    model.head = lambda x_BH: x_BH @ tf.constant([[1.0, 0.0], [2.0, -1.0]]) + [0.5, 0.0]
    np.testing.assert_allclose(model.text_scores(inputs), [[7.5, -2], [9.5, -1]], rtol=1e-6)


def test_the_head_reads_the_mean_of_the_encoder_in_both_layouts(huggingface_dir):
    model = classifier(huggingface_dir, pooling="mean")
    packed = model.task.encode(
        model.task.columns(TEXTS), model.preprocessor.tokenizer.tokenize, model.vocabulary
    ).packed
    batch = to_padded(packed, model.vocabulary)
    outputs, mask = model.encoder(batch)["sequence"].numpy(), np.array(batch["input_mask"])
    assert 0 < mask.mean() < 1
    means = np.stack([row[kept > 0].mean(0) for row, kept in zip(outputs, mask, strict=True)])
    kernel, bias = (weight.numpy() for weight in model.network.head.weights)
    for inputs in (batch, to_flat(packed, model.vocabulary)):
        scores = model.network(inputs)["label"]
        np.testing.assert_allclose(scores, means @ kernel + bias, rtol=1e-5, atol=1e-6)


def test_its_head_is_drawn_wider_from_the_seed_and_the_other_as_published(huggingface_dir):
    def kernel(**options):
        return classifier(huggingface_dir, **options).network.head.kernel.numpy()

    mean, pooled = kernel(pooling="mean"), kernel(pooling="pooled")
    limit = np.sqrt(6 / sum(mean.shape))
    assert 0.8 * limit < np.abs(mean).max() <= limit and np.abs(pooled).max() <= 0.04
    assert np.array_equal(mean, kernel(pooling="mean"))
    assert not np.array_equal(mean, kernel(pooling="mean", seed=1))
    assert np.array_equal(pooled, kernel())


@pytest.mark.parametrize("pooling", ["pooled", "mean"])
def test_only_a_pooler_that_is_read_is_trained(embedder, tmp_path, pooling):
    model = classifier(embedder, pooling=pooling)
    before = [weight.numpy() for weight in model.encoder.pooler.weights]
    assert model.save_run(tmp_path / "new").train["has_trained_pooler"] is False
    model.compile(learning_rate=1e-2)
    model.fit(TEXTS, [label for _, label in ROWS], verbose=0)
    is_changed = not np.array_equal(before[0], model.encoder.pooler.kernel.numpy())
    run = model.save_run(tmp_path / "run")
    is_pooled = pooling == "pooled"
    assert is_changed == run.train["has_trained_pooler"] == is_pooled
    again = load_model(run.path)
    assert again.save_run(tmp_path / "again").train["has_trained_pooler"] == is_pooled
    # Another task with other labels.
    other = TextClassifier.from_pretrained(tmp_path / "again", labels=["x", "y"], keep_head=False)
    assert other.task.pooling == pooling


def test_the_default_depends_on_whether_the_pooler_was_trained(
    tmp_path, config, vocabulary, huggingface_dir, embedder, caplog
):
    caplog.set_level(logging.INFO, "bert_tf")
    plain = read_pretrained(huggingface_dir)
    plain.save(tmp_path / "run")
    sources = {huggingface_dir: "pooled", tmp_path / "run": "pooled", embedder: "mean"}
    TextEmbedder.from_pretrained(huggingface_dir).save_run(tmp_path / "embedder run")
    sources[tmp_path / "embedder run"] = "mean"
    sources[small.write_huggingface(tmp_path / "no pooler", config, vocabulary)] = "mean"
    edit(tmp_path / "no pooler", lambda tensors: [tensors.pop(name) for name in POOLER])
    for path, expected in sources.items():
        caplog.clear()
        assert classifier(path).task.pooling == expected
        verb = "was" if expected == "pooled" else "was not"
        line = f"pooling: {expected}, since the pooler of the weights {verb} trained"
        assert [record.message for record in caplog.records] == [line]
        caplog.clear()
        assert classifier(path, pooling="pooled").task.pooling == "pooled"
        assert not caplog.records
    with pytest.raises(UserError, match="pooling='cls': expected one of pooled, mean"):
        classifier(huggingface_dir, pooling="cls")


def test_files_keep_the_pooling_and_a_head_of_the_other_is_not_kept(embedder, tmp_path):
    model = classifier(embedder)
    model.has_new_head = False
    expected = model.predict(TEXTS)["probabilities"]
    model.save_run(tmp_path / "run")
    model.save(tmp_path / "model.keras")
    reordered = {"labels": LABELS[::-1]}
    for loaded in (
        load_model(tmp_path / "run"),
        load_model(tmp_path / "model.keras"),
        TextClassifier.from_pretrained(tmp_path / "run"),
        TextClassifier.from_pretrained(tmp_path / "run", **reordered, max_seq_length=8),
    ):
        assert loaded.task.pooling == "mean" and not loaded.uses_pooler
        assert not loaded.has_new_head and not loaded.record["has_trained_pooler"]
        order = [loaded.labels.index(label) for label in LABELS]
        found = loaded.predict(TEXTS)["probabilities"][:, order]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.warns(UserWarning, match="expected a head with pooling pooled, received mean"):
        assert TextClassifier.from_pretrained(tmp_path / "run", pooling="pooled").has_new_head


def test_a_file_without_the_field_is_pooled():
    values = ClassificationTask(labels=("a", "b"), max_seq_length=8, pooling="mean").to_dict()
    assert task_from_dict(values).pooling == values.pop("pooling") == "mean"
    assert task_from_dict(values).pooling == "pooled"


@pytest.mark.parametrize("format", ["huggingface", "google"])
def test_other_formats_have_no_place_for_it(embedder, tmp_path, format):
    classifier(embedder).save_run(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        converted(tmp_path / "run", tmp_path / "out", format=format)
    expected = "no other format has a classifier of the mean of the tokens; export it"
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    copy = converted(tmp_path / "run", tmp_path / "copy")
    assert load_model(copy).task.pooling == "mean"


@pytest.mark.medium
@pytest.mark.parametrize("pooling", [None, "pooled"])
def test_the_command_has_the_same_default_and_a_flag(embedder, complaints, tmp_path, pooling):
    lines = []
    settings = small.settings(embedder, complaints, tmp_path / "run", pooling=pooling, epochs=1)
    run = finetune(settings, lines.append)
    said = [line for line in lines if line.startswith("pooling: ")]
    expected = ["pooling: mean, since the pooler of the weights was not trained"]
    assert said == ([] if pooling else expected)
    task = json.loads((tmp_path / "run" / "task.json").read_text())
    assert task["pooling"] == (pooling or "mean")
    assert run.train["has_trained_pooler"] is bool(pooling)
    model = load_model(run.path)
    assert model.uses_pooler is bool(pooling)
    assert not model.record["has_trained_pooler"] or pooling
    # The finished run resumes with what it records.
    finetune(settings, lines.append)
    assert lines[-1].endswith("nothing to do; best step 4")
    assert TextClassifier.from_pretrained(run.path).task.pooling == task["pooling"]
