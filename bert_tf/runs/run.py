"""Run directories: a model, its vocabulary, its settings and its checkpoints in open formats.

RUN/.bert_tf.lock    lock of the writing process, while it runs
RUN/config.json      BertConfig
RUN/vocab.txt        vocabulary
RUN/task.json        fields of the fine-tuning task (absent after pretraining)
RUN/train.json       settings, seed, versions, origin of the initial weights
RUN/conversion.json  report of bert-tf convert (absent after training)
RUN/checkpoints/     checkpoints, see bert_tf.runs.checkpoints
RUN/teacher.npz      outputs of the teacher, if there is one (tasks/training/distillation.py)
RUN/verified_shards.json    shards that were read and verified (bert_tf/pretraining/recipe.py)
RUN/metrics.jsonl    metrics, one JSON object per line
RUN/tensorboard/     the same metrics for TensorBoard
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from bert_tf.config import BertConfig, read_json_object
from bert_tf.errors import UserError
from bert_tf.runs import checkpoints
from bert_tf.storage import files, format_versions, ownership, strict_json
from bert_tf.system.processes import count_processors
from bert_tf.system.versions import versions
from bert_tf.text import unicode_tables
from bert_tf.text.vocabulary import Vocabulary

# Settings that may change when a run is resumed: they do not affect the steps already trained.
MAY_CHANGE = frozenset({"num_train_steps", "save_every", "log_every"})
# These divide a global batch, which leaves its loss and gradient as they are.
MAY_CHANGE |= {"strategy", "tpu", "gradient_accumulation_steps"}
MAY_CHANGE |= {"compile", "steps_per_execution"}
# Data may be moved, since its content is compared.
_MOVABLE = ("shards", "eval_shards", "train", "dev", "unlabelled")

# The files that are read to resume. Only fine-tuned runs have a task.
FILES = ("checkpoints", "config.json", "vocab.txt", "train.json", "task.json")
_PACKAGES = ("tensorflow", "tensorflow-text", "keras", "numpy")
# Types of the entries of train.json that are read later.
_TRAIN_KINDS: dict[str, type] = {
    "settings": dict,
    "versions": dict,
    "changes": list,
    "origin": str,
    "has_new_head": bool,
    "has_trained_pooler": bool,
    "heads": list,
    "threads": int,
    "teacher": dict,
}
# Types of the entries of task.json that readers of files use, if they are not null.
_TASK_KINDS: dict[str, type] = {
    "max_seq_length": int,
    "file_format": str,
    "text_column": str,
    "label_column": str,
    "negatives_column": str,
}
_TRAIN_FIELDS = {
    *(*_TRAIN_KINDS, "data", "masks", "vocabulary_sha256", "tokenizer_tables_sha256"),
}


@dataclasses.dataclass(eq=False)
class Run:
    """An open run directory."""

    path: str
    config: BertConfig
    vocabulary: Vocabulary
    train: dict[str, Any]  # The contents of train.json.
    task: dict[str, Any] | None = None  # The contents of task.json, or `None` after pretraining.
    is_writer: bool = True  # If not, another process writes: one of several, synchronized ones.

    def __post_init__(self) -> None:
        self.checkpoints = checkpoints.CheckpointManager(
            self.file("checkpoints"), is_writer=self.is_writer
        )

    def file(self, name: str) -> str:
        """Return the path of a file in this run directory."""
        return os.path.join(self.path, name)

    def _write(self, name, values):
        files.atomic_write_json(self.file(name), values)

    @classmethod
    def exists(cls, path: str | os.PathLike) -> bool:
        """Return True if `path` is a run directory: it contains config.json and checkpoints/.

        Models of other programs may have checkpoints/ beside their config.json, but neither
        train.json nor checkpoints with the names of ours.
        """
        directory, config, _, train, _ = (os.path.join(path, name) for name in FILES)
        if not (files.exists(config) and files.isdir(directory)):
            return False
        return files.exists(train) or any(map(checkpoints.STEP.fullmatch, files.listdir(directory)))

    @classmethod
    @contextlib.contextmanager
    def writing(cls, path: str | os.PathLike, is_writer: bool = True) -> Iterator[None]:
        """Lock the directory of a new or existing run for the block.

        If `is_writer` is False, do nothing: another process holds the lock.

        Raises:
            UserError: If the directory contains something else, or another process writes there.
        """
        if not is_writer:
            yield
            return
        if not cls.has_checkpoint(path):
            check_free(path)
        with ownership.sole_writer(path):
            yield

    @classmethod
    def is_new(
        cls,
        path: str | os.PathLike,
        settings: Mapping[str, Any],
        kind: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> bool:
        """Check a directory for a run without reading data; return whether a new one would start.

        Remote paths need TensorFlow: they are not checked, and may have a run. For the arguments
        see `check_settings`.

        Raises:
            UserError: If a run with these settings can neither start nor resume there.
        """
        if files.is_remote(path):
            return False
        if not cls.has_checkpoint(path):
            check_free(path)
            return True
        cls.open(path).check_settings(settings, kind, defaults)
        return False

    @classmethod
    def has_checkpoint(cls, path: str | os.PathLike) -> bool:
        """Return True if `path` is a run directory with a complete checkpoint."""
        return cls.exists(path) and bool(_steps(path))

    @classmethod
    def open(cls, path: str | os.PathLike, is_writer: bool = True) -> Self:
        """Open an existing run; raises UserError unless its files are there and belong together."""
        if not files.isdir(path):
            raise UserError(f"{path}: no such directory; expected a run directory")
        if not cls.exists(path):
            raise UserError(
                f"{path}: not a run directory; expected config.json, vocab.txt and "
                "checkpoints/ (convert pretrained weights with bert-tf convert or bert-tf finetune)"
            )
        _, config_path, vocabulary_path, train_path, task_path = (
            os.path.join(path, name) for name in FILES
        )
        config = BertConfig.load(config_path)
        vocabulary = Vocabulary.load(vocabulary_path)
        vocabulary.check_size(config.vocab_size, where=vocabulary_path)
        train = _read_train(train_path)
        for name, kind in _TRAIN_KINDS.items():
            if name in train:
                strict_json.field(train, name, kind, train_path)
        task = read_task(task_path) if files.exists(task_path) else None
        return cls(str(path), config, vocabulary, train, task, is_writer)

    def tuned_task(self, step: int) -> dict[str, Any] | None:
        """Return the contents of task.json with the values tuned for a checkpoint, or `None`."""
        tuned = self.checkpoints.info(step).get("tuned") or {}
        return self.task and {**self.task, **tuned.get("values", {})}

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        config: BertConfig,
        vocabulary: Vocabulary,
        train: Mapping[str, Any],
        task: dict[str, Any] | None = None,
    ) -> Self:
        """Create and open a new run directory.

        A run that has no complete checkpoint starts again: its files are replaced one by one.
        `train` are entries of train.json, to which versions, threads and digests are added. `task`
        is the content of task.json, or `None` for pretraining.

        Raises:
            UserError: If the directory contains something else.
        """
        check_free(path)
        digests = {
            "vocabulary_sha256": vocabulary.sha256,
            "tokenizer_tables_sha256": unicode_tables.sha256(),
        }
        now = {"versions": versions(_PACKAGES), "threads": count_processors()}
        run = cls(str(path), config, vocabulary, {**train, **digests, **now}, task)
        files.makedirs(run.path)
        # First, since `check_free` recognizes a run that was begun by this file.
        run._write("train.json", format_versions.with_version(run.train))
        files.makedirs(run.file("checkpoints"))
        vocabulary.save(run.file("vocab.txt"))
        if task is not None:
            run._write("task.json", format_versions.with_version(task))
        elif files.exists(run.file("task.json")):
            files.remove(run.file("task.json"))
        run._write("config.json", config.to_dict())
        run.forget_metrics_after(0, and_evaluation=True)
        return run

    def check_resumable(
        self,
        settings: Mapping[str, Any],
        task: dict[str, Any] | None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise UserError unless settings and task are those the run was started with.

        For `settings` and `defaults` see `check_settings`; `task` is as in task.json.
        """
        self.check_settings(settings, (task or {}).get("kind"), defaults)
        before, now = json.loads(json.dumps([self.task, task]))  # Tuples become lists.
        if before != now:
            raise UserError(
                f"{self.path}: task.json does not match the data (labels or columns have "
                "changed); name a new directory"
            )

    def check_settings(
        self,
        settings: Mapping[str, Any],
        kind: str | None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise UserError with the first setting that the run was not started with.

        Args:
            settings: The settings by name. Those in `MAY_CHANGE` may differ, and the paths of data,
                but not their number.
            kind: The task type, or `None` for pretraining.
            defaults: Defaults of the settings, for those that the run does not have.
        """
        if "settings" not in self.train:
            raise UserError(
                f"{self.path}: contains converted weights, not a training run; name a new directory"
            )
        there = (self.task or {}).get("kind")
        if there != kind:
            raise UserError(
                f"{self.path}: contains a run of task {there or 'pretraining'!r}, "
                f"not {kind or 'pretraining'!r}; name a new directory"
            )
        before = self.train["settings"]
        may_change = MAY_CHANGE | {
            name for name in _MOVABLE if _count(before.get(name)) == _count(settings.get(name))
        }
        if settings.get("precision") == "auto":  # Resolved once TensorFlow is imported.
            may_change |= {"precision"}
        format_versions.check_same_settings(self.path, before, settings, defaults or {}, may_change)

    def change_num_train_steps(
        self, num_train_steps: int, rate_at: Callable[[int, int], float]
    ) -> str | None:
        """Record in train.json that training resumes with another number of steps.

        Args:
            num_train_steps: Training steps in total.
            rate_at: Returns the learning rate for training steps in total, and a step.

        Returns:
            A line on the effect, or `None` if the number is the same.
        """
        before = self.train["settings"].get("num_train_steps", num_train_steps)
        if before == num_train_steps:
            return None
        step = self.checkpoints.latest_readable()
        if step is None:
            return None  # The loop reports the error.
        rates = [rate_at(steps, step) for steps in (before, num_train_steps)]
        change = {
            "step": step,
            "num_train_steps": [before, num_train_steps],
            "learning_rate": rates,
        }
        self.train["settings"]["num_train_steps"] = num_train_steps
        self.train.setdefault("changes", []).append(change)
        if self.is_writer:
            self._write("train.json", format_versions.with_version(self.train))
        return (
            f"--num_train_steps: changed from {before} to {num_train_steps}; the learning rate at "
            f"step {step} changes from {rates[0]:.3g} to {rates[1]:.3g} (recorded in "
            f"{self.file('train.json')})"
        )

    def changes(self) -> list[str]:
        """Return one warning per package version or thread count that has changed.

        Training is bitwise reproducible only with the same processor, versions and threads.
        """
        now = {**versions(_PACKAGES), "threads": count_processors()}
        before = {**self.train.get("versions", {}), "threads": self.train.get("threads")}
        return [
            f"{self.path}: created with {name} {before.get(name)}, now {value}; "
            "results may differ in the last digits"
            for name, value in now.items()
            if before.get(name) != value
        ]

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append metrics by name, including "step", to metrics.jsonl and the event files."""
        if not self.is_writer:
            return
        with files.open_file(self.file("metrics.jsonl"), "ab") as lines:
            lines.write(f"{json.dumps(metrics)}\n".encode())
        self._write_event(metrics)

    @functools.cached_property
    def _event_file(self):
        import tensorflow as tf

        return tf.summary.create_file_writer(self.file("tensorboard"))

    def _write_event(self, metrics):
        import tensorflow as tf

        # As in tf.summary.scalar, which is not used since it requires TensorBoard to be installed.
        summary = tf.compat.v1.SummaryMetadata
        scalar = summary(plugin_data=summary.PluginData(plugin_name="scalars"))
        with self._event_file.as_default(step=metrics["step"]):
            for name, value in metrics.items():
                if name != "step":
                    tf.summary.write(name, tf.constant(value, tf.float32), metadata=scalar)
        # Flushed at once, so that the metrics remain if the process is killed.
        self._event_file.flush()

    def _forget_events_from(self, step):
        """Write a start of a session, at which TensorBoard discards `step` and later ones."""
        import tensorflow as tf

        log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(step=step, session_log=log)
        event.wall_time = tf.timestamp().numpy()
        # tf.summary cannot write an event without a summary, this public operation can.
        writer = self._event_file._resource
        tf.raw_ops.ImportEvent(writer=writer, event=event.SerializeToString())
        self._event_file.flush()

    def metrics(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl in order, without a truncated last line."""
        return [metrics for _, metrics in self._metrics_lines()]

    def _metrics_lines(self):
        path = self.file("metrics.jsonl")
        if not files.exists(path):
            return []
        try:
            lines = files.read_text(path).split("\n")[:-1]
            # The last line is incomplete if a process was killed. NaN and Infinity are valid here,
            # since a metric may be either.
            parsed = [strict_json.parse_object(line, parse_constant=float) for line in lines]
        except ValueError as error:
            raise UserError(f"{path}: damaged: {error}") from None
        for number, metrics in enumerate(parsed, start=1):
            strict_json.field(metrics, "step", int, f"{path}:{number}")
            for name in metrics:
                strict_json.field(metrics, name, float, f"{path}:{number}")
        return list(zip(lines, parsed, strict=True))

    def patience_exhausted(self, patience: int) -> bool:
        """Return True if none of the last `patience` evaluations improved the best score."""
        best, since = -math.inf, 0
        for score in (line["score"] for line in self.metrics() if "score" in line):
            best, since = (score, 0) if score > best else (best, since + 1)
        return since >= patience

    def is_finished(
        self, num_train_steps: int, evaluates: bool, patience: int | None = None
    ) -> bool:
        """Return True if no training step and no evaluation is left to do.

        The last checkpoint has to be readable, and evaluated if `evaluates`. It is that of step
        `num_train_steps`, or an earlier one if `patience` evaluations brought no improvement.
        """
        steps = self.checkpoints.steps()
        if not steps or not self.checkpoints.is_readable(steps[-1]):
            return False
        is_evaluated = "score" in self.checkpoints.info(steps[-1])
        if steps[-1] >= num_train_steps:
            return is_evaluated or not evaluates
        return patience is not None and is_evaluated and self.patience_exhausted(patience)

    def forget_metrics_after(self, step: int, and_evaluation: bool = False) -> None:
        """Remove the metrics of steps after `step`, which will be repeated, also from TensorBoard.

        With `and_evaluation`, also remove the evaluation of `step`, the line without "loss".
        """
        path = self.file("metrics.jsonl")
        if self.is_writer and files.exists(path):
            lines = self._metrics_lines()
            kept = [
                (line, metrics)
                for line, metrics in lines
                if metrics["step"] < step
                or (metrics["step"] == step and ("loss" in metrics or not and_evaluation))
            ]
            if len(kept) < len(lines):
                # TensorBoard can only drop complete steps, so the kept metrics of this step are
                # written again.
                self._forget_events_from(step)
                for _, metrics in kept:
                    if metrics["step"] == step:
                        self._write_event(metrics)
            files.atomic_write_text(path, "".join(f"{line}\n" for line, _ in kept))


def read_task(path: str) -> dict[str, Any]:
    """Return the contents of a task.json.

    Raises:
        UserError: If the task type is missing, or an entry that readers of files use is invalid.
    """
    task = format_versions.without_version(read_json_object(path), path)
    strict_json.field(task, "kind", str, path)
    for name, kind in _TASK_KINDS.items():
        if task.get(name) is not None:
            strict_json.field(task, name, kind, path)
    for name, counts in (("text_columns", (1, 2)), ("pair_columns", (0, 2))):
        if name not in task:
            continue
        columns = strict_json.field(task, name, list, path)
        if len(columns) not in counts or not all(isinstance(column, str) for column in columns):
            raise UserError(f'{path}: "{name}" is {columns!r:.80}; expected names of columns')
    return task


def check_free(path: str | os.PathLike) -> None:
    """Raise `UserError` unless a run can start in this directory."""
    if files.is_remote(path) and files.has_pattern(path):
        raise UserError(
            f"{path}: expected a remote path without * ? [ and \\, since TensorFlow takes the path "
            "of a checkpoint for a pattern; name another directory"
        )
    if not files.exists(path):
        return
    if not files.isdir(path):
        raise UserError(f"{path}: is a file; expected a directory")
    found = files.listdir(path)
    found = [name for name in found if name != ownership.LOCK and not files.is_temporary(name)]
    if found and (not _is_begun(path) or _steps(path)):
        raise UserError(
            f"{path}: contains other files; name a new directory (found {', '.join(found[:3])}, "
            "but no run that this command can resume)"
        )
    # A remote save that was interrupted looks the same: it is repeated.
    for directory in () if files.is_remote(path) else _checkpoints_without_state(path):
        raise UserError(
            f"{directory}: contains weights but no {checkpoints.STATE}, as after an incomplete "
            "copy; copy the run again, or name a new directory"
        )


def _is_begun(path):
    """Return True if a directory has the train.json of a run."""
    try:
        return "tokenizer_tables_sha256" in _read_train(os.path.join(path, "train.json"))
    except UserError:  # There is none, or that of another program.
        return False


def _read_train(path):
    """Return the content of a train.json."""
    return format_versions.without_version(read_json_object(path), path, _TRAIN_FIELDS)


def _count(paths):
    """Return the number of paths, of a list or of a flag with one."""
    return len(paths) if isinstance(paths, list | tuple) else int(bool(paths))


def _steps(path):
    """Return the steps of the complete checkpoints of a run, oldest first."""
    return checkpoints.CheckpointManager(os.path.join(path, "checkpoints")).steps()


def _checkpoints_without_state(path):
    directory = os.path.join(path, "checkpoints")
    for name in filter(checkpoints.STEP.fullmatch, files.listdir(directory)):
        parts = files.listdir(os.path.join(directory, name))
        if "variables.index" in parts and checkpoints.STATE not in parts:
            yield os.path.join(directory, name)
