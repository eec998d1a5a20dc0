"""TensorBoard's event files: metrics by step, less those of steps that are repeated."""

import tensorflow as tf

# What TensorBoard's own tf.summary.scalar writes, which wants TensorBoard to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class EventFiles:
    """The event files in a directory; each process adds one."""

    def __init__(self, directory):
        self._writer = tf.summary.create_file_writer(directory)

    def write(self, record):
        """Write the values of {"step": ..., name: value}."""
        with self._writer.as_default(step=record["step"]):
            for name, value in record.items():
                if name != "step":
                    tf.summary.write(name, tf.constant(value, tf.float32), metadata=_SCALAR)
        self._writer.flush()

    def forget_from(self, step):
        """Make readers drop all they have read of `step` and later ones.

        TensorBoard takes the start of a session at a step to mean that.
        """
        log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(step=step, session_log=log)
        event.wall_time = tf.timestamp().numpy()
        # The only public way to an Event that is no Summary.
        tf.raw_ops.ImportEvent(writer=self._writer._resource, event=event.SerializeToString())
        self._writer.flush()
