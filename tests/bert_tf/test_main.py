"""The program bert-tf, which starts the commands by name."""

import subprocess
import sys

import pytest

from bert_tf.__main__ import COMMANDS, MODULES
from tests.conftest import ROOT

# Starts the program as its console script does: the working directory is not on sys.path.
CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from bert_tf.__main__ import main; main()"


@pytest.fixture
def program(tmp_path):
    """Return a function that runs the program where other files have the packages' names."""
    for name in ("bert_tf", "tasks", "export", "tensorflow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-P", "-c", CODE, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def test_names_of_commands_are_unique():
    assert len(MODULES) == len(COMMANDS)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command_with_its_purpose(program, arguments):
    done = program(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for name in MODULES:
        (line,) = (line for line in done.stdout.split("\n") if line.startswith(f"  {name} "))
        assert len(line.split()) > 3
    assert "  finetune            Fine-tune BERT on labelled text\n" in done.stdout


def test_the_listing_imports_no_tensorflow_and_no_command():
    code = (
        "import sys; from bert_tf.__main__ import main; main();"
        "assert not {'tensorflow', 'numpy', 'tasks.finetune'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def test_a_command_runs_with_its_flags(program):
    done = program("finetune", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bert-tf finetune --task=classification" in done.stdout
    assert "--max_seq_length" in done.stdout and "python -m" not in done.stdout
    done = program("request", "--model_dir=nothing", "--input=text=a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--model_dir=nothing: no such directory\n"


def test_the_version_is_that_of_the_installed_package(program):
    done = program("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("bert_tf 0.") and "tensorflow 2." in done.stdout


@pytest.mark.parametrize("name", ["finetun", "tasks.finetune", "write-shards", "--run=RUN", ""])
def test_an_unknown_command_is_one_line_and_status_2(program, name):
    done = program(name, "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"bert-tf: {name!r} is not a command. Expected: learn_vocab, ")


def test_python_runs_the_program_too(run_command):
    done = run_command("bert_tf", "finetune", "--no_such_flag=1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no_such_flag" in done.stderr
