"""Baselines of benchmarks/serving.py that are not SavedModels, in a separate environment.

The plan is one of serving_process.py. Batches are padded to their longest text. Weights have been
quantized by serving_conversions.py, for transformers while it loads.
"""

from serving_process import MAX_LENGTH, THREADS, plan_of_this_process, work


def load_transformers(model, precision):
    """Return a function from strings to probabilities, with transformers.

    int8 is PyTorch's own dynamic quantization of the linear layers.
    """
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

    encode = _id_lists_of(model)
    head = dict(np.load(f"{model}/head.npz"))
    encoder = ctranslate2.Encoder(model, compute_type=precision, intra_threads=THREADS)

    def prediction(texts):
        pooled = np.array(encoder.forward_batch(encode(texts)).pooler_output)
        return _softmax(pooled @ head["kernel"] + head["bias"])

    return prediction


# With the modules whose import is timed.
BACKENDS = {
    "transformers": (("torch", "transformers.models.bert.modeling_bert"), load_transformers),
    "onnxruntime": (("onnxruntime", "tokenizers"), load_onnxruntime),
    "openvino": (("openvino", "tokenizers"), load_openvino),
    "ctranslate2": (("ctranslate2", "tokenizers"), load_ctranslate2),
}


def tokenizer_of(model):
    """Return a function from strings to int64 `(B, L)` per input, with the library tokenizers."""
    import numpy as np

    tokenizer = _tokenizer(model)
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


def _id_lists_of(model):
    """Return a function from strings to lists of ids, which CTranslate2 pads itself."""
    tokenizer = _tokenizer(model)
    return lambda texts: [text.ids for text in tokenizer.encode_batch(texts)]


def _tokenizer(model):
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(f"{model}/vocab.txt", lowercase=True)
    tokenizer.enable_truncation(MAX_LENGTH)
    return tokenizer


def _softmax(logits):
    import numpy as np

    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


if __name__ == "__main__":
    plan = plan_of_this_process()
    work(plan, *BACKENDS[plan["backend"]])
