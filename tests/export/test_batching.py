"""A server that batches: which requests fail, and independence of predictions from the batch."""

import concurrent.futures

import numpy as np
import pytest

from export.clients.signature_defs import read_signatures
from export.graph.saved_model import write_saved_model
from export.package import version_files
from export.package.version_files import BATCHING, batching_parameters
from tasks.data import windows
from tasks.graph import chunking
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.tagging import TaggingTask
from tests.export.batching import FAILED_PRECONDITION, Batching
from tests.export.c_engine import INVALID_ARGUMENT, Engine, EngineError
from tests.export.server import Servable
from tests.export.test_kinds import trained


def published(directory, task, config, vocabulary):
    """Write MODELS/name with a version that has the files a server reads."""
    version = directory / "name" / "1"
    write_saved_model(trained(directory, task, config, vocabulary), version)
    parameters = batching_parameters(read_signatures(version))
    if parameters is not None:
        (version / BATCHING).write_text(parameters)
    return directory / "name"


@pytest.fixture(scope="module")
def tagging(tmp_path_factory, config, vocabulary):
    task = TaggingTask(labels=("O", "B-x", "I-x"), max_seq_length=12, doc_stride=5)
    directory = published(tmp_path_factory.mktemp("tagging"), task, config, vocabulary)
    return Servable(directory, batches=True)


def texts(*values):
    return {"text": np.array(values, object)}


def together(engine, requests, signature="serving_default"):
    """Return the predictions, or errors, of requests that form one batch."""

    def ask(inputs):
        try:
            return engine.predict(inputs, signature)
        except EngineError as error:
            return error

    rejected = sum(len(inputs["text"]) > engine.max_batch_size for inputs in requests)
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as threads:
        with engine.held(len(requests) - rejected):
            predictions = [threads.submit(ask, inputs) for inputs in requests]
        return [prediction.result(60) for prediction in predictions]


def assert_begins_with(prediction, alone):
    """Assert that a prediction equals the one for a single request, plus padding of longer rows."""
    for name, values in alone.items():
        array = prediction[name]
        assert array.shape[0] == values.shape[0]
        part = array[tuple(slice(size) for size in values.shape)]
        if values.dtype.kind == "f":
            np.testing.assert_allclose(part, values, atol=1e-5)
        else:
            np.testing.assert_array_equal(part, values)


REQUESTS = (
    texts(b"the bill is too high"),
    texts(b"my app", b"", b"the screen is broken " * 20),
    texts(b"\xff"),
)


@pytest.mark.slow
@pytest.mark.parametrize("signature", ["serving_default", "tokenize", "embed"])
def test_batched_requests_get_their_own_predictions(tagging, signature):
    engine = tagging.engine
    predictions = together(engine, REQUESTS, signature)
    assert sorted(engine.batches[-1]) == [1, 1, 3]
    for prediction, inputs in zip(predictions, REQUESTS, strict=True):
        assert_begins_with(prediction, engine._engine.predict(inputs, signature))


@pytest.mark.slow
def test_a_request_of_too_many_rows_fails_alone(tagging):
    predictions = together(tagging.engine, [*REQUESTS, texts(*[b"a"] * 33), texts(*[b"a"] * 27)])
    assert predictions[3].code == INVALID_ARGUMENT and "33 is larger" in str(predictions[3])
    assert tagging.engine.batches[-1] != [33] and sum(tagging.engine.batches[-1]) == 32
    for prediction, inputs in zip(predictions[:3], REQUESTS, strict=True):
        assert_begins_with(prediction, tagging.engine._engine.predict(inputs))


@pytest.mark.slow
def test_a_request_without_rows_is_batched_with_others(tagging):
    *predictions, empty = together(tagging.engine, [*REQUESTS, texts()])
    assert empty["num_entities"].shape == (0,)
    for prediction, inputs in zip(predictions, REQUESTS, strict=True):
        assert_begins_with(prediction, tagging.engine._engine.predict(inputs))


@pytest.mark.slow
def test_another_rank_fails_its_batch_and_no_later_one(tagging):
    """Check the error that TF Serving raises before the graph; see batching_params.pbtxt."""
    wrong = {"text": np.array([[b"a", b"b"]], object)}
    predictions = together(tagging.engine, [REQUESTS[0], wrong])
    assert {prediction.code for prediction in predictions} == {FAILED_PRECONDITION}
    assert "FAILED_PRECONDITION" in (tagging.path / BATCHING).read_text()
    (prediction,) = together(tagging.engine, REQUESTS[:1])
    assert_begins_with(prediction, tagging.engine._engine.predict(REQUESTS[0]))
    (error,) = together(tagging.engine, [wrong])
    assert error.code == INVALID_ARGUMENT  # A single request reaches the graph, which rejects it.


@pytest.mark.slow
def test_parts_of_a_large_request_could_not_be_concatenated(tagging):
    """Show why enable_large_batch_splitting is not set: outputs of parts differ in width."""
    predictions = [tagging.engine._engine.predict(inputs, "tokenize") for inputs in REQUESTS]
    for name in predictions[0]:
        assert len({prediction[name].shape[1:] for prediction in predictions}) > 1


@pytest.mark.slow
def test_questions_of_different_numbers_of_choices_are_not_batched(tmp_path, config, vocabulary):
    directory = published(tmp_path, MultipleChoiceTask(max_seq_length=12), config, vocabulary)
    engine = Servable(directory, batches=True).engine
    assert isinstance(engine, Engine)
    two = {"prompt": np.array([b"a"], object), "choices": np.array([[b"b", b"c"]], object)}
    three = {**two, "choices": np.array([[b"b", b"c", b"a"]], object)}
    # Batching them would fail like this.
    batching = Batching(engine, "max_batch_size { value: 32 }")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with batching.held(2):
            predictions = [threads.submit(batching.predict, inputs) for inputs in (two, three)]
        assert {prediction.exception(60).code for prediction in predictions} == {
            FAILED_PRECONDITION
        }
        for inputs in (two, three):
            assert engine.predict(inputs)["probabilities"].shape == inputs["choices"].shape


def test_a_batch_of_any_texts_is_within_the_limit_of_an_output():
    """Compare the limits: a single request may exceed it and fail, but must not fail its batch."""
    assert chunking.MAX_VALUES == version_files.MAX_BATCH_SIZE["cpu"] * windows.MAX_WINDOW_TOKENS
