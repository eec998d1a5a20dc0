"""Every task type: parity check in both precisions, and predictions in batches of any size."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.runs.run import Run
from bert_tf.text.encoder_inputs import to_flat
from export.clients.local_client import LocalClient
from export.graph.saved_model import served_pipeline, write_saved_model
from tasks.model.loading import load_model
from tasks.types.anomaly import AnomalyTask
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.ranking import RankingTask
from tasks.types.regression import RegressionTask
from tasks.types.similarity.text_embedder import SimilarityTask
from tasks.types.tagging import TaggingTask
from tests import small
from tests.export.test_kinds import trained
from tests.export.test_publishing import publish

pytestmark = pytest.mark.optimized

LABELS = ("billing", "hardware", "software")
WINDOWED = {"max_seq_length": 12, "doc_stride": 3}
TASKS = {
    "classification": ClassificationTask(labels=LABELS, max_seq_length=12),
    "binary pairs": ClassificationTask(
        labels=("no", "yes"), text_columns=("a", "b"), max_seq_length=9
    ),
    "several labels": ClassificationTask(
        labels=LABELS,
        max_seq_length=12,
        multi_label=True,
        threshold_objective="f1",
        calibrate=True,
        thresholds=(0.2, 0.5, 0.7),
        temperature=1.7,
    ),
    "a rare label": ClassificationTask(
        labels=LABELS,
        max_seq_length=12,
        rare_label="hardware",
        threshold_objective="f1",
        thresholds=(0.25,),
        pooling="mean",
    ),
    "regression": RegressionTask(max_seq_length=12),
    "tagging": TaggingTask(labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC"), **WINDOWED),
    "span_qa": QuestionAnsweringTask(max_query_length=4, **WINDOWED),
    "span_qa with no answer": QuestionAnsweringTask(
        max_query_length=4, may_be_impossible=True, null_threshold=-1.5, **WINDOWED
    ),
    "multiple_choice": MultipleChoiceTask(max_seq_length=12),
    "ranking": RankingTask(max_seq_length=12),
    "ranking without a sigmoid": RankingTask(max_seq_length=12, activation="identity"),
    "similarity": SimilarityTask(
        max_seq_length=12,
        pooling="mean+cls",
        dense_units=(5,),
        dense_activations=("tanh",),
        normalize=True,
        prompts={"query": "the bill "},
        default_prompt="query",
    ),
    "anomaly": AnomalyTask(max_seq_length=12, latent_dim=4, threshold=1.25),
}
SENTENCES = [text for texts in small.TEXTS.values() for text in texts]
TEXTS = ["", " ", "a", *SENTENCES, "cafe\u0301 \U0001f600 the bill, unaffable!", "my app 中 " * 40]


def of_task(name, directory, config, vocabulary):
    """Return a run of one of TASKS with weights that make predictions differ."""
    if name == "anomaly":
        return of_anomaly(directory, config, vocabulary)
    return trained(directory, TASKS[name], config, vocabulary)


def of_anomaly(directory, config, vocabulary):
    from bert_tf import read_pretrained

    weights = small.write_huggingface(directory / "huggingface", config, vocabulary)
    source, task = read_pretrained(str(weights), None), TASKS["anomaly"]
    model = task.build_model(config)
    source.assign_to(model)
    model.adapt(np.random.default_rng(0).normal(size=(64, config.hidden_size)))
    return small.trained(directory / "run", source, task, model)


def of_pretraining(directory, config, vocabulary):
    """Return a pretraining run with random weights."""
    model = PretrainingModel(config)
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if variable.dtype == "float32":
            is_gain = variable.path.endswith("gamma")
            variable.assign(rng.normal(1.0 if is_gain else 0.0, 0.3, variable.shape))
    from bert_tf.runs.checkpoints import model_variables

    run = Run.create(directory / "run", config, vocabulary, {"origin": "random"}, None)
    run.checkpoints.save(0, model_variables(model))
    return load_model(run.path)


def inputs_of(task, texts):
    """Return inputs from texts: a second input in another order, choices two per question."""
    columns = {}
    for number, name in enumerate(task.input_names):
        turned = [*texts[number:], *texts[:number]]
        if task.INPUT_RANKS.get(name) == 2:
            turned = [[text, other] for text, other in zip(turned, turned[::-1], strict=True)]
        columns[name] = turned
    return columns


def of_rows(columns, rows):
    return {name: values[rows] for name, values in columns.items()}


def assert_same(prediction, expected, strip_padding):
    """Assert equal predictions row by row, ignoring padding; floats within 1e-5."""
    for row, expected_row in zip(by_rows(prediction), by_rows(expected), strict=True):
        row, expected_row = strip_padding(row), strip_padding(expected_row)
        for name, value in row.items():
            if np.asarray(value).dtype.kind == "f":
                np.testing.assert_allclose(value, expected_row[name], rtol=1e-5, atol=1e-5)
            else:
                assert value == expected_row[name], name


def by_rows(prediction):
    return [
        dict(zip(prediction, row, strict=True)) for row in zip(*prediction.values(), strict=True)
    ]


@pytest.mark.medium
def test_a_pretraining_run_has_equal_outputs_with_the_served_encoder(tmp_path, config, vocabulary):
    run = of_pretraining(tmp_path, config, vocabulary)
    served = served_pipeline(run, "float32").token_functions
    encoded = run.serving.pipeline.encode(text=tf.constant(["the [MASK] is [MASK]", "", "bill"]))
    inputs = to_flat(encoded.packed, vocabulary)
    for signature, function in run.serving.pipeline.token_functions.items():
        expected, actual = function(inputs), tf.function(served[signature])(inputs)
        assert actual.keys() == expected.keys()
        for output, values in expected.items():
            np.testing.assert_allclose(actual[output], values, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_it_passes_the_parity_check_and_predicts_equally_in_any_batch(
    name, tmp_path, config, vocabulary
):
    run = of_task(name, tmp_path, config, vocabulary)
    publish(run, tmp_path / "models")
    served = LocalClient(tmp_path / "models")
    columns = inputs_of(run.task, TEXTS)
    complete = served.predict(columns)
    for rows in (slice(0, 0), slice(0, 1), slice(3, 10), slice(14, 15)):
        part = {key: values[rows] for key, values in complete.items()}
        assert_same(served.predict(of_rows(columns, rows)), part, run.task.strip_padding)
    many = served.predict(inputs_of(run.task, (TEXTS * 80)[:1000]))
    expected = {key: (values * 80)[:1000] for key, values in complete.items()}
    # Otherwise the rotated second column would be paired with other rows at the end.
    if len(columns) == 1:
        assert_same(many, expected, run.task.strip_padding)
    assert {len(values) for values in many.values()} == {1000}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["several labels", "tagging", "span_qa with no answer", "anomaly", "pretrained"]
)
def test_it_passes_the_parity_check_in_bfloat16(name, tmp_path, config, vocabulary):
    if name == "pretrained":
        run = of_pretraining(tmp_path, config, vocabulary)
    else:
        run = of_task(name, tmp_path, config, vocabulary)
    publish(run, tmp_path / "models", precision="bfloat16")
    served = LocalClient(tmp_path / "models")
    for signature in served._model.signatures.values():
        for output in signature.structured_outputs.values():
            assert output.dtype in (tf.float32, tf.int32, tf.string, tf.bool)


@pytest.mark.slow
def test_another_prediction_passes_in_bfloat16_only_if_it_was_a_close_second(
    tmp_path, config, vocabulary
):
    """Make the served model return the second most likely label."""
    run = of_task("classification", tmp_path, config, vocabulary)
    turned = dataclasses.replace(run.task, labels=(*LABELS[1:], LABELS[0]))

    def write(right, directory, *rest):
        wrong = type(right)(turned, right.config, right.vocabulary, network=right.network)
        write_saved_model(wrong, directory)

    with pytest.raises(UserError, match="not published: serving_default: text=.*: label differs"):
        publish(run, tmp_path / "models", precision="bfloat16", write=write)


@pytest.mark.slow
def test_a_pretraining_run_serves_both_heads(tmp_path, config, vocabulary):
    run = of_pretraining(tmp_path, config, vocabulary)
    publish(run, tmp_path / "models")
    served = LocalClient(tmp_path / "models")
    prediction = served.predict(
        {"text": ["the [MASK] is high", "no mask", "[MASK] [MASK]"]}, "masked_lm"
    )
    assert np.shape(prediction["token"]) == np.shape(prediction["score"]) == (3, 5)
    assert prediction["token"][1] == [""] * 5 and prediction["score"][1] == [0] * 5
    assert prediction == served.predict(
        {"text": ["the [MASK] is high", "no mask", "[MASK] [MASK]"]}
    )
    prediction = served.predict(
        {"text_a": ["the bill", ""], "text_b": ["is high", "a"]}, "next_sentence"
    )
    assert np.shape(prediction["is_next"]) == (2,) and all(0 < p < 1 for p in prediction["is_next"])
    assert served.predict({"text": []}, "masked_lm") == {"score": [], "token": []}
