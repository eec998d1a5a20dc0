"""Programs of serving.py: load a model, and time requests to it, in a process of its own.

Nothing is imported before its time is taken. `convert` writes the models of programs that need
another format than the Hugging Face directory of serving_models.py, in their environment. In int8
OpenVINO's activations have ranges that are fitted to 32 texts per kind, none of which is measured;
those of all other programs are quantized in every call.
"""

import importlib
import json
import pathlib
import shutil
import statistics
import time

import results
from own_process import THREADS, peak_mb

PASSES = 3
MAX_LENGTH = 512  # Tokens per text, at most.
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def serve(backend, model, precision, texts, kind, batches, started):
    """Load a model and time requests to it.

    Returns:
        "figures": (workload, unit, values), of each batch size the medians or rates of passes over
        all texts. "rows": probabilities of the texts that have expected ones.
    """
    modules, load, _ = BACKENDS[backend]
    for name in modules:  # A server in another language has no imports.
        importlib.import_module(name)
    imported = time.time()
    predict = load(model, precision)
    of_kind = json.loads(pathlib.Path(texts).read_text(encoding="utf-8"))[kind]
    chosen = of_kind["texts"]
    predict(chosen[:1])
    answered, figures = time.time(), []
    for batch in batches:
        requests = [chosen[start : start + batch] for start in range(0, len(chosen), batch)]
        timed(predict, requests)  # A running server has seen the shapes before.
        passes = [timed(predict, requests) for _ in range(PASSES)]
        if batch == 1:
            medians = [1000 * statistics.median(seconds) for seconds in passes]
            figures.append((f"{kind} texts, one per request", "ms", medians))
        else:
            rates = [len(chosen) / sum(seconds) for seconds in passes]
            figures.append((f"{kind} texts, {batch} per request", "texts/s", rates))
    rows = predict(chosen[: len(of_kind["expected"])]).tolist()
    if kind == "short":
        figures.append(("Python and imports", "s", [imported - started]))
        figures.append(("load and first answer", "s", [answered - imported]))
        figures.append(("peak memory, short texts", "MB", [peak_mb()]))
    return {"figures": figures, "rows": rows}


def timed(predict, requests):
    """Return the seconds of each request, sent one after the other."""
    seconds = []
    for texts in requests:
        start = time.perf_counter()
        predict(texts)
        seconds.append(time.perf_counter() - start)
    return seconds


def convert(directory, precision, backend):
    """Convert the Hugging Face directory for a program that needs another format."""
    source, converted = pathlib.Path(directory, "huggingface"), pathlib.Path(directory, backend)
    BACKENDS[backend][2](source, converted, precision)
    shutil.copy(source / "vocab.txt", converted)
    return {}


def load_tensorflow(model, precision):
    """Return a function from strings to probabilities, of a SavedModel or of LiteRT."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    if pathlib.Path(model).name == "litert":
        from export.litert.client import load_pipeline

        pipeline = load_pipeline(model).signatures["serving_default"]
        return lambda texts: pipeline(tf.constant(texts))["probabilities"].numpy()
    served = tf.saved_model.load(model).signatures["serving_default"]
    return lambda texts: served(text=tf.constant(texts))["probabilities"].numpy()


def load_transformers(model, precision):
    """Return a function from strings to probabilities; int8 is PyTorch's dynamic quantization."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = BertForSequenceClassification.from_pretrained(model).eval()
    if precision == "int8":
        classifier = torch.ao.quantization.quantize_dynamic(classifier, {torch.nn.Linear})
    else:
        classifier = classifier.to(getattr(torch, precision))

    @torch.inference_mode()
    def prediction(texts):
        inputs = tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        return torch.softmax(classifier(**inputs).logits.float(), -1).numpy()

    return prediction


def load_onnxruntime(model, precision):
    """Return a function from strings to probabilities, with ONNX Runtime."""
    import onnxruntime

    encode = tokenizer_of(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        f"{model}/model.onnx", options, providers=["CPUExecutionProvider"]
    )
    return lambda texts: _softmax(session.run(None, encode(texts))[0])


def load_openvino(model, precision):
    """Return a function from strings to probabilities, with OpenVINO."""
    import openvino

    encode = tokenizer_of(model)
    hints = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",  # A single request uses all threads.
        # In int8 the model itself says which products are quantized.
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
    }
    compiled = openvino.Core().compile_model(f"{model}/model.xml", "CPU", hints)
    return lambda texts: _softmax(compiled(encode(texts))[0])


def load_ctranslate2(model, precision):
    """Return a function from strings to probabilities, with CTranslate2 and a head in numpy."""
    import ctranslate2
    import numpy as np

    tokenizer = _tokenizer(model)  # CTranslate2 pads lists of ids itself.
    head = dict(np.load(f"{model}/head.npz"))
    encoder = ctranslate2.Encoder(model, compute_type=precision, intra_threads=THREADS)

    def prediction(texts):
        ids = [text.ids for text in tokenizer.encode_batch(texts)]
        pooled = np.array(encoder.forward_batch(ids).pooler_output)
        return _softmax(pooled @ head["kernel"] + head["bias"])

    return prediction


def tokenizer_of(model):
    """Return a function from strings to int64 `(B, L)` per input, with the library tokenizers."""
    import numpy as np

    tokenizer = _tokenizer(model)
    tokenizer.enable_padding()
    fields = dict(zip(INPUTS, ("ids", "attention_mask", "type_ids"), strict=True))

    def encode(texts):
        encoded = tokenizer.encode_batch(texts)
        return {
            name: np.array([getattr(text, field) for text in encoded], np.int64)
            for name, field in fields.items()
        }

    return encode


def _tokenizer(model):
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(f"{model}/vocab.txt", lowercase=True)
    tokenizer.enable_truncation(MAX_LENGTH)
    return tokenizer


def _softmax(logits):
    import numpy as np

    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def _write_onnx(source, directory, precision):
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    directory.mkdir()
    path = directory / "model.onnx"
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens", max=MAX_LENGTH)}
    torch.onnx.export(
        _torch_model(source),
        kwargs=_example(),
        f=str(path),
        dynamo=True,
        opset_version=20,  # The first one with the tanh form of gelu as one operation.
        dynamic_shapes=dict.fromkeys(INPUTS, sizes),
        output_names=["logits"],
        external_data=False,
    )
    if precision == "int8":
        # The symbolic shapes of the exporter are complete, and this inference rejects them.
        quant_pre_process(path, path, skip_symbolic_shape=True)
        quantize_dynamic(
            path,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            # Products of 8 bits saturate without VNNI.
            reduce_range=not any(map(results.has_feature, ("avx512_vnni", "avx_vnni"))),
            weight_type=QuantType.QInt8,
        )


def _write_openvino(source, directory, precision):
    import openvino

    model = openvino.convert_model(
        _torch_model(source), example_input=_example(), input=[(name, [-1, -1]) for name in INPUTS]
    )
    if precision == "int8":
        import nncf

        texts = json.loads((source.parent / "calibration.json").read_text(encoding="utf-8"))
        encode = tokenizer_of(source)
        model = nncf.quantize(
            model,
            nncf.Dataset([encode([text]) for text in texts]),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(texts),
        )
    openvino.save_model(model, directory / "model.xml", compress_to_fp16=False)


def _write_ctranslate2(source, directory, precision):
    import numpy as np
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(source))
    converter.convert(str(directory), quantization=None if precision == "float32" else precision)
    head = _torch_model(source).classifier
    np.savez(
        directory / "head.npz",
        kernel=head.weight.detach().numpy().T,
        bias=head.bias.detach().numpy(),
    )


def _torch_model(source):
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(source).eval()


def _example():
    import torch

    return {name: torch.ones((2, 16), dtype=torch.int64) for name in INPUTS}


# Modules whose import is timed, function that loads the model, and one that converts it.
# TF Text registers the operations that tokenizers need.
TENSORFLOW = ("tensorflow", "tensorflow_text"), load_tensorflow, None
TORCH = "torch", "transformers.models.bert.modeling_bert"
BACKENDS = {
    **dict.fromkeys(("ours", "litert", "keras_hub"), TENSORFLOW),
    "transformers": (TORCH, load_transformers, None),
    "onnxruntime": (("onnxruntime", "tokenizers"), load_onnxruntime, _write_onnx),
    "openvino": (("openvino", "tokenizers"), load_openvino, _write_openvino),
    "ctranslate2": (("ctranslate2", "tokenizers"), load_ctranslate2, _write_ctranslate2),
}
