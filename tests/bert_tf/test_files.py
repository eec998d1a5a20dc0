"""Atomic writes of files."""

import gzip
import os
import stat
import subprocess
import sys

import pytest

from bert_tf import UserError
from bert_tf.storage import files
from tests.conftest import ROOT
from tests.rows import as_others_write


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_appears_when_the_block_ends(tmp_path, before):
    path = tmp_path / "a.txt"
    if before:
        path.write_text(before)
    with files.atomic_writer(path) as stream:
        stream.write("é中\r\n\n")
        stream.flush()
        assert (path.read_text() if path.exists() else None) == before
        (temporary,) = (name for name in os.listdir(tmp_path) if name != "a.txt")
        assert files.is_temporary(temporary)
    assert path.read_bytes() == "é中\r\n\n".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("before", [None, "old"])
def test_an_error_leaves_the_old_file_unchanged(tmp_path, error, before):
    path = tmp_path / "a.txt"
    if before:
        path.write_text(before)
    with pytest.raises(error), files.atomic_writer(path) as stream:
        stream.write("new" * 100_000)  # The content exceeds one buffer.
        raise error
    assert os.listdir(tmp_path) == (["a.txt"] if before else [])
    if before:
        assert path.read_text() == "old"


def test_a_disk_error_names_the_target_file(tmp_path):
    path = tmp_path / "absent" / "a.txt"
    with pytest.raises(FileNotFoundError) as raised, files.atomic_writer(path):
        pass
    assert raised.value.filename == str(path)
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(IsADirectoryError) as raised,
        files.atomic_writer(tmp_path / "folder") as stream,
    ):
        stream.write("x")
    assert raised.value.filename == str(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_killed_process_leaves_the_old_file_unchanged(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os, sys\nfrom bert_tf.storage.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as stream:\n"
        "    stream.write('new'); stream.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT)
    assert done.returncode == -9 and path.read_text() == "old"
    # The leftover of the killed process does not affect the next write.
    files.atomic_write_text(path, "newer")
    assert path.read_text() == "newer"


def test_a_new_file_has_the_usual_permissions(tmp_path):
    files.atomic_write_text(tmp_path / "a.txt", "x")
    (tmp_path / "b.txt").write_text("x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "b.txt")}
    assert len(modes) == 1


def test_a_relative_path_without_a_directory_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.atomic_write_text("a.txt", "x")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_is_read_without_mark_and_with_lf(tmp_path, suffix):
    path, text = tmp_path / f"a.txt{suffix}", "one\ntwo \u00e9\n\nthree\n"
    for name, data in as_others_write(text).items():
        path.write_bytes(gzip.compress(data) if suffix else data)
        assert files.read_text(path) == text, name


@pytest.mark.parametrize(
    "text",
    [
        "a\rb\nc\n",  # With LF, CR is white space.
        "x" * (files.TextFile.HEAD_BYTES - 1) + "\r\ntwo\rthree\r\n",  # CR LF of two reads.
        "\n\ufeffa",  # Only the first character is a mark.
    ],
)
def test_cr_and_marks_inside_are_kept(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert files.read_text(path) == text.replace("\r\n", "\n")
    with files.TextFile(path) as stream:
        assert stream.is_verbatim and b"".join(iter(lambda: stream.read(7), b"")) == text.encode()


def test_damaged_gzip_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "a.txt.gz"
    for data in (gzip.compress(b"text\n" * 1000)[:-9], b"no gzip"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="a.txt.gz: damaged gzip file"):
            files.read_text(path)


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?", "a\\b", "%20", "\u4e2d \u00e9", "#", "~"])
def test_a_path_that_exists_is_no_pattern(tmp_path, name):
    directory = tmp_path / f"d {name}"
    directory.mkdir()
    for file in (name, "b1"):
        (directory / file).touch()
    (tmp_path / "d a1").mkdir()
    (tmp_path / "d a1" / "b2").touch()
    assert files.glob_files(str(directory / name)) == [str(directory / name)]
    assert files.glob_files(str(directory / "b*")) == [str(directory / "b1")]
    assert files.glob_files(str(directory)) == files.glob_files(f"{directory}/absent*") == []
    assert len(files.glob_files(str(tmp_path / "d*" / "b[12]"))) == 2
    files.atomic_write_bytes(f"ram://{name}/{name}", b"")
    assert files.glob_files(f"ram://{name}/{name}") == [f"ram://{name}/{name}"]


def test_a_checkpoint_has_a_path_without_pattern(tmp_path):
    directory = tmp_path / "d [1]"
    directory.mkdir()
    (directory / "model*.index").write_text("index")
    assert not files.has_pattern(tmp_path / "plain %20 \u4e2d")
    with files.without_pattern(directory / "model*") as path:
        assert not files.has_pattern(path) and files.read_text(f"{path}.index") == "index"
    with files.without_pattern(directory) as path:
        assert os.listdir(path) == ["model*.index"]
    assert not os.path.lexists(path)
    with files.without_pattern(tmp_path / "absent [1]" / "model") as path:
        assert not os.path.lexists(path)
