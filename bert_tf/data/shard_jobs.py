"""Jobs that write one shard per task, in processes of this machine or on a cluster."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from bert_tf.errors import UserError
from bert_tf.system import cpus
from bert_tf.system.command import flag

OnEntry = Callable[[Mapping[str, Any]], None]
Make = Callable[[Iterable[tuple], OnEntry], None]
_DASK_RUNNER = "apache_beam.runners.dask.dask_runner.DaskRunner"


class ShardJob(Protocol):
    """Job of the workers. The object is pickled and sent to each of them."""

    @property
    def directory(self) -> str:
        """Directory of the shards."""

    def open(self) -> Callable[..., Any]:
        """Return the function that writes the shard of a task, and its entry file.

        It is called with the values of the task and returns the entry.

        A worker calls this once. TensorFlow is imported here.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """Flags of commands that write shards: where their workers run.

    Raises:
        UserError: If a value is invalid. The message names the flag.
    """

    num_workers: int | None = flag("number of processes; default: one per processor", None)
    runner: str = flag(
        "local: processes on this machine; beam: Apache Beam; dask: a Dask cluster, with Beam",
        "local",
        choices=("local", "beam", "dask"),
    )
    beam_args: str = flag("options of Apache Beam, as on its command line", "")
    dask_address: str | None = flag(
        "address of the Dask scheduler, such as tcp://10.0.0.1:8786", None
    )

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise UserError(f"--num_workers={self.num_workers}: expected an integer >= 1")
        if self.beam_args and self.runner == "local":
            raise UserError(f"--beam_args={self.beam_args}: requires --runner=beam")
        if (self.dask_address is not None) != (self.runner == "dask"):
            raise UserError("--runner=dask and --dask_address: expected both, received one")

    @property
    def workers(self) -> int:
        """Maximum number of worker processes."""
        return self.num_workers or cpus.count()

    @property
    def beam_options(self) -> str:
        """Options of Apache Beam, with those of a Dask cluster."""
        if self.runner != "dask":
            return self.beam_args
        # One shard per task of Dask; by default, a single one would get all shards.
        address = f"--dask_client_address={self.dask_address}"
        return f"--runner={_DASK_RUNNER} {address} --dask_partition_size=1 {self.beam_args}"


def run(
    settings: RunnerSettings, job: ShardJob, num_tasks: int
) -> contextlib.AbstractContextManager[Make]:
    """Start the workers of a job for a block.

    Args:
        settings: Where they run.
        job: The job.
        num_tasks: Number of shards to write.

    Returns:
        Context manager of the function that writes the shards of an iterable of tasks. It passes
        the entry of each to its second argument, in order of completion.

    Raises:
        UserError: If Apache Beam or Dask is not installed.
    """
    if settings.runner == "local":
        from bert_tf.data.workers import run_local

        return run_local(job, min(settings.workers, num_tasks))
    try:
        from bert_tf.data.beam import run_on_beam

        if settings.runner == "dask":
            import distributed  # noqa: F401  Beam's own message names no package.
    except ModuleNotFoundError as error:
        raise UserError(
            f"--runner={settings.runner}: {error.name} is not installed; "
            f"pip install 'bert_tf[{settings.runner}]'"
        ) from None
    return run_on_beam(job, settings.beam_options, f"--runner={settings.runner}")
