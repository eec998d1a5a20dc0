"""The wheel, built from the source distribution and installed into a fresh environment.

Every command and the Python quickstart run there, in directories outside of the repository.
"""

import dataclasses
import email
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from bert_tf.__main__ import MODULES
from tests.conftest import ROOT
from tests.corpus import write_corpus
from tests.test_docs import command_lines
from tests.test_python_docs import snippets

pytestmark = pytest.mark.slow

PACKAGES = ("bert_tf", "tasks", "export")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Jobs of the commands that README.md does not run, before and after those that it does.
PREPARATION = (
    "learn_vocab --input=corpus/*.txt --output=vocab.txt --vocab_size=64",
    "write_shards --input=corpus/*.txt --vocab=vocab.txt --output_dir=SHARDS --num_shards=2 "
    "--num_workers=2 --max_seq_length=16 --max_predictions_per_seq=2",
    "inspect_shards --shards=SHARDS --vocab=vocab.txt",
    "pretrain --shards=SHARDS --config=config.json --output_dir=PRETRAINED --num_train_steps=2 "
    "--warmup_steps=1 --global_batch_size=4",
    "convert --from=PRETRAINED --to=WEIGHTS --format=huggingface",
)
FURTHER = (
    "evaluate --run=RUN --data=examples/complaints/dev.csv",
    "extract --model=WEIGHTS --input=examples/complaints/dev.csv --output=vectors.npy",
    "search --model=WEIGHTS --input=examples/complaints/dev.csv --vectors=vectors.npy --query=bill",
    "mine_negatives --run=WEIGHTS --pairs=examples/complaints/dev.csv --anchor_column=text "
    "--positive_column=label --corpus=examples/complaints/train.csv --output=mined.jsonl",
    "export_litert --run=RUN --output=model.tflite --quantize=float16",
    "plan --config=config.json --tokens=1e6 --max_seq_length=16",
    "fill_mask --model=PRETRAINED --text=[MASK] --top_k=2",
    "plot_attention --run=WEIGHTS --text=a --max_seq_length=16 --output=attention.html",
)


def check(arguments, **options):
    """Run a program and return its standard output."""
    done = subprocess.run(
        [str(word) for word in arguments], text=True, capture_output=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def quickstart():
    """Return the commands of README.md as lists of a name and flags."""
    lines = map(shlex.split, command_lines(README))
    return [words for program, *words in lines if program == "bert-tf" and words[0] in MODULES]


def package_files():
    """Return the paths of all files of the packages in the repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Build the source distribution from a copy of the repository, and the wheel from that."""
    here = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".*_cache", ".git", ".venv*", "__pycache__", "*.egg-info")
    shutil.copytree(
        ROOT, here / "source", ignore=lambda *found: {*ignored(*found), "build", "demo", "dist"}
    )
    check([sys.executable, "-c", BUILD], cwd=here / "source")
    (source,) = (here / "source" / "dist").iterdir()
    flags = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    check([sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", here / "dist", source])
    (wheel,) = (here / "dist").iterdir()
    return source, wheel


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """Install the wheel, with the requirements of this environment; return its directory bin."""
    environment = tmp_path_factory.mktemp("environment")
    check([sys.executable, "-m", "venv", "--without-pip", environment])
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    check([*pip, "--no-deps", "--no-index", archives[1]])
    # A line adds a directory, but does not read the .pth files there: these may name this source.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory):
    """Return a function that runs a program of the environment in a directory."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program, *arguments, cwd):
        return check([installed / program, *arguments], cwd=cwd, env=environ)

    return run


@pytest.fixture(scope="module")
def directory(run, config, tmp_path_factory):
    """Return a directory with WEIGHTS of a BERT, after the commands that make them from text."""
    here = tmp_path_factory.mktemp("directory")
    for name in PACKAGES:  # `python -m` would import these instead of the packages.
        (here / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    shutil.copytree(ROOT / "examples" / "complaints", here / "examples" / "complaints")
    (here / "corpus").mkdir()
    write_corpus(here / "corpus" / "a.txt", num_documents=400)
    tiny = dataclasses.replace(config, vocab_size=64, max_position_embeddings=128)
    (here / "config.json").write_text(json.dumps(tiny.to_dict()))
    for job in PREPARATION:
        run("bert-tf", *job.split(), cwd=here)
    return here


def test_archives_have_all_files(archives):
    source, wheel = archives
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith(PACKAGES) and "-info/" not in name} == (
        package_files()
    )
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= in_source
    assert {"LICENSE", "README.md", ".ci/run", "tests/conftest.py", "docs/design.md"} <= in_source
    assert not [name for name in in_source if "__pycache__" in name]


def test_metadata_is_complete(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
    assert metadata["Name"].replace("-", "_") == "bert_tf"
    assert metadata["Author"] == "The bert_tf authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert description.startswith("# bert_tf\n") and "## Limits\n" in description
    assert "](" not in description.replace("](https:", "") and "## Documentation" not in description
    extras = "all and-cuda beam docs index litert parquet plots serving tensorboard test".split()
    assert sorted(metadata.get_all("Provides-Extra")) == extras


@pytest.mark.parametrize("name", MODULES)
def test_each_command_prints_its_help(run, name, tmp_path):
    assert f"bert-tf {name} --" in run("bert-tf", name, "--help", cwd=tmp_path)


def test_packages_are_those_of_the_wheel(run, installed, tmp_path):
    code = f"import {', '.join(PACKAGES)}; print(*({', '.join(PACKAGES)}), sep='\\n')"
    lines = run("python", "-c", code, cwd=tmp_path).splitlines()
    assert len(lines) == len(PACKAGES) and all(str(installed.parent) in line for line in lines)


def test_commands_run_where_files_have_the_names_of_the_packages(run, directory):
    outputs = {
        name: run("bert-tf", name, *flags, cwd=directory)
        for name, *flags in (*quickstart(), *(job.split() for job in FURTHER))
    }
    assert json.loads(outputs["request"])["label"][0] in ("billing", "hardware", "software")
    assert 0 <= json.loads(outputs["evaluate"].splitlines()[-1])["accuracy"] <= 1
    assert (directory / "predictions.jsonl").read_text().count("\n") == 90
    assert {*outputs, *(job.split()[0] for job in PREPARATION)} == {*MODULES}


def test_the_quickstart_runs(run, directory, tmp_path):
    (snippet,) = snippets(README)
    *lines, last = snippet.strip().split("\n")
    (tmp_path / "quickstart.py").write_text("\n".join([*lines, f"print({last})"]))
    printed = run("python", tmp_path / "quickstart.py", cwd=directory)
    assert printed.split()[-1] in ("billing", "hardware", "software")
