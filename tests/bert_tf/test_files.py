"""Atomic writes of files, and errors of file systems."""

import errno
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


def test_an_error_of_an_input_names_the_input(tmp_path):
    for read in (files.read_text, os.listdir):
        with pytest.raises(FileNotFoundError) as raised, files.atomic_writer(tmp_path / "out.txt"):
            read(str(tmp_path / "absent"))
        assert raised.value.filename == str(tmp_path / "absent")


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that fails")
def test_reading_and_writing_name_the_file_that_fails(tmp_path):
    for read in (lambda stream: stream.read(), lambda stream: stream.read(3), files.TextFile.read):
        with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
            is_text = read is files.TextFile.read
            read(files.TextFile("/proc/self/mem") if is_text else files.open_file("/proc/self/mem"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        with files.open_file("/dev/full", "wb") as stream:
            stream.write(b"x")
    path = tmp_path / "out.txt"
    with pytest.raises(OSError, match="No space left") as raised, files.atomic_path(path) as name:
        os.symlink("/dev/full", name)
        with files.open_file(name, "wb") as stream:
            stream.write(b"x" * 100_000)
    assert raised.value.filename == str(path) and not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTDIR, errno.ENOENT])
def test_only_what_is_not_there_is_absent(tmp_path, monkeypatch, number):
    (tmp_path / "file").touch()

    def fail(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(files.os, "stat", fail)
    for function, absent in (
        (files.exists, False),
        (files.isdir, False),
        (files.size, None),
        (files.listdir, []),
        (files.remove_tree, None),
    ):
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output error"):
                function(tmp_path / "file")
        else:
            assert function(tmp_path / "file") == absent
    with pytest.raises(OSError, match=os.strerror(number)):
        files.stamp(tmp_path / "file")


def test_what_exists_has_its_size_and_kind(tmp_path):
    (tmp_path / "file").write_text("xyz")
    files.atomic_write_text("ram://kinds/d/file", "xyz")
    for directory in (tmp_path, "ram://kinds/d"):
        path = os.path.join(directory, "file")
        assert files.exists(path) and not files.isdir(path) and files.size(path) == 3
        assert files.exists(directory) and files.isdir(directory)
        assert files.listdir(directory) == ["file"]
        assert files.size(f"{path}2") is None and files.listdir(f"{path}2") == []
        other = os.path.join(os.path.dirname(directory), "other")
        files.rename_directory(str(directory), other)
        assert not files.exists(directory) and files.listdir(other) == ["file"]
        for _ in range(2):
            files.remove_tree(other)
            assert not files.exists(other)


def test_of_a_link_to_a_directory_only_the_link_is_deleted(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "link").symlink_to("a")
    files.remove_tree(tmp_path / "link")
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == ["file"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_directories_is_usable(tmp_path, monkeypatch, number):
    fsync, fails = os.fsync, stat.S_ISDIR

    def fail(descriptor):
        if fails(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            files.atomic_write_text(tmp_path / "a.txt", "x")
        return
    files.atomic_write_text(tmp_path / "a.txt", "x")
    files.makedirs(tmp_path / "b" / "c")
    assert (tmp_path / "a.txt").read_text() == "x"
    fails = stat.S_ISREG
    with pytest.raises(OSError, match=os.strerror(number)):
        files.atomic_write_text(tmp_path / "a.txt", "y")


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
