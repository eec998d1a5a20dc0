"""bert_tf.convert to other formats: exact tensors, heads and labels, and nothing half written."""

import dataclasses
import json

import h5py
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
import tokenizers

from bert_tf import UserError, Vocabulary, convert, read_pretrained
from bert_tf.config import strips_accents
from bert_tf.conversion import checked_conversion, exported_model, google_export, keras_export
from bert_tf.runs.run import Run
from bert_tf.storage import ownership
from bert_tf.text.vocabulary import SPECIALS
from bert_tf.weights import heads, name_map, tensor_files
from tasks.base.task import task_class
from tasks.base.task_types import TASK_TYPES
from tests import small
from tests.bert_tf.test_weights import edit

WORDS_OF_TASKS = {
    "classification": {"labels": ["ham", "mid", "spam"]},
    "binary": {"kind": "classification", "labels": ["ham", "spam"], "thresholds": [0.3]},
    "multi_label": {"kind": "classification", "labels": ["ham", "spam"], "multi_label": True},
    "regression": {},
    "tagging": {"labels": ["O", "B-X", "I-X"], "doc_stride": 4},
    "span_qa": {"doc_stride": 4},
    "multiple_choice": {},
}
UNITS = {"classification": 3, "multi_label": 2, "tagging": 3, "span_qa": 2}


def fine_tuned(path, config, vocabulary, name, **more):
    """Write a run of a task with random weights; return its weights."""
    kind = WORDS_OF_TASKS.get(name, {}).get("kind", name)
    given = {"max_seq_length": 12, **WORDS_OF_TASKS.get(name, {}), **more}
    task = {"kind": kind, **heads.TEMPLATES[kind], **given}
    weights = small.random_weights(config)
    rng = np.random.default_rng(1)
    units = UNITS.get(name, 1)
    weights["classifier/kernel"] = rng.normal(size=(config.hidden_size, units)).astype(np.float32)
    weights["classifier/bias"] = rng.normal(size=units).astype(np.float32)
    run = Run.create(path, config, vocabulary, train={}, task=task)
    run.checkpoints.save(3, weights)
    return weights


def pretrained_run(path, config, vocabulary, parts=name_map.COMPONENTS):
    weights = small.random_weights(config, parts=parts)
    run = Run.create(path, config, vocabulary, train={})
    run.checkpoints.save(0, weights)
    return weights


def converted(source, directory, **flags):
    settings = convert.ConvertSettings(str(source), str(directory), **flags)
    settings.check()
    convert.main(settings)
    return directory


@pytest.fixture
def tanh(config):
    """Return a configuration that every format can hold."""
    return dataclasses.replace(config, hidden_act="gelu_new")


@pytest.mark.medium
def test_a_real_checkpoint_goes_through_all_formats_and_back_bitwise(data_dir, tmp_path):
    source = data_dir / "checkpoints" / "tf1_ckpt_tiny"
    first = read_pretrained(source)
    path, expected, config = source, first.weights, first.config
    assert config.max_input_chars_per_word == 200
    formats = ("run", "huggingface", "run", "google", "run", "keras", "run", "google")
    for number, format in enumerate(formats):
        path = converted(path, tmp_path / str(number), format=format)
        if format == "keras":  # It has no next sentence head.
            expected = {
                name: array
                for name, array in expected.items()
                if not name.startswith("next_sentence/")
            }
            config = dataclasses.replace(config, max_input_chars_per_word=100)
        back = read_pretrained(path)
        there = {name: back.weights[name] for name in expected}
        checked_conversion.compare_bitwise(expected, there, path)
        assert back.config == config
        assert back.vocabulary.lines == first.vocabulary.lines
    released = tf.train.load_checkpoint(str(source / "bert_model.ckpt"))
    ours = tf.train.load_checkpoint(str(tmp_path / "3" / "bert_model.ckpt"))
    names = [
        name
        for name in released.get_variable_to_shape_map()
        if "adam" not in name and name != "global_step"
    ]
    assert set(ours.get_variable_to_shape_map()) == set(names)
    for name in names:
        np.testing.assert_array_equal(ours.get_tensor(name), released.get_tensor(name))


@pytest.mark.parametrize(
    ("parts", "architecture", "tensors"),
    [
        (("bert",), "BertModel", 0),
        (("bert", "masked_lm"), "BertForMaskedLM", 5 - 2),
        (("bert", "next_sentence"), "BertForNextSentencePrediction", 2),
        (("bert", "masked_lm", "next_sentence"), "BertForPreTraining", 7),
    ],
)
def test_hugging_face_gets_the_class_and_exactly_its_tensors(
    tmp_path, config, vocabulary, parts, architecture, tensors
):
    pretrained_run(tmp_path / "run", config, vocabulary, parts)
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    assert json.loads((path / "config.json").read_text())["architectures"] == [architecture]
    found = safetensors.numpy.load_file(path / "model.safetensors")
    assert len(found) == len(name_map.table(config)) + tensors
    has_prefix = any(name.startswith("bert.") for name in found)
    assert has_prefix == (architecture != "BertModel")


@pytest.mark.medium
@pytest.mark.parametrize("name", WORDS_OF_TASKS)
def test_every_head_goes_to_hugging_face_and_google(tmp_path, config, vocabulary, name, capsys):
    weights = fine_tuned(tmp_path / "run", config, vocabulary, name)
    kernel, bias = weights["classifier/kernel"], weights["classifier/bias"]
    huggingface = converted(tmp_path / "run", tmp_path / "huggingface", format="huggingface")
    google = converted(tmp_path / "run", tmp_path / "google", format="google")
    owner = "qa_outputs" if name == "span_qa" else "classifier"
    prefix = "cls/squad/" if name == "span_qa" else ""
    theirs = safetensors.numpy.load_file(huggingface / "model.safetensors")
    reader = tf.train.load_checkpoint(str(google / "bert_model.ckpt"))
    for W, B in [
        (theirs[f"{owner}.weight"], theirs[f"{owner}.bias"]),
        (
            reader.get_tensor(f"{prefix}output_weights"),
            reader.get_tensor(f"{prefix}output_bias"),
        ),
    ]:
        if name == "binary":
            np.testing.assert_array_equal(W[1] - W[0], kernel[:, 0])
            np.testing.assert_array_equal(B[1] - B[0], bias[0])
            assert W.shape == (2, config.hidden_size)
        else:
            np.testing.assert_array_equal(W, kernel.T)
            np.testing.assert_array_equal(B, bias)
    values = json.loads((huggingface / "config.json").read_text())
    expected = {
        "classification": ("SequenceClassification", "single_label_classification", 3),
        "binary": ("SequenceClassification", "single_label_classification", 2),
        "multi_label": ("SequenceClassification", "multi_label_classification", 2),
        "regression": ("SequenceClassification", "regression", 1),
        "tagging": ("TokenClassification", None, 3),
        "span_qa": ("QuestionAnswering", None, None),
        "multiple_choice": ("MultipleChoice", None, None),
    }[name]
    labels = values.get("id2label")
    assert (
        values["architectures"][0].removeprefix("BertFor"),
        values.get("problem_type"),
        labels and len(labels),
    ) == expected
    if "labels" in WORDS_OF_TASKS[name]:
        assert list(labels.values()) == WORDS_OF_TASKS[name]["labels"]
    assert ("bert.pooler.dense.weight" in theirs) == (name not in ("tagging", "span_qa"))
    report = json.loads((huggingface / "conversion.json").read_text())
    assert not [line for line in report["dropped"] if "thresholds" in line]
    assert read_pretrained(huggingface).task == read_pretrained(google).task
    assert read_pretrained(google).task == read_pretrained(tmp_path / "run").task
    assert "thresholds" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "format",
    ["huggingface", *(pytest.param(of, marks=pytest.mark.slow) for of in ("google", "keras"))],
)
@pytest.mark.parametrize("name", WORDS_OF_TASKS)
def test_a_head_comes_back_bitwise_with_its_labels(tmp_path, tanh, vocabulary, name, format):
    weights = fine_tuned(tmp_path / "run", tanh, vocabulary, name)
    there = converted(tmp_path / "run", tmp_path / "there", format=format)
    back = read_pretrained(converted(there, tmp_path / "back"))
    kind = WORDS_OF_TASKS[name].get("kind", name)
    if format == "keras" and kind not in ("classification", "regression"):
        assert back.task is None
        return
    for part in ("kernel", "bias"):
        if not (format == "keras" and name == "multi_label"):  # Read as one of two labels.
            np.testing.assert_array_equal(
                back.weights[f"classifier/{part}"], weights[f"classifier/{part}"]
            )
    assert back.task["kind"] == kind
    if format == "keras":
        report = json.loads((there / "conversion.json").read_text())
        assert ("thresholds=[0.3]" in report["dropped"]) == (name == "binary")
        assert ("multi_label" in report["dropped"]) == (name == "multi_label")
    else:
        assert back.task.get("labels") == WORDS_OF_TASKS[name].get("labels")
        assert bool(back.task.get("multi_label")) == (name == "multi_label")


@pytest.mark.parametrize("format", ["huggingface", "sentence-transformers"])
def test_an_untrained_head_is_reported_as_such(tmp_path, tanh, vocabulary, format, capsys):
    fine_tuned(tmp_path / "run", tanh, vocabulary, "binary")
    trained = read_pretrained(tmp_path / "run")
    dataclasses.replace(trained, has_new_head=True).save(tmp_path / "new")
    mark = "that the classification head was never trained: its predictions are random"
    for name, expected in (("run", []), ("new", [mark])):
        path = converted(tmp_path / name, tmp_path / f"{name}_out", format=format)
        dropped = json.loads((path / "conversion.json").read_text())["dropped"]
        assert [line for line in dropped if "trained" in line] == expected
        assert (mark in capsys.readouterr().err) == bool(expected)


def test_tuned_values_are_named_as_dropped(tmp_path, config, vocabulary):
    fine_tuned(tmp_path / "run", config, vocabulary, "classification")
    run = Run.open(tmp_path / "run")
    run.checkpoints.set_tuned(3, {"values": {"temperature": 1.5}, "metrics": {}})
    assert exported_model.from_pretrained(
        read_pretrained(tmp_path / "run"), tmp_path / "run"
    ).dropped == ["max_seq_length=12", "temperature=1.5"]


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_all_fields_that_predictions_depend_on_are_named_as_dropped(kind):
    fields = dataclasses.fields(task_class(kind))
    described = {field.name for field in fields if "description" in field.metadata}
    # The threshold that was tuned for this rate is named.
    assert described - {"false_alarm_rate"} <= set(exported_model._PREDICTION_FIELDS)


def test_tuned_values_are_not_those_of_a_head_that_was_trained_since(tmp_path, config, vocabulary):
    fine_tuned(tmp_path / "run", config, vocabulary, "binary")
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    task = read_pretrained(path).task
    assert task == read_pretrained(tmp_path / "run").task and task["thresholds"] == [0.3]
    edit(path, lambda tensors: tensors.update({"classifier.bias": np.ones(2, np.float32)}))
    with pytest.warns(UserWarning, match="ignored thresholds, since the head was changed after"):
        assert read_pretrained(path).task == {**task, "thresholds": None}


@pytest.mark.parametrize("format", ["huggingface", "google"])
@pytest.mark.parametrize(
    ("name", "task", "flags"),
    [
        ("binary", {"text_columns": ["one", "two"], "truncation": "tail"}, {"pairs": True}),
        ("binary", {"rare_label": "spam"}, {"labels": ("ham", "spam")}),
        ("ranking", {}, {"pairs": True}),
    ],
)
def test_flags_that_agree_with_the_recorded_task_keep_it(
    tmp_path, tanh, vocabulary, name, task, flags, format
):
    fine_tuned(tmp_path / "run", tanh, vocabulary, name, **task)
    path = converted(tmp_path / "run", tmp_path / "out", format=format)
    assert read_pretrained(path, **flags).task == read_pretrained(tmp_path / "run").task


@pytest.mark.parametrize(
    ("name", "task", "windows"),
    [
        ("binary", {"rare_label": "spam", "text_columns": ["one", "two"]}, {}),
        ("span_qa", {"max_answer_length": 5}, {"max_query_length": 2, "doc_stride": 1}),
    ],
)
def test_a_shorter_tokenizer_limits_the_length_of_the_recorded_task_alone(
    tmp_path, tanh, vocabulary, name, task, windows
):
    fine_tuned(tmp_path / "run", tanh, vocabulary, name, **task)
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 8}))
    expected = {**read_pretrained(tmp_path / "run").task, "max_seq_length": 8, **windows}
    assert read_pretrained(path).task == expected


def test_pairs_replaces_the_columns_of_the_recorded_task_alone(tmp_path, tanh, vocabulary):
    fine_tuned(tmp_path / "run", tanh, vocabulary, "binary")
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    expected = {**read_pretrained(path).task, "text_columns": ["text_a", "text_b"]}
    assert read_pretrained(path, pairs=True).task == expected


def test_an_anomaly_detector_gives_its_encoder(tmp_path, config, vocabulary, capsys):
    run = Run.create(
        tmp_path / "run", config, vocabulary, train={}, task={"kind": "anomaly", "threshold": 0.5}
    )
    run.checkpoints.save(0, small.random_weights(config))
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    assert json.loads((path / "config.json").read_text())["architectures"] == ["BertModel"]
    report = json.loads((path / "conversion.json").read_text())
    assert report["dropped"] == ["the anomaly detector", "threshold=0.5"]
    run.checkpoints.set_tuned(0, {"values": {"threshold": 0.25}, "metrics": {}})
    model = exported_model.from_pretrained(read_pretrained(tmp_path / "run"), tmp_path / "run")
    assert model.dropped == ["the anomaly detector", "threshold=0.25"]
    path = converted(tmp_path / "run", tmp_path / "again")
    report = json.loads((path / "conversion.json").read_text())
    assert report["source"].endswith("step-00000000 (not used: anomaly detector)")
    assert report["source"] in capsys.readouterr().err


@pytest.mark.parametrize("format", ["huggingface", "google"])
def test_a_task_type_of_the_users_gives_its_encoder(tmp_path, tanh, vocabulary, format):
    task = {"kind": "rating", "max_seq_length": 12}
    weights = small.random_weights(tanh, parts=("bert", "classifier"))
    run = Run.create(tmp_path / "run", tanh, vocabulary, train={}, task=task)
    run.checkpoints.save(3, weights)
    path = converted(tmp_path / "run", tmp_path / "out", format=format)
    dropped = json.loads((path / "conversion.json").read_text())["dropped"]
    assert {"the rating head", "max_seq_length=12"} <= set(dropped)
    assert read_pretrained(path).task is None
    back = read_pretrained(converted(tmp_path / "run", tmp_path / "back"))
    assert back.task == task
    np.testing.assert_array_equal(back.weights[heads.KERNEL], weights[heads.KERNEL])


def test_the_tokenizer_files_hold_ids_case_and_length(tmp_path, config, vocabulary):
    cased = dataclasses.replace(config, do_lower_case=False, strip_accents=True)
    fine_tuned(tmp_path / "run", cased, vocabulary, "regression")
    path = converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    values = json.loads((path / "tokenizer.json").read_text())
    assert values["model"]["vocab"] == {word: id for id, word in enumerate(vocabulary.entries)}
    assert values["normalizer"]["lowercase"] is False
    assert values["normalizer"]["strip_accents"] is True
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    assert (tokenizer["do_lower_case"], tokenizer["model_max_length"]) == (False, 12)
    assert read_pretrained(path).config == cased
    (path / "vocab.txt").unlink()
    assert read_pretrained(path).vocabulary.lines == vocabulary.lines


@pytest.mark.medium
@pytest.mark.parametrize("limit", [100, 200, 37])
def test_the_length_of_words_is_kept_and_read_by_other_libraries(tmp_path, tanh, vocabulary, limit):
    config = dataclasses.replace(tanh, max_input_chars_per_word=limit)
    pretrained_run(tmp_path / "run", config, vocabulary, parts=("bert",))
    path = tmp_path / "run"
    for number, format in enumerate(("huggingface", "google", "run")):
        path = converted(path, tmp_path / str(number), format=format)
        assert read_pretrained(path).config.max_input_chars_per_word == limit
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "0" / "tokenizer.json"))
    counts = [len(theirs.encode("a" * n, add_special_tokens=False)) for n in (limit, limit + 1)]
    assert counts == [1, 1] and theirs.model.max_input_chars_per_word == limit
    settings = json.loads((tmp_path / "0" / "tokenizer_config.json").read_text())
    # BertTokenizer of transformers 5 has 100, whatever tokenizer.json says.
    assert (settings["tokenizer_class"] == "BertTokenizer") == (limit == 100)
    path = converted(tmp_path / "run", tmp_path / "keras", format="keras")
    dropped = json.loads((path / "conversion.json").read_text())["dropped"]
    assert dropped == [f"max_input_chars_per_word={limit}: keras-hub uses 100"] * (limit != 100)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strips", [True, False, None])
def test_a_preset_keeps_the_case_and_the_accents(tmp_path, tanh, vocabulary, lower, strips):
    config = dataclasses.replace(tanh, do_lower_case=lower, strip_accents=strips)
    pretrained_run(tmp_path / "run", config, vocabulary, parts=("bert",))
    model = exported_model.from_pretrained(read_pretrained(tmp_path / "run"), tmp_path / "run")
    (tmp_path / "preset").mkdir()
    _, dropped = keras_export.write(model, tmp_path / "preset")
    back = read_pretrained(tmp_path / "preset").config
    assert back.do_lower_case is lower
    assert strips_accents(lower, back.strip_accents) is strips_accents(lower, strips)
    assert not any("strip_accents" in line for line in dropped)


@pytest.mark.parametrize("accents", [0, 6])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strips", [True, False, None])
def test_a_release_keeps_a_normalization_that_its_vocabulary_does_not_show(
    tmp_path, tanh, lower, strips, accents
):
    vocabulary = Vocabulary([*SPECIALS, *"abcdef"[accents:], *"äöüéèê"[:accents]])
    config = dataclasses.replace(
        tanh, vocab_size=len(vocabulary), do_lower_case=lower, strip_accents=strips
    )
    pretrained_run(tmp_path / "run", config, vocabulary, parts=("bert",))
    model = exported_model.from_pretrained(read_pretrained(tmp_path / "run"), tmp_path / "run")
    (tmp_path / "release").mkdir()
    _, dropped = google_export.write(model, tmp_path / "release")
    assert read_pretrained(tmp_path / "release").config == config
    # google-research/bert strips accents exactly if it lower-cases.
    differs = strips_accents(lower, strips) != lower
    assert any("strip_accents" in line for line in dropped) == differs


@pytest.mark.medium
@pytest.mark.parametrize("name", small.fast(WORDS_OF_TASKS, "binary"))
def test_a_preset_holds_heads_of_classification_and_regression(
    tmp_path, tanh, vocabulary, name, inputs_BL
):
    keras_nlp = pytest.importorskip("keras_nlp")
    weights = fine_tuned(tmp_path / "run", tanh, vocabulary, name)
    path = converted(tmp_path / "run", tmp_path / "out", format="keras")
    report = json.loads((path / "conversion.json").read_text())
    assert report["outputs"]["library"] == "keras-hub"
    assert report["outputs"]["largest_difference"] < 1e-5
    if name in ("tagging", "span_qa", "multiple_choice"):
        assert f"the {name} head, which keras-hub does not have" in report["dropped"]
        return
    classifier = keras_nlp.models.BertTextClassifier.from_preset(str(path))
    theirs = classifier(
        {
            "token_ids": inputs_BL["input_ids"],
            "padding_mask": inputs_BL["input_mask"],
            "segment_ids": inputs_BL["segment_ids"],
        }
    ).numpy()
    pooled = keras_nlp.models.BertBackbone.from_preset(str(path))(
        {
            "token_ids": inputs_BL["input_ids"],
            "padding_mask": inputs_BL["input_mask"],
            "segment_ids": inputs_BL["segment_ids"],
        }
    )["pooled_output"].numpy()
    logits = pooled @ weights["classifier/kernel"] + weights["classifier/bias"]
    if name == "binary":
        theirs = theirs[:, 1:] - theirs[:, :1]
    np.testing.assert_allclose(theirs, logits, atol=1e-5)


@pytest.mark.medium
def test_a_preset_holds_the_masked_language_model(tmp_path, tanh, vocabulary):
    weights = pretrained_run(tmp_path / "run", tanh, vocabulary)
    path = converted(tmp_path / "run", tmp_path / "out", format="keras")
    with h5py.File(path / "task.weights.h5") as file:
        np.testing.assert_array_equal(
            file["layers/masked_lm_head/_intermediate_dense/vars/0"],
            weights["masked_lm/transform/kernel"],
        )
    keras_nlp = pytest.importorskip("keras_nlp")
    model = keras_nlp.models.BertMaskedLM.from_preset(str(path), preprocessor=None)
    head = model.get_layer("mlm_head")
    found = [weight.numpy() for weight in head.weights if weight.shape == (tanh.vocab_size,)]
    np.testing.assert_array_equal(found[0], weights["masked_lm/output_bias"])


@pytest.mark.slow
def test_a_preset_of_many_layers_has_one_group_per_layer(tmp_path, tanh, vocabulary):
    deep = dataclasses.replace(tanh, num_hidden_layers=12)
    weights = pretrained_run(tmp_path / "run", deep, vocabulary, ("bert",))
    path = converted(tmp_path / "run", tmp_path / "out", format="keras")
    again = read_pretrained(path)
    for name, array in weights.items():
        np.testing.assert_array_equal(again.weights[name], array, err_msg=name)


def test_a_conversion_overwrites_what_a_killed_one_left_and_is_alone(tmp_path, config, vocabulary):
    pretrained_run(tmp_path / "run", config, vocabulary)
    left = tmp_path / ".writing-out" / "1_Pooling"
    left.mkdir(parents=True)
    (left / "config.json").touch()
    converted(tmp_path / "run", tmp_path / "out", format="huggingface")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    with ownership.sole_output(tmp_path / "next"):
        with pytest.raises(UserError, match="next: in use by another process"):
            converted(tmp_path / "run", tmp_path / "next", format="huggingface")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "hidden_act is 'gelu', but keras-hub has 'gelu_new' only"),
        (
            {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
            "layer_norm_eps is 1e-05, but keras-hub has 1e-12 only",
        ),
    ],
)
def test_a_preset_cannot_hold_other_activations(tmp_path, config, vocabulary, changes, message):
    changed = dataclasses.replace(config, **changes)
    pretrained_run(tmp_path / "run", changed, vocabulary)
    with pytest.raises(UserError, match=message):
        converted(tmp_path / "run", tmp_path / "out", format="keras")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_google_says_what_its_code_does_not_compute(tmp_path, config, vocabulary):
    changed = dataclasses.replace(config, layer_norm_eps=1e-5, do_lower_case=False)
    pretrained_run(tmp_path / "run", changed, vocabulary)
    path = converted(tmp_path / "run", tmp_path / "out", format="google")
    values = json.loads((path / "bert_config.json").read_text())
    assert (values["hidden_act"], values["type_vocab_size"]) == ("gelu_python", 2)
    report = json.loads((path / "conversion.json").read_text())
    assert report["dropped"] == [
        "hidden_act=gelu (erf), which google-research/bert does not know",
        "layer_norm_eps=1e-05: google-research/bert uses 1e-12",
        "max_input_chars_per_word=100: google-research/bert uses 200",
    ]
    assert read_pretrained(path).config.hidden_act == "gelu"


@pytest.mark.medium
def test_the_report_names_sizes_and_digests(tmp_path, config, vocabulary):
    from bert_tf.storage import files

    weights = pretrained_run(tmp_path / "run", config, vocabulary)
    path = converted(tmp_path / "run", tmp_path / "out", format="google")
    report = json.loads((path / "conversion.json").read_text())
    assert report["tensors"] == len(weights)
    assert report["bytes"] == sum(array.nbytes for array in weights.values())
    assert set(report["sha256"]) == {
        "bert_model.ckpt.data-00000-of-00001",
        "bert_model.ckpt.index",
    }
    for name, digest in report["sha256"].items():
        assert digest == files.sha256(path / name)
    outputs = report["outputs"]
    assert outputs["library"] == "bert_tf" and outputs["warnings"] == []
    assert outputs["largest_difference"] == 0 < outputs["largest_output"]
    again = converted(path, tmp_path / "again")
    assert json.loads((again / "conversion.json").read_text())["tensors"] == len(weights)


def test_a_difference_after_writing_leaves_nothing(tmp_path, tanh, vocabulary, monkeypatch):
    pretrained_run(tmp_path / "run", tanh, vocabulary)
    read = tensor_files.read_h5

    def damaged(path, kinds):
        tensors = read(path, kinds)
        if path.name == "model.weights.h5":
            pooler = tensors["layers/dense/vars/1"]
            tensors["layers/dense/vars/1"] = np.nextafter(pooler, 9, dtype=np.float32)
        return tensors

    monkeypatch.setattr(tensor_files, "read_h5", damaged)
    with pytest.raises(UserError, match="layers/dense/vars/1 reads back differently"):
        converted(tmp_path / "run", tmp_path / "out", format="keras")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_difference_that_is_no_number_is_found_in_any_text(tmp_path, tanh, vocabulary):
    pretrained_run(tmp_path / "run", tanh, vocabulary)
    model = exported_model.from_pretrained(read_pretrained(tmp_path / "run"), tmp_path / "run")
    theirs = [{"pooled": np.array([0.0, value])} for value in (0, 0, 0, np.nan, 0)]
    found = checked_conversion._compare(model, "x", lambda ids: {"pooled": np.zeros(2)}, theirs)
    assert np.isnan(found["largest_difference"]) and found["largest_output"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"to": "gs://bucket/model", "format": "google"}, "expected a directory of this machine"),
        ({"verify_python": "python3"}, "--verify_python: expected --format=huggingface"),
        ({"extend_positions": 0}, "--extend_positions=0: expected an integer >= 1"),
    ],
)
def test_flags_that_do_not_fit_are_rejected(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        convert.ConvertSettings(**{"from_": "run", "to": str(tmp_path / "new"), **flags})


def test_an_existing_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="exists; name a new directory"):
        convert.ConvertSettings("run", str(tmp_path), format="huggingface")
