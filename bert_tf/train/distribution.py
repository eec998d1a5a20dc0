"""Distribution strategies, precision, and coordination between worker processes."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bert_tf.errors import UserError, tensorflow_reason
from bert_tf.train.cluster import Cluster
from bert_tf.train.compilation import GPU, is_accelerated, is_default
from bert_tf.train.signals import default_signals

# TensorFlow reports a lost worker in the text of its errors only.
_OF_WORKERS = re.compile(
    r"Collective ops is aborted|tensorflow\.(Worker|Coordination)Service|[Cc]oordination service"
)
_LOST = re.compile(
    r"(?:remote target|reported from|heartbeats\):)\s+/job:worker(?:/replica:\d+)?/task:(\d+)"
)
_FIRST = re.compile(r"RPC to coordination service|RPC: /tensorflow\.CoordinationService/")
DTYPE_POLICIES = {
    "float32": "float32",
    "tf32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
BFLOAT16_CAPABILITY = (8, 0)  # Of the first GPUs whose matrix units have bfloat16 (A100).
_BATCHES_ON_GPU = 2  # Copied before the step asks for them.


def make_strategy(
    name: str, tpu: str = "local", log: Callable[[str], None] = lambda line: None
) -> tf.distribute.Strategy:
    """Return a tf.distribute strategy. Call this before TensorFlow is used for anything else.

    Args:
        name: "none"; "mirrored", one replica per local GPU; "multi_worker", the processes listed in
            TF_CONFIG, with one replica per GPU, or one per process without GPUs; or "tpu", one
            replica per core.
        tpu: The TPU's name, a grpc:// address, or "local" on a TPU VM.
        log: Receives lines on workers that this process waits for.

    Returns:
        `tf.distribute.Strategy`.

    Raises:
        UserError: There is no such TPU, or TF_CONFIG is missing, malformed or of a process that
            does not train.
    """
    # Lambdas, because creating a strategy initializes TensorFlow's devices.
    return {
        "none": tf.distribute.get_strategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "multi_worker": lambda: _multi_worker(Cluster.read(), log),
        "tpu": lambda: _tpu(tpu),
    }[name]()


def _tpu(name):
    """Return a `TPUStrategy`, as in https://www.tensorflow.org/guide/tpu. Untested on hardware."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, ValueError) as error:
        reason = tensorflow_reason(error)[:200]
        raise UserError(
            f"--strategy=tpu --tpu={name}: no TPU found ({reason}); expected a TPU name, a grpc:// "
            "address, or local on a TPU VM"
        ) from None
    return tf.distribute.TPUStrategy(resolver)


def _multi_worker(cluster, log):
    """Return a `MultiWorkerMirroredStrategy` once all processes of a cluster are there."""
    cluster.wait(log)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": cluster.addresses}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )
    # Collectives have no timeout here: each one would start threads that sleep until it expires.
    # TensorFlow's coordination service, which the strategy starts, detects a worker that sends no
    # heartbeat for 10 seconds, regardless of the time between two collectives.
    with default_signals():
        return tf.distribute.MultiWorkerMirroredStrategy(resolver)


def names_lost_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function to raise `UserError` if a worker is lost."""

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


def lost_worker(error: tf.errors.OpError, where: str = "") -> UserError | None:
    """Return the `UserError` for a TensorFlow error that a lost worker caused, or `None`.

    Args:
        error: Error raised by TensorFlow.
        where: Prefix of the message, such as the current step.
    """
    text = str(error)
    # The replicas of one process abort each other's collectives as well, whatever failed.
    if "TF_CONFIG" not in os.environ or not _OF_WORKERS.search(text):
        return None
    task = _LOST.search(text)
    # Worker 0 runs the coordination service that receives all heartbeats.
    is_first = task is None and _FIRST.search(text)
    name = f"worker {task[1]}, " if task else "worker 0, " if is_first else ""
    return UserError(
        f"{where}another worker is lost ({name}{type(error).__name__}); restart all workers "
        "with the same commands to resume from the latest checkpoint"
    )


def resolve_precision(precision: str, strategy: tf.distribute.Strategy) -> str:
    """Return the precision that "auto" selects for the devices of a strategy.

    Args:
        precision: A precision of `use_precision`, which is returned unchanged; or "auto": bfloat16
            on TPUs and on GPUs with matrix units for it, float16 on other GPUs, float32 on CPUs.
        strategy: Distribution strategy.
    """
    if precision != "auto":
        return precision
    if not is_accelerated(strategy):
        return "float32"
    gpus = [] if isinstance(strategy, tf.distribute.TPUStrategy) else _gpus(strategy)
    details = map(tf.config.experimental.get_device_details, gpus)
    capabilities = [of.get("compute_capability", BFLOAT16_CAPABILITY) for of in details]
    is_fast = min(capabilities, default=BFLOAT16_CAPABILITY) >= BFLOAT16_CAPABILITY
    return "bfloat16" if is_fast else "float16"


def _gpus(strategy):
    """Return the visible GPUs that compute, without another one such as that of a display."""
    devices = [GPU] if is_default(strategy) else strategy.extended.worker_devices
    numbers = [tf.DeviceSpec.from_string(device).device_index for device in devices]
    gpus = enumerate(tf.config.get_visible_devices("GPU"))
    return [gpu for number, gpu in gpus if number in numbers]


def use_precision(precision: str) -> str:
    """Set the precision of this process's float32 matrix products; return a Keras dtype policy.

    By default TensorFlow rounds their factors to 10 bits on GPUs with TensorFloat-32, and to
    bfloat16 on TPUs. Here only "tf32" does so. The switch is TensorFlow's own and is global.

    Args:
        precision: "float32", "tf32", "bfloat16" or "float16".

    Returns:
        "float32", "mixed_bfloat16" or "mixed_float16".
    """
    tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    return DTYPE_POLICIES[precision]


def warn_of_float16(policy: str) -> None:
    """Warn if the replicas of the current strategy have no products in a policy's float16."""
    if policy == "mixed_float16" and not is_accelerated(tf.distribute.get_strategy()):
        warnings.warn(
            "float16 on a CPU is many times slower than float32; choose float32, or use a GPU",
            stacklevel=2,
        )


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Turn TensorFlow's global switch of TensorFloat-32 off, and afterwards back to what it was."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Return True if other processes take part."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Return True in worker 0, the only process that writes and logs."""
    return not is_multi_worker(strategy) or strategy.cluster_resolver.task_id == 0


def barrier(strategy: tf.distribute.Strategy) -> None:
    """Wait for all processes."""
    from_chief(strategy, lambda: 0)


def from_chief(strategy: tf.distribute.Strategy, function: Callable[[], int]) -> int:
    """Return the chief's result of `function()` in all processes, which all have to call this.

    Only the chief reads the files that decide how a run continues. Another process could read a
    file while the chief replaces it, decide differently and wait in another collective forever.

    Args:
        strategy: Distribution strategy.
        function: Returns an int or bool; called by the chief only.

    Returns:
        The result as an int.
    """
    number = int(function()) if is_chief(strategy) else 0
    if not is_multi_worker(strategy):
        return number
    # All replicas but the first add 0, so the sum broadcasts the chief's number.
    return _sum_of_replicas(strategy, number, of_first=True)


def in_any_process(strategy: tf.distribute.Strategy, is_true: bool) -> bool:
    """Return whether something is true in any of the processes, which all have to call this."""
    if not is_multi_worker(strategy):
        return is_true
    return _sum_of_replicas(strategy, int(is_true), of_first=False) > 0


def _sum_of_replicas(strategy, number, of_first):
    """Return the sum of an int over all replicas, or the first replica's number."""
    results = _traced_sum(strategy, tf.constant(number, tf.int64), of_first)
    return int(strategy.experimental_local_results(results)[0])


@tf.function(autograph=False)
def _traced_sum(strategy, number, of_first):
    def on_replica():
        replica = tf.distribute.get_replica_context()
        is_added = tf.equal(replica.replica_id_in_sync_group, 0) if of_first else True
        own = tf.where(is_added, number, tf.zeros_like(number))
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

    return strategy.run(on_replica)


def check_alike(strategy: tf.distribute.Strategy, values: Any) -> None:
    """Check that `values` are equal in all processes.

    Otherwise workers would take different steps than the chief and wait for each other forever.

    Args:
        strategy: Distribution strategy.
        values: Any JSON-serializable value.

    Raises:
        UserError: The values of this process differ from the chief's.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    # 48 bits of the hash fit into the int64 that is broadcast.
    number = int(digest[:12], 16)
    if from_chief(strategy, lambda: number) != number:
        raise UserError(
            "this worker's flags or data differ from those of worker 0; start all workers with the "
            "same flags and files"
        )


@dataclasses.dataclass(frozen=True)
class LocalReplicas:
    """The replicas of one process, among all that read the elements of a dataset in turn.

    Attributes:
        first: Number of the first one.
        count: Their number.
        total: The number of all replicas.
    """

    first: int = 0
    count: int = 1
    total: int = 1

    def select(self, elements: tf.data.Dataset, per_replica: int = 1) -> tf.data.Dataset:
        """Return the elements that these replicas read, in order.

        Args:
            elements: Dataset, the same one in every process.
            per_replica: Consecutive elements that a replica reads in a step.
        """
        if self.count == self.total:
            return elements

        def is_here(number, _):
            replica = number // per_replica % self.total
            return (replica >= self.first) & (replica < self.first + self.count)

        return elements.enumerate().filter(is_here).map(lambda _, element: element)


def distribute(
    batches: Callable[[LocalReplicas], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    is_compiled: bool = False,
) -> tf.distribute.DistributedDataset:
    """Distribute a dataset of per-replica batches; a step reads one per replica, in order.

    Args:
        batches: Returns the batches that some replicas read. It selects them with
            `LocalReplicas.select`, as early as it can, so that a process makes no batch of others.
        strategy: Distribution strategy.
        is_compiled: Whether the step is compiled by XLA. A single GPU then receives batches before
            the step asks for them; operations that are not compiled read integers from the host.

    Returns:
        `tf.distribute.DistributedDataset`.
    """

    def of_process(context):
        count, total = context.num_input_pipelines, context.num_replicas_in_sync
        here = total // count
        dataset = batches(LocalReplicas(context.input_pipeline_id * here, here, total))
        # Strategies of several replicas do this by themselves.
        if is_compiled and is_default(strategy) and is_accelerated(strategy):
            to_gpu = tf.data.experimental.prefetch_to_device(GPU, _BATCHES_ON_GPU)
            dataset = dataset.apply(to_gpu)
        return dataset

    return strategy.distribute_datasets_from_function(of_process)


def gather(strategy: tf.distribute.Strategy, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Concatenate per-replica results along axis 0, in replica order, as numpy arrays."""
    # Outside of a tf.function, every gather of several processes would trace a function of its own.
    function = _gather if is_multi_worker(strategy) else _gather.python_function
    return {name: value.numpy() for name, value in function(strategy, dict(values)).items()}


@tf.function(autograph=False, reduce_retracing=True)
def _gather(strategy, values):
    return {name: strategy.gather(value, axis=0) for name, value in values.items()}
