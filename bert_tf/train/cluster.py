"""The worker processes of TF_CONFIG: which one this process is, and waiting for the others."""

import contextlib
import dataclasses
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from bert_tf.errors import UserError
from bert_tf.storage import strict_json

JOBS = ("chief", "worker")  # Those that train, in their order.
UNUSED_JOBS = ("ps", "evaluator")  # May be listed, but have nothing to do here.
SECONDS_BEFORE_LOG, SECONDS_BETWEEN_LOGS = 15.0, 60.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_CONNECT = 2.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that train together.

    Attributes:
        addresses: "host:port" of each worker. A chief, if there is one, is worker 0.
        index: Index of this process.
    """

    addresses: tuple[str, ...]
    index: int

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read TF_CONFIG.

        Args:
            environment: Variables of the environment.

        Raises:
            UserError: If it is missing or malformed, or this process is not one that trains.
        """
        try:
            config = strict_json.parse_object(environment["TF_CONFIG"])
            return cls._of(config["cluster"], config["task"])
        except UserError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError):
            raise UserError(
                "--strategy=multi_worker: expected the environment variable TF_CONFIG, equal in "
                'all processes except for the index: {"cluster": {"worker": ["host1:port", '
                '"host2:port"]}, "task": {"type": "worker", "index": 0}}'
            ) from None

    @classmethod
    def _of(cls, jobs: dict[str, Any], task: dict[str, Any]) -> Self:
        job, index = task["type"], task["index"]
        if unknown := sorted(jobs.keys() - {*JOBS, *UNUSED_JOBS}):
            raise UserError(f"TF_CONFIG: cluster has {unknown[0]!r:.80}: expected chief and worker")
        if job not in JOBS:
            raise UserError(
                f"TF_CONFIG: task type {job!r:.80}: expected chief or worker; the workers hold the "
                "weights and evaluate, so start no process of another type"
            )
        if len(jobs.get("chief", [])) > 1:
            raise UserError(f"TF_CONFIG: {len(jobs['chief'])} chiefs: expected one, or none")
        if type(index) is not int or not 0 <= index < len(jobs[job]):
            raise UserError(
                f"TF_CONFIG: task index {index!r:.80}: expected an integer from 0 to "
                f"{len(jobs[job]) - 1}, since the cluster has {len(jobs[job])} of type {job}"
            )
        addresses = [address for name in JOBS for address in jobs.get(name, [])]
        for address in addresses:
            is_address = re.fullmatch(r".+:\d+", address)
            if not is_address or not 0 < _host_and_port(address)[1] < 2**16:
                raise UserError(f"TF_CONFIG: address {address!r:.80}: expected host:port")
        first = len(jobs.get("chief", [])) if job == "worker" else 0
        return cls(tuple(addresses), first + index)

    def wait(self, log: Callable[[str], None]) -> None:
        """Return once each of the other processes has been started.

        TensorFlow waits for them as well, but in silence, and deaf to signals.

        Args:
            log: Receives a line per minute that names those that are missing.

        Raises:
            UserError: If another process uses the port of this one.
        """
        missing = {
            number: address for number, address in enumerate(self.addresses) if number != self.index
        }
        next_log = time.monotonic() + SECONDS_BEFORE_LOG
        with self._answering() as answer:
            while True:
                missing = {
                    number: address for number, address in missing.items() if not _answers(address)
                }
                if not missing:
                    return
                answer()
                if time.monotonic() >= next_log:
                    names = ", ".join(f"{number} ({missing[number]})" for number in missing)
                    log(f"worker {self.index}: waiting for worker {names} to be started")
                    next_log += SECONDS_BETWEEN_LOGS
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Callable[[], None]]:
        """Listen on the port of this process, as TensorFlow's server does afterwards.

        Yields:
            Function that accepts the connections that are waiting.
        """
        _, port = _host_and_port(self.addresses[self.index])
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        try:
            server = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            raise UserError(
                f"TF_CONFIG: worker {self.index}: port {port} of this machine: {error.strerror}; "
                "is the worker running already?"
            ) from None
        server.setblocking(False)

        def answer():
            with contextlib.suppress(BlockingIOError):
                while True:
                    server.accept()[0].close()

        with server:
            yield answer


def _answers(address):
    try:
        socket.create_connection(_host_and_port(address), _SECONDS_TO_CONNECT).close()
    except OSError:  # Refused, unreachable, or a name that is not known yet.
        return False
    return True


def _host_and_port(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
