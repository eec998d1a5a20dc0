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

import tensorflow as tf

from bert_tf import files, ownership, run_directory
from bert_tf.checkpoints import Checkpoints
from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

# Settings that may change when a run is resumed: how often, how loud.
MAY_CHANGE = frozenset({"num_train_steps", "save_every", "log_every"})
# What TensorBoard's own tf.summary.scalar writes, which wants TensorBoard to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class Run:
    """An open run: `config`, `vocabulary`, `task` (dict or None), `train` (dict), `checkpoints`."""

    def __init__(self, path, writes=True):
        self.path = str(path)
        self.writes = writes
        self.checkpoints = Checkpoints(self.file("checkpoints"), writes=writes)
        self._board = None

    def file(self, name):
        """The path of one of the files of this run."""
        return os.path.join(self.path, name)

    @classmethod
    def is_at(cls, path):
        return run_directory.is_run(path)

    @classmethod
    @contextlib.contextmanager
    def writing(cls, path, writes=True):
        """Lock the directory of a new or existing run for the block.

        A run of an earlier version, which has no marker, gets one. With `writes` False nothing is
        done, as another process holds the directory.

        Raises:
            UserError: If the directory holds something else, or another process writes there.
        """
        if not writes:
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
    def open(cls, path, writes=True):
        """Opens a run. Raises UserError if the directory is none, or its parts do not fit.

        With `writes` False this process only reads: another one, which does the same, writes.
        """
        run = cls(path, writes)
        if not files.is_folder(run.path):
            raise UserError(f"{run.path}: no such directory, wanted a run directory")
        if not cls.is_at(path):
            raise UserError(
                f"{run.path}: not a run directory (config.json, vocab.txt, checkpoints/); "
                "pretrained weights in "
                "other forms become one with bert_tf.convert or tasks.finetune"
            )
        run.config = BertConfig.load(run.file("config.json"))
        run.vocabulary = Vocabulary.load(run.file("vocab.txt"))
        run.vocabulary.check_size(run.config.vocab_size, where=run.file("vocab.txt"))
        run.train = read_json_object(run.file("train.json"))
        task = run.file("task.json")
        run.task = read_json_object(task) if files.exists(task) else None
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
        files.make_folder(run.file("checkpoints"))
        vocabulary.save(run.file("vocab.txt"))
        if task is not None:
            _write_json(run.file("task.json"), task)
        _write_json(run.file("train.json"), run.train)
        _write_json(run.file("config.json"), config.to_dict())
        return run

    def check_resumable(self, settings, task, decided=()):
        """Raises UserError naming what differs from when the run began, except what MAY_CHANGE.

        `decided` are the fields of task.json that training itself fills in.
        """
        if "settings" not in self.train:
            raise UserError(
                f"{self.path}: holds converted weights, no training; name a new directory"
            )
        if (self.task or {}).get("kind") != (task or {}).get("kind"):
            raise UserError(
                f"{self.path}: holds a run of task "
                f"{(self.task or {}).get('kind', 'pretraining')!r}, "
                f"not {(task or {}).get('kind', 'pretraining')!r}; name a new directory"
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
        before = self.task and {**self.task, **dict.fromkeys(decided)}
        if before != json.loads(json.dumps(task)):
            raise UserError(
                f"{self.path}: its task.json no longer fits the data (labels or "
                "columns have changed); "
                "name a new directory"
            )

    def write_task(self, task):
        """Replaces task.json, whole or not at all."""
        self.task = json.loads(json.dumps(task))
        if self.writes:
            _write_json(self.file("task.json"), self.task)

    def changes(self):
        """What is not as when the run began, as lines: then numbers may differ in the last digits.

        Steps are the same bit for bit where processor, versions and threads are.
        """
        now = {**_versions(), "threads": os.cpu_count()}
        before = {**self.train["versions"], "threads": self.train["threads"]}
        return [
            f"{self.path}: begun with {name} {before.get(name)}, here it is {value}; the rest may "
            "differ in the last digits from what it would have been"
            for name, value in now.items()
            if before.get(name) != value
        ]

    def log_metrics(self, record):
        """Appends {"step": ..., ...} to metrics.jsonl, and to what TensorBoard reads."""
        if not self.writes:
            return
        with files.open_file(self.file("metrics.jsonl"), "ab") as lines:
            lines.write(f"{json.dumps(record)}\n".encode())
        if self._board is None:
            self._board = tf.summary.create_file_writer(self.file("tensorboard"))
        with self._board.as_default(step=record["step"]):
            for name, value in record.items():
                if name != "step":
                    tf.summary.write(name, tf.constant(value, tf.float32), metadata=_SCALAR)
        self._board.flush()

    def metrics(self):
        """The records of metrics.jsonl, in order, but for a line that a killed process left."""
        path = self.file("metrics.jsonl")
        if not files.exists(path):
            return []
        lines = files.read_text(path).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has_stalled(self, patience):
        """True if none of the last `patience` evaluations was better than the best before them."""
        best, since = -math.inf, 0
        for score in (record["score"] for record in self.metrics() if "score" in record):
            best, since = (score, 0) if score > best else (best, since + 1)
        return since >= patience

    def is_over(self, num_train_steps, evaluates, patience=None):
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
        return patience is not None and is_evaluated and self.has_stalled(patience)

    def forget_metrics_after(self, step, and_evaluation=False):
        """Drops lines of steps that were lost with a killed process and will be written again.

        With `and_evaluation` also what `step` itself was evaluated to, which is told by having no
        "loss".
        """
        path = self.file("metrics.jsonl")
        if self.writes and files.exists(path):
            lines = files.read_text(path).splitlines(keepends=True)
            records = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
            kept = [
                line
                for line, record in records
                if record["step"] < step
                or (record["step"] == step and ("loss" in record or not and_evaluation))
            ]
            files.replace_file(path, "".join(kept))


def _versions():
    packages = ("tensorflow", "tensorflow-text", "keras", "numpy")
    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def _write_json(path, values):
    files.replace_file(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
