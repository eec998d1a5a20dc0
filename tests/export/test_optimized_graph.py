"""Optimization of the served graph by TensorFlow: the fused kernels that make it fast."""

import collections
import dataclasses

import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf.checkpoints import assign, model_variables
from bert_tf.run import Run
from export.saved_model import write_saved_model
from tasks.classification import ClassificationTask
from tasks.loading import load_model
from tests import small

NUM_LAYERS = 3
MATMUL = "_MklNativeFusedMatMul"


def write_model(directory, config, vocabulary, hidden_act="gelu", portable=True):
    """Write a SavedModel with random weights: TensorFlow would remove biases of 0."""
    config = dataclasses.replace(config, num_hidden_layers=NUM_LAYERS, hidden_act=hidden_act)
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    run = Run.create(directory / "run", config, vocabulary, {"origin": "random"}, task.to_dict())
    model = task.build_model(config)
    variables = model_variables(model)
    weights = small.random_weights(config)
    assign({name: variables[name] for name in weights}, weights, "test")
    for name in set(variables) - set(weights):
        if variables[name].dtype == "float32":
            variables[name].assign_add(tf.random.stateless_normal(variables[name].shape, [1, 2]))
    run.checkpoints.save(0, variables)
    write_saved_model(load_model(run.path), directory / "model", portable=portable)
    return directory / "model"


def session():
    """Return a Session like that of TF Serving, on the CPU even if there is a GPU."""
    return tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(device_count={"GPU": 0}))


def optimized(session, fetches, feeds):
    """Return {(operation, *fused operations): count} of what a Session runs for the fetches."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    session.run(fetches, feeds, options=options, run_metadata=metadata)
    return collections.Counter(
        (node.op, *(name.decode() for name in node.attr["fused_ops"].list.s))
        for graph in metadata.partition_graphs
        for node in graph.node
    )


def kernels(directory, signature):
    """Return the kernels of a signature of a SavedModel, loaded like in TF Serving."""
    with tf.Graph().as_default(), session() as loaded:
        meta_graph = tf.compat.v1.saved_model.loader.load(loaded, ["serve"], str(directory))
        definition = meta_graph.signature_def[signature]
        fetches = {name: output.name for name, output in definition.outputs.items()}
        texts = ["the bill", "my app does not open !"]
        return optimized(loaded, fetches, {definition.inputs["text"].name: texts})


@pytest.fixture(scope="module", autouse=True)
def onednn():
    """Skip if TensorFlow does not use oneDNN, which a product outside of our graph shows."""
    with tf.Graph().as_default(), session() as plain:
        x = tf.compat.v1.placeholder(tf.float32, [None, 8])
        product = tf.nn.softmax(tf.matmul(x, tf.ones([8, 8])))
        found = optimized(plain, product, {x: [[1.0] * 8]})
    if not any(operation.startswith("_Mkl") for operation, *_ in found):
        pytest.skip("TensorFlow does not use oneDNN on this processor")


@pytest.fixture(scope="module")
def model(tmp_path_factory, config, vocabulary):
    return write_model(tmp_path_factory.mktemp("optimized"), config, vocabulary)


@pytest.mark.parametrize("signature", ["serving_default", "embed"])
def test_products_sums_and_norms_are_fused(model, signature):
    found = kernels(model, signature)
    # Where only [CLS] is read, the last attention has one output row per text, by a reshape that
    # hides from TensorFlow that it has as many rows as the residual.
    whole_layers = NUM_LAYERS - (signature == "serving_default")
    assert found[MATMUL, "BiasAdd", "GeluExact"] == NUM_LAYERS
    assert found[MATMUL, "BiasAdd", "Add"] == NUM_LAYERS + whole_layers
    assert found[("_MklLayerNorm",)] == 2 * NUM_LAYERS + 1
    assert found["_MklFusedBatchMatMulV2", "Mul", "Add"] == NUM_LAYERS  # Scaled and masked scores.
    # One more turns logits into probabilities.
    assert found[("_MklSoftmax",)] == NUM_LAYERS + (signature == "serving_default")
    assert found[("_MklBatchMatMulV2",)] == NUM_LAYERS  # Probabilities times values.
    assert found[MATMUL, "BiasAdd", "Tanh"] == 1  # The pooler.
    operations = {kernel[0] for kernel in found}
    assert not operations & {"MatMul", "_MklMatMul", "BatchMatMulV2", "FusedBatchNormV3", "Erf"}
    assert not operations & {"_MklNativeFusedBatchNormV3", "BiasAdd", "Erfc"}
    # The graph also holds the plain formula of each norm, for few rows.
    assert found[("Rsqrt",)] == found[("_MklLayerNorm",)]


@pytest.mark.parametrize("signature", ["serving_default", "embed"])
def test_a_short_text_has_a_branch_of_its_own(model, signature, tmp_path, config, vocabulary):
    portable = kernels(model, signature)
    found = kernels(write_model(tmp_path, config, vocabulary, portable=False), signature)
    added = found - portable
    assert not portable - found
    # Queries, keys and values together; and the head.
    assert added[MATMUL, "BiasAdd"] == NUM_LAYERS + (signature == "serving_default")
    assert added[MATMUL, "BiasAdd", "GeluExact"] == NUM_LAYERS
    assert added[MATMUL, "BiasAdd", "Add"] == 2 * NUM_LAYERS
    assert added[MATMUL, "BiasAdd", "Tanh"] == 1
    assert added["_MklFusedBatchMatMulV2", "Mul", "Add"] == NUM_LAYERS  # Scaled and masked scores.
    assert added[("_MklSoftmax",)] == NUM_LAYERS
    assert added[("_MklBatchMatMulV2",)] == NUM_LAYERS  # Probabilities times values.
    operations = {kernel[0] for kernel in added}
    assert not operations & {"_MklTranspose", "Transpose", "MatMul", "BiasAdd"}


@pytest.mark.slow
def test_the_tanh_gelu_is_fused(tmp_path, config, vocabulary):
    found = kernels(write_model(tmp_path, config, vocabulary, "gelu_new"), "serving_default")
    assert found[MATMUL, "BiasAdd", "GeluApproximate"] == NUM_LAYERS


@pytest.mark.slow
def test_unfused_layer_norm_is_detected(tmp_path, config, vocabulary, monkeypatch):
    """Compute LayerNorm by moments, which is not fused, as a negative control of the counts."""
    from bert_tf.model import inference_norm

    monkeypatch.setattr(inference_norm, "_norm_as_one_kernel", inference_norm.norm_by_moments)
    found = kernels(write_model(tmp_path, config, vocabulary), "serving_default")
    assert found[("_MklLayerNorm",)] == 0 and found[("Rsqrt",)] > 0
