"""Where a run computes: one device, or one replica of the model a device, on one or many hosts."""

import functools
import hashlib
import json
import os
import re

import tensorflow as tf

from bert_tf import strict_json
from bert_tf.errors import UserError
from bert_tf.text.packing import to_flat, to_padded

_OF_WORKERS = re.compile(
    r"Collective ops is aborted|tensorflow\.(Worker|Coordination)Service|[Cc]oordination service"
)
_LOST = re.compile(
    r"(?:remote target|reported from|heartbeats\):)\s+/job:worker(?:/replica:\d+)?/task:(\d+)"
)
_FIRST = re.compile(r"RPC to coordination service|RPC: /tensorflow\.CoordinationService/")
DTYPE_POLICIES = {"float32": "float32", "tf32": "float32", "bfloat16": "mixed_bfloat16"}


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
    # Collectives have no timeout: each would start threads that sleep for all of it. TensorFlow's
    # coordination service, which the strategy starts, misses a worker that sends no heartbeat for
    # 10 seconds, however long one works between two collectives.
    return tf.distribute.MultiWorkerMirroredStrategy()


def names_lost_worker(function):
    """Decorate a function that trains: a lost worker is a UserError, wherever it is noticed."""

    @functools.wraps(function)
    def decorated(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            user_error = lost_worker(error)
            if user_error is None:
                raise
            raise user_error from None

    return decorated


def lost_worker(error, where=""):
    """Return the UserError for an error of TensorFlow's that a lost worker caused, or None."""
    text = str(error)
    if not _OF_WORKERS.search(text):
        return None
    task = _LOST.search(text)
    # The first worker runs the service that all others send their heartbeats to.
    is_first = task is None and _FIRST.search(text)
    name = f"worker {task[1]}, " if task else "worker 0, " if is_first else ""
    return UserError(
        f"{where}another worker is lost ({name}{type(error).__name__}); start all of them again "
        "with the same commands: they go on from the last save"
    )


def use_precision(precision):
    """Set how this process computes float32 matrix products, and return the Keras dtype policy.

    By default TensorFlow rounds their factors to 10 bits on GPUs with TensorFloat-32, and to
    bfloat16 on TPUs. Here only "tf32" does; the switch is TensorFlow's own and global.

    Args:
        precision: "float32", "tf32" or "bfloat16".
    """
    tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    return DTYPE_POLICIES[precision]


def is_multi_worker(strategy):
    """True if other processes take part."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_chief(strategy):
    """True in the one process that writes and speaks: the first worker."""
    return not is_multi_worker(strategy) or strategy.cluster_resolver.task_id == 0


def barrier(strategy):
    """Waits for all processes."""
    from_chief(strategy, lambda: 0)


def from_chief(strategy, function):
    """Return the integer (or bool) that `function()` is in the chief; all processes have to call.

    What decides how a run goes on is looked up by the one process that writes: others might read a
    file that it is replacing, and would then wait for it in another collective than it for them.
    """
    number = int(function()) if is_chief(strategy) else 0
    if not is_multi_worker(strategy):
        return number
    results = _of_first_replica(strategy, tf.constant(number, tf.int64))
    return int(strategy.experimental_local_results(results)[0])


@tf.function(autograph=False)
def _of_first_replica(strategy, number):
    def on_replica():
        replica = tf.distribute.get_replica_context()
        is_first = tf.equal(replica.replica_id_in_sync_group, 0)
        own = tf.where(is_first, number, tf.zeros_like(number))
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

    return strategy.run(on_replica)


def check_alike(strategy, values):
    """Raise UserError in each process whose `values`, anything JSON can hold, are not the chief's.

    They would take other steps than the chief, and both would wait for each other forever.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    number = int(digest[:12], 16)
    if from_chief(strategy, lambda: number) != number:
        raise UserError(
            "this worker has other flags or other data than the first one; start all of them with "
            "the same flags, on the same files"
        )


def choose_layout(strategy):
    """How batches are laid out: `to_flat`, or `to_padded` for XLA (a TPU's, or set_jit's)."""
    compiled = tf.config.optimizer.get_jit() or isinstance(strategy, tf.distribute.TPUStrategy)
    return to_padded if compiled else to_flat


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
