"""Convert the model of benchmarks/serving.py for its baselines, in their environment.

Run as `python serving_conversions.py PLAN`, see serving_models.py, whose Hugging Face directory is
the source. Of int8 there are three kinds:

    onnxruntime    dynamic quantization of the matrix products by constants: int8 weights with a
                   scale per column, activations quantized in every call
    openvino       post-training quantization by NNCF: int8 weights, and activations whose ranges
                   are fitted to a calibration set of 32 texts per kind, none of which is measured
    ctranslate2    int8 weights with a scale per row, activations quantized per row in every call
"""

import json
import pathlib
import shutil

from serving_baselines import tokenizer_of
from serving_machine import has_feature
from serving_process import MAX_LENGTH, plan_of_this_process

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def main(plan):
    """Convert the Hugging Face directory for the backends that need another format."""
    root = pathlib.Path(plan["directory"])
    for backend, write in WRITERS.items():
        if backend in plan["backends"]:
            write(root / "huggingface", root / backend, plan["precision"])
            shutil.copy(root / "huggingface" / "vocab.txt", root / backend)


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
            reduce_range=not (has_feature("avx512_vnni") or has_feature("avx_vnni")),
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


WRITERS = {
    "onnxruntime": _write_onnx,
    "openvino": _write_openvino,
    "ctranslate2": _write_ctranslate2,
}


def _torch_model(source):
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(source).eval()


def _example():
    import torch

    return {name: torch.ones((2, 16), dtype=torch.int64) for name in INPUTS}


if __name__ == "__main__":
    main(plan_of_this_process())
