"""Publishing: whole versions only, whatever happens, and the same bytes from the same run."""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf import UserError, read_pretrained
from export import package, parity, probe, publishing, unpublished, warmup
from export.publishing import publish, versions
from tasks.classification import Classification
from tasks.trained import Trained
from tests import small
from tests.conftest import ROOT
from tests.export import c_engine

# Publishes in processes of its own, each killed at another moment.
KILLED = """
import os, shutil, signal, sys
from export import package, parity, publishing
from tasks.trained import Trained

run, whole, output_dir = sys.argv[1:]

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def write(trained, directory, *rest):
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    if module is None:
        (directory / "saved_model.pb").write_bytes(b"half")
        kill()

for module, name in (
    (None, "while TensorFlow writes"),
    (package.warmup, "write"),
    (parity, "check"),
    (package, "write_documents"),
    (publishing, "_rename_to_next_version"),
):
    process = os.fork()
    if process == 0:
        parity.check = package.write_documents = lambda *arguments: {}
        if module:
            setattr(module, name, kill)
        publishing.publish(Trained.open(run), output_dir, write=write)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL, name
    assert os.listdir(output_dir) == [f".writing-{process}"], name  # Not those before it.
"""


def fake(content=b"model"):
    """Writes what is no SavedModel, in two steps."""

    def write(trained, directory, *rest):
        for name in ("first", "last"):
            (directory / name).write_bytes(content)

    return write


@pytest.fixture
def without_tensorflow(monkeypatch):
    """Publishing alone: nothing is added to what was written, and nothing asked."""
    monkeypatch.setattr(package, "prepare", lambda directory, trained, say: ())
    monkeypatch.setattr(parity, "check", lambda *arguments: {})
    monkeypatch.setattr(package, "write_documents", lambda *arguments: None)


class Nothing:
    checkpoint = "step-00000000"


def test_a_poller_sees_whole_versions_only(tmp_path, without_tensorflow):
    output_dir, seen, is_over = tmp_path / "model", set(), threading.Event()

    def poll():
        while not is_over.is_set():
            for version in versions(output_dir) if output_dir.exists() else ():
                files = sorted(path.name for path in (output_dir / str(version)).iterdir())
                seen.add((version, tuple(files)))

    poller = threading.Thread(target=poll)
    poller.start()
    for _ in range(50):
        publish(Nothing, output_dir, write=fake())
    is_over.set()
    poller.join()
    assert {files for _, files in seen} == {("first", "last")} and len(seen) > 10
    assert versions(output_dir) == list(range(1, 51))
    assert not list(output_dir.glob(".*"))


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_killed_exports_left_is_removed_and_nothing_of_the_living(
    tmp_path, without_tensorflow
):
    dead, held = dead_process(), dead_process()
    names = [f".writing-{number}" for number in (dead, held, os.getppid(), "notes")]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    lines = []
    # A process of another container: its number says nothing here, but its lock does.
    lock = os.open(tmp_path / f".writing-{held}", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    publish(Nothing, tmp_path, lines.append, write=fake())
    assert {path.name for path in tmp_path.iterdir()} == {"1", *names[1:]}
    assert [line for line in lines if "killed" in line] == [
        f"{tmp_path / names[0]}: removed, left by an export that was killed"
    ]
    os.close(lock)
    publish(Nothing, tmp_path, lines.append, write=fake())
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", *names[2:]}


def test_the_folder_being_written_is_held(tmp_path, without_tensorflow):
    own = tmp_path / f".writing-{os.getpid()}"

    def write(trained, directory, *rest):
        assert directory == own and not unpublished._is_free(own)
        with pytest.raises(UserError, match="another export is at work there"):
            publish(Nothing, tmp_path, write=fake())
        (directory / "last").touch()

    own.mkdir()
    (own / "left").touch()  # By a process of our number.
    publish(Nothing, tmp_path, write=write)
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["last"]


def test_the_model_is_called_as_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, name in (("a/models/x y", "x y"), (".", tmp_path.name), ("/", "model")):
        assert publishing._name(pathlib.Path(path)) == name
    assert publishing._name(pathlib.Path(os.fsdecode(b"a\xff"))) == "a?"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, config, vocabulary):
    folder = tmp_path_factory.mktemp("publishing")
    source = read_pretrained(
        str(small.write_huggingface(folder / "huggingface", config, vocabulary))
    )
    task = Classification(labels=("a", "b", "c"), max_seq_length=12)
    return Trained.create(folder / "run", source, task, task.build_model(config)).run.path


def hashes(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def exported_twice(run_dir, tmp_path_factory):
    """Two versions of one run, by two processes, which hash differently, in two directories."""
    folders = [tmp_path_factory.mktemp(name) / "model" for name in ("one", "another")]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "export.export_saved_model"),
                *(f"--run={run_dir}", f"--output_dir={folder}"),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.DEVNULL,
        )
        for seed, folder in enumerate(folders)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    return [folder / "1" for folder in folders]


@pytest.mark.slow
def test_one_run_gives_the_same_bytes_from_two_processes(exported_twice):
    one, another = map(hashes, exported_twice)
    assert one == another
    assert set(one) == {
        *("saved_model.pb", "fingerprint.pb", "variables/variables.index"),
        "variables/variables.data-00000-of-00001",
        *(f"assets.extra/{name}.json" for name in ("config", "task", "tokenizer")),
        *("assets.extra/vocab.txt", "assets.extra/tf_serving_warmup_requests"),
        *("batching_params.pbtxt", "models.config", "SIGNATURES.md", "MODEL_CARD.md"),
    }


@pytest.mark.slow
def test_no_file_tells_of_the_building_machine(exported_twice, run_dir):
    for directory in exported_twice:
        secrets = (run_dir, str(directory.parent), str(ROOT), str(pathlib.Path.home()))
        for path in directory.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            for secret in (*secrets, str(pathlib.Path(run_dir).parent.name), "site-packages"):
                assert secret.encode() not in content, (path, secret)


@pytest.mark.slow
def test_what_servers_run_graphs_with_answers_every_warm_up_record(exported_twice, tmp_path):
    cases = [
        {
            "signature": signature,
            "inputs": {name: parity._encoded(values) for name, values in inputs.items()},
        }
        for signature, inputs in warmup.read(exported_twice[0])
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [
            *(sys.executable, "-I", c_engine.__file__, str(exported_twice[0])),
            *(str(tmp_path / name) for name in ("cases.json", "results.npz")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answered = {name.partition("/")[0] for name in probe.load(tmp_path / "results.npz")}
    assert len(answered) == len(cases) > 10


@pytest.mark.slow
def test_a_poller_can_load_every_version_that_it_sees(
    exported_twice, run_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(parity, "check", lambda *arguments: None)
    monkeypatch.setattr(package, "write_documents", lambda *arguments: None)
    trained, seen, is_over = Trained.open(run_dir), {}, threading.Event()

    def poll():
        while not is_over.wait(0.001):
            for version in set(versions(tmp_path)) - set(seen):
                seen[version] = hashes(tmp_path / str(version))

    poller = threading.Thread(target=poll)
    poller.start()
    for _ in range(20):
        publish(
            trained,
            tmp_path,
            write=lambda trained, directory, *rest: shutil.copytree(
                exported_twice[0], directory, dirs_exist_ok=True
            ),
        )
    is_over.set()
    poller.join()
    assert len(seen) > 1
    assert all(found == hashes(exported_twice[0]) for found in seen.values())
    assert tf.saved_model.load(str(tmp_path / "20")).signatures


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_that_a_server_reads(
    exported_twice, run_dir, tmp_path, without_tensorflow
):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, run_dir, str(exported_twice[0]), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = []
    publish(Nothing, tmp_path, lines.append, write=fake())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert sum("left by an export that was killed" in line for line in lines) == 1
