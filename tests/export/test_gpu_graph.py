"""Graphs for GPUs: what a server with a GPU would do with them, checked on a CPU."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import export
from bert_tf import UserError
from bert_tf.model.layers import _norm_as_one_kernel
from export.export_saved_model import ExportSettings
from export.graph import saved_model
from export.graph.saved_model import portable_encoder, served_pipeline, write_saved_model
from export.package.version_files import batching_parameters
from tasks.graph.heads import SequenceClassifier
from tests import small
from tests.export import gpu_graph
from tests.export.serving_operations import nodes_of, problems, read
from tests.export.test_every_kind import TASKS, inputs_of, of_pretraining, of_task

FLAT = {
    "input_ids": tf.TensorSpec([None], tf.int32),
    "segment_ids": tf.TensorSpec([None], tf.int32),
    "row_splits": tf.TensorSpec([None], tf.int32),
}
# Number of outputs of serving_default that are computed on the GPU, each copied once.
OUTPUTS = {"span_qa": 2, "span_qa with no answer": 2, "anomaly": 4, "pretrained": 2}
# The index of the first [MASK] is an integer, from which the host computes where its vector is.
WAITS = {"pretrained": {"ArgMax to ExpandDims", "Reshape to GatherV2"}}
OF_OTHER_SIGNATURES = {"embed": 2, "next_sentence": 1}
KINDS = [*TASKS, "pretrained"]


@pytest.fixture
def model_of(tmp_path, config, vocabulary):
    def make(kind):
        if kind == "pretrained":
            return of_pretraining(tmp_path, config, vocabulary)
        return of_task(kind, tmp_path, config, vocabulary)

    return make


@pytest.mark.medium
@gpu_graph.needs_cuda_build
@pytest.mark.parametrize("kind", small.fast(KINDS, "tagging", "pretrained"))
def test_the_gpu_has_kernels_and_waits_for_nothing(kind, model_of):
    served = served_pipeline(model_of(kind), "float16", device="gpu")
    for signature, function in served.token_functions.items():
        traced = tf.function(function, input_signature=[FLAT], autograph=False)
        graph = gpu_graph.optimized(traced.get_concrete_function())
        assert not gpu_graph.without_kernel(graph)
        assert not gpu_graph.internal_operations(graph)
        copies = gpu_graph.copies(graph)
        assert copies.to_gpu == {"Pack"}  # Token ids and segments, stacked.
        if signature == "serving_default":
            assert copies.num_to_host == OUTPUTS.get(kind, 1)
            assert copies.in_between == WAITS.get(kind, set())
        else:
            assert copies.num_to_host == OF_OTHER_SIGNATURES[signature]
            assert not copies.in_between


@gpu_graph.needs_cuda_build
@pytest.mark.skipif(os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0", reason="oneDNN is off")
def test_checks_find_the_layer_norm_of_onednn():
    """Trace the form of LayerNorm for CPUs, which TensorFlow replaces on a GPU as well."""

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32)], autograph=False)
    def normed(x_TH):
        with tf.device(saved_model.GPU):
            return {"normed": _norm_as_one_kernel(x_TH, tf.ones([8]), tf.zeros([8]), 1e-12)}

    graph = gpu_graph.optimized(normed.get_concrete_function())
    assert gpu_graph.internal_operations(graph) == {"_MklLayerNorm"}
    assert gpu_graph.without_kernel(graph)


@gpu_graph.needs_cuda_build
def test_checks_find_a_missing_kernel_and_a_wait():
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int32)], autograph=False)
    def of_integers(ids_B2):
        with tf.device(saved_model.GPU):
            last = tf.argmax(ids_B2)
            picked = tf.gather(tf.range(9.0), tf.reshape(ids_B2, [-1]))
        return {"last": last, "picked": picked}

    graph = gpu_graph.optimized(of_integers.get_concrete_function())
    (operation,) = gpu_graph.without_kernel(graph)
    assert operation.startswith("ArgMax T=int32")
    assert "Reshape to GatherV2" in gpu_graph.copies(graph).in_between


@pytest.mark.medium
def test_every_node_names_its_device(model_of, tmp_path):
    model = model_of("classification")
    for device in ("cpu", "gpu"):
        write_saved_model(
            model, tmp_path / device, "float16" if device == "gpu" else "float32", device=device
        )
        nodes = nodes_of(read(tmp_path / device).graph_def)
        on_gpu = {node.op for node in nodes if node.device == saved_model.GPU}
        on_cpu = {node.op for node in nodes if node.device.startswith("/device:CPU:")}
        assert all(node.device == saved_model.GPU or node.op in on_cpu for node in nodes)
        assert {"FastWordpieceTokenizeWithOffsets", "While"} <= on_cpu
        computed = {"MatMul", "BatchMatMulV2", "VarHandleOp"}
        if device == "gpu":
            assert computed <= on_gpu and not computed & on_cpu
            assert not any(operation.startswith("_") for operation in on_gpu | on_cpu)
        else:
            assert not on_gpu
        assert problems(tmp_path / device) == []
    with pytest.raises(UserError, match="was exported with device=gpu, and TensorFlow sees no GPU"):
        export.LocalClient(tmp_path / "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_without_soft_placement_runs_it(kind, model_of, tmp_path):
    """Load the graph like TensorFlow Serving, with another device, CPU:1, as the GPU."""
    model = model_of(kind)
    write_saved_model(model, tmp_path / "gpu", device="gpu")
    path = tmp_path / "gpu" / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for node in nodes_of(saved.meta_graphs[0].graph_def):
        node.device = node.device.replace("GPU:0", "CPU:1")
    other = shutil.copytree(tmp_path / "gpu", tmp_path / "stand_in")
    (other / "saved_model.pb").write_bytes(saved.SerializeToString())
    texts = inputs_of(model.task, ["the bill", "", "my app does not open !"])

    def predict(directory):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            loaded = tf.compat.v1.saved_model.loader.load(session, ["serve"], str(directory))
            definition = loaded.signature_def["serving_default"]
            return session.run(
                {name: output.name for name, output in definition.outputs.items()},
                {definition.inputs[name].name: values for name, values in texts.items()},
            )

    expected = model.serving.call("serving_default", texts)
    for name, values in predict(other).items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, expected[name], atol=1e-5, err_msg=name)
    with pytest.raises(tf.errors.InvalidArgumentError, match="assigned to .*GPU:0 but available"):
        predict(tmp_path / "gpu")


@pytest.mark.parametrize("lengths", [[], [1], [16, 2, 7], [5] * 33])
def test_rows_and_lengths_are_padded_to_few_sizes(lengths, monkeypatch):
    monkeypatch.setattr(saved_model, "GPU", saved_model.CPU)
    seen = {}

    def function(inputs):
        seen.update({name: values.numpy() for name, values in inputs.items()})
        return {"sum": tf.reduce_sum(inputs["input_ids"], axis=1), "ids": inputs["input_ids"]}

    splits = np.cumsum([0, *lengths])
    ids = np.arange(1, splits[-1] + 1)
    flat = {"input_ids": [*ids, 99], "segment_ids": [*ids % 2, 0], "row_splits": splits}
    inputs = {name: tf.constant(values, tf.int32) for name, values in flat.items()}
    outputs = saved_model.on_gpu(function, max_seq_length=24)(inputs)
    rows = {0: 1, 1: 1, 3: 3, 33: 48}[len(lengths)]
    assert {values.shape for values in seen.values()} == {(rows, 16)}
    assert seen["input_mask"].sum(axis=1).tolist() == [*lengths, *[0] * (rows - len(lengths))]
    of_rows = np.split(ids, splits[1:-1])
    for name, values in (("input_ids", ids), ("segment_ids", ids % 2)):
        np.testing.assert_array_equal(seen[name][seen["input_mask"]], values)
    assert outputs["sum"].numpy().tolist() == [of.sum() for of in of_rows][: len(lengths)]


def test_precisions_fit_the_device(model_of, tmp_path):
    model = model_of("classification")
    with pytest.raises(UserError, match="precision=float16: expected with device=gpu only"):
        export.publish(model, tmp_path / "models", precision="float16")
    with pytest.raises(UserError, match="^precision=int8: has no operations for GPUs"):
        export.publish(model, tmp_path / "models", precision="int8", device="gpu")
    with pytest.raises(UserError, match="device=tpu: expected one of cpu, gpu"):
        export.publish(model, tmp_path / "models", device="tpu")
    flags = {"run": "run", "output_dir": "models"}
    with pytest.raises(UserError, match="--precision=float16: expected with --device=gpu only"):
        ExportSettings(**flags, precision="float16")
    with pytest.raises(UserError, match="--precision=int8: has no operations for GPUs"):
        ExportSettings(**flags, precision="int8", device="gpu")


def test_batches_of_a_gpu_are_larger_and_wait():
    assert "value: 128" in batching_parameters([], "gpu")
    assert "batch_timeout_micros { value: 2000 }" in batching_parameters([], "gpu")
    assert "batch_timeout_micros { value: 0 }" in batching_parameters([])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_it_is_published_from_a_cpu(precision, model_of, tmp_path):
    model = model_of("classification")
    version = export.publish(model, tmp_path / "models", precision=precision, device="gpu")
    card = (version / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "device: the model on a GPU" in card and "on a CPU, since the export saw no GPU" in card
    assert f"served in: {precision}" in card and "operations: standard operations only" in card


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_token_ids_that_are_floats_are_not_rounded(precision, config):
    """Compare with integers: bfloat16 has 8 bits, float16 has 11."""
    config = dataclasses.replace(config, vocab_size=3000)
    network = SequenceClassifier(config, 3, dtype=f"mixed_{precision}")
    encoder = portable_encoder(network.encoder, precision)
    served = object.__new__(SequenceClassifier)
    vars(served).update(vars(network), encoder=encoder)
    ids_BL = tf.constant([[2, 1999, 2049, 3]])
    for model in (encoder, served):
        expected, found = (
            model({"input_ids": tf.cast(ids_BL, dtype)}) for dtype in (tf.int32, tf.float32)
        )
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
