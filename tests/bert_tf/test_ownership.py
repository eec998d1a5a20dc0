"""Locks of output directories, and removal of our own files only."""

import os
import re
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
    with ownership.sole_writer(directory) as (made, is_locked):
        assert made == [str(directory), str(tmp_path / "a")]
        assert is_locked and ownership.is_marked(directory)
        (directory / "file").touch()
        with pytest.raises(UserError, match=OWNER), ownership.sole_writer(directory):
            pass
    assert sorted(os.listdir(directory)) == [ownership.MARKER, "file"]
    with ownership.sole_writer(directory) as (made, _):
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
    assert sorted(os.listdir(tmp_path / "a")) == [ownership.MARKER, "file"]


def killed(code, path):
    """Run code that kills its own process."""
    code = f"import os, sys\nfrom bert_tf.storage import files, ownership\n{code}"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    killed("with ownership.sole_writer(sys.argv[1]): os.kill(os.getpid(), 9)", tmp_path)
    assert re.fullmatch(rf"{socket.gethostname()} \d+\n", (tmp_path / ".bert_tf.lock").read_text())
    with ownership.sole_writer(tmp_path):
        pass
    assert not (tmp_path / ".bert_tf.lock").read_text()  # No process holds it.


def test_the_partial_output_of_a_killed_process_is_removed(tmp_path):
    path = tmp_path / "out.jsonl"
    killed(
        "with ownership.sole_output(sys.argv[1]), files.atomic_writer(sys.argv[1]) as stream:\n"
        "    stream.write('half'); stream.flush(); os.kill(os.getpid(), 9)",
        path,
    )
    assert len(os.listdir(tmp_path)) == 2 and not path.exists()
    other = tmp_path / f".other.jsonl.{'0' * 32}"
    other.touch()  # This file belongs to another output, which may be in progress.
    with ownership.sole_output(path):
        files.atomic_write_text(path, "whole")
    assert sorted(os.listdir(tmp_path)) == [other.name, path.name]


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


def test_file_systems_without_locks_are_usable(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(ownership.fcntl, "flock", refuse)
    left = tmp_path / f".out.jsonl.{'0' * 32}"
    left.touch()  # Another process may still write it.
    with ownership.sole_writer(tmp_path), ownership.sole_output(tmp_path / "out.jsonl"):
        pass
    assert sorted(os.listdir(tmp_path)) == [ownership.MARKER, left.name]


def test_a_remote_directory_is_marked(tmp_path):
    with ownership.sole_writer("ram://ownership/folder") as (made, is_locked):
        assert not made and not is_locked and ownership.is_marked("ram://ownership/folder")
    with ownership.sole_output("ram://ownership/out.jsonl"):
        files.atomic_write_text("ram://ownership/out.jsonl", "x")
    with pytest.raises(UserError, match="already exists"):
        with ownership.sole_output("ram://ownership/out.jsonl"):
            pass


def test_only_our_own_files_are_removed(tmp_path):
    for path in ("a.txt", "x/a.txt", "x/y/a.txt", "x/y/b.txt", "z/a.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "z")
    everything = ["a.txt", "empty/", "link", "x/a.txt", "x/y/a.txt", "x/y/b.txt", "z/a.txt"]
    assert list(files.walk(tmp_path)) == everything
    files.remove_own(tmp_path, re.compile(r"(.*/)?a\.txt"))
    assert list(files.walk(tmp_path)) == ["empty/", "link", "x/y/b.txt"]
    files.remove_own(tmp_path, re.compile(r".*"))
    assert not tmp_path.exists()


def test_a_new_directory_is_synced_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", synced.append)
    files.makedirs(tmp_path / "a" / "b")
    assert synced == [str(tmp_path / "a"), str(tmp_path)]
