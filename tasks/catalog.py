"""The kinds of task, and data sets known by name. A new kind is a module and an entry here.

Free of TensorFlow, so that flags can be checked before it is imported.
"""

import dataclasses
import importlib

from bert_tf.errors import UserError

KINDS = {"classification": "tasks.classification:Classification"}


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What a published data set calls its columns, and its labels in their published order."""

    kind: str
    text_columns: tuple[str, ...]
    label_column: str
    labels: tuple[str, ...]


DATA_SETS = {
    # Socher et al. 2013, in GLUE's files (Wang et al. 2019): a header, sentence TAB label; 1 is
    # positive.
    "sst2": DataSet("classification", ("sentence",), "label", ("0", "1")),
}
NAMES = (*KINDS, *DATA_SETS)


def task_class(kind):
    """The class of a kind of task. Raises UserError for a kind that there is not."""
    if kind not in KINDS:
        raise UserError(f"task kind {kind!r}: wanted one of {', '.join(KINDS)}")
    module, name = KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)


def task_from_dict(values):
    """The task that a run's task.json describes."""
    values = dict(values)
    return task_class(values.pop("kind")).from_dict(values)
