"""Fine-tuning as on a TPU: batches of one shape, and the step as one program."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import AdamW
from bert_tf.text.encoder_inputs import to_packed, to_padded
from bert_tf.train.step import TrainStep
from tasks.data.examples import EncodedExamples, Examples
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.tagging import TaggingTask
from tests import small
from tests.shared_graphs import tokenizer_of

TEXTS = [text for texts in small.TEXTS.values() for text in texts] + ["the"]
LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]
# Two to four choices.
CHOICES = [["is high", "a"], ["broken", "not open", "b"], ["a", "b", "c", "is broken !"]]
ARGUMENTS = {"global_batch_size": 4, "num_epochs": 2, "seed": 5}
KINDS = ("classification", "multiple_choice", "tagging")


def classification(directory):
    task = ClassificationTask(labels=("billing", "hardware", "software"), max_seq_length=12)
    return task, Examples({"text": TEXTS}, LABELS)


def multiple_choice(directory):
    texts = {"prompt": TEXTS, "choices": [CHOICES[number % 3] for number in range(10)]}
    return MultipleChoiceTask(max_seq_length=12), Examples(
        texts, [number % 2 for number in range(10)]
    )


def tagging(directory):
    """Write five texts that make ten windows of 6 tokens."""
    sentence = "the O\nbill B-X\nis O\ntoo O\nhigh B-X\n! O\n\n"
    path = directory / "train.txt"
    path.write_text(sentence * 5)
    task = TaggingTask.from_data(path, max_seq_length=6, doc_stride=2)
    return task, task.load_examples(path)


@pytest.fixture
def encoded(config, vocabulary, tmp_path):
    """Return a function of (kind, static_shape): EncodedExamples and the task's model."""
    # XLA draws other dropout noise.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def encode(kind, static_shape, layout=to_padded):
        task, examples = globals()[kind](tmp_path)
        keras.utils.set_random_seed(3)
        model = task.build_model(dataclasses.replace(config, **still))
        pipeline = Pipeline(task, tokenizer_of(vocabulary, True), model)
        return EncodedExamples.encode(examples, pipeline, layout, static_shape), model

    return encode


def shapes(batch):
    return [tuple(tensor.shape) for tensor in tf.nest.flatten(batch)]


@pytest.mark.parametrize("kind", small.fast(KINDS, "tagging"))
def test_all_shapes_are_known_before_the_first_batch(encoded, kind):
    data, _ = encoded(kind, True)
    assert len(data) == 10
    length, rows = data.task.max_seq_length, 16 if kind == "multiple_choice" else 4
    expected = [(rows, length)] * 3 + [(4, 4)] * (kind == "multiple_choice")
    of_labels = (4, length) if kind == "tagging" else (4,)
    for batches, targets in (
        (data.training_batches(**ARGUMENTS), [of_labels] * 2),
        (data.evaluation_batches(data.by_length(), 4), [(4,)]),
    ):
        assert shapes(batches.element_spec) == expected + targets
        assert len([shapes(batch) for batch in batches]) >= 3


def test_a_row_of_many_texts_makes_no_other_batch_larger(vocabulary):
    """Read 41 questions, one with 30 choices; 5 sequences of 12 tokens fill a row."""
    choices = [["a", "b"]] * 40 + [["a"] * 30]
    examples = Examples({"prompt": ["the " * 12] * 41, "choices": choices}, [0] * 41)
    pipeline = Pipeline(MultipleChoiceTask(max_seq_length=12), tokenizer_of(vocabulary, True), None)
    data = EncodedExamples.encode(examples, pipeline, to_packed, True)
    rows = [len(batch[0]["input_ids"]) for batch in data.training_batches(**ARGUMENTS)]
    # Most need 2 rows; with the long question a batch of 4 needs 8, and one of 120 sequences 24.
    assert rows.count(2) == 20 and max(rows) <= 16


@pytest.mark.slow
def test_filler_rows_of_a_batch_have_no_weight(encoded):
    batches = encoded("classification", True)[0].training_batches(**ARGUMENTS)
    usual = encoded("classification", False)[0].training_batches(**ARGUMENTS)
    for mine, theirs in zip(batches, usual, strict=True):
        count, length = theirs[0]["input_ids"].shape
        for name, values in theirs[0].items():
            np.testing.assert_array_equal(mine[0][name][:count, :length], values)
        assert not mine[0]["input_mask"][:count, length:].numpy().any()
        np.testing.assert_array_equal(mine[1]["label"][:count], theirs[1]["label"])
        assert mine[2]["label"].numpy().tolist() == [1.0] * count + [0.0] * (4 - count)
    evaluation = encoded("classification", True)[0].evaluation_batches(np.arange(10), 4)
    is_sample = [is_sample_B.numpy().tolist() for _, is_sample_B in evaluation]
    assert is_sample == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


def test_a_replica_without_examples_gets_a_batch_of_weight_zero(encoded):
    data, _ = encoded("classification", True)
    batches = list(data.training_batches(**ARGUMENTS, num_replicas=2))
    assert [shapes(batch) for batch in batches] == [[(2, 12)] * 3 + [(2,)] * 2] * 12
    weights = [batch[2]["label"].numpy().tolist() for batch in batches[:6]]
    assert weights == [[1.0, 1.0]] * 5 + [[0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [to_padded, to_packed])
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_is_one_program_and_trains_and_evaluates_equally(encoded, kind, layout):
    results, traces = [], []
    for static_shape in (True, False):
        data, model = encoded(kind, static_shape, layout if static_shape else to_padded)
        optimizer = AdamW(1e-3)
        optimizer.build(model.trainable_variables)
        strategy = tf.distribute.get_strategy()
        step = TrainStep(model, data.task.losses, optimizer, strategy, 0, is_compiled=static_shape)

        def on_replica(batch, step=step, static_shape=static_shape):
            traces.append(static_shape)
            return step._on_replica(batch, tf.constant(True))

        if static_shape:
            on_replica = tf.function(on_replica, jit_compile=True, autograph=False)
        logs = [on_replica(batch) for batch in data.training_batches(**ARGUMENTS)]
        assert [int(counts[0]) for _, counts, _ in logs] == [4, 4, 2] * 2
        evaluator = Evaluator(data.task, model, strategy, 4)
        outputs = evaluator.outputs(data)
        weights = [variable.numpy() for variable in model.trainable_variables]
        results.append(([float(floats[0]) for floats, *_ in logs], *outputs.values(), *weights))
    assert traces.count(True) == 1
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
