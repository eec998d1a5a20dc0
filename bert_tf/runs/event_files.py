"""Write metrics to TensorBoard event files."""

import os
from collections.abc import Mapping

import tensorflow as tf

# As in tf.summary.scalar, which is not used since it requires TensorBoard to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class EventFiles:
    """Event file writer. Each process adds a file to the directory."""

    def __init__(self, directory: str | os.PathLike) -> None:
        self._writer = tf.summary.create_file_writer(directory)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write metrics by name. "step" is their step."""
        with self._writer.as_default(step=metrics["step"]):
            for name, value in metrics.items():
                if name != "step":
                    tf.summary.write(name, tf.constant(value, tf.float32), metadata=_SCALAR)
        # Flushed at once, so that the metrics remain if the process is killed.
        self._writer.flush()

    def forget_from(self, step: int) -> None:
        """Make readers discard the metrics of `step` and of later steps.

        TensorBoard does so if an event marks the start of a session at `step`.
        """
        log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(step=step, session_log=log)
        event.wall_time = tf.timestamp().numpy()
        # tf.summary cannot write an event without a summary, this public operation can.
        tf.raw_ops.ImportEvent(writer=self._writer._resource, event=event.SerializeToString())
        self._writer.flush()
