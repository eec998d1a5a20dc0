"""What every kind of task has in common; a kind is a module with a subclass, and a catalog entry.

Legend: N examples, W token sequences (windows) made of them, B of either in a batch.
"""

import dataclasses
import types
import typing

from bert_tf.errors import UserError
from tasks.examples import Examples
from tasks.forms.records import BadRow, strict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A frozen dataclass of what task.json holds, and what follows from it. A subclass gives:

        kind, best_metric   its name, and the metric that chooses the best checkpoint
        input_names         what the inputs of a served request are called
        losses              {output: (labels, output) -> a loss an element}, as TrainStep takes them
        from_data(path, **options)          the task that a training file shows
        rows(path, labelled)                yields Example or BadRow, streaming
        encode(texts, tokenize, vocabulary)  {input: [N] strings} -> Windows, in the graph
        targets(examples, windows)          (labels, weights), each {output: an element a unit}
        build_model(config, dtype)          the Keras model, built
        metrics(data, outputs)              {name: figure} over a whole EncodedExamples
        answer(texts, windows, outputs)     the served answer, in the graph, {name: [N, ...]}
        margin(answer, windows, outputs)    [N]: how much of probability another answer was short

    A unit is what a batch counts: a window, or where windows are choices an example with all of
    them. What is decided after training, on the first dev file, are the fields `to_decide`. They
    belong to one checkpoint (tasks/tuning.py) and are None in task.json.
    """

    max_seq_length: int

    to_decide = ()
    answers_untuned = True  # Whether there are answers while the fields `to_decide` are None.
    tunes_without_request = (
        False  # Whether those fields are only tuned because there is a dev file.
    )
    INPUT_RANKS = {}  # Of inputs that are not [N] strings but [N, C].
    has_windows = False  # Whether an example may be several, with outputs of every token.
    trains_on_vectors = False  # Whether the encoder is frozen, and read once (VectorExamples).
    needs_offsets = False  # Whether answers name characters of the text.
    unused = "not learned from"  # What is said of the rows that `to_learn_from` leaves out.

    @classmethod
    def from_dict(cls, values):
        """The task of a task.json. Raises UserError where a field is missing or too many."""
        wanted = sorted(field.name for field in dataclasses.fields(cls))
        if sorted(values) != wanted:
            found = ", ".join(values)
            raise UserError(f"task.json: holds {found:.200}, wanted {', '.join(wanted)}")
        return cls(**cls._checked(values, "task.json"))

    def to_dict(self):
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def read(self, path, labelled=True):
        """All rows of a file as Examples, less bad ones that are known.

        Raises UserError at the first other bad one, or if none is left.
        """
        everything = list(self.rows(path, labelled))
        rows = list(strict(everything))
        left_out = tuple(row for row in everything if isinstance(row, BadRow))
        if not rows:
            raise UserError(f"{path}: no rows but bad ones, the first {left_out[0]}")
        texts = {name: [row.texts[name] for row in rows] for name in self.input_names}
        return Examples(texts, [row.label for row in rows] if labelled else [], left_out)

    def to_learn_from(self, examples):
        """Those of the training examples that training takes."""
        return examples

    def unit_weights(self, examples, windows):
        """[units] float32: how much each counts in training, or None if all count the same."""
        return None

    def unit_odds(self, examples, windows):
        """[units]: how often each is drawn in training, or None if each once an epoch."""
        return None

    def prepare(self, model, encoded):
        """Sets what of a new head follows from the training examples, an EncodedExamples."""

    def to_measure(self, outputs):
        """What metrics need of a batch's outputs, {name: array}: it is kept of all batches."""
        return outputs

    def report(self, data, outputs):
        """What an evaluation has to tell beside its metrics: tables, as lists, by name."""
        return {}

    def tuned(self, data, outputs):
        """The task with its fields `to_decide` decided on dev data."""
        return self

    def check_dev(self, examples):
        """Return what the first dev file cannot tell of the fields `to_decide`, a line each.

        Raises UserError if it can tell nothing of one. Labels alone decide that: it is asked before
        anything is tokenized.
        """
        return []

    def tuning_warnings(self, data, outputs):
        """Return a line for each of the fields `to_decide` that this dev data cannot decide."""
        return []

    def with_tuned(self, values):
        """Return the task with these values of its fields `to_decide`, `None` for the others."""
        unknown = sorted(set(values) - set(self.to_decide))
        if unknown:
            raise UserError(
                f"checkpoint.json: tuned holds {', '.join(unknown)}; expected only "
                f"{', '.join(self.to_decide) or 'nothing'}"
            )
        fields = {**dict.fromkeys(self.to_decide), **self._checked(values, "checkpoint.json")}
        return dataclasses.replace(self, **fields)

    @classmethod
    def _checked(cls, values, where):
        """Fields as JSON has them, with tuples for lists. Raises UserError on a wrong type."""
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name])
                raise UserError(f"{where}: {name} is {value!r:.80}, expected {expected}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    @property
    def undecided(self):
        """The fields `to_decide` that have no value."""
        return tuple(name for name in self.to_decide if getattr(self, name) is None)

    def trimmed(self, row):
        """A row of the answer, {name: JSON value}, less the padding that a batch brings along."""
        return row

    def remarks(self, data):
        """What of an EncodedExamples' labels the task cannot say or measure, a line each."""
        return []

    def description(self):
        """What is worth saying of the task beside the number of its rows."""
        return ""

    def warning(self, metrics):
        """What a reader of these metrics has to know, as a line, or None."""
        return None


def _fits(value, hint):
    """Whether a JSON value is of a field's type; a tuple's is a list."""
    kinds = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, kinds[0]) for entry in value)
    return type(value) is hint or (hint is float and type(value) is int)
