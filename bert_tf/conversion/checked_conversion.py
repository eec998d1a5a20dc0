"""Conversion of pretrained weights to another format, with a check of what was written.

The directory is written under a temporary name, read back and compared bit by bit, run on fixed
texts where another library is at hand, and renamed at the end.
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.conversion import (
    google_export,
    huggingface_export,
    keras_export,
    sentence_transformers_export,
)
from bert_tf.conversion.exported_model import ExportedModel
from bert_tf.errors import UserError
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.runs import checkpoints
from bert_tf.storage import files, ownership
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.train.distribution import exact_float32
from bert_tf.weights import heads
from bert_tf.weights.pretrained_encoder import Encoder
from bert_tf.weights.sources import PretrainedWeights, read_pretrained, read_stored

REPORT = "conversion.json"
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "My bill of March is too high, and nobody answered my two letters!",
    "Café Zürich – 12,50 € (naïve façade)",
    "你好，世界 and hello",
    "a",
)
TOLERANCE = 1e-3  # Of hidden states of size 1; other libraries differ by rounding, 1e-5.
_WRITERS = {
    "huggingface": huggingface_export,
    "google": google_export,
    "keras": keras_export,
    "sentence-transformers": sentence_transformers_export,
}
Outputs = dict[str, np.ndarray]


def convert(
    model: ExportedModel,
    directory: str,
    format: str,
    verify_python: str | None = None,
) -> dict[str, Any]:
    """Write a model to a new local directory in another format and check it.

    `verify_python` is an interpreter with torch and transformers, for "huggingface".

    Returns:
        The content of conversion.json.

    Raises:
        UserError: The format cannot represent the model, or what was written differs.
    """
    target = pathlib.Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    # An existing directory is refused by the flags, and by the renaming.
    with (
        ownership.sole_output(target, overwrite=True),
        files.staging_directory(target.absolute()) as staging,
    ):
        report = _write(model, staging, target, format, verify_python)
        files.rename_directory(staging, target)
    return report


def _write(model, directory, target, format, verify_python):
    """Write a model to an empty directory, which will be `target`, and check it; see `convert`."""
    tensors, dropped = _WRITERS[format].write(model, directory)
    if model.pretrained.has_new_head and (model.kind or format == "sentence-transformers"):
        head = heads.name_of(model.task["kind"])
        dropped = [*dropped, f"that the {head} was never trained: its predictions are random"]
    stored = read_stored(directory)
    found = {
        name: array
        for name, array in stored.tensors.items()
        if name in tensors or not re.fullmatch(stored.ignored, name)
    }
    compare_bitwise(tensors, found, target)
    with exact_float32():  # As in the other library.
        outputs = _compare_outputs(model, directory, format, verify_python)
    if outputs and not outputs["largest_difference"] <= TOLERANCE:
        raise UserError(
            f"{target}: outputs in {outputs['library']} differ by "
            f"{outputs['largest_difference']:.2g}; expected at most {TOLERANCE}; nothing was "
            "written"
        )
    report = _report(model.pretrained.origin, format, dropped, tensors, directory, outputs)
    files.atomic_write_json(directory / REPORT, report)
    for parent in {path.parent for path in directory.rglob("*")}:
        files.sync_directory(parent)
    return report


def save_run(pretrained: PretrainedWeights, path: str) -> dict[str, Any]:
    """Save weights as a new run directory and check it; returns the content of conversion.json.

    Raises:
        UserError: The directory contains something else, or what was written differs.
    """
    run = pretrained.save(path)
    directory = run.checkpoints.path(0)
    compare_bitwise(pretrained.saved_weights, checkpoints.read(directory), path)
    report = _report(pretrained.origin, "run", [], pretrained.saved_weights, directory)
    files.atomic_write_json(os.path.join(path, REPORT), report)
    return report


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return a report as lines of text."""
    lines = [
        f"{report['bytes']:,} bytes read back without a difference; "
        + "; ".join(f"SHA-256 of {name} {digest}" for name, digest in report["sha256"].items())
    ]
    if report["outputs"]:
        outputs = report["outputs"]
        lines.append(
            f"largest difference of outputs on {len(TEXTS)} texts in {outputs['library']}: "
            f"{outputs['largest_difference']:.2g} (largest output {outputs['largest_output']:.2g})"
        )
        lines += [f"warning of {outputs['library']}: {line}" for line in outputs["warnings"]]
    if report["dropped"] and report["format"] != "run":
        lines.append(
            f"dropped, since {report['format']} cannot hold: {', '.join(report['dropped'])}"
        )
    return lines


def _report(origin, format, dropped, tensors, directory, outputs=None):
    """Return the content of conversion.json, with sizes of tensors and digests of their files."""
    weight_files = [
        name
        for name in files.listdir(directory)
        if name.endswith((".safetensors", ".h5", ".index")) or ".data-" in name
    ]
    return {
        "source": origin,
        "format": format,
        "dropped": dropped,
        "tensors": len(tensors),
        "parameters": sum(array.size for array in tensors.values()),
        "bytes": sum(array.nbytes for array in tensors.values()),
        "bitwise_round_trip": True,
        "sha256": {name: files.sha256(os.path.join(directory, name)) for name in weight_files},
        "outputs": outputs,
    }


def compare_bitwise(
    written: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], where: str | os.PathLike
) -> None:
    """Raise UserError with the name of the first tensor whose shape, type or bits differ."""
    for name in sorted(set(written) | set(found)):
        one, two = written.get(name), found.get(name)
        if (
            one is None
            or two is None
            or (one.shape, one.dtype) != (two.shape, two.dtype)
            or one.tobytes() != two.tobytes()
        ):
            raise UserError(f"{where}: {name} reads back differently; check the disk and try again")


def _compare_outputs(model, directory, format, verify_python):
    """Compare outputs of the written model in the library that can run the format, if any.

    Returns:
        Entry "outputs" of the report: the library, the largest absolute difference of any output,
        the largest absolute value of any output, by which to judge the difference, and warnings of
        the library; or `None`.
    """
    if format in ("huggingface", "sentence-transformers"):
        return verify_python and _compare_in_transformers(model, directory, verify_python)
    if format == "google":
        library, outputs_of = "bert_tf", _outputs_here(read_pretrained(directory))
    elif outputs_of := keras_export.outputs_in_library(directory):
        library = "keras-hub"
    else:
        return None
    theirs = map(outputs_of, token_ids(model.pretrained))
    return _compare(model, library, _outputs_here(model.pretrained), theirs)


def _compare(model, library, ours_of, theirs: Iterable[Outputs], warnings=()):
    """Compare outputs on the fixed texts, those of `ours_of` by token ids with `theirs`."""
    differences, sizes = [], []
    for ids, outputs in zip(token_ids(model.pretrained), theirs, strict=True):
        for name, array in ours_of(ids).items():
            differences.append(np.abs(array - outputs[name]).max())
            sizes.append(np.abs(array).max())
    return {
        "library": library,
        # Unlike `max`, also NaN if another number is first.
        "largest_difference": float(np.max(differences)),
        "largest_output": float(np.max(sizes)),
        "warnings": list(warnings),
    }


def token_ids(pretrained: PretrainedWeights) -> Iterator[np.ndarray]:
    """Yield the token ids of each fixed text with [CLS] and [SEP], int32 `(L,)`."""
    vocabulary, config = pretrained.vocabulary, pretrained.config
    tokenizer = Tokenizer.from_config(config, vocabulary)
    for ids in tokenizer.tokenize(TEXTS).ids.to_list():
        ids = ids[: config.max_position_embeddings - 2]
        yield np.array([vocabulary["[CLS]"], *ids, vocabulary["[SEP]"]], np.int32)


def _outputs_here(pretrained):
    """Return a function from token ids to the encoder's outputs."""
    encoder = Encoder(pretrained.config)
    encoder.build()
    pretrained.assign_to(encoder)

    def outputs_of(ids):
        outputs = encoder({"input_ids": ids[np.newaxis]})
        return {name: outputs[name][0].numpy() for name in ("sequence", "pooled")}

    return outputs_of


def _compare_in_transformers(model, directory, python):
    """Compare with transformers, run by another interpreter; see `_compare_outputs`."""
    runner = pathlib.Path(__file__).with_name("transformers_runner.py")
    with tempfile.TemporaryDirectory() as scratch:
        texts, results = (os.path.join(scratch, name) for name in ("texts.json", "results.npz"))
        pathlib.Path(texts).write_text(json.dumps(TEXTS), encoding="utf-8")
        try:
            done = subprocess.run(
                [python, "-I", str(runner), str(directory), texts, results],
                capture_output=True,
                text=True,
                errors="backslashreplace",
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        except OSError as error:
            raise UserError(f"--verify_python={python}: {error.strerror}") from None
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"--verify_python={python}: transformers failed: {reason}")
        with np.load(results, allow_pickle=False) as file:
            theirs = {name: file[name] for name in file.files}
    outputs: list[Outputs] = [{} for _ in TEXTS]
    for name in theirs.keys() - {"versions", "warnings"}:
        number, _, output = name.partition("/")
        outputs[int(number)][output] = theirs[name]
    for text, of_text, ids in zip(TEXTS, outputs, token_ids(model.pretrained), strict=True):
        if of_text["ids"].tolist() != ids.tolist():
            raise UserError(
                f"--verify_python={python}: transformers tokenizes {text!r} as "
                f"{of_text['ids'].tolist()}; expected {ids.tolist()}"
            )
    library = theirs["versions"].tobytes().decode()
    warnings = json.loads(theirs["warnings"].tobytes())
    return _compare(model, library, _outputs_in_transformers(model), outputs, warnings)


def _outputs_in_transformers(model):
    """Return a function from token ids to the outputs of the model's class in transformers."""
    if model.heads and not model.kind:
        return _pretraining_outputs(model.pretrained, model.heads)
    encode, weights = _outputs_here(model.pretrained), model.pretrained.weights

    def outputs_of(ids):
        outputs = encode(ids)
        if not model.kind:
            return {"last_hidden_state": outputs["sequence"], "pooler_output": outputs["pooled"]}
        vectors = outputs["sequence" if model.kind in ("tagging", "span_qa") else "pooled"]
        logits = vectors @ weights[heads.KERNEL] + weights[heads.BIAS]
        if model.kind == "span_qa":
            return {"start_logits": logits[:, 0], "end_logits": logits[:, 1]}
        return {"logits": logits}

    return outputs_of


def _pretraining_outputs(pretrained, parts):
    """Return a function from token ids to the logits of the pretraining heads."""
    model = PretrainingModel(pretrained.config)
    pretrained.assign_to(model)
    is_alone = len(parts) == 1
    names = {
        "masked_lm": "logits" if is_alone else "prediction_logits",
        "next_sentence": "logits" if is_alone else "seq_relationship_logits",
    }

    def outputs_of(ids):
        positions = tf.range(len(ids))[tf.newaxis]
        outputs = model({"input_ids": ids[np.newaxis], "masked_lm_positions": positions})
        return {names[head]: outputs[head][0].numpy() for head in parts}

    return outputs_of
