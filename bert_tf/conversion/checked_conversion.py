"""Conversion of pretrained weights to another format, with a check of what was written.

The directory is written under a temporary name, read back and compared bit by bit, run on fixed
texts where another library is at hand, and renamed at the end.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.conversion import google_export, huggingface_export, keras_export
from bert_tf.conversion.exported_model import ExportedModel
from bert_tf.errors import UserError
from bert_tf.pretraining.model import PretrainingModel
from bert_tf.runs import checkpoints
from bert_tf.storage import files
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.weights import name_map
from bert_tf.weights.pretrained_encoder import Encoder
from bert_tf.weights.sources import PretrainedWeights, read_pretrained

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
}
Outputs = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Outputs of the written model compared with those of the model here.

    Attributes:
        library: Who ran the written model.
        largest_difference: The largest absolute difference of any output.
        largest_output: The largest absolute value of any output, by which to judge the difference.
        warnings: Warnings of the library.
    """

    library: str
    largest_difference: float
    largest_output: float
    warnings: tuple[str, ...] = ()


def convert(
    model: ExportedModel,
    directory: str,
    format: str,
    verify_python: str | None = None,
) -> dict[str, Any]:
    """Write a model in another format and check it.

    Args:
        model: The model.
        directory: Local directory to create.
        format: "huggingface", "google" or "keras".
        verify_python: An interpreter with torch and transformers, for "huggingface".

    Returns:
        The content of conversion.json.

    Raises:
        UserError: The format cannot represent the model, or what was written differs.
    """
    target = pathlib.Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(files.temporary_name(target.resolve()))
    staging.mkdir()
    try:
        writer = _WRITERS[format]
        tensors, dropped = writer.write(model, staging)
        compare_bitwise(tensors, writer.read_tensors(staging), target)
        comparison = _compare_outputs(model, staging, format, verify_python)
        if comparison and not comparison.largest_difference <= TOLERANCE:
            raise UserError(
                f"{target}: outputs in {comparison.library} differ by "
                f"{comparison.largest_difference:.2g}; expected at most {TOLERANCE}; nothing was "
                "written"
            )
        report = {
            "source": model.pretrained.origin,
            "format": format,
            "dropped": dropped,
            **measured(tensors, staging),
            "outputs": comparison and dataclasses.asdict(comparison),
        }
        write_report(report, staging)
        for parent in {path.parent for path in staging.rglob("*")}:
            for path in parent.iterdir():
                files.sync(path)
        _rename(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


def save_run(pretrained: PretrainedWeights, path: str) -> dict[str, Any]:
    """Save weights as a new run directory and check it.

    Args:
        pretrained: The weights.
        path: Local or remote directory to create.

    Returns:
        The content of conversion.json.

    Raises:
        UserError: The directory contains something else, or what was written differs.
    """
    run = pretrained.save(path)
    directory = run.checkpoints.path(0)
    # The model of a task has no pretraining heads.
    unused = name_map.HEADS if pretrained.task else ()
    tensors = {
        name: array
        for name, array in pretrained.weights.items()
        if name.split("/")[0] not in unused
    }
    compare_bitwise(tensors, checkpoints.read(directory), path)
    report = {
        "source": pretrained.origin,
        "format": "run",
        "dropped": [],
        **measured(tensors, directory),
        "outputs": None,
    }
    write_report(report, path)
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


def measured(tensors: Mapping[str, np.ndarray], directory: str | os.PathLike) -> dict[str, Any]:
    """Return the numbers of a report: sizes of the tensors and digests of their files.

    Args:
        tensors: The tensors in the files, compared bit by bit.
        directory: Directory with the files.
    """
    weight_files = [
        name
        for name in files.walk(directory)
        if name.endswith((".safetensors", ".h5", ".index")) or ".data-" in name
    ]
    return {
        "tensors": len(tensors),
        "parameters": sum(array.size for array in tensors.values()),
        "bytes": sum(array.nbytes for array in tensors.values()),
        "bitwise_round_trip": True,
        "sha256": {name: files.sha256(os.path.join(directory, name)) for name in weight_files},
    }


def write_report(report: Mapping[str, Any], directory: str | os.PathLike) -> None:
    """Write conversion.json."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    files.atomic_write_text(os.path.join(directory, REPORT), text)


def compare_bitwise(
    written: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], where: str | os.PathLike
) -> None:
    """Compare tensors that were written with those read back.

    Raises:
        UserError: A name, shape, type or bit differs. The message names the first tensor.
    """
    for name in sorted(set(written) | set(found)):
        one, two = written.get(name), found.get(name)
        if (
            one is None
            or two is None
            or (one.shape, one.dtype) != (two.shape, two.dtype)
            or one.tobytes() != two.tobytes()
        ):
            raise UserError(f"{where}: {name} reads back differently; check the disk and try again")


def _rename(staging, target):
    try:
        os.rename(staging, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    files.sync(target.parent)


def _compare_outputs(model, directory, format, verify_python):
    """Return the `Comparison` with the library that can run the format here, or `None`."""
    if format == "google":
        return _compare(model, "bert_tf", _outputs_here(read_pretrained(directory)))
    if format == "keras":
        runner = keras_export.outputs_in_library(directory)
        return runner and _compare(model, "keras-hub", runner)
    return verify_python and _in_transformers(model, directory, verify_python)


def _compare(model, library, outputs_of: Callable[[np.ndarray], Outputs]) -> Comparison:
    """Compare the encoder's outputs on the fixed texts."""
    ours_of = _outputs_here(model.pretrained)
    differences, sizes = [], []
    for ids in token_ids(model.pretrained):
        ours, theirs = ours_of(ids), outputs_of(ids)
        differences += [np.abs(ours[name] - theirs[name]).max() for name in theirs]
        sizes += [np.abs(ours[name]).max() for name in theirs]
    return Comparison(library, float(max(differences)), float(max(sizes)))


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


def _in_transformers(model, directory, python):
    """Return the `Comparison` with transformers, run by another interpreter."""
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
    ours_of, differences, sizes = _outputs_in_transformers(model), [0.0], [0.0]
    for number, ids in enumerate(token_ids(model.pretrained)):
        if theirs[f"{number}/ids"].tolist() != ids.tolist():
            raise UserError(
                f"--verify_python={python}: transformers tokenizes {TEXTS[number]!r} as "
                f"{theirs[f'{number}/ids'].tolist()}; expected {ids.tolist()}"
            )
        for name, array in ours_of(ids).items():
            differences.append(np.abs(array - theirs[f"{number}/{name}"]).max())
            sizes.append(np.abs(array).max())
    library = theirs["versions"].tobytes().decode()
    warnings = tuple(json.loads(theirs["warnings"].tobytes()))
    return Comparison(library, float(max(differences)), float(max(sizes)), warnings)


def _outputs_in_transformers(model):
    """Return a function from token ids to the outputs of the model's class in transformers."""
    head, heads = model.head, model.pretraining_heads
    if heads:
        return _pretraining_outputs(model.pretrained, heads)
    encode = _outputs_here(model.pretrained)

    def outputs_of(ids):
        outputs = encode(ids)
        if head is None:
            return {"last_hidden_state": outputs["sequence"], "pooler_output": outputs["pooled"]}
        is_token_wise = head.kind in ("tagging", "span_qa")
        logits = outputs["sequence" if is_token_wise else "pooled"] @ head.kernel + head.bias
        if head.kind == "span_qa":
            return {"start_logits": logits[:, 0], "end_logits": logits[:, 1]}
        return {"logits": logits}

    return outputs_of


def _pretraining_outputs(pretrained, heads):
    """Return a function from token ids to the logits of the pretraining heads."""
    model = PretrainingModel(pretrained.config)
    pretrained.assign_to(model)
    is_alone = len(heads) == 1
    names = {
        "masked_lm": "logits" if is_alone else "prediction_logits",
        "next_sentence": "logits" if is_alone else "seq_relationship_logits",
    }

    def outputs_of(ids):
        positions = tf.range(len(ids))[tf.newaxis]
        outputs = model({"input_ids": ids[np.newaxis], "masked_lm_positions": positions})
        return {names[head]: outputs[head][0].numpy() for head in heads}

    return outputs_of
