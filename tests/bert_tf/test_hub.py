"""Models in the local cache of the Hugging Face hub."""

import pathlib

import pytest

from bert_tf import UserError, read_pretrained
from bert_tf.weights import hub, sources

ID, COMMIT = "google-bert/bert-tiny", "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(params=["HF_HUB_CACHE", "HF_HOME", "HOME"])
def cache(request, tmp_path, monkeypatch):
    """Return the cache, named by one of the variables that transformers knows."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path / "there"))
    inside = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "HOME": ".cache/huggingface/hub"}
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
    for reference in ("../../secret", "", "0" * 40, "\xff"):
        (model / "refs" / "main").write_text(reference, encoding="latin-1")
        with pytest.raises(UserError, match=command):
            read_pretrained(ID)
    assert hub.find("no_such_preset") is None


@pytest.mark.parametrize("path", ["a/b/c", "/a", "../a", "a/..", "./a/b", "~/a", "a b/c", "a/b\n"])
def test_a_path_that_is_no_id_is_no_such_directory(cache, path):
    with pytest.raises(UserError, match="no such directory$"):
        read_pretrained(path)
