"""The train step on a GPU, as far as a machine without one shows it: kernels, copies, waits."""

import collections
import dataclasses
import functools

import keras
import pytest
import tensorflow as tf

from bert_tf import AdamW, Lamb
from bert_tf.data.batches import flatten_examples, pack_examples
from bert_tf.pretraining.model import LOSSES, METRICS, PretrainingModel, to_batch
from bert_tf.text.encoder_inputs import PackedShape
from bert_tf.train.distribution import make_strategy
from bert_tf.train.step import TrainStep
from tests.bert_tf.test_packed import pretraining_examples
from tests.gpu_kernels import copies, kernel, missing, operations

pytestmark = pytest.mark.skipif(
    not tf.sysconfig.get_build_info()["is_cuda_build"],
    reason="this TensorFlow has no kernels of GPUs",
)


@pytest.fixture(scope="module", autouse=True)
def kernels_of_xla():
    """Compile something: XLA registers its kernels then."""
    tf.function(lambda x: x + 1.0, jit_compile=True)(tf.constant(1.0))


@pytest.fixture(scope="module")
def graph_of(config):
    """Return the function that traces two steps per call with some options, once."""
    with_dropout = dataclasses.replace(config, num_hidden_layers=1)

    @functools.cache
    def traced(dtype="mixed_bfloat16", optimizer=AdamW, is_compiled=True, parts=1):
        keras.utils.set_random_seed(1)
        model = PretrainingModel(with_dropout, dtype=dtype)
        rule = optimizer(1e-3, scales_loss=dtype == "mixed_float16")
        rule.build(model.trainable_variables)
        strategy = make_strategy("none")
        step = TrainStep(model, LOSSES, rule, strategy, 1, METRICS, parts, is_compiled=is_compiled)
        layout = flatten_examples
        if is_compiled:
            layout = functools.partial(pack_examples, shape=PackedShape(16, (12,)), num_parts=parts)
        data = tf.data.Dataset.from_tensors(pretraining_examples(config, 12))
        batches = iter(data.map(layout).map(to_batch))
        function = step.__call__.get_concrete_function(batches, tf.constant(False), tf.constant(2))
        return function.graph

    return traced


COMPILED = [
    {},
    {"dtype": "mixed_float16"},
    {"dtype": "float32", "optimizer": Lamb, "parts": 2},
]


@pytest.mark.medium
@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_each_operation_of_a_compiled_step_has_a_kernel(graph_of, options):
    assert missing(graph_of(**options)) == []


@pytest.mark.medium
@pytest.mark.parametrize("options", COMPILED[:2], ids=str)
def test_a_compiled_step_copies_nothing_to_the_host(graph_of, options):
    """The host would wait for the GPU; to the GPU goes whether the loop of steps goes on."""
    assert copies(graph_of(**options)) == ([], ["Less -> Identity (bool)"])


@pytest.mark.medium
def test_a_compiled_step_adds_in_any_order_in_three_places(graph_of):
    """Their sums differ between runs, unless XLA is told to be deterministic."""
    types = [of.type for of, _ in operations(graph_of())]
    adding = collections.Counter(of for of in types if "Scatter" in of or "Segment" in of)
    # Token embeddings; positions and the vectors of masked tokens.
    assert adding == {"TensorScatterAdd": 1, "UnsortedSegmentSum": 2}


@pytest.mark.medium
def test_a_step_of_kernels_has_all_kernels_too_but_waits(graph_of):
    graph = graph_of(is_compiled=False)
    assert missing(graph) == []
    to_host, to_gpu = copies(graph)
    assert len(to_host) <= 50 and len(to_gpu) <= 64


def test_what_has_no_kernel_is_found():
    @tf.function
    def joined(parts):
        return tf.strings.join(parts), tf.ragged.range(tf.constant([1, 2])).to_tensor()

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.unique(x)[0] + 1

    graph = joined.get_concrete_function([tf.constant("a")]).graph
    found = [of.split("(")[0] for of in missing(graph)]
    assert found == ["RaggedRange", "RaggedTensorToTensor", "StringJoin"]
    outer = tf.function(lambda x: compiled(x)).get_concrete_function(tf.constant([1.0]))
    assert missing(outer.graph) == []  # tf.unique has one for XLA.
    product = tf.function(tf.matmul).get_concrete_function(*[tf.zeros([2, 2], tf.uint8)] * 2)
    (product,) = [of for of in product.graph.get_operations() if of.type == "MatMul"]
    assert kernel(product, "GPU") is None


def test_integers_of_32_bits_are_found_to_be_copied():
    @tf.function
    def added(x):
        return tf.reduce_sum(tf.cast(x, tf.int32)) + 1

    graph = added.get_concrete_function(tf.zeros([3])).graph
    assert copies(graph) == (["Cast -> Sum (int32)"], [])


def test_the_operations_that_send_batches_to_a_gpu_have_kernels():
    """Those of tf.data.experimental.prefetch_to_device and of its iterator."""
    registered = ("GeneratorDataset", "PrefetchDataset", "AnonymousIteratorV3", "IteratorGetNext")
    from tests.gpu_kernels import _kernels

    for name in registered:
        assert "GPU" in {of.device_type for of in _kernels(name)}, name
