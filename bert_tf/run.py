"""A run directory: everything that a model is, in files anybody can read.

RUN/.bert_tf.lock    marker, and lock of the writing process
RUN/config.json      BertConfig
RUN/vocab.txt
RUN/task.json        what it was fine-tuned for (absent after pretraining)
RUN/train.json       settings, seed, versions, where its weights came from
RUN/checkpoints/
RUN/metrics.jsonl    a JSON object a line
RUN/tensorboard/     the same, for TensorBoard
"""

import contextlib
import json
import math
import os
import platform
from importlib import metadata

from bert_tf import files, ownership, run_directory, strict_json
from bert_tf.checkpoints import CheckpointManager
from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

# Settings that may change when a run is resumed: how often, how loud.
MAY_CHANGE = frozenset({"num_train_steps", "save_every", "log_every"})

# Keys in the train.json, task.json and metrics.jsonl of earlier versions, and their names now.
# A key that ends in _ is a prefix. What earlier versions wrote is read with the new names.
RENAMED_KEYS = {
    "preset": "model_size",
    "steps_per_call": "steps_per_execution",
    "aim": "threshold_objective",
    "code_size": "latent_dim",
    "form": "file_format",
    "html_entities": "unescape_html",
    "ordinary_labels": "normal_labels",
    "stride": "doc_stride",
    "decided_": "tuned_",
}


class Run:
    """An open run: `config`, `vocabulary`, `task` (dict or None), `train` (dict), `checkpoints`."""

    def __init__(self, path, is_writer=True):
        self.path = str(path)
        self.is_writer = is_writer
        self.checkpoints = CheckpointManager(self.file("checkpoints"), is_writer=is_writer)
        self._board = None

    def file(self, name):
        """The path of one of the files of this run."""
        return os.path.join(self.path, name)

    @classmethod
    def exists(cls, path):
        return run_directory.is_run(path)

    @classmethod
    @contextlib.contextmanager
    def writing(cls, path, is_writer=True):
        """Lock the directory of a new or existing run for the block.

        A run of an earlier version, which has no marker, gets one. With `is_writer` False nothing
        is done, as another process holds the directory.

        Raises:
            UserError: If the directory holds something else, or another process writes there.
        """
        if not is_writer:
            yield
            return
        run_directory.check(path)
        with ownership.sole_writer(path):
            for name in filter(run_directory.OF_RUN.fullmatch, files.walk(path)):
                if files.is_temporary(os.path.basename(name)):  # A killed process left it.
                    files.remove(os.path.join(path, name))
            try:
                yield
            except OSError:
                if not cls(path).checkpoints.steps():
                    files.remove_own(path, run_directory.OF_RUN)
                raise

    @classmethod
    def check_resume(cls, path, settings, kind=None):
        """Return the run that goes on in a directory, or `None` where one begins.

        Raises UserError unless one with these settings can. `kind` is that of the task, `None` in
        pretraining. The data are not looked at, nor is a path that only TensorFlow reaches.
        """
        if files.is_remote(path):
            return None
        run_directory.check(path)
        if not (cls.exists(path) and cls(path).checkpoints.steps()):
            return None
        run = cls.open(path)
        run.check_settings(settings, kind)
        return run

    @classmethod
    def has_checkpoint(cls, path):
        """Return True if a run with a complete checkpoint is there."""
        return cls.exists(path) and bool(cls(path).checkpoints.steps())

    @classmethod
    def open(cls, path, is_writer=True):
        """Opens a run. Raises UserError if the directory is none, or its parts do not fit.

        With `is_writer` False this process only reads: another one, which does the same, writes.
        """
        run = cls(path, is_writer)
        if not files.isdir(run.path):
            raise UserError(f"{run.path}: no such directory, wanted a run directory")
        if not cls.exists(path):
            raise UserError(
                f"{run.path}: not a run directory (config.json, vocab.txt, checkpoints/); "
                "pretrained weights in "
                "other forms become one with bert_tf.convert or tasks.finetune"
            )
        run.config = BertConfig.load(run.file("config.json"))
        run.vocabulary = Vocabulary.load(run.file("vocab.txt"))
        run.vocabulary.check_size(run.config.vocab_size, where=run.file("vocab.txt"))
        run.train = read_json_object(run.file("train.json"))
        kinds = {"settings": dict, "versions": dict, "changes": list}
        kinds |= {"origin": str, "threads": int}
        for name, kind in kinds.items():
            if name in run.train:
                strict_json.field(run.train, name, kind, run.file("train.json"))
        for name in {"settings", "changes"} & set(run.train):
            run.train[name] = _with_new_names(run.train[name])
        task = run.file("task.json")
        run.task = _with_new_names(read_json_object(task)) if files.exists(task) else None
        return run

    @classmethod
    def create(cls, path, config, vocabulary, train, task=None):
        """Makes and opens a new run directory. Raises UserError where something else already is.

        Files of a run that was killed before its first checkpoint are replaced. `train` is what
        train.json has to hold beside versions and threads.
        """
        run = cls(path)
        run_directory.check_free(run.path)
        run.config, run.vocabulary, run.task = config, vocabulary, task
        run.train = {
            **train,
            "vocabulary_sha256": vocabulary.sha256,
            "tokenizer_tables_sha256": unicode_tables.sha256(),
            "versions": _versions(),
            "threads": os.cpu_count(),
        }
        if ownership.is_ours(run.path):
            files.remove_own(run.path, run_directory.OF_RUN)
        ownership.mark(run.path)  # First, because nothing is ever deleted without it.
        files.makedirs(run.file("checkpoints"))
        vocabulary.save(run.file("vocab.txt"))
        if task is not None:
            _write_json(run.file("task.json"), task)
        _write_json(run.file("train.json"), run.train)
        _write_json(run.file("config.json"), config.to_dict())
        return run

    def check_resumable(self, settings, task, tunable_fields=()):
        """Raises UserError naming what differs from when the run began, except what MAY_CHANGE.

        `tunable_fields` are the fields of task.json that earlier versions filled in after training.
        """
        self.check_settings(settings, (task or {}).get("kind"))
        before = self.task and {**self.task, **dict.fromkeys(tunable_fields)}
        if before != json.loads(json.dumps(task)):
            raise UserError(
                f"{self.path}: its task.json no longer fits the data (labels or "
                "columns have changed); "
                "name a new directory"
            )

    def check_settings(self, settings, kind):
        """Raises UserError naming the first setting, or the kind of task, that differs."""
        if "settings" not in self.train:
            raise UserError(
                f"{self.path}: holds converted weights, no training; name a new directory"
            )
        there = (self.task or {}).get("kind")
        if there != kind:
            raise UserError(
                f"{self.path}: holds a run of task {there or 'pretraining'!r}, "
                f"not {kind or 'pretraining'!r}; name a new directory"
            )
        before = self.train["settings"]
        now = json.loads(json.dumps(settings))  # As it would be read back: tuples become lists.
        for name in sorted(set(before) | set(now)):
            if before.get(name) != now.get(name) and name not in MAY_CHANGE:
                raise UserError(
                    f"--{name}: was {before.get(name)!r} when {self.path} began, is "
                    f"{now.get(name)!r}; give the old "
                    "value to go on, or a new --output_dir"
                )

    def change_num_train_steps(self, step, before, after, rate_before, rate_after):
        """Record in train.json that a run goes on from a step with another number of steps."""
        change = {
            "step": step,
            "num_train_steps": [before, after],
            "learning_rate": [rate_before, rate_after],
        }
        self.train["settings"]["num_train_steps"] = after
        self.train.setdefault("changes", []).append(change)
        if self.is_writer:
            _write_json(self.file("train.json"), self.train)

    def changes(self):
        """What is not as when the run began, as lines: then numbers may differ in the last digits.

        Steps are the same bit for bit where processor, versions and threads are.
        """
        now = {**_versions(), "threads": os.cpu_count()}
        before = {**self.train.get("versions", {}), "threads": self.train.get("threads")}
        return [
            f"{self.path}: begun with {name} {before.get(name)}, here it is {value}; the rest may "
            "differ in the last digits from what it would have been"
            for name, value in now.items()
            if before.get(name) != value
        ]

    def log_metrics(self, record):
        """Appends {"step": ..., ...} to metrics.jsonl, and to what TensorBoard reads."""
        if not self.is_writer:
            return
        with files.open_file(self.file("metrics.jsonl"), "ab") as lines:
            lines.write(f"{json.dumps(record)}\n".encode())
        self._event_files().write(record)

    def _event_files(self):
        from bert_tf.event_files import EventFiles  # With TensorFlow.

        self._board = self._board or EventFiles(self.file("tensorboard"))
        return self._board

    def metrics(self):
        """The records of metrics.jsonl, in order, but for a line that a killed process left."""
        return [_with_new_names(record) for _, record in self._metrics_lines()]

    def _metrics_lines(self):
        path = self.file("metrics.jsonl")
        if not files.exists(path):
            return []
        try:
            lines = files.read_text(path).split("\n")[:-1]
            # An evaluation may have logged NaN or Infinity.
            records = [strict_json.parse_object(line, parse_constant=float) for line in lines]
        except ValueError as error:
            raise UserError(f"{path}: damaged: {error}") from None
        for number, record in enumerate(records, start=1):
            strict_json.field(record, "step", int, f"{path}:{number}")
            for name in record:
                strict_json.field(record, name, float, f"{path}:{number}")
        return list(zip(lines, records, strict=True))

    def patience_exhausted(self, patience):
        """True if none of the last `patience` evaluations was better than the best before them."""
        best, since = -math.inf, 0
        for score in (record["score"] for record in self.metrics() if "score" in record):
            best, since = (score, 0) if score > best else (best, since + 1)
        return since >= patience

    def is_finished(self, num_train_steps, evaluates, patience=None):
        """True if nothing is left to do: the last step is saved whole, and evaluated if wanted.

        That is num_train_steps, or where the run stopped for lack of improvement (`patience`).
        A damaged end is made again from what is before it, a missing evaluation made up for.
        """
        steps = self.checkpoints.steps()
        if not steps or not self.checkpoints.is_readable(steps[-1]):
            return False
        is_evaluated = "score" in self.checkpoints.info(steps[-1])
        if steps[-1] >= num_train_steps:
            return is_evaluated or not evaluates
        return patience is not None and is_evaluated and self.patience_exhausted(patience)

    def forget_metrics_after(self, step, and_evaluation=False):
        """Drops lines of steps that were lost with a killed process and will be written again.

        TensorBoard is told to drop them too. With `and_evaluation` also what `step` itself was
        evaluated to, which is told by having no "loss".
        """
        path = self.file("metrics.jsonl")
        if self.is_writer and files.exists(path):
            records = self._metrics_lines()
            kept = [
                (line, record)
                for line, record in records
                if record["step"] < step
                or (record["step"] == step and ("loss" in record or not and_evaluation))
            ]
            if len(kept) < len(records):
                # Whole steps only can be dropped there: what is kept of this one is written again.
                self._event_files().forget_from(step)
                for _, record in kept:
                    if record["step"] == step:
                        self._event_files().write(record)
            files.atomic_write_text(path, "".join(f"{line}\n" for line, _ in kept))


def _with_new_names(node):
    """Return an object, or a list of objects, with the keys that it would have today."""
    if isinstance(node, list):
        return [_with_new_names(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {_new_name(name): value for name, value in node.items()}


def _new_name(name):
    for former, new in RENAMED_KEYS.items():
        if name == former or (former.endswith("_") and name.startswith(former)):
            return new + name.removeprefix(former)
    return name


def _versions():
    packages = ("tensorflow", "tensorflow-text", "keras", "numpy")
    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def _write_json(path, values):
    files.atomic_write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
