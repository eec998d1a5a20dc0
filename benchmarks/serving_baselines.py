"""Baselines of benchmarks/serving.py that are not SavedModels, in a separate environment.

If the plan has "output": "models", a Hugging Face directory is converted to ONNX and OpenVINO.
Otherwise the plan is one of serving_process.py. Batches are padded to their longest text.
"""

import pathlib

from serving_process import THREADS, plan_of_this_process, work

MAX_LENGTH = 512


def load_transformers(model, precision):
    """Return a function from strings to probabilities, with transformers."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = BertForSequenceClassification.from_pretrained(model)
    classifier = classifier.eval().to(getattr(torch, precision))

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

    encode = _tokenizer(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        f"{model}/model.onnx", options, providers=["CPUExecutionProvider"]
    )
    return lambda texts: _softmax(session.run(None, encode(texts))[0])


def load_openvino(model, precision):
    """Return a function from strings to probabilities, with OpenVINO."""
    import openvino

    encode = _tokenizer(model)
    hints = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",  # A single request uses all threads.
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[precision],
    }
    compiled = openvino.Core().compile_model(f"{model}/model.xml", "CPU", hints)
    return lambda texts: _softmax(compiled(encode(texts))[0])


BACKENDS = {
    "transformers": load_transformers,
    "onnxruntime": load_onnxruntime,
    "openvino": load_openvino,
}


def _tokenizer(model):
    """Return a function from strings to int64 `(B, L)` per input, with the library tokenizers."""
    import numpy as np
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(f"{model}/vocab.txt", lowercase=True)
    tokenizer.enable_truncation(MAX_LENGTH)
    tokenizer.enable_padding()

    def encode(texts):
        encoded = tokenizer.encode_batch(texts)
        fields = {
            "input_ids": [text.ids for text in encoded],
            "attention_mask": [text.attention_mask for text in encoded],
            "token_type_ids": [text.type_ids for text in encoded],
        }
        return {name: np.array(values, np.int64) for name, values in fields.items()}

    return encode


def _softmax(logits):
    import numpy as np

    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def write_models(root, backends):
    """Convert the Hugging Face directory in `root` for the backends that need another format."""
    import torch
    from transformers import BertForSequenceClassification

    source = root / "huggingface"
    model = BertForSequenceClassification.from_pretrained(source).eval()
    example = {
        name: torch.ones((2, 16), dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    for backend, write in (("onnxruntime", _write_onnx), ("openvino", _write_openvino)):
        if backend in backends:
            directory = root / backend
            directory.mkdir()
            (directory / "vocab.txt").write_bytes((source / "vocab.txt").read_bytes())
            write(model, example, directory)


def _write_onnx(model, example, directory):
    import torch

    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens", max=MAX_LENGTH)}
    torch.onnx.export(
        model,
        kwargs=example,
        f=str(directory / "model.onnx"),
        dynamo=True,
        opset_version=20,  # The first one with the tanh form of gelu as one operation.
        dynamic_shapes=dict.fromkeys(example, sizes),
        output_names=["logits"],
        external_data=False,
    )


def _write_openvino(model, example, directory):
    import openvino

    converted = openvino.convert_model(
        model, example_input=example, input=[(name, [-1, -1]) for name in example]
    )
    openvino.save_model(converted, directory / "model.xml", compress_to_fp16=False)


if __name__ == "__main__":
    plan = plan_of_this_process()
    if plan["output"] == "models":
        write_models(pathlib.Path(plan["directory"]), plan["backends"])
    else:
        work(plan, BACKENDS[plan["backend"]])
