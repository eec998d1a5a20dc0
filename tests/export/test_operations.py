"""The files of examples/serving: configurations that servers parse, and clients that run."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from bert_tf import read_pretrained
from export.graph.saved_model import write_saved_model
from tasks.types.classification.text_classifier import ClassificationTask
from tests import small
from tests.conftest import ROOT
from tests.export.server import serving

FILES = ROOT / "examples" / "serving"
TEXTS = ["the bill is too high", 'a "quote", a \\ and \t中 é 😀']
CLIENTS = {
    "node": ["node", FILES / "client.mjs"],
    "java": ["java", FILES / "Client.java"],
    "go": ["go", "run", FILES / "client.go"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("operations")
    source = read_pretrained(small.write_huggingface(directory / "tiny", config, vocabulary))
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    return small.trained(directory / "run", source, task, task.build_model(config))


@pytest.fixture(scope="module")
def models(trained, tmp_path_factory):
    """Return MODELS/name with one version."""
    directory = tmp_path_factory.mktemp("operations-models") / "letters"
    directory.mkdir()
    write_saved_model(trained, directory / "1")
    return directory


def test_the_models_are_a_server_configuration():
    text = (FILES / "models.config").read_text(encoding="utf-8")
    models = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
    (config,) = models.model_config_list.config
    assert (config.name, config.base_path) == ("complaints", "/models/complaints")
    assert config.model_version_policy.latest.num_versions == 2


def test_compose_mounts_what_it_names_and_prometheus_asks_that_server():
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    server, prometheus = services["model"], services["prometheus"]
    named = re.findall(r"/config/([\w.]+)", json.dumps(server))
    assert {"models.config", "monitoring.config", "is_ready.sh"} == set(named)
    assert all((FILES / name).is_file() for name in named)
    assert ".:/config:ro" in server["volumes"]
    (scrape,) = yaml.safe_load((FILES / "prometheus.yml").read_text())["scrape_configs"]
    # The message of this file is in no package.
    assert f'path: "{scrape["metrics_path"]}"' in (FILES / "monitoring.config").read_text()
    assert scrape["static_configs"] == [{"targets": ["model:8501"]}]
    assert prometheus["depends_on"] == {"model": {"condition": "service_healthy"}}


def test_a_model_is_ready_if_a_server_has_it(echo_dir):
    with serving(echo_dir) as addresses:
        host, port = addresses.rest.removeprefix("http://").split(":")

        def status(model, port=port):
            command = ["bash", FILES / "is_ready.sh", host, port, model]
            return subprocess.run(command, capture_output=True).returncode

        assert status(pathlib.Path(echo_dir).name) == 0
        assert status("another") == 1
    assert status(pathlib.Path(echo_dir).name) == 1  # No server.


@pytest.mark.slow
@pytest.mark.parametrize("language", CLIENTS)
def test_clients_print_the_predictions(language, models, trained, tmp_path):
    if not shutil.which(language):
        pytest.skip(f"{language} is not installed")
    expected = trained.predict(TEXTS)
    with serving(models) as addresses:
        url = f"{addresses.rest}/v1/models/{models.name}"
        done = asked(language, url, *TEXTS)
        wrong = asked(language, f"{url}-other", *TEXTS)
    assert done.returncode == 0, done.stderr
    if language == "java":
        rows = [(row["label"], row["score"]) for row in json.loads(done.stdout)["predictions"]]
    else:
        rows = [(line.split()[0], float(line.split()[1])) for line in done.stdout.splitlines()]
    assert [label for label, _ in rows] == list(expected["label"])
    assert [score for _, score in rows] == pytest.approx(list(expected["score"]), abs=1e-3)
    assert wrong.returncode == 1 and "Servable not found" in wrong.stdout + wrong.stderr


def asked(language, *arguments):
    return subprocess.run([*CLIENTS[language], *arguments], capture_output=True, text=True)
