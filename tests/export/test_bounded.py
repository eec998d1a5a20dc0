"""A served model under load: huge strings, random bytes, thousands of requests."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from export.graph.saved_model import write_saved_model
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.question_answering import QuestionAnsweringTask
from tests.conftest import READS_PROC
from tests.export import c_engine
from tests.export.test_kinds import trained

pytestmark = READS_PROC


@pytest.fixture(scope="module")
def labels_dir(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("bounded_labels")
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    write_saved_model(trained(directory, task, config, vocabulary), directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def answers_dir(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("bounded_answers")
    task = QuestionAnsweringTask(max_query_length=4, max_seq_length=16, doc_stride=8)
    write_saved_model(trained(directory, task, config, vocabulary), directory / "model")
    return directory / "model"


# Each script runs in its own process with TensorFlow and TF Text only, to measure its memory.
BEGIN = """
import json, sys, threading
import numpy as np, tensorflow as tf, tensorflow_text
model = tf.saved_model.load(sys.argv[1])
ask = model.signatures["serving_default"]
def memory():
    # Not getrusage's ru_maxrss, which begins with the peak of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
"""
HUGE = """
sizes = [1, 2**16, 10 * 2**20, 100 * 2**20]
first = {}
for size in sizes:
    texts = [b"the bill is high " * (size // 17 + 1), b"\\xff" * size, b"a" * size]
    texts = [text[:size] for text in texts]
    before = memory()
    answer = ask(text=tf.constant(texts))
    first[size] = answer["probabilities"].numpy().tolist()
    del texts
print(json.dumps({"memory": memory(), "answers": list(first.values())}))
"""
FUZZ = """
rng = np.random.default_rng(0)
alphabets = [
    bytes(range(256)),
    b"\\xc2\\xe2\\xf0\\x9f\\x98\\x80\\xcc\\x81ab ",
    b"ab [MASK]#\\x00\\xed\\xa0\\x80",
]
texts = []
for number in range(2000):
    letters = np.frombuffer(alphabets[number % 3], np.uint8)
    texts.append(rng.choice(letters, int(rng.integers(0, 60))).tobytes())
count = 0
for start in range(0, 2000, 100):
    part = texts[start : start + 100]
    answer = ask(text=tf.constant(part))
    count += int(np.isfinite(answer["probabilities"].numpy()).all(axis=1).sum())
    tokens = model.signatures["tokenize"](text=tf.constant(part))
    for row, text in enumerate(part):
        decoded = text.decode("utf-8", "replace")
        ends = tokens["end"].numpy()[row]
        starts = tokens["start"].numpy()[row]
        assert (starts[starts >= 0] < ends[starts >= 0]).all(), text
        assert ends.max() <= len(decoded), text
print(json.dumps({"count": count}))
"""
MANY = """
phrases = ["the bill is high", "broken screen", "my app ,", "b a c"]
texts = [" ".join(phrases[n % 4].split() * (1 + n % 3)) for n in range(12)]
expected = [ask(text=tf.constant([text]))["probabilities"].numpy()[0] for text in texts]
wrong, begun = [], memory()
def client(number):
    for request in range(625):
        which = [(number + request) % 12, (number * 5 + request) % 12]
        actual = ask(text=tf.constant([texts[w] for w in which]))["probabilities"].numpy()
        for row, w in enumerate(which):
            if not np.allclose(actual[row], expected[w], atol=1e-5):
                wrong.append((number, request))
threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps({"wrong": len(wrong), "grown": memory() - begun}))
"""


def in_a_process(code, directory):
    done = subprocess.run(
        [sys.executable, "-I", "-c", BEGIN + code, str(directory)],
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_strings_of_a_byte_to_a_hundred_megabytes_are_served_in_bounded_memory(labels_dir):
    found = in_a_process(HUGE, labels_dir)
    assert np.shape(found["answers"]) == (4, 3, 3)
    # Nothing after the limit is read: ten megabytes and a hundred are the same text.
    np.testing.assert_allclose(found["answers"][2], found["answers"][3], atol=1e-5)
    # 1.8 GB were measured: 0.9 for TensorFlow and the model, and 300 MB of text three times.
    assert found["memory"] < 2700, found["memory"]


@pytest.mark.slow
def test_random_bytes_yield_finite_numbers_and_offsets_within_the_text(labels_dir):
    assert in_a_process(FUZZ, labels_dir) == {"count": 2000}


@pytest.mark.slow
def test_ten_thousand_concurrent_requests_get_their_own_predictions(labels_dir):
    found = in_a_process(MANY, labels_dir)
    assert found["wrong"] == 0
    assert found["grown"] < 500, found["grown"]


@pytest.mark.slow
def test_contexts_of_one_to_twenty_thousand_words_are_answered_with_their_own_characters(
    answers_dir,
):
    words = "caf\u00e9 \U0001f600 the bill cafe\u0301 is \U0001f469\u200d\U0001f680 too high"
    words = f"{words} , 中 my app".split()
    contexts = [" ".join((words * 1539)[:count]) for count in (1, 30, 20_000, 0, 400)]
    model = tf.saved_model.load(str(answers_dir))
    prediction = model.signatures["serving_default"](
        question=tf.constant(["is the bill high"] * len(contexts)), context=tf.constant(contexts)
    )
    names = ("nbest_answer", "nbest_start", "nbest_end")
    found = 0
    for row, context in enumerate(contexts):
        for text, start, end in zip(
            *(prediction[name].numpy()[row] for name in names), strict=True
        ):
            if start >= 0:
                assert context[start:end] == text.decode()
                found += 1
    assert found >= 30  # Equal texts count once.
    assert prediction["nbest_start"].numpy()[3].tolist() == [-1] * 20 and len(contexts[2]) > 75_000


@pytest.mark.slow
def test_inputs_of_a_wrong_rank_are_rejected_where_shapes_are_not_checked(labels_dir):
    """Run in a Session, like TF Serving, which would otherwise read [2, 2] texts as four."""
    engine = c_engine.Engine(labels_dir)
    assert len(engine.predict({"text": np.array([b"a", b"b"], object)})["label"]) == 2
    for texts in (np.array([[b"a", b"b"], [b"c", b"d"]], object), np.array(b"a", object)):
        with pytest.raises(c_engine.EngineError, match="not compatible with expected shape"):
            engine.predict({"text": texts})
