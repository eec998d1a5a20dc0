"""The export of task types other than classification: parity and requests."""

import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError
from export import request
from export.checks import isolated_runner, parity
from export.clients.local_client import LocalClient
from export.graph.saved_model import write_saved_model
from tasks.graph.pipeline import TOKENIZE_OUTPUTS
from tasks.model.loading import load_model
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tasks.types.regression import RegressionTask
from tasks.types.tagging import TaggingTask
from tests import small
from tests.export.test_publishing import publish

PROMPTS = ["the bill", "my app", "a"]
CHOICES = [["is high", "broken"], ["broken", "c", "does not open"], ["", "b"]]
TOKENIZED = ("end", "input_ids", "input_mask", "segment_ids", "start")


def trained(directory, task, config, vocabulary):
    """Return a run of a task with weights so large that predictions differ, from a fixed seed."""
    from bert_tf import read_pretrained

    weights = small.write_huggingface(directory / "huggingface", config, vocabulary)
    source = read_pretrained(str(weights), None)
    model = task.build_model(config)
    source.assign_to(model)
    head = model.dense_layers[0] if task.kind == "similarity" else model.head
    head.kernel.assign(np.random.default_rng(0).normal(0, 0.6, head.kernel.shape))
    return small.trained(directory / "run", source, task, model)


@pytest.fixture(scope="module")
def of_choices(tmp_path_factory, config, vocabulary):
    task = MultipleChoiceTask(max_seq_length=12)
    return trained(tmp_path_factory.mktemp("choices"), task, config, vocabulary)


@pytest.fixture(scope="module")
def choices_dir(of_choices, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "choices"
    publish(of_choices, directory)
    return directory


def shapes_of(served, signature):
    outputs = served._model.signatures[signature].structured_outputs
    return {name: (spec.dtype.name, spec.shape.rank) for name, spec in outputs.items()}


@pytest.mark.slow
def test_multiple_choice_is_served_as_trained(of_choices, choices_dir):
    served = LocalClient(choices_dir)
    assert shapes_of(served, "serving_default") == {
        "choice": ("int32", 1),
        "probabilities": ("float32", 2),
    }
    assert shapes_of(served, "tokenize") == dict.fromkeys(TOKENIZED, ("int32", 3))
    prediction = served.predict({"prompt": PROMPTS, "choices": CHOICES})
    expected = of_choices.serving.pipeline.predict(
        prompt=tf.constant(PROMPTS), choices=tf.ragged.constant(CHOICES).to_tensor("")
    )
    np.testing.assert_allclose(prediction["probabilities"], expected["probabilities"], atol=1e-5)
    assert prediction["choice"] == expected["choice"].numpy().tolist()
    assert prediction["choice"][2] == 1 and prediction["probabilities"][2] == [0, 1, 0]
    for number in range(3):
        inputs = {"prompt": PROMPTS[number : number + 1], "choices": CHOICES[number]}
        alone = served.predict(inputs)  # A flat list of strings belongs to a single question.
        count = len(CHOICES[number])
        np.testing.assert_allclose(
            alone["probabilities"], [prediction["probabilities"][number][:count]], atol=1e-5
        )
    assert served.predict({"prompt": [], "choices": []}) == {"choice": [], "probabilities": []}
    tokens = served.predict({"prompt": ["the bill"], "choices": ["is high", "", "a"]}, "tokenize")
    assert tokens["input_ids"] == [[[2, 5, 6, 3, 7, 9, 3], [0] * 7, [2, 5, 6, 3, 22, 3, 0]]]


@pytest.mark.slow
def test_wrong_requests_for_choices_are_reported(choices_dir):
    served = LocalClient(choices_dir)
    with pytest.raises(UserError, match="values per name, received 2 of prompt, 1 of choices"):
        served.predict({"prompt": ["a", "b"], "choices": ["c", "d"]})
    with pytest.raises(UserError, match="expected choices, prompt; received prompt"):
        served.predict({"prompt": ["a"]})


@pytest.mark.slow
def test_the_command_takes_the_choices_of_one_question(choices_dir, capsys):
    inputs = ("prompt=the bill", "choices=is high", "choices=broken")
    request.main(request.RequestSettings(inputs, str(choices_dir)))
    prediction = json.loads(capsys.readouterr().out)
    assert len(prediction["choice"]) == 1 and len(prediction["probabilities"][0]) == 2


def test_the_parity_check_covers_questions_with_none_to_three_choices(of_choices):
    for signature, inputs in parity.requests(of_choices, of_choices.serving.pipeline.signatures):
        if signature != "embed":
            assert len(inputs["prompt"]) == len(inputs["choices"])
            assert {len(choices) for choices in inputs["choices"]} == {3}
    counts = {
        sum(choice != b"" for choice in choices)
        for signature, inputs in parity.requests(of_choices, of_choices.serving.pipeline.signatures)
        if signature == "serving_default"
        for choices in inputs["choices"]
    }
    assert counts == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_sabotaged_export_of_choices_is_not_published(of_choices, tmp_path):
    """Flip the sign of the scores."""
    wrong = load_model(of_choices.source.run.path)
    wrong.network.head.kernel.assign(-wrong.network.head.kernel)
    message = r"serving_default: prompt='.*', choices=\[.*: (choice|probabilities) differs"
    with pytest.raises(UserError, match=f"not published: {message}"):
        publish(
            of_choices,
            tmp_path / "models",
            write=lambda right, *rest: write_saved_model(wrong, *rest),
        )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("expected", "served", "is_same"),
    [
        (np.zeros([2, 3, 4], np.int32), np.zeros([2, 3, 5], np.int32), False),
        (np.zeros([2, 3, 4]), np.zeros([2, 2, 4]), False),
        (np.array([[b"a"], [b""]], object), np.array([[b"a", b""], [b"", b""]], object), False),
        (np.array([[b"a"], [b""]], object), np.array([[b"a"], [b""]], object), True),
        (np.full([2, 1, 3], 0.5), np.full([2, 1, 3], 0.500009), True),
    ],
)
def test_outputs_of_any_rank_are_compared(expected, served, is_same):
    inputs = {"prompt": [b"p", b"q"], "choices": [[b"c", b"\xff"], [b"d", b""]]}
    case = parity._Case("tokenize", inputs, "start", TOKENIZE_OUTPUTS["start"])
    messages = parity._compare(case, expected, served)
    assert not messages if is_same else "choices=['c', '\ufffd']: start differs" in messages[0]


@pytest.mark.parametrize(
    ("name", "expected", "served"),
    [
        ("entity_text", [[b"bill"], [b"a"]], [[b"bill", b""], [b"a", b"high"]]),
        ("entity_start", [[4], [0]], [[4, -1], [0, 7]]),
        ("entity_score", [[0.9], [0.5]], [[0.9, -1.0], [0.5, 0.5]]),
    ],
)
def test_one_entity_within_tolerance_makes_no_other_row_differ(name, expected, served):
    """Add an entity in bfloat16 to the second text, which makes all rows of the batch wider."""
    inputs, tolerance = {"text": [b"the bill", b"a high"]}, parity.TOLERANCES["bfloat16"]
    expected, served = (
        np.array(rows, object if name == "entity_text" else None) for rows in (expected, served)
    )
    close, clear = np.array([0.9, 0.01]), np.array([0.9, 0.9])
    spec = TaggingTask.outputs[name]
    case = parity._Case("serving_default", inputs, name, spec, tolerance, close)
    assert not parity._compare(case, expected, served)
    [(row, message)] = parity._compare(case._replace(margins=clear), expected, served).items()
    assert row == 1 and f"text='a high': {name} differs" in message


@pytest.mark.parametrize(
    ("precision", "expected", "served", "is_same"),
    [
        ("bfloat16", -0.904, -0.879, True),  # Probabilities 0.288 and 0.293.
        ("bfloat16", -0.9, -0.8, False),  # 0.289 and 0.310.
        ("bfloat16", 12.0, 14.0, True),
        ("bfloat16", 1e30, 1e30, True),
        ("float32", 12.0, 12.001, False),
    ],
)
def test_log_odds_are_compared_as_probabilities_in_bfloat16(precision, expected, served, is_same):
    case = parity._Case(
        "serving_default",
        {"context": [b"the bill"]},
        "no_answer_score",
        QuestionAnsweringTask.outputs["no_answer_score"],
        parity.TOLERANCES[precision],
        np.array([0.9]) if precision == "bfloat16" else None,
    )
    expected, served = (np.array([score], np.float32) for score in (expected, served))
    messages = parity._compare(case, expected, served)
    assert not messages if is_same else "'the bill': no_answer_score differs" in messages[0]


def test_predictions_keep_their_size_next_to_long_ones(tmp_path):
    """Use strings that would take 300 GB as fixed-width bytes."""
    strings = np.full([3, 100_000], b"", object)
    strings[0, 0], strings[1, 1], strings[2, 5] = (
        b"x" * (1 << 20),
        b"\x00end\x00",
        "\u00e9".encode(),
    )
    predictions = {"0/entity_text": strings, "0/none": strings[:, :0], "0/score": np.eye(3)}
    isolated_runner.save(tmp_path / "results.npz", predictions)
    loaded = isolated_runner.load(tmp_path / "results.npz")
    assert set(loaded) == set(predictions)
    for name, array in predictions.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.slow
def test_regression_is_served_as_trained(tmp_path, config, vocabulary):
    task = RegressionTask(text_columns=("a", "b"), max_seq_length=12)
    run = trained(tmp_path, task, config, vocabulary)
    publish(run, tmp_path / "models")
    served = LocalClient(tmp_path / "models")
    assert shapes_of(served, "serving_default") == {"value": ("float32", 1)}
    texts = {"text_a": ["the bill", ""], "text_b": ["is high", "a"]}
    prediction = served.predict(texts)
    expected = run.serving.pipeline.predict(
        **{name: tf.constant(values) for name, values in texts.items()}
    )
    np.testing.assert_allclose(prediction["value"], expected["value"], atol=1e-5)
    assert abs(prediction["value"][0] - prediction["value"][1]) > 1e-3
    assert served.predict({"text_a": [], "text_b": []}) == {"value": []}
