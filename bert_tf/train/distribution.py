"""Where a run computes: one device, or one replica of the model a device, on one or many hosts."""

import os

import tensorflow as tf

from bert_tf import strict_json
from bert_tf.errors import UserError
from bert_tf.text.packing import flat, padded

# After so long without an answer a worker is taken for lost.
WORKER_TIMEOUT_SECONDS = 120
POLICIES = {"float32": "float32", "tf32": "float32", "bfloat16": "mixed_bfloat16"}


def make_strategy(name, devices=None, tpu="local"):
    """A tf.distribute strategy, to be made before TensorFlow is used for anything else.

    "none"; "mirrored" over `devices`, by default all local GPUs; "multi_worker", over the processes
    that TF_CONFIG lists, one replica a GPU or else one a process; "tpu", over the cores of `tpu`: a
    name, a grpc:// address, or "local" for those of this machine. Raises UserError where there is
    nothing of the kind.
    """
    return {
        "none": tf.distribute.get_strategy,
        "mirrored": lambda: tf.distribute.MirroredStrategy(devices),
        "multi_worker": _multi_worker,
        "tpu": lambda: _tpu(tpu),
    }[name]()


def _tpu(name):
    """As https://www.tensorflow.org/guide/tpu has it; never run."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, ValueError) as error:
        reason = (getattr(error, "message", None) or str(error)).splitlines()[0][:200]
        raise UserError(
            f"--strategy=tpu --tpu={name}: no TPU answers there ({reason}); wanted a TPU's name, a "
            "grpc:// address, or local on a TPU VM"
        ) from None
    return tf.distribute.TPUStrategy(resolver)


def _multi_worker():
    try:
        config = strict_json.parse_object(os.environ["TF_CONFIG"])
        config["cluster"]["worker"][config["task"]["index"]], config["task"]["type"]
    except (KeyError, ValueError, IndexError, TypeError):
        raise UserError(
            "--strategy=multi_worker: wanted the environment variable TF_CONFIG, the same in every "
            'process but for its index: {"cluster": {"worker": ["host1:port", "host2:port"]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from None
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=WORKER_TIMEOUT_SECONDS
        )
    )


def use_precision(precision):
    """Set how this process computes float32 matrix products, and return the Keras dtype policy.

    By default TensorFlow rounds their factors to 10 bits on GPUs with TensorFloat-32, and to
    bfloat16 on TPUs. Here only "tf32" does; the switch is TensorFlow's own and global.

    Args:
        precision: "float32", "tf32" or "bfloat16".
    """
    tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    return POLICIES[precision]


def is_several(strategy):
    """True if other processes take part."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_chief(strategy):
    """True in the one process that writes and speaks: the first worker."""
    return not is_several(strategy) or strategy.cluster_resolver.task_id == 0


def meet(strategy):
    """Waits for all processes."""
    if is_several(strategy):
        float(strategy.experimental_local_results(_count(strategy))[0])


@tf.function(autograph=False)
def _count(strategy):
    """How many replicas there are: each has to answer."""
    return strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.ones([])
        )
    )


def make_layout(strategy):
    """How batches are laid out: `flat`, or `padded` for XLA (a TPU's, or set_jit's)."""
    compiled = tf.config.optimizer.get_jit() or isinstance(strategy, tf.distribute.TPUStrategy)
    return padded if compiled else flat


def distribute(batches, strategy):
    """Of `batches()`, a dataset of replica batches, a step takes one for each replica, in order."""

    def of_process(context):
        count = context.num_input_pipelines
        if count == 1:
            return batches()
        replicas = context.num_replicas_in_sync
        here = replicas // count

        def is_here(number, batch):
            return number % replicas // here == context.input_pipeline_id

        return batches().enumerate().filter(is_here).map(lambda number, batch: batch)

    return strategy.distribute_datasets_from_function(of_process)


def gather(strategy, values):
    """Joins a dict of per-replica results along the batch axis, in order, as numpy arrays."""
    return {name: strategy.gather(value, axis=0).numpy() for name, value in values.items()}
