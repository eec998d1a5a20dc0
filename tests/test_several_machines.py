"""The files for systemd and Kubernetes of docs/several-machines.md."""

import configparser
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

from bert_tf.__main__ import MODULES
from bert_tf.system import command
from tests.test_docs import read, settings_class, split_fences

PAGE = "docs/several-machines.md"


def block(language):
    (lines,) = (lines for name, lines in split_fences(read(PAGE))[1] if name == language)
    return "\n".join(lines)


def check_command(words, config, num_workers, index):
    """Check a command line and its TF_CONFIG."""
    program, name, *flags = words
    settings, _ = command.parse(settings_class(MODULES[name]), [name, *flags])
    assert (pathlib.Path(program).name, settings.strategy) == ("bert-tf", "multi_worker")
    cluster = json.loads(config)
    assert len(cluster["cluster"]["worker"]) == num_workers
    assert cluster["task"] == {"type": "worker", "index": index}
    return cluster["cluster"]["worker"]


def test_the_unit_of_systemd_starts_a_worker_and_restarts_it():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(block("ini"))
    service = unit["Service"]
    (variable,) = shlex.split(service["Environment"])
    words = shlex.split(service["ExecStart"].replace("\\\n", " "))
    check_command(words, variable.removeprefix("TF_CONFIG="), num_workers=2, index=0)
    assert service["Restart"] == "on-failure"
    # The statuses of a stop at another worker, so that this one stays stopped.
    assert set(service["SuccessExitStatus"].split()) == {
        str(command.STATUS_INTERRUPTED + signum) for signum in (2, 15)
    }


@pytest.mark.parametrize("index", [0, 1])
def test_the_job_of_kubernetes_starts_each_worker(tmp_path, index):
    """Run the shell command of the container with a bert-tf that writes what it gets."""
    service, job = yaml.safe_load_all(block("yaml"))
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    fake = tmp_path / "bert-tf"
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv, os.environ['TF_CONFIG']]))\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        container["command"] + container["args"],
        env={"PATH": f"{tmp_path}{os.pathsep}/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
        capture_output=True,
        text=True,
        check=True,
    )
    count, name = job["spec"]["completions"], job["metadata"]["name"]
    workers = check_command(*json.loads(done.stdout), num_workers=count, index=index)
    subdomain = service["metadata"]["name"]
    assert workers == [f"{name}-{number}.{subdomain}:2222" for number in range(count)]
    assert job["spec"]["parallelism"] == count and spec["restartPolicy"] == "OnFailure"
    assert job["spec"]["completionMode"] == "Indexed" and spec["subdomain"] == subdomain
    # Without a virtual address, the names are those of the pods, also before they are ready.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name}
    (mount,), (volume,) = container["volumeMounts"], spec["volumes"]
    assert mount["name"] == volume["name"] and mount["mountPath"] == "/data"
