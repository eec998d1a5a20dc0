"""Publishing of Keras models and of runs by path."""

import tempfile
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import export
import tasks
from bert_tf import UserError
from bert_tf.weights.sources import PretrainedWeights
from export import publishing
from export.checks import parity
from export.graph.saved_model import served_pipeline
from export.package import version_files
from export.package.documents import MetricChange, model_card
from tasks import TextClassifier, load_model
from tests import small
from tests.export.test_publishing import publish
from tests.small import TEXTS

LABELS = list(TEXTS)


@pytest.fixture
def model(huggingface_dir):
    return TextClassifier.from_pretrained(huggingface_dir, labels=LABELS, max_seq_length=12)


@pytest.fixture
def opened(monkeypatch):
    """Collect what is published, without writing a SavedModel."""
    monkeypatch.setattr(version_files, "prepare", lambda directory, trained, log: ())
    monkeypatch.setattr(parity, "check", lambda *arguments: {})
    monkeypatch.setattr(version_files, "write_documents", lambda *arguments: None)
    found = []
    return found, lambda model, *rest: found.append((model.task, model.source.path))


def test_the_model_card_of_a_model_names_the_origin_and_no_temporary_directory(
    model, tmp_path, opened, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "builders-place"))
    (tmp_path / "builders-place").mkdir()
    cards = []
    publish(
        model,
        tmp_path / "models",
        write=lambda trained, *rest: cards.append(model_card("m", trained, "float32", True)),
    )
    assert "huggingface" in cards[0].lower() and "builders-place" not in cards[0]
    assert not list((tmp_path / "builders-place").glob("tmp*"))


def test_the_model_card_has_the_tolerances_and_names_no_refused_flag(model, tmp_path):
    model = load_model(model.save_run(tmp_path / "run").path)
    for precision in ("bfloat16", "float16"):
        tolerance, card = parity.TOLERANCES[precision], model_card("m", model, precision, True)
        assert f"are within {tolerance.probability:g} of" in card and "--portable" in card
        assert f"vectors within {100 * tolerance.number:g}% of the row's largest" in card
    card = model_card("m", model, "int8", True, MetricChange("accuracy", "dev.csv", 0.9, 0.9))
    assert "- operations: TensorFlow for x86-64 on a CPU\n" in card


@pytest.mark.parametrize("name", ["TextClassifier", "TextEmbedder"])
def test_the_served_network_shares_all_but_the_encoder(name, huggingface_dir):
    options = {"labels": LABELS} if name == "TextClassifier" else {}
    model = getattr(tasks, name).from_pretrained(huggingface_dir, max_seq_length=12, **options)
    served = served_pipeline(model, "float32").model
    assert type(served) is type(model.network)
    trained = vars(model.network)
    assert [key for key, value in vars(served).items() if value is not trained[key]] == ["encoder"]


@pytest.mark.slow
def test_a_model_is_published_without_the_name_of_its_temporary_directory(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "builders-place"))
    (tmp_path / "builders-place").mkdir()
    version = export.publish(model, tmp_path / "models" / "complaints")
    assert version == tmp_path / "models" / "complaints" / "1"
    texts = ["my bill is high !", "broken screen !"]
    served = export.LocalClient(version.parent).predict({"text": texts})
    predicted = model.predict(texts)
    assert served["label"] == predicted["label"].tolist()
    assert served["score"] == pytest.approx(predicted["score"].tolist(), abs=1e-5)
    for path in version.rglob("*"):
        if path.is_file():
            assert b"builders-place" not in path.read_bytes(), path


def test_a_run_is_published_by_its_path(model, tmp_path, opened):
    found, write = opened
    run = model.save_run(tmp_path / "run")
    publish(tmp_path / "run", tmp_path / "models", write=write)
    publish(str(tmp_path / "run"), tmp_path / "models", checkpoint="step-00000000", write=write)
    assert found == [(model.task, run.checkpoints.path(0))] * 2
    with pytest.raises(UserError, match="step-00000001: no complete checkpoint"):
        export.publish(tmp_path / "run", tmp_path / "models", checkpoint="step-00000001")


def test_what_was_trained_in_bfloat16_is_compared_in_float32(model, tmp_path):
    run = model.save_run(tmp_path / "run")
    options = {"labels": LABELS, "max_seq_length": 12, "dtype": "mixed_bfloat16"}
    trained = TextClassifier.from_pretrained(run.path, **options)
    trained.source = load_model(run.path).source  # As after `train`.
    with publishing.loaded(trained, None) as served:
        assert served.dtype_policy.name == "float32"
        assert served.source.path == trained.source.path


@pytest.mark.parametrize("is_on", [True, False])
def test_programs_that_a_gpu_ran_in_tf32_are_not_compared(model, tmp_path, monkeypatch, is_on):
    loaded = load_model(model.save_run(tmp_path / "run").path)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: is_on)
    with publishing.loaded(loaded, None) as served:
        assert (served is not loaded) == is_on
        assert served.source.path == loaded.source.path


def test_an_untrained_head_is_published_with_a_warning(model, tmp_path, opened):
    with pytest.warns(UserWarning, match="TextClassifier: .* an untrained head are random; call"):
        publish(model, tmp_path / "models", write=opened[1])
    model.has_new_head = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        publish(model, tmp_path / "models", write=opened[1])
    assert not [one for one in found if "untrained head" in str(one.message)]


@pytest.mark.medium
def test_an_untuned_model_is_published_once_it_is_tuned(huggingface_dir, tmp_path, opened):
    found, write = opened
    model = TextClassifier.from_pretrained(
        huggingface_dir,
        labels=LABELS[:2],
        max_seq_length=12,
        rare_label=LABELS[1],
        threshold_objective="recall=1.0",
    )
    with pytest.raises(UserError, match=r"untuned: thresholds .*; call tune\(x, y\) of the model"):
        publish(model, tmp_path / "models", write=write)
    model.tune(TEXTS["billing"] + TEXTS["hardware"], ["billing"] * 3 + ["hardware"] * 3)
    publish(model, tmp_path / "models", write=write)
    assert [task for task, _ in found] == [model.task] and model.task.thresholds


@pytest.mark.slow
def test_a_loaded_model_is_published_as_its_run_until_it_is_trained_further(
    model, tmp_path, opened
):
    found, write = opened
    run = model.save_run(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    publish(loaded, tmp_path / "models", write=write)
    assert found == [(model.task, run.checkpoints.path(0))]
    loaded.fit(TEXTS["billing"], ["hardware"] * 3, epochs=1, verbose=0)
    kernel, expected = [], loaded.network.head.kernel.numpy()
    publish(
        loaded,
        tmp_path / "models",
        write=lambda model, *rest: kernel.append((model.source.path, model.network.head.kernel)),
    )
    ((path, published),) = kernel
    assert not path.startswith(run.path)
    np.testing.assert_array_equal(published.numpy(), expected)
    assert not np.array_equal(expected, model.network.head.kernel.numpy())


def contents(version):
    """Return the files of a version; the graph is the same up to the numbers of its functions."""
    return {
        str(path.relative_to(version)): path.read_bytes()
        for path in version.rglob("*")
        if path.is_file() and path.name not in ("saved_model.pb", "fingerprint.pb")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TextClassifier", "TextEmbedder", "MaskedLanguageModel"])
def test_a_loaded_model_and_its_path_are_published_alike(
    name, huggingface_dir, config, vocabulary, tmp_path
):
    if name == "TextClassifier":
        model = TextClassifier.from_pretrained(huggingface_dir, labels=LABELS, max_seq_length=12)
        rows = [(text, label) for label, texts in TEXTS.items() for text in texts]
        texts, labels = zip(*rows, strict=True)
        dev = (texts[::2], labels[::2])
        model.train(texts, labels, dev, output_dir=tmp_path / "run", epochs=1)
    else:
        if name == "MaskedLanguageModel":
            parts = ("bert", "masked_lm", "next_sentence")
            weights = small.random_weights(config, parts=parts)
            PretrainedWeights(config, vocabulary, weights, "random").save(tmp_path / "heads")
            huggingface_dir = tmp_path / "heads"
        model = getattr(tasks, name).from_pretrained(huggingface_dir, max_seq_length=16)
        model.save_run(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    rows = loaded.predict_rows(["my bill is high !"])
    by_model = export.publish(loaded, tmp_path / "by_model" / "name")
    by_path = export.publish(tmp_path / "run", tmp_path / "by_path" / "name")
    assert contents(by_model) == contents(by_path)
    served = export.LocalClient(by_path.parent).predict({"text": ["my bill is high !"]})
    assert sorted(served) == sorted(rows[0])
    card = (by_model / "MODEL_CARD.md").read_text()
    assert ("dev_accuracy" in card) == (name == "TextClassifier")


def test_errors_name_the_argument(model, tmp_path):
    with pytest.raises(UserError, match="checkpoint='best': expected with the path of a run only"):
        export.publish(model, tmp_path / "models", checkpoint="best")
    with pytest.raises(UserError, match="checkpoint='best': expected with a run directory only"):
        export.publish(tmp_path / "model.keras", tmp_path / "models", checkpoint="best")
    with pytest.raises(UserError, match="model_or_run: expected a model such as TextClassifier"):
        export.publish(keras.Sequential(), tmp_path / "models")
    with pytest.raises(UserError, match="^precision=float8: expected one of float32, bf"):
        export.publish(model, tmp_path / "models", precision="float8")
    for name, value in {"dev": "dev.csv", "max_metric_drop": 0.1}.items():
        with pytest.raises(UserError, match=f"^{name}={value}: expected with precision=int8 only"):
            export.publish(model, tmp_path / "models", **{name: value})
    assert not (tmp_path / "models").exists()


def test_public_names_are_lazy():
    clients = ["GrpcClient", "LiteRTClient", "LocalClient", "RestClient"]
    assert export.__all__ == [*clients, "publish", "write_litert"]
    assert all(getattr(export, name).__name__ == name for name in dir(export))
    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        export.Client  # noqa: B018
