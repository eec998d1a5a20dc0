"""Parity check of a LiteRT file against the trained model, on the requests of a SavedModel's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from bert_tf.errors import UserError
from export.checks import parity
from export.checks.parity_cases import text_requests
from export.litert.client import load_pipeline, signatures_of

if TYPE_CHECKING:
    from tasks.model.task_model import TaskModel

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


def check(path: str | os.PathLike, model: TaskModel, quantize: str) -> Agreement:
    """Compare a LiteRT file with the trained model that it was converted from.

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
    cases = [*examples, *text_requests(model, functions)]
    outputs = [parity.called(functions[name], inputs) for name, inputs in cases]
    rows = equal = 0
    first = None
    for (_, inputs), differing in zip(
        cases,
        parity.differences(model.serving.pipeline, cases, outputs, TOLERANCES[quantize]),
        strict=True,
    ):
        rows += len(next(iter(inputs.values())))
        equal -= len(differing)
        first = first or next(iter(differing.values()), None)
    equal += rows
    if equal < MIN_EQUAL[quantize] * rows:
        raise UserError(f"not written: {first} ({equal} of {rows} rows are equal)")
    return Agreement(rows, equal)
