"""Locks of output directories and files, and the temporary names of those who hold them."""

import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from bert_tf import UserError
from bert_tf.storage import files, ownership
from tests.conftest import ROOT

OWNER = rf"in use by another process \(PID {os.getpid()} on {socket.gethostname()}\)"


def test_a_directory_is_locked_by_one_process_which_the_error_names(tmp_path):
    directory = tmp_path / "a" / "b"
    with ownership.sole_writer(directory) as made:
        assert made == [str(directory), str(tmp_path / "a")]
        (directory / "file").touch()
        with pytest.raises(UserError, match=OWNER), ownership.sole_writer(directory):
            pass
        assert sorted(os.listdir(directory)) == [ownership.LOCK, "file"]
    assert os.listdir(directory) == ["file"]
    with ownership.sole_writer(directory) as made:
        assert not made


def test_an_error_leaves_a_directory_unchanged(tmp_path):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "a" / "b", tmp_path / "empty"):
        with pytest.raises(KeyError), ownership.sole_writer(directory):
            raise KeyError
    assert os.listdir(tmp_path) == ["empty"] and not os.listdir(tmp_path / "empty")
    with pytest.raises(KeyError), ownership.sole_writer(tmp_path / "a"):
        (tmp_path / "a" / "file").touch()
        raise KeyError
    assert os.listdir(tmp_path / "a") == ["file"]


def killed(code, path):
    """Run code that kills its own process; return its PID."""
    code = f"import os, sys\nfrom bert_tf.storage import files, ownership\n{code}"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT)
    assert process.wait() == -signal.SIGKILL
    return process.pid


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    pid = killed("with ownership.sole_writer(sys.argv[1]): os.kill(os.getpid(), 9)", tmp_path)
    assert (tmp_path / ".bert_tf.lock").read_text() == f"{pid} on {socket.gethostname()}"
    with ownership.sole_writer(tmp_path):
        pass
    assert not os.listdir(tmp_path)


def test_the_partial_output_of_a_killed_process_is_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    killed(
        "with ownership.sole_output(sys.argv[1]), files.atomic_writer(sys.argv[1]) as stream:\n"
        "    stream.write('half'); stream.flush(); os.kill(os.getpid(), 9)",
        path,
    )
    assert sorted(os.listdir(tmp_path)) == [".out.jsonl.lock", ".writing-out.jsonl"]
    with ownership.sole_output(path):
        files.atomic_write_text(path, "whole")
    assert os.listdir(tmp_path) == [path.name] and path.read_text() == "whole"


def test_an_output_has_one_writer_and_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "out.jsonl"
    with ownership.sole_output(path):
        with pytest.raises(UserError, match=OWNER), ownership.sole_output(path):
            pass
        files.atomic_write_text(path, "first")
    with pytest.raises(UserError, match="already exists; .* --overwrite"):
        with ownership.sole_output(path):
            pass
    with pytest.raises(KeyError), ownership.sole_output(path, overwrite=True):
        raise KeyError
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["out.jsonl"]


def test_a_temporary_name_is_fixed_only_where_this_process_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    owner = f".writing-{socket.gethostname()}-{os.getpid()}"
    with ownership.sole_writer("run"), ownership.sole_output(tmp_path / "a.txt"):
        for path in ("run/checkpoints/x", str(tmp_path / "run" / "x")):
            fixed = os.path.join(os.path.dirname(path), ".writing-x")
            assert files.temporary_name(path) == fixed and files.is_temporary(".writing-x")
        assert files.temporary_name("a.txt") == ".writing-a.txt"
        assert files.temporary_name("b.txt") == f"{owner}-b.txt"
        assert files.temporary_name("run2/x") == f"run2/{owner}-x"
    assert files.temporary_name("run/x") == f"run/{owner}-x" and not files.locked
    assert files.temporary_name("gs://b/x") == f"gs://b/{owner}-x"


def test_file_systems_without_locks_are_usable(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ownership.sole_writer(tmp_path), ownership.sole_output(tmp_path / "out.jsonl"):
        assert files.temporary_name(tmp_path / "x") != str(tmp_path / ".writing-x")
    assert not os.listdir(tmp_path)


def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error.*bert_tf.lock"):
        with ownership.sole_writer(tmp_path):
            pass


def test_remote_paths_are_not_locked():
    with ownership.sole_writer("ram://ownership/folder") as made:
        assert not made and not files.locked
    with ownership.sole_output("ram://ownership/out.jsonl"):
        files.atomic_write_text("ram://ownership/out.jsonl", "x")
    with pytest.raises(UserError, match="already exists"):
        with ownership.sole_output("ram://ownership/out.jsonl"):
            pass
    assert files.listdir("ram://ownership") == ["folder", "out.jsonl"]


def test_a_new_directory_is_synced_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", synced.append)
    files.makedirs(tmp_path / "a" / "b")
    assert synced == [str(tmp_path / "a"), str(tmp_path)]
