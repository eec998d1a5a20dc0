"""TF_CONFIG: every task type trains or is refused, and a process that waits says for whom."""

import json
import signal
import socket

import pytest

from bert_tf.errors import UserError
from bert_tf.runs.run import Run
from bert_tf.train import cluster
from bert_tf.train.cluster import Cluster
from tests.workers import finish, free_ports, make_flags, start_process, wait_for_line

WORKERS = {"worker": ["a:1", "b:2"]}
WITH_CHIEF = {"chief": ["c:3"], **WORKERS}
ALL = {**WITH_CHIEF, "ps": ["d:4", "e:5"], "evaluator": ["f:6"]}


def variable(jobs, job, index):
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    ("jobs", "job", "index", "addresses", "number"),
    [
        (WORKERS, "worker", 1, ("a:1", "b:2"), 1),
        (WITH_CHIEF, "chief", 0, ("c:3", "a:1", "b:2"), 0),
        (WITH_CHIEF, "worker", 0, ("c:3", "a:1", "b:2"), 1),
        (ALL, "worker", 1, ("c:3", "a:1", "b:2"), 2),
        ({"chief": ["[::1]:3"]}, "chief", 0, ("[::1]:3",), 0),
    ],
)
def test_chief_and_workers_are_counted_together(jobs, job, index, addresses, number):
    found = Cluster.read({"TF_CONFIG": variable(jobs, job, index)})
    assert found == Cluster(addresses, number)


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        (variable(ALL, "ps", 0), "task type 'ps': expected chief or worker"),
        (variable(ALL, "evaluator", 0), "task type 'evaluator': expected chief or worker"),
        (variable(WORKERS, "master", 0), "task type 'master'"),
        (variable({**WORKERS, "master": ["m:1"]}, "worker", 0), "cluster has 'master'"),
        (variable(WORKERS, "worker", 2), "index 2: expected an integer from 0 to 1"),
        (variable(WORKERS, "worker", -1), "index -1"),
        (variable(WORKERS, "worker", "0"), "index '0'"),
        (variable({"chief": ["a:1", "b:2"]}, "chief", 1), "2 chiefs: expected one"),
        (variable({"worker": ["a"]}, "worker", 0), "address 'a': expected host:port"),
        (variable({"worker": ["a:1", "b:65536"]}, "worker", 0), "'b:65536': expected host:port"),
        (variable({"worker": ["a:0"]}, "worker", 0), "address 'a:0': expected host:port"),
        (variable(WORKERS, "chief", 0), "expected the environment variable TF_CONFIG"),
        (variable({"worker": [7]}, "worker", 0), "expected the environment variable TF_CONFIG"),
        ('{"cluster": [], "task": {"type": "worker", "index": 0}}', "TF_CONFIG, equal in"),
        ("{", "expected the environment variable TF_CONFIG"),
        (None, "expected the environment variable TF_CONFIG"),
    ],
)
def test_other_processes_are_refused_in_one_line(tf_config, message):
    environment = {} if tf_config is None else {"TF_CONFIG": tf_config}
    with pytest.raises(UserError, match=message) as raised:
        Cluster.read(environment)
    assert "\n" not in str(raised.value)


@pytest.fixture
def impatient(monkeypatch):
    """Log at once, and look again at once."""
    for name in ("SECONDS_BEFORE_LOG", "SECONDS_BETWEEN_LOGS", "_SECONDS_BETWEEN_LOOKS"):
        monkeypatch.setattr(cluster, name, 0.0)


def addresses(count):
    return tuple(f"localhost:{port}" for port in free_ports(count))


def test_a_worker_says_whom_it_waits_for_until_they_listen(impatient):
    """Start one of the missing workers at each line."""
    others, lines = addresses(3), []
    servers = []

    def log(line):
        lines.append(line)
        # Connections to the worker that waits are accepted meanwhile.
        socket.create_connection(("localhost", int(others[0].rpartition(":")[2]))).close()
        port = int(others[len(lines)].rpartition(":")[2])
        servers.append(socket.create_server(("localhost", port)))

    Cluster(others, 0).wait(log)
    for server in servers:
        server.close()
    missing = [f"{number} ({others[number]})" for number in (1, 2)]
    assert lines == [
        f"worker 0: waiting for worker {', '.join(missing)} to be started",
        f"worker 0: waiting for worker {missing[1]} to be started",
    ]


def test_a_worker_that_waits_can_be_interrupted(impatient):
    def log(line):
        signal.raise_signal(signal.SIGINT)

    # A shell makes its background jobs ignore SIGINT, and these tests may be such a job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Cluster(addresses(2), 1).wait(log)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_port_in_use_is_named(impatient):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"worker 0: port {port} of this machine: Address"):
            Cluster((f"localhost:{port}",), 0).wait(pytest.fail)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return make_flags(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_a_chief_and_a_worker_train_together(flags, tmp_path):
    first, second = addresses(2)
    jobs = {"chief": [first], "worker": [second], "ps": ["localhost:1"]}
    processes = [
        start_process("bert_tf.pretrain", {**flags, "output_dir": tmp_path / "run"}, jobs, job, 0)
        for job in ("worker", "chief")
    ]
    worker, chief = finish(processes)
    assert "step 10/10" in chief and "on 2 replicas" in chief and worker == ""
    assert Run.open(tmp_path / "run").checkpoints.steps()[-1] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_started", "signum", "status"),
    [(False, signal.SIGTERM, 143), (True, signal.SIGINT, -signal.SIGINT)],
)
def test_a_worker_without_its_peer_ends_at_a_signal(flags, tmp_path, is_started, signum, status):
    """Wait for a worker that is not there, or that listens and says nothing."""
    first, second = addresses(2)
    with socket.socket() as peer:
        if is_started:
            peer.bind(("localhost", int(first.rpartition(":")[2])))
            peer.listen()
        jobs = {"worker": [first, second]}
        flags = {**flags, "output_dir": tmp_path / "run"}
        process = start_process("bert_tf.pretrain", flags, jobs, "worker", 1)
        if is_started:
            peer.accept()  # The next connection is that of TensorFlow.
            peer.accept()
        else:
            assert f"worker 0 ({first})" in wait_for_line(process, "worker 1: waiting for ")
        process.send_signal(signum)
        process.communicate(timeout=60)
    assert process.returncode == status
    assert not (tmp_path / "run").exists()
