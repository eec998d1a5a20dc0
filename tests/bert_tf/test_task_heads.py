"""Heads of fine-tuned models: their tasks, labels and weights, and incomplete sources."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from bert_tf import UserError, convert, read_pretrained
from bert_tf.runs.run import Run
from bert_tf.weights import heads, name_map
from tests import small
from tests.bert_tf.test_weights import edit

RNG = np.random.default_rng(5)


def write_head(directory, config, vocabulary, model, units, **values):
    """Write a model of Hugging Face with a head; return its kernel (H, C) and bias."""
    small.write_huggingface(
        directory, config, vocabulary, architectures=[f"BertFor{model}"], **values
    )
    kernel = RNG.normal(size=(config.hidden_size, units)).astype(np.float32)
    bias = RNG.normal(size=units).astype(np.float32)
    owner = "qa_outputs" if model == "QuestionAnswering" else "classifier"

    def change(tensors):
        tensors |= {f"{owner}.weight": np.ascontiguousarray(kernel.T), f"{owner}.bias": bias}
        if model in ("TokenClassification", "QuestionAnswering", "MaskedLM"):
            del tensors["bert.pooler.dense.weight"], tensors["bert.pooler.dense.bias"]

    edit(directory, change)
    return kernel, bias


def table(*labels):
    """Return an id2label, not sorted."""
    return dict(reversed([(str(number), label) for number, label in enumerate(labels)]))


def read(tmp_path, config, vocabulary, model, units, labels=(), pairs=False, **values):
    kernel, bias = write_head(tmp_path / "model", config, vocabulary, model, units, **values)
    pretrained = read_pretrained(tmp_path / "model", labels=labels, pairs=pairs)
    return pretrained, kernel, bias


@pytest.mark.parametrize(
    ("model", "units", "values", "expected"),
    [
        ("SequenceClassification", 1, {}, {"kind": "regression"}),
        ("SequenceClassification", 1, {"problem_type": "regression"}, {"kind": "regression"}),
        (
            "SequenceClassification",
            3,
            {"id2label": table("x", "a", "b")},
            {"kind": "classification", "labels": ["x", "a", "b"], "multi_label": False},
        ),
        (
            "SequenceClassification",
            3,
            {"num_labels": 3, "id2label": table("no", "yes")},
            {"kind": "classification", "labels": ["LABEL_0", "LABEL_1", "LABEL_2"]},
        ),
        (
            "SequenceClassification",
            2,
            {"problem_type": "multi_label_classification", "id2label": table("x", "a")},
            {"kind": "classification", "labels": ["x", "a"], "multi_label": True},
        ),
        (
            "SequenceClassification",
            1,
            {"problem_type": "multi_label_classification", "id2label": table("x")},
            {"kind": "classification", "labels": ["x"], "multi_label": True},
        ),
        (
            "TokenClassification",
            5,
            {"id2label": table("O", "I-B", "B-B", "B-A", "I-A")},
            {"kind": "tagging", "labels": ["O", "I-B", "B-B", "B-A", "I-A"], "doc_stride": 7},
        ),
        ("QuestionAnswering", 2, {}, {"kind": "span_qa", "max_query_length": 6, "doc_stride": 3}),
        ("MultipleChoice", 1, {}, {"kind": "multiple_choice"}),
        (
            "MultipleChoice",
            1,
            {"id2label": table("no", "maybe", "yes")},
            {"kind": "multiple_choice"},
        ),
    ],
)
def test_the_task_follows_from_class_labels_and_size(
    tmp_path, config, vocabulary, model, units, values, expected
):
    pretrained, kernel, bias = read(tmp_path, config, vocabulary, model, units, **values)
    assert pretrained.heads == ("classifier",)
    assert pretrained.task.items() >= expected.items()
    assert pretrained.task["max_seq_length"] == config.max_position_embeddings
    np.testing.assert_array_equal(pretrained.weights["classifier/kernel"], kernel)
    np.testing.assert_array_equal(pretrained.weights["classifier/bias"], bias)


def test_two_softmax_logits_become_one_sigmoid_logit(tmp_path, config, vocabulary):
    pretrained, kernel, bias = read(
        tmp_path,
        config,
        vocabulary,
        "SequenceClassification",
        2,
        pairs=True,
        id2label=table("no", "yes"),
    )
    assert pretrained.task["labels"] == ["no", "yes"]
    assert pretrained.task["text_columns"] == ["text_a", "text_b"]
    head = pretrained.weights["classifier/kernel"], pretrained.weights["classifier/bias"]
    np.testing.assert_array_equal(head[0][:, 0], kernel[:, 1] - kernel[:, 0])
    np.testing.assert_array_equal(head[1], bias[1:] - bias[:1])
    hidden = RNG.normal(size=(50, config.hidden_size))
    exp = np.exp(hidden @ kernel + bias)
    probability = 1 / (1 + np.exp(-(hidden @ head[0] + head[1])[:, 0]))
    np.testing.assert_allclose(probability, exp[:, 1] / exp.sum(1), atol=1e-6)
    # The reverse: half of it for each label.
    back = np.concatenate([-head[0] / 2, head[0] / 2], axis=1)
    np.testing.assert_array_equal(back[:, 1] - back[:, 0], head[0][:, 0])


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        (("I-PER", "O", "I-LOC", "B-LOC"), "bio"),
        (("DATE", "HCW", "O", "PATIENT"), "bio"),
        (("O", "S-A", "E-A"), "bio"),
        (("NOUN", "VERB"), "plain"),
        (("LABEL_0", "LABEL_1"), "plain"),
    ],
)
def test_labels_of_a_tagger_are_those_of_the_source(tmp_path, config, vocabulary, labels, scheme):
    pretrained, kernel, bias = read(
        *(tmp_path, config, vocabulary, "TokenClassification", len(labels)), id2label=table(*labels)
    )
    assert pretrained.task["labels"] == list(labels) and pretrained.task["scheme"] == scheme
    np.testing.assert_array_equal(pretrained.weights["classifier/kernel"], kernel)
    np.testing.assert_array_equal(pretrained.weights["classifier/bias"], bias)


@pytest.mark.parametrize(
    ("model", "units", "values", "reason"),
    [
        ("QuestionAnswering", 3, {}, "answer spans: expected a head with 2 outputs, received 3"),
        ("MultipleChoice", 2, {}, "multiple choice: expected a head with 1 outputs, received 2"),
        (
            "SequenceClassification",
            1,
            {"problem_type": "single_label_classification"},
            "single_label_classification: expected two labels or more",
        ),
        ("SequenceClassification", 2, {"problem_type": "x"}, "problem_type is 'x'"),
        ("SequenceClassification", 2, {"problem_type": "regression"}, "regression: expected a "),
        ("SequenceClassification", 3, {"id2label": table("a", "b")}, "id2label: expected names of"),
        ("SequenceClassification", 2, {"id2label": table("a", "a")}, "id2label: expected differ"),
        ("Other", 2, {}, "architectures is BertForOther; expected one of BertForSequenceClass"),
    ],
)
def test_a_head_without_a_task_is_unused_with_the_reason(
    tmp_path, config, vocabulary, model, units, values, reason
):
    pretrained, *_ = read(tmp_path, config, vocabulary, model, units, **values)
    assert (pretrained.task, pretrained.heads) == (None, ())
    assert f"not used: classifier head, {reason}" in pretrained.origin
    for name, array in small.random_weights(config).items():
        if "pooler" not in name:
            np.testing.assert_array_equal(pretrained.weights[name], array)


def test_names_of_labels_replace_those_of_the_source(tmp_path, config, vocabulary):
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 3)
    task = read_pretrained(tmp_path / "model", labels=("a", "b", "c")).task
    assert task["labels"] == ["a", "b", "c"]
    for labels in ("ab", ("a", "b", "")):
        origin = read_pretrained(tmp_path / "model", labels=labels).origin
        assert "expected 3 different names" in origin


def test_without_a_pooler_a_new_one_is_reported_and_always_equal(tmp_path, config, vocabulary):
    pretrained, *_ = read(tmp_path, config, vocabulary, "QuestionAnswering", 2)
    assert pretrained.initialized == ("pooler",)
    assert pretrained.origin == "Hugging Face directory model (initialized: pooler)"
    again = read_pretrained(tmp_path / "model")
    kernel = pretrained.weights["bert/pooler/kernel"]
    np.testing.assert_array_equal(kernel, again.weights["bert/pooler/kernel"])
    assert 0.5 * config.initializer_range < kernel.std() < config.initializer_range
    assert not pretrained.weights["bert/pooler/bias"].any()


@pytest.mark.parametrize("model", ["SequenceClassification", "MultipleChoice", "PreTraining"])
def test_a_model_whose_head_uses_the_pooler_needs_it(huggingface_dir, model):
    def change(tensors):
        del tensors["bert.pooler.dense.weight"], tensors["bert.pooler.dense.bias"]

    edit(huggingface_dir, change)
    values = json.loads((huggingface_dir / "config.json").read_text())
    values["architectures"] = [f"BertFor{model}"]
    (huggingface_dir / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="2 weights are missing, the first pooler.dense.bias"):
        read_pretrained(huggingface_dir)


def test_half_a_pooler_is_rejected(huggingface_dir):
    edit(huggingface_dir, lambda tensors: tensors.pop("bert.pooler.dense.bias"))
    with pytest.raises(UserError, match="1 weights are missing, the first pooler.dense.bias"):
        read_pretrained(huggingface_dir)


def test_half_a_head_and_two_heads_are_rejected(tmp_path, config, vocabulary):
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "SequenceClassification", 3)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    edit(path, lambda tensors: tensors.pop("classifier.weight"))
    with pytest.raises(UserError, match="first classifier.weight; expected a complete classifier"):
        read_pretrained(path)
    tensors |= {f"qa_outputs.{name}": tensors[f"classifier.{name}"] for name in ("weight", "bias")}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match="two task heads, qa_outputs.weight, qa_outputs.bias"):
        read_pretrained(path)


def test_the_length_of_the_tokenizer_limits_that_of_the_task(tmp_path, config, vocabulary):
    path = tmp_path / "model"
    write_head(path, config, vocabulary, "MultipleChoice", 1)
    for limit, expected in ((12, 12), (1e30, 16)):
        (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert read_pretrained(path).task["max_seq_length"] == expected


@pytest.mark.parametrize("length", [600, 601])
def test_a_recorded_task_may_use_all_positions(tmp_path, config, vocabulary, length):
    longer = dataclasses.replace(config, max_position_embeddings=600)
    default = {"kind": "regression", **heads.TEMPLATES["regression"]}
    task = {**default, "max_seq_length": length, "truncation": "tail"}
    record = heads.record_of(task)
    pretrained, *_ = read(tmp_path, longer, vocabulary, "SequenceClassification", 1, **record)
    assert pretrained.task == {**task, "max_seq_length": 600}


@pytest.mark.parametrize("column", ["google", "huggingface", "keras", "ours"])
def test_exported_tensors_are_read_bitwise(config, vocabulary, column):
    parts = {
        "google": ("bert", *name_map.HEADS, "classifier"),
        "huggingface": ("bert", *name_map.HEADS, "span_classifier"),
        "keras": ("bert", "masked_lm", "classifier"),
        "ours": ("bert", *name_map.HEADS, "classifier"),
    }[column]
    weights = small.random_weights(config, parts=parts)
    tensors = name_map.export_tensors(config, column, weights, parts)
    stored = name_map.StoredModel(config, vocabulary, tensors, column, "", "model")
    again, unused = name_map.rename(stored)
    assert (set(again), unused) == (set(weights), [])
    for name, array in weights.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    assert all(array.flags.c_contiguous for array in tensors.values())


def test_weights_that_do_not_fit_are_not_exported(config):
    weights = small.random_weights(config)
    weights["bert/layer_0/output/kernel"] = weights["bert/layer_0/output/kernel"].T
    with pytest.raises(UserError, match=r"layer_0/output/kernel: expected .*\(20, 12\), received"):
        name_map.export_tensors(config, "google", weights, ["bert"])
    with pytest.raises(UserError, match=r"masked_lm/transform/kernel: .* received none"):
        name_map.export_tensors(config, "google", weights, ["masked_lm"])
    with pytest.raises(UserError, match="keras: has no next_sentence head"):
        name_map.export_tensors(config, "keras", weights, ["next_sentence"])


def test_the_head_of_another_task_type_or_other_labels_is_not_kept(tmp_path, config, vocabulary):
    pretrained, kernel, bias = read(
        tmp_path, config, vocabulary, "SequenceClassification", 3, id2label=table("a", "b", "c")
    )
    same = {**pretrained.task, "labels": ["c", "a", "b"]}
    kept = pretrained.head_for(same)
    np.testing.assert_array_equal(kept["classifier/kernel"], kernel[:, [2, 0, 1]])
    np.testing.assert_array_equal(kept["classifier/bias"], bias[[2, 0, 1]])
    assert pretrained.head_for(same, keep=False) is None
    for changes, message in (
        ({"kind": "tagging"}, "expected a head of task tagging, received classification"),
        ({"labels": ["a", "b"]}, "expected a head with the labels a, b, received a, b, c"),
        ({"multi_label": True}, "expected both heads with multi_label, or none"),
    ):
        assert pretrained.head_for({**same, **changes}) is None
        with pytest.raises(UserError, match=message):
            pretrained.head_for({**same, **changes}, keep=True)


def test_convert_writes_the_task(tmp_path, config, vocabulary, capsys):
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 2)
    settings = convert.ConvertSettings(
        str(tmp_path / "model"), str(tmp_path / "run"), labels=("no", "yes"), pairs=True
    )
    settings.check()
    convert.main(settings)
    assert capsys.readouterr().err.endswith("heads: classifier; task classification\n")
    again = read_pretrained(tmp_path / "run")
    assert again.task["labels"] == ["no", "yes"]
    assert again.weights["classifier/kernel"].shape == (12, 1)


@pytest.mark.parametrize(
    ("model", "units", "given", "received"),
    [
        (None, 0, {"labels": ("no", "yes")}, "directory model, with no head of a task. Correct"),
        (None, 0, {"pairs": True}, "directory model, with no head of a task. Correct"),
        ("SequenceClassification", 3, {"labels": ("a", "b")}, "classifier head, labels a, b: exp"),
        ("SequenceClassification", 3, {"labels": ("a", "a", "b")}, "expected 3 different names"),
        ("QuestionAnswering", 2, {"labels": ("a", "b")}, "with the head of task span_qa. Correct"),
        ("TokenClassification", 3, {"pairs": True}, "with the head of task tagging. Correct"),
    ],
)
def test_convert_rejects_flags_that_the_head_cannot_use(
    tmp_path, config, vocabulary, model, units, given, received
):
    path, flag = tmp_path / "model", next(iter(given))
    if model is None:
        small.write_huggingface(path, config, vocabulary)
    else:
        write_head(path, config, vocabulary, model, units, id2label=table("O", "B-X", "I-X"))
    settings = convert.ConvertSettings(str(path), str(tmp_path / "run"), **given)
    settings.check()
    with pytest.raises(UserError, match=f"--{flag}: expected weights with a head.*{received}"):
        convert.main(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given", [{"labels": ("no", "yes")}, {"pairs": True}, {"config_file": "x"}, {"vocab_file": "x"}]
)
def test_what_the_files_of_a_run_say_is_not_given_for_it(tmp_path, config, vocabulary, given):
    run = Run.create(tmp_path / "run", config, vocabulary, train={})
    run.checkpoints.save(0, small.random_weights(config))
    settings = convert.ConvertSettings(
        str(tmp_path / "run"), str(tmp_path / "to"), format="google", **given
    )
    message = f"--{next(iter(given))}: only for weights of other libraries; .*run is a run"
    for read in (settings.check, lambda: read_pretrained(tmp_path / "run", **given)):
        with pytest.raises(UserError, match=message):
            read()
    assert read_pretrained(tmp_path / "run").config == config


@pytest.mark.parametrize(
    ("model", "units", "pairs"),
    [
        ("SequenceClassification", 3, True),
        ("QuestionAnswering", 2, False),
        ("MultipleChoice", 1, False),
    ],
)
def test_a_head_of_pairs_is_not_used_with_one_segment(
    tmp_path, config, vocabulary, model, units, pairs
):
    config = dataclasses.replace(config, type_vocab_size=1)
    write_head(tmp_path / "model", config, vocabulary, model, units)
    pretrained = read_pretrained(tmp_path / "model", pairs=pairs)
    assert pretrained.task is None and "classifier/kernel" not in pretrained.weights
    assert "pairs of texts require two segments; type_vocab_size is 1" in pretrained.origin
    if pairs:
        assert read_pretrained(tmp_path / "model").task["text_columns"] == ["text"]
