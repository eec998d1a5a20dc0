"""Export of a trained run as a LiteRT (TensorFlow Lite) file, from token ids to head outputs.

The file has passed the parity check before an atomic rename makes it visible.
"""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from bert_tf.storage import files, ownership, paths
from bert_tf.system.progress import Progress
from bert_tf.system.versions import versions
from bert_tf.text import unicode_tables
from export.checks import parity
from export.litert import archive
from export.litert.archive import INPUTS
from export.litert.client import load_pipeline, signatures_of
from export.publishing import loaded

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

QUANTIZATIONS = ("none", "float16", "dynamic")
TOLERANCES = {
    "none": parity.Tolerance(1e-4, 1e-4, None),
    "float16": parity.TOLERANCES["bfloat16"],
    "dynamic": parity.Tolerance(0.1, 0.2, 0.1),
}
# Minimum fraction of equal rows. Rounding to int8 changes some predictions of unusual texts.
MIN_EQUAL = {"none": 1.0, "float16": 1.0, "dynamic": 0.9}


class Agreement(NamedTuple):
    """Number of rows of the requests, and of those with equal outputs within the tolerance."""

    rows: int
    equal: int


@argument_names()
def write_litert(
    model_or_run: TaskModel | os.PathLike | str,
    output: os.PathLike | str,
    *,
    quantize: str = "none",
    checkpoint: str | None = None,
    overwrite: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Agreement:
    """Write a trained model as a LiteRT file, from token ids to the outputs of its head.

    After any error nothing is written.

    Args:
        model_or_run: A model such as `TextClassifier`, or what `tasks.load_model` takes, such as
            the path of a run.
        output: File to write.
        quantize: "none", "float16" or "dynamic"; see `convert`.
        checkpoint: Name of a directory in the checkpoints of the run; by default the best, else
            the latest. Only with the path of a run.
        overwrite: Whether an existing file is replaced.
        log: Receives one line per stage.

    Returns:
        How many predictions of the parity check are those of the trained model.

    Raises:
        UserError: If the parity check fails, if the file exists, if ai-edge-litert is not
            installed, or if the run requires thresholds or a temperature that were not tuned for
            this checkpoint.
        OSError: If the file cannot be written.
    """
    output = paths.path_argument("output", output, "a file")
    paths.check_local("output", output)
    paths.check_output(output, (), overwrite)
    if quantize not in QUANTIZATIONS:
        raise UserError(f"quantize={quantize!r}: expected one of {', '.join(QUANTIZATIONS)}")
    archive.check_runtime(f"--output={output}")
    with ownership.sole_output(output, overwrite), loaded(model_or_run, checkpoint) as model:
        try:
            with files.atomic_path(output) as temporary:
                return _write(model, temporary, quantize, log)
        except (OSError, tf.errors.OpError) as error:
            # TensorFlow converts a SavedModel in a temporary directory, which may be full.
            reason = getattr(error, "strerror", None) or tensorflow_reason(error)
            number = getattr(error, "errno", None) or errno.EIO
            raise OSError(number, f"{reason}; nothing is written", output) from None


def _write(model, temporary, quantize, log):
    with Progress(log, "stages", 2) as progress:
        log(f"converting {model.record['origin']}")
        pathlib.Path(temporary).write_bytes(convert(model, quantize))
        contents = archive.Contents(model.config, model.task.to_dict(), model.vocabulary)
        contents.append_to(temporary)
        progress.move(1)
        log("checking parity with the trained model")
        agreement = check_parity(temporary, model, quantize)
        record = {
            "quantize": quantize,
            "parity": agreement._asdict(),
            "tokenizer_tables_sha256": unicode_tables.sha256(),
            "versions": versions(("bert_tf", "tensorflow", "ai-edge-litert")),
        }
        archive.append(temporary, {"export.json": archive.as_json(record)})
        progress.move(2)
    return agreement


def convert(model: TaskModel, quantize: str = "none") -> bytes:
    """Convert the token functions of a trained model (`Pipeline.token_functions`).

    The signatures have the inputs input_ids, input_mask and segment_ids, int32 `(B, L)`. B and L
    may be resized. They consist of built-in operations and share their weights.

    With `quantize`, weights are stored in float16 ("float16"), or weight matrices are stored and
    multiplied in int8 ("dynamic").
    """
    functions = model.serving.pipeline.token_functions
    signatures = {name: _traced(function) for name, function in functions.items()}
    with tempfile.TemporaryDirectory() as directory:
        module = tf.Module(name="litert")
        module.functions = signatures
        module.weights = [variable.value for variable in model.network.variables]
        tf.saved_model.save(module, directory, signatures=signatures)
        converter = tf.lite.TFLiteConverter.from_saved_model(
            directory, signature_keys=list(signatures)
        )
        if quantize != "none":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantize == "float16":
            converter.target_spec.supported_types = [tf.float16]
        return converter.convert()


def _traced(function):
    """Return the concrete function of token ids, mask and segments, as positional arguments."""
    # With `jit_compile`, layers choose the forms that XLA compiles. LiteRT has the operations of
    # these; it has neither tf.cond nor batch normalization of any number of channels.
    return tf.function(
        lambda *tokens: function(dict(zip(INPUTS, tokens, strict=True))),
        input_signature=[tf.TensorSpec([None, None], tf.int32, name=name) for name in INPUTS],
        autograph=False,
        jit_compile=True,
    ).get_concrete_function()


def check_parity(path: str | os.PathLike, model: TaskModel, quantize: str) -> Agreement:
    """Compare a LiteRT file with the trained model, on the requests of a SavedModel's parity check.

    Raises:
        UserError: If too many outputs differ. The message names the first string.
    """
    pipeline = load_pipeline(path)
    examples = [
        (signature.name, signature.example())
        for signature in signatures_of(pipeline)
        if signature.name in pipeline.token_functions
    ]
    functions = {name: pipeline.signatures[name] for name in pipeline.token_functions}
    cases = [*examples, *parity.text_requests(model, functions)]
    outputs = [parity.called(functions[name], inputs) for name, inputs in cases]
    rows = sum(len(next(iter(inputs.values()))) for _, inputs in cases)
    trained, tolerance = model.serving.pipeline, TOLERANCES[quantize]
    messages = [
        message
        for differing in parity.differences(trained, cases, outputs, tolerance)
        for message in differing.values()
    ]
    equal = rows - len(messages)
    if equal < MIN_EQUAL[quantize] * rows:
        raise UserError(f"not written: {messages[0]} ({equal} of {rows} rows are equal)")
    return Agreement(rows, equal)
