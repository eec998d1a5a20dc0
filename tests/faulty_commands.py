"""Commands that write files, and how test_faults.py runs them."""

import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from bert_tf import Vocabulary
from tests import small
from tests.conftest import ROOT
from tests.corpus import ENTRIES, write_corpus, write_shards
from tests.pretraining import make_config


@dataclasses.dataclass(frozen=True)
class Writer:
    """A command that writes OUT/`output` and reads `inputs` from the directory of inputs."""

    module: str
    flags: str  # Flags may contain {inputs} and {output}.
    output: str
    source: str  # The input that a user might pass as the output by mistake.
    output_flag: str


WRITERS = {
    "learn_vocab": Writer(
        "bert_tf.learn_vocab",
        "--input={inputs}/corpus.txt --vocab_size=120 --output={output}",
        "vocab.txt",
        "corpus.txt",
        "output",
    ),
    "write_shards": Writer(
        "bert_tf.write_shards",
        "--input={inputs}/corpus.txt --vocab={inputs}/vocab.txt --num_shards=4 --max_seq_length=32 "
        "--max_predictions_per_seq=5 --dupe_factor=3 --num_workers=1 --output_dir={output}",
        "shards",
        "",
        "output_dir",
    ),
    "pretrain": Writer(
        "bert_tf.pretrain",
        "--shards={inputs}/pretraining/shards --config={inputs}/config.json --num_train_steps=12 "
        "--global_batch_size=12 --warmup_steps=2 --save_every=2 --log_every=1 "
        "--output_dir={output}",
        "run",
        "pretraining/shards",
        "output_dir",
    ),
    "convert": Writer(
        "bert_tf.convert", "--from={inputs}/huggingface --to={output}", "run", "huggingface", "to"
    ),
    "finetune": Writer(
        "tasks.finetune",
        "--task=classification --train={inputs}/train.csv --dev={inputs}/dev.csv "
        "--init_from={inputs}/huggingface --max_seq_length=12 --global_batch_size=8 --epochs=3 "
        "--learning_rate=1e-2 --log_every=1 --save_every=2 --output_dir={output}",
        "run",
        "huggingface",
        "output_dir",
    ),
    "predict": Writer(
        "tasks.predict",
        "--run={inputs}/run --input={inputs}/rows.csv --output={output}",
        "answers.jsonl",
        "rows.csv",
        "output",
    ),
    "predict_shards": Writer(
        "tasks.predict",
        "--run={inputs}/run --input={inputs}/rows.csv --num_shards=4 --num_workers=1 "
        "--output_dir={output}",
        "predictions",
        "run",
        "output_dir",
    ),
    "extract": Writer(
        "tasks.extract",
        "--model={inputs}/huggingface --input={inputs}/rows.jsonl --max_seq_length=12 "
        "--output={output}",
        "vectors.npy",
        "rows.jsonl",
        "output",
    ),
    "export": Writer(
        "export.export_saved_model",
        "--run={inputs}/run --output_dir={output}",
        "models/name",
        "run",
        "output_dir",
    ),
}


class Commands:
    """Runs the WRITERS in forks of tests.fault_server; their inputs are in directory `inputs`."""

    def __init__(self, directory, config, vocabulary):
        self.directory = directory
        self.inputs = directory / "inputs"
        self.inputs.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fault_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": str(directory)},
        )
        write_corpus(self.inputs / "corpus.txt", 400)
        Vocabulary(ENTRIES).save(self.inputs / "vocab.txt")
        write_shards(self.inputs / "pretraining")
        make_config(self.inputs)
        small.write_huggingface(self.inputs / "huggingface", config, vocabulary)
        small.write_complaints(self.inputs)
        rows = [(text,) for texts in small.TEXTS.values() for text in texts]
        small.write_rows(self.inputs / "rows.csv", rows * 300, ["text"])
        lines = [json.dumps({"text": text}) + "\n" for (text,) in rows * 300]
        (self.inputs / "rows.jsonl").write_text("".join(lines))
        done = self.run("finetune", self.inputs)
        assert done.status == 0, done.output

    def close(self):
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def start(self, name, out, output=None):
        """Start the command, writing to OUT or to `output`, and return its pid."""
        writer = WRITERS[name]
        output = output or out / writer.output
        values = {"inputs": self.inputs, "output": output}
        arguments = [flag.format(**values) for flag in writer.flags.split()]
        log = self.directory / f"log-{time.monotonic_ns()}"
        pid = self._ask(module=writer.module, arguments=arguments, output=str(log))
        return pid, log

    def wait(self, pid, log):
        status = self._ask(pid=pid)
        text = log.read_text()
        log.unlink()
        return Done(status, text)

    def run(self, name, out, output=None):
        return self.wait(*self.start(name, out, output))

    def kill_after(self, seconds, name, out):
        """Kill the command and its children, like `kill -9` or a lost machine."""
        pid, log = self.start(name, out)
        time.sleep(seconds)
        os.killpg(pid, signal.SIGKILL)
        return self.wait(pid, log)

    def _ask(self, **request):
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@dataclasses.dataclass(frozen=True)
class Done:
    status: int
    output: str

    @property
    def last_line(self):
        return (self.output.splitlines() or [""])[-1]

    def assert_one_line(self, *words):
        """Assert that it failed with one line that holds one of the `words`."""
        assert self.status in (1, 2), self.output
        assert "Traceback" not in self.output and "Error:" not in self.output, self.output
        assert any(word in self.last_line for word in words), self.output


def listing(directory):
    """Return the paths of all files below a directory, less the digits of TensorBoard names."""
    paths = (path.relative_to(directory) for path in pathlib.Path(directory).rglob("*"))
    return sorted({str(path).partition(".tfevents.")[0] for path in paths})


def content(name, out):
    """Return {path: sha256} and the losses, which are equal in all runs of a command."""
    output = out / WRITERS[name].output
    if output.is_file():
        return {"": _sha256(output)}
    if name == "export":
        versions = sorted(path for path in output.iterdir() if path.name.isdecimal())
        each = [_hashes(version, "*") for version in versions]
        assert all(hashes == each[0] for hashes in each)  # Every JSON file is complete.
        return each[0] if each else {}
    found = _hashes(output, "*.tfrecord") | _hashes(output, "checkpoints/*/variables.data*")
    found |= _hashes(output, "vocab.txt") | _hashes(output, "config.json")
    found |= _hashes(output, "predictions-*")
    if (output / "metrics.jsonl").exists():
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        found["losses"] = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return found


def _hashes(directory, pattern):
    return {
        str(path.relative_to(directory)): _sha256(path)
        for path in directory.rglob(pattern)
        if path.is_file()
    }


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
