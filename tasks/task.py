"""What every kind of task has in common; a kind is a module with a subclass, and a registry entry.

Legend: N examples, W token sequences (windows) made of them, B of either in a batch.
"""

import dataclasses
import types
import typing

from bert_tf.errors import UserError
from tasks.examples import Examples
from tasks.readers.records import BadRow, raise_bad_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A frozen dataclass of what task.json holds, and what follows from it. A subclass gives:

        kind, best_metric   its name, and the metric that chooses the best checkpoint
        input_names         what the inputs of a served request are called
        losses              {output: (labels, output) -> a loss an element}, as TrainStep takes them
        from_data(path, **options)          the task that a training file shows
        iter_examples(path, labelled)       yields Example or BadRow, streaming
        encode(texts, tokenize, vocabulary)  {input: [N] strings} -> Windows, in the graph
        targets(examples, windows)          (labels, weights), each {output: an element a sample}
        build_model(config, dtype)          the Keras model, built
        metrics(data, outputs)              {name: figure} over a whole EncodedExamples
        serving_outputs(texts, windows, outputs)  what is served, in the graph, {name: [N, ...]}
        margin(predictions, windows, outputs)  [N]: how much of probability another answer was short

    A sample is what a batch counts: a window, or where windows are choices an example with all of
    them. What is decided after training, on the first dev file, are the fields `tunable_fields`.
    They belong to one checkpoint (tasks/tuning.py) and are None in task.json.
    """

    max_seq_length: int

    tunable_fields = ()
    predicts_untuned = True  # Whether there are answers while the fields `tunable_fields` are None.
    tunes_without_request = (
        False  # Whether those fields are only tuned because there is a dev file.
    )
    INPUT_RANKS = {}  # Of inputs that are not [N] strings but [N, C].
    has_windows = False  # Whether an example may be several, with outputs of every token.
    trains_on_vectors = False  # Whether the encoder is frozen, and read once (FeatureExamples).
    needs_offsets = False  # Whether answers name characters of the text.
    unused = (
        "not learned from"  # What is said of the rows that `select_training_examples` leaves out.
    )

    @classmethod
    def from_dict(cls, values):
        """The task of a task.json. Raises UserError where a field is missing or too many."""
        expected = sorted(field.name for field in dataclasses.fields(cls))
        if sorted(values) != expected:
            found = ", ".join(values)
            raise UserError(f"task.json: holds {found:.200}, wanted {', '.join(expected)}")
        return cls(**cls._checked(values, "task.json"))

    def to_dict(self):
        return {"kind": self.kind, **dataclasses.asdict(self)}

    def load_examples(self, path, labelled=True):
        """All rows of a file as Examples, less bad ones that are known.

        Raises UserError at the first other bad one, or if none is left.
        """
        everything = list(self.iter_examples(path, labelled))
        rows = list(raise_bad_rows(everything))
        skipped_rows = tuple(row for row in everything if isinstance(row, BadRow))
        if not rows:
            raise UserError(f"{path}: no rows but bad ones, the first {skipped_rows[0]}")
        texts = {name: [row.texts[name] for row in rows] for name in self.input_names}
        return Examples(texts, [row.label for row in rows] if labelled else [], skipped_rows)

    def select_training_examples(self, examples):
        """Those of the training examples that training takes."""
        return examples

    def sample_weights(self, examples, windows):
        """[samples] float32: how much each counts in training, or None if all count the same."""
        return None

    def sampling_weights(self, examples, windows):
        """[samples]: how often each is drawn in training, or None if each once an epoch."""
        return None

    def init_head(self, model, encoded):
        """Sets what of a new head follows from the training examples, an EncodedExamples."""

    def metric_inputs(self, outputs):
        """What metrics need of a batch's outputs, {name: array}: it is kept of all batches."""
        return outputs

    def report(self, data, outputs):
        """What an evaluation has to tell beside its metrics: tables, as lists, by name."""
        return {}

    def tune(self, data, outputs):
        """The task with its fields `tunable_fields` decided on dev data."""
        return self

    def check_dev(self, examples):
        """Return what the first dev file cannot tell of the fields `tunable_fields`, a line each.

        Raises UserError if it can tell nothing of one. Labels alone decide that: it is asked before
        anything is tokenized.
        """
        return []

    def tuning_warnings(self, data, outputs):
        """Return a line for each of the fields `tunable_fields` that this dev data
        cannot decide.
        """
        return []

    def with_tuned(self, values):
        """Return the task with these values of its fields `tunable_fields`, `None` for
        the others.
        """
        unknown = sorted(set(values) - set(self.tunable_fields))
        if unknown:
            raise UserError(
                f"checkpoint.json: tuned holds {', '.join(unknown)}; expected only "
                f"{', '.join(self.tunable_fields) or 'nothing'}"
            )
        fields = {**dict.fromkeys(self.tunable_fields), **self._checked(values, "checkpoint.json")}
        return dataclasses.replace(self, **fields)

    @classmethod
    def _checked(cls, values, location):
        """Fields as JSON has them, with tuples for lists. Raises UserError on a wrong type."""
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                expected = getattr(hints[name], "__name__", hints[name])
                raise UserError(f"{location}: {name} is {value!r:.80}, expected {expected}")
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }

    @property
    def untuned_fields(self):
        """The fields `tunable_fields` that have no value."""
        return tuple(name for name in self.tunable_fields if getattr(self, name) is None)

    def strip_padding(self, row):
        """A row of the answer, {name: JSON value}, less the padding that a batch brings along."""
        return row

    def label_warnings(self, data):
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
