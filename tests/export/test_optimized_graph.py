"""Optimization of the served graph by TensorFlow: the fused kernels that make it fast."""

import collections
import dataclasses

import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf.runs.checkpoints import assign, model_variables
from bert_tf.runs.run import Run
from export.graph import served_encoder
from export.graph.saved_model import write_saved_model
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small

pytestmark = pytest.mark.optimized

NUM_LAYERS = 3
MATMUL = "_MklNativeFusedMatMul"
# Enough for the LayerNorm kernel: these tokens of 12 numbers are more than FEW_NUMBERS.
MANY_TEXTS, MANY_TOKENS = ["my app does not open !"] * 704, 5632


def write_model(directory, config, vocabulary, hidden_act="gelu", portable=False):
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


def executed(session, fetches, feeds):
    """Return {(operation, shape of its first output): count} of what a Session runs."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.SOFTWARE_TRACE)
    session.run(fetches, feeds, options=options, run_metadata=metadata)
    return collections.Counter(
        (node.timeline_label.split(" = ")[-1].split("(")[0], shape(node.output))
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    )


def shape(outputs):
    if not outputs:
        return None
    return tuple(dim.size for dim in outputs[0].tensor_description.shape.dim)


def kernels(directory, signature, texts):
    """Return the `executed` kernels of a signature of a SavedModel, loaded like in TF Serving."""
    with tf.Graph().as_default(), session() as loaded:
        meta_graph = tf.compat.v1.saved_model.loader.load(loaded, ["serve"], str(directory))
        definition = meta_graph.signature_def[signature]
        fetches = {name: output.name for name, output in definition.outputs.items()}
        return executed(loaded, fetches, {definition.inputs["text"].name: texts})


@pytest.fixture(scope="module", autouse=True)
def onednn():
    """Skip if TensorFlow does not use oneDNN, which a product outside of our graph shows."""
    with tf.Graph().as_default(), session() as plain:
        x = tf.compat.v1.placeholder(tf.float32, [None, 8])
        product = tf.nn.softmax(tf.matmul(x, tf.ones([8, 8])))
        found = executed(plain, product, {x: [[1.0] * 8]})
    if not any(operation.startswith("_Mkl") for operation, _ in found):
        pytest.skip("TensorFlow does not use oneDNN on this processor")


@pytest.fixture(scope="module")
def model(tmp_path_factory, config, vocabulary):
    return write_model(tmp_path_factory.mktemp("optimized"), config, vocabulary)


@pytest.fixture(scope="module")
def portable_model(tmp_path_factory, config, vocabulary):
    return write_model(tmp_path_factory.mktemp("portable"), config, vocabulary, portable=True)


def without_norms(found, shape):
    """Return how many sums of a shape were executed besides those of LayerNorms by formula."""
    return found["AddV2", shape] - found["Rsqrt", (shape[0], 1)]


SIGNATURES = pytest.mark.parametrize(
    "signature", small.fast(["serving_default", "embed"], "serving_default")
)


@pytest.mark.medium
@SIGNATURES
@pytest.mark.parametrize("texts", [MANY_TEXTS, ["the bill", "my app"]], ids=["many", "few"])
@pytest.mark.parametrize("graph", small.fast(["model", "portable_model"], "model"))
def test_the_common_graph_has_fused_kernels(graph, signature, texts, config, request):
    found = kernels(request.getfixturevalue(graph), signature, texts)
    num_texts, tokens = len(texts), MANY_TOKENS if texts is MANY_TEXTS else 8
    is_portable = graph == "portable_model"
    check_layers(found, signature, config, num_texts, tokens, is_portable)
    has_transposes = any(operation == "_MklTranspose" for operation, _ in found)
    assert has_transposes == is_portable
    if texts is MANY_TEXTS:
        whole_layers = NUM_LAYERS - (signature == "serving_default")
        assert found["_MklLayerNorm", (tokens, config.hidden_size)] == 2 * whole_layers + 1
        assert ("Rsqrt", (tokens, 1)) not in found


@pytest.mark.medium
@SIGNATURES
def test_a_short_text_has_fused_kernels(model, signature, config):
    found = kernels(model, signature, ["the bill"])
    check_layers(found, signature, config, texts=1, tokens=served_encoder.MIN_ROWS)
    assert not any(operation == "_MklTranspose" for operation, _ in found)


def check_layers(found, signature, config, texts, tokens, is_portable=False):
    """Check that each product includes its bias, and its activation or residual."""
    hidden, inner = config.hidden_size, config.intermediate_size
    is_prediction = signature == "serving_default"
    # Where only [CLS] is read, the last layer has one row per text.
    whole = NUM_LAYERS - is_prediction
    of_all, of_first = 2 * whole, 2 * is_prediction + 1  # With the pooler.
    if is_portable:
        of_all += 2 * NUM_LAYERS + whole
        of_first += is_prediction
    else:
        assert found[MATMUL, (tokens, 3 * hidden)] == NUM_LAYERS  # Queries, keys and values.
    assert found[MATMUL, (tokens, hidden)] == of_all
    assert found[MATMUL, (tokens, inner)] == whole
    assert found[MATMUL, (texts, hidden)] == of_first
    # No residual is added alone, but three embeddings are. TensorFlow may make one AddN of those.
    assert without_norms(found, (tokens, hidden)) == 2 - 2 * found["AddN", (tokens, hidden)]
    counts = collections.Counter()
    for (operation, _), count in found.items():
        counts[operation] += count
    assert counts["_MklFusedBatchMatMulV2"] == NUM_LAYERS  # Scaled and masked scores.
    assert counts["_MklBatchMatMulV2"] == NUM_LAYERS  # Probabilities times values.
    # One more turns logits into probabilities.
    assert counts["_MklSoftmax"] == NUM_LAYERS + is_prediction
    assert not counts.keys() & {"MatMul", "_MklMatMul", "BatchMatMulV2", "Softmax"}
    assert not counts.keys() & {"BiasAdd", "Erf", "Erfc", "Tanh", "FusedBatchNormV3"}
    assert "_MklNativeFusedBatchNormV3" not in counts


@pytest.mark.slow
def test_the_tanh_gelu_is_fused(tmp_path, config, vocabulary):
    path = write_model(tmp_path, config, vocabulary, "gelu_new", portable=True)
    found = kernels(path, "embed", ["the bill", "my app"])
    assert found[MATMUL, (8, config.intermediate_size)] == NUM_LAYERS
    assert not any(operation in ("Tanh", "Pow") for operation, _ in found)


@pytest.mark.slow
def test_unfused_layer_norm_is_detected(tmp_path, config, vocabulary, monkeypatch):
    """Compute LayerNorm by moments, which is not fused, as a negative control of the counts."""
    from bert_tf.model import layers

    monkeypatch.setattr(layers, "_norm_as_one_kernel", layers.norm_by_moments)
    path = write_model(tmp_path, config, vocabulary, portable=True)
    operations = {operation for operation, _ in kernels(path, "serving_default", MANY_TEXTS)}
    assert "_MklLayerNorm" not in operations and "Rsqrt" in operations
