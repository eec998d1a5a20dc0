"""The step of each task type on a GPU, as far as a machine without one shows it."""

import collections

import pytest
import tensorflow as tf

import tasks
from bert_tf import AdamW
from bert_tf.train.distribution import make_strategy
from bert_tf.train.step import TrainStep
from tests import small
from tests.bert_tf.test_packed import compiled_calls
from tests.gpu_kernels import copies, missing, operations
from tests.tasks.test_task_model import CASES, ROWS

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(
        not tf.sysconfig.get_build_info()["is_cuda_build"],
        reason="this TensorFlow has no kernels of GPUs",
    ),
]

EXAMPLES = {
    **CASES,
    "TextEmbedder": ({}, (ROWS, ROWS[::-1]), None),
    "TextRanker": ({}, {"query": ["the bill"], "texts": [["is high", "a"]]}, [[1, 0]]),
}
# Sums whose order differs between runs, unless XLA is told to be deterministic: the gradients of
# token and position embeddings, and those of what is arranged in a row per question. Each of the
# latter is one summand, so that its order changes nothing; the sum of the padding is not used.
SUMS_IN_ANY_ORDER = dict.fromkeys(EXAMPLES, 2)
SUMS_IN_ANY_ORDER |= {"MultipleChoice": 3, "TextEmbedder": 3, "TextRanker": 3}
SUMS_IN_ANY_ORDER["AnomalyDetector"] = 0  # Its encoder is not trained.


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    # XLA registers its kernels when it first compiles something.
    tf.function(lambda x: x + 1.0, jit_compile=True)(tf.constant(1.0))
    return small.write_huggingface(tmp_path_factory.mktemp("gpu") / "weights", config, vocabulary)


@pytest.mark.parametrize("name", small.fast(EXAMPLES, "TextClassifier"))
def test_a_compiled_step_has_all_kernels_and_waits_for_nothing(name, weights):
    options, x, y = EXAMPLES[name]
    source = getattr(tasks, name)
    model = source.from_pretrained(weights, max_seq_length=12, dtype="mixed_bfloat16", **options)
    model.compile(jit_compile=True)
    encoded = model._evaluation_rows(x, y)
    batches = iter(encoded.training_batches(global_batch_size=4, num_epochs=1, seed=1))
    optimizer = AdamW(1e-3)
    optimizer.build(model.network.trainable_variables)
    step = TrainStep(
        *(model.network, model.task.losses, optimizer, make_strategy("none"), 1), is_compiled=True
    )
    once = step.__call__.get_concrete_function(batches, tf.constant(False))
    outside, calls = compiled_calls(once.graph)
    types = [of.type for of in outside]
    executed = [of for of in types if of not in ("Placeholder", "Const", "NoOp", "Identity")]
    assert calls == 1 and len(executed) <= 100, executed
    twice = step.__call__.get_concrete_function(batches, tf.constant(False), tf.constant(2))
    assert missing(twice.graph) == []
    # To the GPU goes whether the loop of steps goes on.
    assert copies(twice.graph) == ([], ["Less -> Identity (bool)"])
    types = [of.type for of, _ in operations(twice.graph)]
    adding = collections.Counter(of for of in types if "Scatter" in of or "Segment" in of)
    assert adding == collections.Counter(UnsortedSegmentSum=SUMS_IN_ANY_ORDER[name])
