"""From a run to a numbered version that a server picks up: whole, checked, or not at all."""

import errno
import os
import pathlib

import tensorflow as tf

from bert_tf import paths
from bert_tf.errors import UserError
from bert_tf.files import sync
from export import package, parity, staging
from export.saved_model import write_saved_model


def publish(
    trained,
    output_dir,
    log=lambda line: None,
    precision="float32",
    write=write_saved_model,
):
    """Publishes a trained run as the next version under `output_dir`; returns its path.

    `write(trained, directory, precision)` makes the files. They come to stand under a name that no
    server reads, on the same file system, pass the parity check, and are renamed. Raises UserError,
    with nothing published, if they do not pass, or if the run asked for thresholds or a temperature
    that were not tuned for this checkpoint.
    """
    paths.check_local("output_dir", output_dir)
    if trained.untuned:
        raise UserError(trained.untuned)
    output_dir = pathlib.Path(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir={output_dir}: is a file, wanted a directory of versions")
    try:
        with staging.staging_directory(output_dir, log) as temporary:
            log(f"writing the SavedModel of {trained.checkpoint}")
            write(trained, temporary, precision)
            signatures = package.prepare(temporary, trained, log)
            log("asking it in a process of its own, and comparing")
            examples = [(signature.name, signature.example()) for signature in signatures]
            predictions = parity.check(temporary, trained, precision, examples)
            package.write_documents(
                temporary, _name(output_dir), trained, precision, signatures, predictions
            )
            for path in (*temporary.rglob("*"), temporary):
                path.chmod(0o755 if path.is_dir() else 0o644)  # The server may be another user.
                sync(path)
            return _rename_to_next_version(temporary, output_dir)
    except (OSError, tf.errors.OpError) as error:
        # Of a full disk TensorFlow says one of several things.
        reason = getattr(error, "message", None) or str(error)
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"the export failed ({reason.split(' [Op:')[0].strip()}); nothing is published",
            str(output_dir),
        ) from None


def versions(directory):
    """The published versions under a directory, oldest first."""
    return sorted(
        int(path.name)
        for path in pathlib.Path(directory).iterdir()
        if path.name.isdecimal() and path.is_dir()
    )


def _rename_to_next_version(temporary, output_dir):
    version = max(versions(output_dir), default=0) + 1
    while True:
        try:
            os.rename(temporary, output_dir / str(version))
            sync(output_dir)
            return output_dir / str(version)
        except OSError:
            if not (output_dir / str(version)).exists():
                raise
            version += 1  # Another export was quicker.


def _name(output_dir):
    """What the model is called: the name of its directory, as text."""
    return output_dir.resolve().name.encode("utf-8", "replace").decode() or "model"
