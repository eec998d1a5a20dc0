"""Faults while a command writes: it succeeds, or reports in one line what to do.

The table of commands and faults is FAULTS.md. To test a single command, use `-k predict`.
"""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from tests.faulty_commands import WRITERS, Commands, content, listing

pytestmark = pytest.mark.slow
MOMENTS = 10
NAMES = sorted(WRITERS)


@pytest.fixture(scope="module")
def commands(tmp_path_factory, config, vocabulary):
    commands = Commands(tmp_path_factory.mktemp("faults"), config, vocabulary)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def undisturbed(commands):
    """Return {command: (its listing, its content, seconds)}; commands run at first access."""
    return Undisturbed(commands)


class Undisturbed(dict):
    def __init__(self, commands):
        self.commands = commands

    def __missing__(self, name):
        for directory in (f"first-{name}", f"undisturbed-{name}"):  # The first run is slower.
            out = self.commands.directory / directory
            out.mkdir()
            began = time.monotonic()
            done = self.commands.run(name, out)
            seconds = time.monotonic() - began
            assert done.status == 0, done.output
        self[name] = listing(out), content(name, out), seconds
        return self[name]


def is_over(done):
    """Whether the output is complete and the command declines to write it again."""
    return done.status == 2 and "already exists" in done.output


def assert_ends_well(commands, undisturbed, name, out):
    """Run the same command again and assert that all files equal those of an undisturbed run."""
    before = content(name, out) if (out / WRITERS[name].output).is_file() else None
    done = commands.run(name, out)
    paths, expected, _ = undisturbed[name]
    if not (before == expected and is_over(done)):
        if done.status:
            done.assert_one_line("name a new directory")
            return
    assert content(name, out) == expected, done.output
    found = [path for path in listing(out) if not path.startswith("models/name/2")]
    assert found == paths, done.output


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_ten_moments(commands, undisturbed, name, tmp_path):
    paths, expected, seconds = undisturbed[name]
    for moment in range(MOMENTS):
        out = tmp_path / f"{moment}"
        out.mkdir()
        done = commands.kill_after((moment + 0.5) / MOMENTS * seconds, name, out)
        left = [path for path in listing(out) if path not in paths]
        print(f"{name} {moment}: status {done.status}, left {left[:5]}")
        if (out / WRITERS[name].output).is_file():
            assert content(name, out) == expected  # No partial file has the final name.
        assert_ends_well(commands, undisturbed, name, out)


@contextlib.contextmanager
def disk(directory, kilobytes):
    """Mount a small file system."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remount(directory, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_full_disk(commands, undisturbed, name, tmp_path):
    undisturbed[name]
    complete = commands.directory / f"undisturbed-{name}"
    sizes = (path.stat().st_size for path in complete.rglob("*") if path.is_file())
    kilobytes, failed = sum(-(-size // 4096) * 4 for size in sizes), 0
    for fraction in (0, 0.2, 0.5, 0.9):
        out = tmp_path / f"{fraction}"
        with disk(out, max(4, int(fraction * kilobytes))):
            done = commands.run(name, out)
            print(f"{name} {fraction} of {kilobytes}: {done.last_line}; left {listing(out)}")
            if done.status == 0:  # Some outputs are larger than others.
                assert content(name, out) == undisturbed[name][1]
                continue
            failed += 1
            done.assert_one_line(str(out))
            assert not [path for path in listing(out) if path.startswith("models/name/1")]
            assert not (out / WRITERS[name].output).is_file()
            remount(out, "size=64m")
            assert_ends_well(commands, undisturbed, name, out)
    assert failed >= 3


@pytest.mark.parametrize("name", NAMES)
def test_read_only_directory(commands, name, tmp_path):
    out = tmp_path / "out"
    with disk(out, 1024):
        remount(out, "ro")
        commands.run(name, out).assert_one_line("Read-only file system")


@pytest.mark.parametrize("name", NAMES)
def test_existing_output(commands, undisturbed, name, tmp_path):
    output = tmp_path / WRITERS[name].output
    is_file = output.suffix in (".txt", ".npy", ".jsonl")
    theirs = output if is_file else output / "notes.txt"
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("theirs")
    done = commands.run(name, tmp_path)
    if name == "export":  # The export adds a version to the existing ones.
        assert done.status == 0, done.output
        assert content(name, tmp_path) == undisturbed[name][1]
    else:
        done.assert_one_line("already exists", "contains other files")
        assert listing(theirs.parent) == [theirs.name]
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("name", NAMES)
def test_output_equal_to_input(commands, name, tmp_path):
    source = commands.inputs / WRITERS[name].source
    before = tmp_path / "before"
    (shutil.copytree if source.is_dir() else shutil.copy)(source, before)
    done = commands.run(name, None, output=source)
    done.assert_one_line(
        "name another",
        "contains other files",
        "is the run directory",
        "part of the input",
        "no files other than those in",
    )
    if source.is_dir():
        assert listing(source) == listing(before)
    files = [path for path in before.rglob("*") if path.is_file()] if source.is_dir() else [before]
    for path in files:
        assert path.read_bytes() == (source / path.relative_to(before)).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_two_at_once(commands, undisturbed, name, tmp_path):
    started = [commands.start(name, tmp_path) for _ in range(2)]
    done = [commands.wait(*process) for process in started]
    paths, expected, _ = undisturbed[name]
    print([one.last_line for one in done])
    assert content(name, tmp_path) == expected
    found = [path for path in listing(tmp_path) if not path.startswith("models/name/2")]
    assert found == paths
    failed = [one for one in done if one.status]
    assert len(failed) <= 1
    for one in failed:
        # Those words are for the case that the first process ended before.
        over = ("already exists", "contains other files")
        one.assert_one_line("in use by another process (PID", *over)


def test_evaluate_writes_nothing(commands, run_command):
    before = listing(commands.inputs)
    flags = (f"--run={commands.inputs}/run", f"--data={commands.inputs}/dev.csv")
    assert run_command("tasks.evaluate", *flags).returncode == 0
    assert listing(commands.inputs) == before
