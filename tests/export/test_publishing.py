"""Publishing: atomic under any interruption, and identical bytes from the same run."""

import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading
import types

import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401  Registers the operations that the tokenizer needs.

from bert_tf import UserError, read_pretrained
from export import publishing
from export.checks import isolated_runner, parity
from export.export_saved_model import ExportSettings
from export.package import version_files, warmup
from tasks.graph.published import published_version, version_directories
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.conftest import ROOT
from tests.export import c_engine

# Publishes in separate processes, each killed at another moment.
KILLED = """
import os, shutil, signal, sys
from export import publishing
from export.checks import parity
from export.package import version_files

run, complete, output_dir = sys.argv[1:]

def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def write(trained, directory, *rest):
    shutil.copytree(complete, directory, dirs_exist_ok=True)
    if module is None:
        (directory / "saved_model.pb").write_bytes(b"half")
        kill()

for module, name in (
    (None, "while TensorFlow writes"),
    (version_files.warmup, "write"),
    (parity, "check"),
    (version_files, "write_documents"),
    (publishing, "_rename_to_next_version"),
):
    process = os.fork()
    if process == 0:
        parity.check = version_files.write_documents = lambda *arguments: {}
        if module:
            setattr(module, name, kill)
        publishing.write_saved_model = write
        publishing.publish(run, output_dir)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL, name
    assert set(os.listdir(output_dir)) == {".bert_tf.lock", ".writing-version"}, name
"""


def publish(*args, write=publishing.write_saved_model, **options):
    """Publish with a function that writes the SavedModel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "write_saved_model", write)
        return publishing.publish(*args, **options)


def fake(content=b"model"):
    """Return a writer of something that is no SavedModel, in two steps."""

    def write(trained, directory, *rest):
        for name in ("first", "last"):
            (directory / name).write_bytes(content)

    return write


NOTHING = types.SimpleNamespace(
    source=types.SimpleNamespace(
        path="step-00000000", untuned=None, is_that_of=lambda task, network: True
    ),
    task=None,
    network=None,
    dtype_policy=types.SimpleNamespace(name="float32"),
    has_new_head=False,
    record={"origin": "run RUN"},
)


@pytest.fixture
def without_tensorflow(monkeypatch):
    """Publish only: no run is read, nothing is added to the files, no parity check runs."""
    monkeypatch.setattr(publishing, "load_model", lambda path, checkpoint: NOTHING)
    monkeypatch.setattr(version_files, "prepare", lambda directory, trained, log: ())
    monkeypatch.setattr(parity, "check", lambda *arguments: {})
    monkeypatch.setattr(version_files, "write_documents", lambda *arguments: None)


def test_a_poller_sees_complete_versions_only(tmp_path, without_tensorflow):
    output_dir, seen, is_over = tmp_path / "model", set(), threading.Event()

    def poll():
        while not is_over.is_set():
            for version in version_directories(output_dir) if output_dir.exists() else ():
                files = sorted(path.name for path in (output_dir / str(version)).iterdir())
                seen.add((version, tuple(files)))

    poller = threading.Thread(target=poll)
    poller.start()
    for _ in range(50):
        publish("run", output_dir, write=fake())
    is_over.set()
    poller.join()
    assert {files for _, files in seen} == {("first", "last")} and len(seen) > 10
    assert list(version_directories(output_dir)) == list(range(1, 51))
    assert not list(output_dir.glob(".*"))


def test_versions_are_the_names_that_tensorflow_serving_reads(tmp_path, without_tensorflow):
    newest, too_new = str(2**63 - 1), str(2**63)
    for name in ("2", "3", "003", "007", "\u0668", "\u00b2", "-9", "1_0", too_new, "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").touch()
    found = version_directories(tmp_path)
    assert list(found) == [2, 3, 7]
    assert [os.path.basename(path) for path in found.values()] == ["2", "3", "007"]
    assert published_version(tmp_path) is None
    (tmp_path / "007" / "saved_model.pb").touch()
    assert published_version(tmp_path) == str(tmp_path / "007")
    (tmp_path / "8").unlink()
    assert publish("run", tmp_path, write=fake()) == tmp_path / "8"
    (tmp_path / newest).mkdir()
    with pytest.raises(UserError, match=f"has version {newest}, the highest that TensorFlow Serv"):
        publish("run", tmp_path, write=fake())
    assert list(version_directories(tmp_path))[-2:] == [8, int(newest)]


def contents(output_dir):
    return {path.name for path in output_dir.iterdir()}


@pytest.mark.parametrize("has_locks", [True, False])
def test_files_of_killed_exports_are_overwritten_unless_they_may_be_of_running_ones(
    tmp_path, without_tensorflow, monkeypatch, has_locks
):
    left = tmp_path / ".writing-version"
    left.mkdir()
    (left / "left").touch()
    if not has_locks:

        def refuse(*arguments):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    version = publish("run", tmp_path, write=fake())
    assert sorted(os.listdir(version)) == ["first", "last"]
    assert contents(tmp_path) == {"1", *([] if has_locks else [left.name])}


def test_one_process_at_a_time_exports_to_a_directory(tmp_path, without_tensorflow):
    def write(trained, directory, *rest):
        with pytest.raises(UserError, match=rf"another process \(PID {os.getpid()} on "):
            publish("run", tmp_path, write=fake())
        (directory / "last").touch()

    publish("run", tmp_path, write=write)
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["last"]


def test_a_server_of_another_user_can_read_a_version_under_any_umask(tmp_path, without_tensorflow):
    def write(trained, directory, *rest):
        (directory / "variables").mkdir()
        (directory / "variables" / "last").touch(0o600)

    before = os.umask(0o077)
    try:
        version = publish("run", tmp_path / "models" / "name", write=write)
    finally:
        os.umask(before)
    inner = (version.parents[1], version.parent, version, version / "variables")
    assert {stat.S_IMODE(path.stat().st_mode) for path in inner} == {0o755}
    assert stat.S_IMODE((version / "variables" / "last").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.OutOfRangeError(
            None,
            None,
            "{{function_node __wrapped__SaveV2_device_/a:0}} variables; full [Op:SaveV2]",
        ),
        OSError(errno.ENOSPC, "No space left on device", "variables"),
    ],
)
def test_a_failed_export_leaves_nothing(tmp_path, without_tensorflow, error):
    def write(trained, directory, *rest):
        (directory / "half").touch()
        raise error

    with pytest.raises(OSError, match=r"export failed \([v\[].*; nothing is published") as raised:
        publish("run", tmp_path / "models" / "name", write=write)
    assert "{{" not in str(raised.value) and "[Op:" not in str(raised.value)
    assert raised.value.filename == str(tmp_path / "models" / "name")
    assert not list(tmp_path.iterdir())


def test_versions_are_published_to_local_directories_only(
    tmp_path, without_tensorflow, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^output_dir=gs://b/m: expected a local path"):
        publish("run", "gs://b/m", write=fake())
    with pytest.raises(UserError, match=r"^output_dir=models \[x\]: expected a path without"):
        publish("run", "models [x]", write=fake())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", None, 3, b"models"])
def test_a_directory_of_versions_has_a_name(path, tmp_path, without_tensorflow, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^output_dir: expected a directory, received {path!r}$"):
        publish("run", path, write=fake())
    assert not list(tmp_path.iterdir())


def test_the_model_has_the_name_of_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, name in (("a/models/x y", "x y"), (".", tmp_path.name), ("/", "model")):
        assert publishing._name(pathlib.Path(path)) == name
    assert publishing._name(pathlib.Path(os.fsdecode(b"a\xff"))) == "a?"


def test_a_link_to_a_directory_of_versions_names_the_model(tmp_path, without_tensorflow):
    (tmp_path / "store").mkdir()
    (tmp_path / "name").symlink_to("store")
    (tmp_path / "store" / "1").symlink_to("removed")
    assert publishing._name(tmp_path / "name") == "name"
    assert publish("run", tmp_path / "name", write=fake()) == tmp_path / "name" / "2"


def test_neither_a_version_nor_a_run_gets_versions(tmp_path, run_dir, without_tensorflow):
    version = publish("run", tmp_path / "name", write=fake())
    (version / "saved_model.pb").touch()
    (tmp_path / "file").touch()
    for path, message in (
        (version, f"is a version itself; name the directory of versions, {tmp_path / 'name'}$"),
        (run_dir, "is a run directory; choose another directory"),
        (tmp_path / "file", "expected a directory, received a file"),
    ):
        for check in (
            lambda path: publish("run", path, write=fake()),
            lambda path: ExportSettings(run="run", output_dir=str(path)),
        ):
            with pytest.raises(UserError, match=message):
                check(path)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("publishing")
    source = read_pretrained(
        str(small.write_huggingface(directory / "huggingface", config, vocabulary))
    )
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    return small.trained(directory / "run", source, task, task.build_model(config)).source.run.path


def hashes(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def exported_twice(run_dir, tmp_path_factory):
    """Export one run twice, in two processes with different hash seeds, to two directories."""
    directories = [tmp_path_factory.mktemp(name) / "model" for name in ("one", "another")]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "export.export_saved_model"),
                *(f"--run={run_dir}", f"--output_dir={directory}"),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.DEVNULL,
        )
        for seed, directory in enumerate(directories)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    return [directory / "1" for directory in directories]


@pytest.mark.slow
def test_one_run_has_the_same_bytes_from_two_processes(exported_twice):
    one, another = map(hashes, exported_twice)
    assert one == another
    assert set(one) == {
        *("saved_model.pb", "fingerprint.pb", "variables/variables.index"),
        "variables/variables.data-00000-of-00001",
        *(f"assets.extra/{name}.json" for name in ("config", "export", "task", "tokenizer")),
        *("assets.extra/vocab.txt", "assets.extra/tf_serving_warmup_requests"),
        *("batching_params.pbtxt", "models.config", "SIGNATURES.md", "MODEL_CARD.md"),
    }


@pytest.mark.slow
def test_no_file_contains_paths_of_the_building_machine(exported_twice, run_dir):
    for directory in exported_twice:
        secrets = (run_dir, str(directory.parent), str(ROOT), str(pathlib.Path.home()))
        for path in directory.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            for secret in (*secrets, str(pathlib.Path(run_dir).parent.name), "site-packages"):
                assert secret.encode() not in content, (path, secret)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('found in PYTHONPATH')", "ImportError: found in PYTHONPATH"),
        (
            "try: raise OSError('first')\nfinally: raise ValueError('bad row\\n\\n  of x [Op:f]')",
            r"ValueError: bad row of x \[Op:f\]",
        ),
        ("import os; os.kill(os.getpid(), 9)", r"SIGKILL ended it \(out of memory\?\)"),
        ("raise SystemExit('not installed')", "not installed"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_the_separate_process_finds_packages_where_this_one_does_and_tells_why_it_fails(
    code, reason, tmp_path, monkeypatch
):
    """Python's isolated mode has neither PYTHONPATH nor what pip installs for a user."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "tensorflow.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    with pytest.raises(UserError, match=f"not published: .* clean Python process: {reason}$"):
        parity._run_isolated(tmp_path, tmp_path, "cpu")


@pytest.mark.parametrize(("device", "visible"), [("cpu", "-1"), ("gpu", "all of them")])
def test_the_separate_process_sees_gpus_for_an_export_that_needs_one(
    device, visible, tmp_path, monkeypatch
):
    code = "import os; raise SystemExit(os.environ.get('CUDA_VISIBLE_DEVICES', 'all of them'))"
    (tmp_path / "tensorflow.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=f"clean Python process: {visible}$"):
        parity._run_isolated(tmp_path, tmp_path, device)


@pytest.mark.slow
def test_the_session_of_servers_answers_every_warm_up_record(exported_twice, tmp_path):
    cases = [
        {
            "signature": signature,
            "inputs": isolated_runner.encoded(inputs),
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
    answered = {name.partition("/")[0] for name in isolated_runner.load(tmp_path / "results.npz")}
    assert len(answered) == len(cases) > 10


@pytest.mark.slow
def test_a_poller_can_load_every_version_that_it_sees(
    exported_twice, run_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(parity, "check", lambda *arguments: None)
    monkeypatch.setattr(version_files, "write_documents", lambda *arguments: None)
    trained, seen, is_over = load_model(run_dir), {}, threading.Event()

    def poll():
        while not is_over.wait(0.001):
            for version in set(version_directories(tmp_path)) - set(seen):
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
    publish("run", tmp_path, write=fake())
    assert contents(tmp_path) == {"1"}
