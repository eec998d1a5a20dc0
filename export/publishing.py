"""Publishing of a trained run as a numbered version that a model server loads.

A version is complete and has passed the parity check before an atomic rename makes it visible.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import tensorflow as tf

from bert_tf.errors import UserError, argument_names, tensorflow_reason
from bert_tf.storage import files, ownership, paths
from bert_tf.system.progress import Progress
from bert_tf.train.distribution import exact_float32
from export.checks import metric_gate, options, parity
from export.graph.saved_model import write_saved_model
from export.graph.served_encoder import has_packed_products
from export.package import version_files
from tasks.graph.published import MAX_VERSION, version_directories
from tasks.model.loading import load_model
from tasks.model.task_model import TaskModel, warn_of_new_head


@argument_names()
def publish(
    model_or_run: TaskModel | os.PathLike | str,
    output_dir: os.PathLike | str,
    *,
    precision: str = "float32",
    portable: bool = False,
    device: str = "cpu",
    dev: str | None = None,
    max_metric_drop: float = options.MAX_METRIC_DROP,
    checkpoint: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> pathlib.Path:
    """Publish a trained model as the next version in a directory of versions.

        version = publish("RUN", "MODELS/name")
        LocalClient(version).predict({"text": ["My invoice is wrong."]})["label"]

    The files are written on the same file system, under a name that servers ignore. They are
    renamed once they have passed the parity check. After any error nothing is published.

    Args:
        model_or_run: A model such as `TextClassifier`, or what `tasks.load_model` takes, such as
            the path of a run.
        output_dir: Directory of versions. It is created if it does not exist.
        precision: "float32", "bfloat16", "float16" on GPUs, or "int8" on CPUs.
        portable: Uses standard operations only, for other processors than x86-64. Single short
            texts take longer. Graphs for GPUs always do.
        device: "cpu"; or "gpu" for the model on a GPU of the server.
        dev: File of labelled rows on which an int8 graph is evaluated; by default the run's first
            dev file.
        max_metric_drop: By how many points the task's metric may be lower in int8.
        checkpoint: Name of a directory in the checkpoints of the run; by default the best, else
            the latest. Only with the path of a run.
        log: Receives one line per stage.

    Returns:
        The directory of the published version.

    Raises:
        UserError: If the parity check fails, or the metric drops by more than `max_metric_drop`.
            Also if `output_dir` is not a local directory, or the run requires thresholds or a
            temperature that were not tuned for this checkpoint.
        OSError: If the files cannot be written.
    """
    path = paths.path_argument("output_dir", output_dir)
    options.check(path, precision, portable, device, dev, max_metric_drop)
    if precision == "int8" and not has_packed_products("int8"):
        raise UserError(
            "--precision=int8: expected TensorFlow 2.20 or later for x86-64; export float32 or "
            "bfloat16 instead"
        )
    if precision == "int8" and tf.config.get_visible_devices("GPU"):
        raise UserError(
            "--precision=int8: expected a process without a GPU, received one that sees a GPU; "
            "run it again with CUDA_VISIBLE_DEVICES=-1"
        )
    output_dir = pathlib.Path(path)
    _next_version(output_dir)  # Before minutes of work.
    with loaded(model_or_run, checkpoint) as model:
        gate = None
        if precision == "int8":
            # A missing dev file is found before minutes of work.
            dev = dev or metric_gate.dev_file(model)
            gate = functools.partial(
                metric_gate.check, model, dev=dev, max_drop=max_metric_drop, log=log
            )
        return _publish(model, output_dir, precision, portable, device, gate, log)


@contextlib.contextmanager
def loaded(
    model_or_run: TaskModel | os.PathLike | str, checkpoint: str | None
) -> Iterator[TaskModel]:
    """Yield a model of a run whose files describe it: metrics, data and origin.

    Arguments as for `publish`.

    Raises:
        UserError: If the run requires thresholds or a temperature that were not tuned.
    """
    if isinstance(model_or_run, str | os.PathLike):
        model = load_model(model_or_run, checkpoint=checkpoint)
    elif not isinstance(model_or_run, TaskModel):
        raise UserError(
            "model_or_run: expected a model such as TextClassifier or the path of a run, received "
            f"a {type(model_or_run).__name__}"
        )
    elif checkpoint is not None:
        raise UserError(
            f"checkpoint={checkpoint!r}: expected with the path of a run only, received a "
            f"{type(model_or_run).__name__}"
        )
    else:
        model = model_or_run
    if model.has_new_head:
        warn_of_new_head(model, stacklevel=5)
    # XLA compiles TF32 into the programs of a model that has already predicted.
    uses_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    is_exact = model.dtype_policy.name == "float32" and not (
        uses_tf32 and tf.config.get_visible_devices("GPU")
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(exact_float32())  # As in the separate process of the parity check.
        if not (model.source and model.source.is_that_of(model.task, model.network)):
            # The metrics of a run are not those of a model that was trained further.
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            run = model.save_run(os.path.join(directory, "run"))
            model = load_model(run.path)
            model.record["origin"] = run.train.get("origin", "new weights")
        elif not is_exact:
            # The weights are float32, and so are the outputs that others are compared with.
            name = os.path.basename(model.source.path)
            model = load_model(model.source.run.path, checkpoint=name)
        assert model.source  # Since `load_model` read a run.
        if model.source.untuned:
            raise UserError(model.source.untuned)
        yield model


def _publish(model, output_dir, precision, portable, device, gate, log):
    """Publish; `gate` maps the served pipeline of an int8 graph to its `MetricChange`."""
    try:
        with (
            ownership.sole_writer(output_dir) as made,
            files.staging_directory(output_dir / "version") as temporary,
            Progress(log, "stages", 3) as progress,
        ):
            for directory in made:
                os.chmod(directory, 0o755)  # The server may run as another user.
            log(f"writing the SavedModel of {model.record['origin']}")
            pipeline = write_saved_model(model, temporary, precision, portable, device)
            signatures = version_files.prepare(temporary, model, log)
            progress.move(1)
            log("checking parity with the trained model in a separate process")
            examples = [(signature.name, signature.example()) for signature in signatures]
            # Rounding to 8 bits may change any prediction, so that the metric decides; the
            # SavedModel has to compute what the evaluated graph does.
            change = gate(pipeline) if gate else None
            predictions = parity.check(
                temporary, model, precision, examples, pipeline if gate else None, device
            )
            progress.move(2)
            version_files.write_documents(
                temporary,
                _name(output_dir),
                model,
                precision,
                signatures,
                predictions,
                change,
                device,
            )
            for path in (*temporary.rglob("*"), temporary):
                path.chmod(0o755 if path.is_dir() else 0o644)
                files.sync(path)
            version = _rename_to_next_version(temporary, output_dir)
    except (OSError, tf.errors.OpError) as error:
        # TensorFlow reports a full disk as one of several error types; raise one type for all.
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"export failed ({tensorflow_reason(error)}); nothing is published",
            str(output_dir),
        ) from None
    files.sync(output_dir)
    return version


def _next_version(output_dir):
    """Return the number of the next version, which is 1 if there is no directory yet."""
    newest = max(version_directories(output_dir), default=0) if files.exists(output_dir) else 0
    if newest >= MAX_VERSION:
        raise UserError(
            f"--output_dir={output_dir}: has version {newest}, the highest that TensorFlow Serving "
            "reads; expected lower versions only; remove it, or name another directory"
        )
    return newest + 1


def _rename_to_next_version(temporary, output_dir):
    version = _next_version(output_dir)
    while True:
        try:
            os.rename(temporary, output_dir / str(version))
            return output_dir / str(version)
        except OSError:
            if not os.path.lexists(output_dir / str(version)):
                raise
            version += 1  # Another export has published this number meanwhile.


def _name(output_dir):
    """Return the name of the model, which is the name of its directory, as valid UTF-8."""
    # Of a symbolic link the name of the link, which the server gets.
    name = os.path.basename(os.path.abspath(output_dir))
    return name.encode("utf-8", "replace").decode() or "model"
