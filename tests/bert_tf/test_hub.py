"""Models in the local cache of the Hugging Face hub."""

import pathlib
import sys
import types

import pytest

from bert_tf import UserError, read_pretrained
from bert_tf.weights import huggingface, sources

ID, COMMIT = "google-bert/bert-tiny", "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(params=["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def cache(request, tmp_path, monkeypatch):
    """Return the cache, named by one of the variables that transformers knows."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path / "there"))
    inside = {
        "HF_HUB_CACHE": "",
        "HF_HOME": "hub",
        "XDG_CACHE_HOME": "huggingface/hub",
        "HOME": ".cache/huggingface/hub",
    }
    return tmp_path / "there" / inside[request.param]


def download(cache, huggingface_dir, model_id=ID):
    """Move a directory to where the hub's client puts it: links to files under blobs/."""
    model = cache / f"models--{model_id.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for number, path in enumerate(sorted(huggingface_dir.iterdir())):
        path.rename(model / "blobs" / str(number))
        (snapshot / path.name).symlink_to(pathlib.Path("../../blobs") / str(number))
    return model


@pytest.mark.parametrize("model_id", [ID, "bert-base-tiny"])
def test_a_hub_id_is_found_in_the_cache(cache, huggingface_dir, config, model_id):
    download(cache, huggingface_dir, model_id)
    assert sources.check(model_id).hidden_size == 12
    assert read_pretrained(model_id).origin == f"Hugging Face model {model_id}"


def test_an_existing_path_wins(cache, huggingface_dir, tmp_path):
    download(cache, huggingface_dir)
    (tmp_path / ID).mkdir(parents=True)
    with pytest.raises(UserError, match="bert-tiny: no model found"):
        read_pretrained(ID)


def test_a_model_that_is_not_there_is_reported_with_the_command(cache, huggingface_dir):
    command = f"no such directory, and the .* has no such model; .*: hf download {ID}$"
    with pytest.raises(UserError, match=command) as raised:
        sources.check(ID)
    assert "\n" not in str(raised.value)
    model = download(cache, huggingface_dir)
    others = "bert-tiny: the Hugging Face cache has other revisions than main only; pass the dir"
    for reference in ("../../secret", "0" * 40, "\xff"):
        (model / "refs" / "main").write_text(reference, encoding="latin-1")
        with pytest.raises(UserError, match=others) as raised:
            read_pretrained(ID)
    directory = str(raised.value).split("such as ")[1].split(";")[0]
    assert read_pretrained(directory).config.hidden_size == 12
    assert huggingface.find_cached("no_such_preset") is None


def test_a_name_that_is_neither_a_model_nor_a_preset_is_reported_with_the_command(
    cache, monkeypatch
):
    """Such as bert-base-uncased, an old id without a "/". keras-hub explains names in ten lines."""

    def from_preset(name):
        raise ValueError(f"Unknown preset identifier.\n1) a built-in one\nReceived: {name}")

    backbone = types.SimpleNamespace(from_preset=from_preset)
    models = types.SimpleNamespace(BertBackbone=backbone, BertTokenizer=backbone)
    monkeypatch.setitem(sys.modules, "keras_nlp", types.SimpleNamespace(models=models))
    with pytest.raises(
        UserError, match="^bert-base-x: no such directory, .*, run: hf down"
    ) as raised:
        read_pretrained("bert-base-x")
    assert str(raised.value).endswith("load this preset: ValueError: Unknown preset identifier.")


def test_the_only_revision_is_read_where_main_is_unknown(cache, huggingface_dir):
    model = download(cache, huggingface_dir)
    (model / "refs" / "main").unlink()
    assert read_pretrained(ID).origin == f"Hugging Face model {ID}, revision {COMMIT}"
    (model / "snapshots" / ("f" * 40)).mkdir()
    with pytest.raises(UserError, match="has other revisions than main only"):
        sources.check(ID)


def test_a_model_without_its_weights_is_reported_with_the_command(cache, huggingface_dir):
    """transformers downloads config.json alone for some of its classes."""
    (huggingface_dir / "model.safetensors").unlink()
    download(cache, huggingface_dir)
    for read in (sources.check, read_pretrained):
        with pytest.raises(UserError, match=f"no model found; .*, run: hf download {ID}$"):
            read(ID)


def test_a_user_without_a_home_directory_has_no_cache(monkeypatch):
    """Numbers of users in containers are often in no list of users."""
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654)
    with pytest.raises(UserError, match="no_such/model: no such directory"):
        sources.check("no_such/model")


def test_an_address_is_no_path():
    with pytest.raises(
        UserError, match="^https://huggingface.co/a/b.*: expected a local path"
    ) as raised:
        read_pretrained("https://huggingface.co/a/b")
    assert "gs://" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["a/b/c", "/a", "../a", "a/..", "./a/b", "~/a", "a b/c", "a/b\n"])
def test_a_path_that_is_no_id_is_no_such_directory(cache, path):
    with pytest.raises(UserError, match="no such directory$"):
        read_pretrained(path)
