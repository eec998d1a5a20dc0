"""Models that were fine-tuned elsewhere: as runs that are evaluated, exported and fine-tuned."""

import dataclasses
import itertools
import json
import typing

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Encoder, UserError, read_pretrained
from bert_tf.runs.checkpoints import read
from bert_tf.weights import heads
from export.graph.saved_model import write_saved_model
from tasks import TextClassifier, TokenClassifier, load_model
from tasks.base.task import task_class, task_from_dict
from tasks.evaluate import EvaluateSettings
from tasks.evaluate import main as evaluate
from tasks.finetuning.recipe import finetune
from tests import small
from tests.bert_tf.test_head_weights import MASKED_LM, add_heads
from tests.bert_tf.test_task_heads import table, write_head
from tests.bert_tf.test_weights import edit

POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
TEXTS = ["the bill is too high", "broken screen !", "my app", ""]
TAGS = table("O", "B-A", "I-A", "B-B", "I-B")


@pytest.mark.parametrize("kind", heads.TEMPLATES)
def test_the_templates_are_the_fields_of_the_tasks(kind):
    fields = {field.name: field for field in dataclasses.fields(task_class(kind))}
    assert list(heads.TEMPLATES[kind]) and set(heads.TEMPLATES[kind]) == set(fields)
    hints = typing.get_type_hints(task_class(kind))
    for name, value in heads.TEMPLATES[kind].items():
        default = fields[name].default
        if default is dataclasses.MISSING:
            assert value is None, name
        else:
            assert value == (list(default) if isinstance(default, tuple) else default), name
            assert hints[name] is not None


def converted(tmp_path, config, vocabulary, model, units, **values):
    """Return a run, and its source's encoder, kernel and bias."""
    kernel, bias = write_head(tmp_path / "model", config, vocabulary, model, units, **values)
    pretrained = read_pretrained(tmp_path / "model", pairs=values.pop("pairs", False))
    encoder = Encoder(config)
    encoder.build()
    pretrained.assign_to(encoder)
    return pretrained.save(tmp_path / "run"), encoder, kernel, bias


def encoded(trained, texts):
    """Return the encoder's inputs of the run's own tokenizer, padded."""
    windows = trained.serving.pipeline.task.encode(
        texts, trained.serving.pipeline.tokenizer.tokenize, trained.vocabulary
    )
    ids = windows.packed.input_ids
    return {
        "input_ids": ids.to_tensor(),
        "input_mask": tf.sequence_mask(ids.row_lengths(), dtype=tf.int32),
        "segment_ids": windows.packed.segment_ids.to_tensor(),
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("units", "is_multi"),
    small.fast(itertools.product([1, 2, 3], [False, True]), (3, True)),
)
def test_a_sequence_classifier_predicts_the_softmax_of_its_source(
    tmp_path, config, vocabulary, units, is_multi
):
    labels = [f"label {number}" for number in range(units)]
    problem = "multi_label_classification" if is_multi else None
    run, encoder, kernel, bias = converted(
        tmp_path,
        config,
        vocabulary,
        "SequenceClassification",
        units,
        id2label=table(*labels),
        problem_type=problem,
    )
    trained = load_model(run.path)
    pooled = encoder(encoded(trained, {"text": tf.constant(TEXTS)}))["pooled"].numpy()
    logits = pooled @ kernel + bias
    predicted = load_model(run.path).predict(TEXTS)
    if units == 1 and not is_multi:
        np.testing.assert_allclose(predicted["value"], logits[:, 0], atol=1e-5)
        return
    expected = 1 / (1 + np.exp(-logits)) if is_multi else tf.nn.softmax(logits).numpy()
    np.testing.assert_allclose(predicted["probabilities"], expected, atol=1e-6)
    assert predicted["labels"][0].tolist() == labels


@pytest.mark.slow
def test_a_run_of_a_foreign_classifier_is_evaluated_and_exported(
    tmp_path, config, vocabulary, complaints, capsys
):
    run, *_ = converted(
        tmp_path,
        config,
        vocabulary,
        "SequenceClassification",
        3,
        id2label=table("software", "billing", "hardware"),
    )
    evaluate(EvaluateSettings(run=run.path, data=str(complaints["dev"])))
    assert 0 <= json.loads(capsys.readouterr().out)["accuracy"] <= 1
    trained = load_model(run.path)
    assert trained.source.untuned is None
    write_saved_model(trained, tmp_path / "exported", "float32")
    served = tf.saved_model.load(tmp_path / "exported").signatures["serving_default"]
    np.testing.assert_allclose(
        served(text=tf.constant(TEXTS))["probabilities"],
        load_model(run.path).predict(TEXTS)["probabilities"],
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_tagger_predicts_the_entities_of_its_source(tmp_path, config, vocabulary):
    run, encoder, kernel, bias = converted(
        tmp_path, config, vocabulary, "TokenClassification", 5, id2label=TAGS
    )
    trained = load_model(run.path)
    ids = vocabulary["the"], vocabulary["screen"], vocabulary["app"]
    inputs = tf.constant([[vocabulary["[CLS]"], *ids, vocabulary["[SEP]"]]])
    best = np.argmax(encoder(inputs)["sequence"][0, 1:-1] @ kernel + bias, axis=-1)
    types = [None, "A", "A", "B", "B"]
    (row,) = load_model(run.path).predict_rows(["the screen app"])
    found = {word for text in row["entity_text"] for word in text.split()}
    assert found == {
        word for word, tag in zip(["the", "screen", "app"], best, strict=True) if types[tag]
    }
    assert trained.task.labels == ("O", "B-A", "I-A", "B-B", "I-B")


@pytest.mark.slow
def test_answer_spans_and_choices_predict_the_scores_of_their_source(tmp_path, config, vocabulary):
    run, *_ = converted(tmp_path / "qa", config, vocabulary, "QuestionAnswering", 2)
    (row,) = load_model(run.path).predict_rows({"question": ["the"], "context": ["my app"]})
    assert row["answer"] in ("my app", "my", "app")
    run, encoder, kernel, bias = converted(
        tmp_path / "choice", config, vocabulary, "MultipleChoice", 1
    )
    rows = {"prompt": ["the bill"], "choices": [["my", "app", "screen !"]]}
    trained = load_model(run.path)
    texts = {"prompt": tf.constant(rows["prompt"]), "choices": tf.constant(rows["choices"])}
    scores = encoder(encoded(trained, texts))["pooled"].numpy() @ kernel + bias
    np.testing.assert_allclose(
        load_model(run.path).predict(rows)["probabilities"][0],
        tf.nn.softmax(scores[:, 0]).numpy(),
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_masked_language_model_without_the_other_head_is_served(tmp_path, config, vocabulary):
    small.write_huggingface(tmp_path / "model", config, vocabulary)
    add_heads(tmp_path / "model", config, MASKED_LM)
    edit(tmp_path / "model", lambda tensors: [tensors.pop(name) for name in POOLER])
    run = read_pretrained(tmp_path / "model").save(tmp_path / "run")
    trained = load_model(run.path)
    assert set(trained.serving.pipeline.signatures) >= {"serving_default", "masked_lm"}
    assert "next_sentence" not in trained.serving.pipeline.signatures
    assert trained.source.is_that_of(trained.task, trained.network)
    (row,) = load_model(run.path).predict_rows(["the [MASK] is"])
    assert len(row["token"]) == len(row["score"]) == 5


@pytest.fixture
def classifier(tmp_path, config, vocabulary):
    """Return a model whose labels are those of the complaints, in another order."""
    labels = table("software", "billing", "hardware")
    kernel, bias = write_head(
        tmp_path / "model", config, vocabulary, "SequenceClassification", 3, id2label=labels
    )
    return str(tmp_path / "model"), kernel, bias


# With this batch size and warmup, the first of two steps has rate 0, so the weights stay.
FIRST_STEP = {"global_batch_size": 27, "warmup_proportion": 0.5, "save_every": 1}


@pytest.mark.slow
def test_fine_tuning_keeps_a_head_of_the_same_labels(tmp_path, classifier, complaints):
    path, kernel, bias = classifier
    for keep in ("auto", "true", "false"):
        lines = []
        run = finetune(
            small.settings(path, complaints, tmp_path / keep, keep_head=keep, **FIRST_STEP),
            lines.append,
        )
        head = read(run.checkpoints.path(1))
        is_kept = np.array_equal(head["classifier/kernel"], kernel[:, [1, 2, 0]])
        assert is_kept == np.array_equal(head["classifier/bias"], bias[[1, 2, 0]])
        assert is_kept == (keep != "false")
        state = "kept" if is_kept else "new"
        (line,) = (line for line in lines if line.startswith("head: "))
        assert line == (
            f"head: {state}, Hugging Face directory model is of task classification with labels "
            "software, billing, hardware"
        )
        assert ("classifier head" in run.train["origin"]) == (not is_kept)
        assert run.train["settings"].get("keep_head", "auto") == keep


def test_a_head_of_other_labels_is_new_unless_it_is_requested(
    tmp_path, classifier, huggingface_dir, complaints
):
    settings = small.settings(classifier[0], complaints, tmp_path / "run", labels=("a", "b"))
    small.write_rows(complaints["train"], [("the bill", "a"), ("my app", "b")])
    with pytest.raises(UserError, match="expected a head with the labels a, b, received software"):
        finetune(dataclasses.replace(settings, keep_head="true", dev=()))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="expected weights with the head of a task, received none"):
        finetune(
            dataclasses.replace(settings, keep_head="true", dev=(), init_from=str(huggingface_dir))
        )
    model = TextClassifier.from_pretrained(classifier[0], labels=["a", "b"])
    assert model.record["origin"].endswith("(not used: classifier head)")


def test_from_pretrained_keeps_the_head_and_a_run_passes_it_on(tmp_path, classifier):
    path, kernel, _ = classifier
    labels = ["billing", "hardware", "software"]
    model = TextClassifier.from_pretrained(path, labels=labels, max_seq_length=12)
    np.testing.assert_array_equal(model.network.head.kernel, kernel[:, [1, 2, 0]])
    new = TextClassifier.from_pretrained(path, labels=labels, keep_head=False)
    assert not np.array_equal(new.network.head.kernel, kernel[:, [1, 2, 0]])
    again = read_pretrained(model.save_run(tmp_path / "run").path)
    assert task_from_dict(again.task) == model.task
    np.testing.assert_array_equal(again.weights["classifier/kernel"], kernel[:, [1, 2, 0]])


@pytest.mark.parametrize(
    ("labels", "tags"),
    [
        # A tag without a prefix is one with I-, as in transformers.
        (("O", "PATIENT", "HCW"), [["B-PATIENT", "PATIENT", "O"], ["HCW", "O"]]),
        (("B-A", "E-A", "I-A", "O", "S-A"), [["S-A", "B-A", "E-A"], ["O", "U-A"]]),
        (("NOUN", "VERB", "O"), [["B-NOUN", "NOUN", "O"], ["O", "VERB"]]),
    ],
)
def test_a_tagger_of_any_scheme_keeps_its_head(tmp_path, config, vocabulary, labels, tags):
    weights = write_head(
        *(tmp_path / "model", config, vocabulary, "TokenClassification", len(labels)),
        id2label=table(*labels),
    )
    model = TokenClassifier.from_pretrained(tmp_path / "model")
    converted = load_model(read_pretrained(tmp_path / "model").save(tmp_path / "run").path)
    rows = [["the", "app", "screen"], ["my", "bill"]]
    for of in (model, converted):
        assert of.labels == labels and of.task.scheme == "bio" and not of.has_new_head
        for found, expected in zip(of.network.head.weights, weights, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert model.predict_rows(rows) == converted.predict_rows(rows)
    model.fit(rows, tags, epochs=1, verbose=0)
    assert not np.allclose(model.network.head.kernel, weights[0])


def test_a_tagger_without_o_tags_each_word(tmp_path, config, vocabulary):
    write_head(
        *(tmp_path / "model", config, vocabulary, "TokenClassification", 2),
        id2label=table("NOUN", "VERB"),
    )
    model = load_model(tmp_path / "model")
    assert model.task.scheme == "plain" and model.labels == ("NOUN", "VERB")
    (row,) = model.predict_rows([["the", "bill's", "high"]])
    assert row["entity_text"] == ["the", "bill's", "high"] and row["tags"] == row["entity_type"]
    model.fit([["the", "bill"]], [["NOUN", 1]], epochs=1, verbose=0)
    with pytest.raises(UserError, match=r"y\[0\]: tag 'DET': expected one of NOUN, VERB"):
        model.fit([["the"]], [["DET"]])
