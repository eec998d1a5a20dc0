"""Models of the Hugging Face hub by their ids, from a server on this machine."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from bert_tf import Encoder, UserError, read_pretrained
from bert_tf.weights import huggingface, sources
from tests import hub as hubs
from tests.hub import COMMIT

ID = "google-bert/bert-tiny"
FILES = ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
NOBODY = "http://127.0.0.1:9"  # Nothing listens there.
OLD, EMBEDDER = "bert-tiny-uncased", "all-tiny-v2"


@pytest.fixture
def hub(huggingface_dir, tmp_path, monkeypatch):
    """Serve one directory under several ids, in an empty working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ids = (ID, OLD, f"sentence-transformers/{EMBEDDER}")
    with hubs.served(dict.fromkeys(ids, huggingface_dir)) as hub:
        hubs.use(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def message(path, read=sources.check):
    """Return the error of an id, which is one line, after the path and what it is not."""
    with pytest.raises(UserError) as raised:
        read(path)
    text = str(raised.value)
    assert "\n" not in text and text.startswith(f"{path}: no such directory; ")
    return text.removeprefix(f"{path}: no such directory; ")


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        (ID, ID),
        (f"{ID}@v1", ID),
        (f"{ID}@{COMMIT}", ID),
        (OLD, OLD),
        (EMBEDDER, f"sentence-transformers/{EMBEDDER}"),
    ],
)
def test_an_id_is_downloaded_once_and_read_without_a_network_afterwards(
    hub, tmp_path, monkeypatch, name, model_id
):
    assert sources.check(name).hidden_size == 12
    count, downloads = len(hub.requests), hub.downloads
    assert read_pretrained(name).origin == f"Hugging Face model {model_id}, revision {COMMIT}"
    assert Encoder.from_pretrained(pathlib.Path(name)).config.hidden_size == 12
    assert len(hub.requests) == count  # Of a process, one look-up.
    huggingface.download.cache_clear()
    read_pretrained(name)
    assert hub.downloads == downloads == FILES
    hubs.use(monkeypatch, NOBODY, tmp_path / "cache")
    assert read_pretrained(name).origin == f"Hugging Face model {model_id}, revision {COMMIT}"


def test_only_the_files_that_are_read_are_downloaded(hub, huggingface_dir):
    for name in ("pytorch_model.bin", "tf_model.h5", "README.md", "model.onnx", "train.json"):
        (huggingface_dir / name).write_text("not read")
    (huggingface_dir / "1_Pooling").mkdir()
    (huggingface_dir / "1_Pooling" / "config.json").write_text("{}")
    sources.check(ID)
    assert hub.downloads == ["1_Pooling/config.json", *FILES]


@pytest.mark.parametrize("parent", ["", "0_BERT"])
def test_weights_of_a_later_format_are_found(hub, huggingface_dir, tmp_path, monkeypatch, parent):
    """Those of the encoder, which old embedders have in a directory."""
    (huggingface_dir / "model.safetensors").rename(huggingface_dir / "pytorch_model.bin")
    (huggingface_dir / "2_Dense").mkdir()
    (huggingface_dir / "2_Dense" / "model.safetensors").write_text("not the encoder's")
    inner = huggingface_dir / parent
    inner.mkdir(exist_ok=True)
    for name in ("config.json", "vocab.txt", "tokenizer_config.json", "pytorch_model.bin"):
        (huggingface_dir / name).rename(inner / name)
    directory, _ = huggingface.download(ID)
    assert (directory / parent / "pytorch_model.bin").is_file()
    hubs.use(monkeypatch, NOBODY, tmp_path / "cache")
    assert huggingface.download(ID)[0] == directory


def test_weights_of_another_architecture_are_not_downloaded(hub, huggingface_dir):
    values = json.loads((huggingface_dir / "config.json").read_text()) | {"model_type": "gpt2"}
    (huggingface_dir / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="config.json: model_type is 'gpt2'; expected 'bert'"):
        sources.check(ID)
    assert "model.safetensors" not in hub.downloads


def test_what_cannot_be_downloaded_is_one_line(hub, tmp_path, monkeypatch):
    of_hub = "of the Hugging Face hub"
    assert message("owner/none") == (
        f"owner/none {of_hub} does not exist, or is private and needs hf auth login"
    )
    assert message("none") == (
        f"none or sentence-transformers/none {of_hub} does not exist, or is private and needs hf "
        "auth login"
    )
    assert message(f"{ID}@v2") == f"{ID} {of_hub} has no revision v2"
    hub.gated.add(ID)
    assert message(ID, read_pretrained) == (
        f"{ID} {of_hub} is gated: ask for access on its page, then run hf auth login"
    )
    hubs.use(monkeypatch, NOBODY, tmp_path / "empty")
    unreachable = message(ID)
    assert unreachable.startswith(f"{ID} {of_hub} is not in the cache {tmp_path / 'empty'}, and ")
    assert "cannot be reached: [Errno 111] Connection refused" in unreachable
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in message("none")


def test_an_interrupted_download_is_completed(hub, huggingface_dir):
    directory, _ = huggingface.download(ID)
    (directory / "model.safetensors").unlink()
    huggingface.download.cache_clear()
    assert read_pretrained(ID).config.hidden_size == 12


def test_an_existing_path_and_a_path_in_an_existing_directory_are_no_ids(hub):
    pathlib.Path(ID).mkdir(parents=True)
    with pytest.raises(UserError, match="bert-tiny: no model found"):
        read_pretrained(ID)
    with pytest.raises(UserError, match="^google-bert/other: no such directory$"):
        read_pretrained("google-bert/other")
    assert not hub.requests


@pytest.mark.parametrize("path", ["a/b/c", "/a", "../a", "a/..", "./a/b", "~/a", "a b/c", "a/b\n"])
def test_a_path_that_is_no_id_is_no_such_directory(hub, path):
    with pytest.raises(UserError, match="no such directory$"):
        read_pretrained(path)
    assert not hub.requests


def test_a_name_of_keras_hub_is_not_looked_up(hub):
    assert sources.check("bert_tiny_en_uncased") is None
    assert huggingface.download("bert_tiny_en_uncased") is None
    assert not hub.requests


def test_a_model_without_weights_that_are_read_is_an_error(hub, huggingface_dir):
    shutil.move(huggingface_dir / "model.safetensors", huggingface_dir / "model.gguf")
    with pytest.raises(UserError, match=f"{COMMIT}: no model found; expected a run directory"):
        sources.check(ID)


def test_the_variables_of_huggingface_hub_choose_server_and_cache(hub, tmp_path):
    code = f"from bert_tf.weights import sources; print(sources.check({ID!r}).hidden_size)"
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code]
    for offline in ("0", "1"):
        environment = {**os.environ, **variables, "HF_HUB_OFFLINE": offline}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout == "12\n", done.stderr
    assert hub.downloads == FILES


def test_an_address_is_no_path():
    with pytest.raises(
        UserError, match="^https://huggingface.co/a/b.*: expected a local path"
    ) as raised:
        read_pretrained("https://huggingface.co/a/b")
    assert "gs://" in str(raised.value) and "\n" not in str(raised.value)
