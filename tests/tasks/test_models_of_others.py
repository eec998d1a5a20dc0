"""Fine-tuned models of other libraries without a conversion: Python models and commands."""

import json

import numpy as np
import pytest

from bert_tf import UserError, Vocabulary, read_pretrained
from tasks import (
    MaskedLanguageModel,
    MultipleChoice,
    QuestionAnswerer,
    TextClassifier,
    TextEmbedder,
    TextRanker,
    TextRegressor,
    TokenClassifier,
    load_model,
)
from tasks.evaluate import EvaluateSettings
from tasks.evaluate import main as evaluate
from tasks.predict import PredictSettings
from tasks.predict import main as predict
from tests import hub as hubs
from tests import small
from tests.bert_tf.test_head_weights import MASKED_LM, add_heads
from tests.bert_tf.test_task_heads import table, write_head

TEXTS = ["the bill is too high", "broken screen !"]
TAGS = table("B-A", "I-A", "O")
LABELS = ["software", "billing", "hardware"]
MULTI = {"problem_type": "multi_label_classification", "id2label": table(*LABELS)}
CROSS = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
PAIRS = {"text_a": TEXTS, "text_b": TEXTS[::-1]}
# Class, architecture, outputs of the head, values of config.json, and rows.
MODELS = {
    "labels": (TextClassifier, "SequenceClassification", 3, {"id2label": table(*LABELS)}, TEXTS),
    "multi-label": (TextClassifier, "SequenceClassification", 3, MULTI, TEXTS),
    "number": (TextRegressor, "SequenceClassification", 1, {}, TEXTS),
    "cross-encoder": (TextRegressor, "SequenceClassification", 1, CROSS, PAIRS),
    "entities": (
        *(TokenClassifier, "TokenClassification", 3),
        *({"id2label": TAGS}, TEXTS),
    ),
    "answers": (
        *(QuestionAnswerer, "QuestionAnswering", 2, {}),
        {"question": ["the"], "context": ["my app is broken"]},
    ),
    "choices": (
        *(MultipleChoice, "MultipleChoice", 1, {}),
        {"prompt": ["the bill"], "choices": [["my app", "screen !"]]},
    ),
}


@pytest.mark.parametrize("name", small.fast(list(MODELS), "multi-label"))
def test_a_head_decides_the_options_and_the_class(tmp_path, config, vocabulary, name):
    model_class, architecture, units, values, rows = MODELS[name]
    path = tmp_path / "model"
    write_head(path, config, vocabulary, architecture, units, **values)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 12}))
    converted = load_model(read_pretrained(path).save(tmp_path / "run").path)
    assert type(converted) is model_class and converted.task.max_seq_length == 12
    expected = converted.predict_rows(rows)
    for model in (model_class.from_pretrained(path), load_model(path)):
        assert type(model) is model_class and model.task == converted.task
        assert not model.has_new_head
        assert model.predict_rows(rows) == expected


def test_a_cross_encoder_is_a_ranker_too(tmp_path, config, vocabulary):
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 1, **CROSS)
    ranker = TextRanker.from_pretrained(tmp_path / "model")
    assert (ranker.task.max_seq_length, ranker.task.activation) == (
        config.max_position_embeddings,
        "sigmoid",
    )
    listwise = TextRanker.from_pretrained(tmp_path / "model", ranking_loss="listwise")
    assert listwise.task.activation == "identity"


def test_given_options_replace_those_of_the_head(tmp_path, config, vocabulary):
    path = tmp_path / "model"
    write_head(
        path, config, vocabulary, "TokenClassification", 3, id2label=table("B-A", "I-A", "O")
    )
    shorter = TokenClassifier.from_pretrained(path, max_seq_length=10)
    assert (shorter.task.max_seq_length, shorter.task.doc_stride) == (10, 4)
    assert shorter.labels == ("B-A", "I-A", "O") and not shorter.has_new_head
    default = TokenClassifier.from_pretrained(path, labels=["A"]).task.max_seq_length
    assert default == min(128, config.max_position_embeddings)


def test_what_was_tuned_is_kept_while_no_option_is_given(tmp_path, config, vocabulary):
    path, tuned = tmp_path / "model", {"calibrate": True, "temperature": 2.0}
    write_head(path, config, vocabulary, "SequenceClassification", 3, id2label=table(*LABELS))
    pretrained = read_pretrained(path)
    pretrained.task.update(tuned)
    run = pretrained.save(tmp_path / "run").path
    assert TextClassifier.from_pretrained(run).task.temperature == 2.0
    assert TextClassifier.from_pretrained(run, truncation="tail").task.temperature is None
    assert TextClassifier.from_pretrained(run, labels=LABELS).task.calibrate is False


def test_an_error_says_which_head_there_is(tmp_path, config, vocabulary, huggingface_dir):
    path = tmp_path / "model"
    write_head(
        path, config, vocabulary, "TokenClassification", 3, id2label=table("B-A", "I-A", "O")
    )
    expected = (
        "labels: expected names, in a list, or weights with a classification head to keep. "
        "Received: no labels, and Hugging Face directory model (initialized: pooler) "
        "with a tagging head"
    )
    with pytest.raises(UserError) as raised:
        TextClassifier.from_pretrained(path)
    assert str(raised.value) == expected
    with pytest.raises(UserError, match="directory huggingface with no head$"):
        TextClassifier.from_pretrained(huggingface_dir)
    with pytest.raises(UserError, match="with no head$"):
        TokenClassifier.from_pretrained(path, keep_head=False)
    with pytest.warns(UserWarning, match="a head of task regression, received tagging"):
        TextRegressor.from_pretrained(path)
    with pytest.raises(UserError, match="received .* directory huggingface without a head; "):
        load_model(huggingface_dir)


@pytest.mark.medium
def test_an_embedder_and_a_masked_language_model_are_loaded(
    tmp_path, config, vocabulary, huggingface_dir
):
    small.write_huggingface(tmp_path / "masked", config, vocabulary)
    add_heads(tmp_path / "masked", config, MASKED_LM)
    masked = load_model(tmp_path / "masked")
    assert type(masked) is MaskedLanguageModel and not masked.has_new_head
    assert len(masked.predict_rows(["the [MASK] is"])[0]["token"]) == 5
    types = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"path": name, "type": f"sentence_transformers.models.{kind}"}
        for name, kind in types.items()
    ]
    (huggingface_dir / "modules.json").write_text(json.dumps(modules))
    (huggingface_dir / "1_Pooling").mkdir()
    (huggingface_dir / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    embedder = load_model(huggingface_dir)
    assert type(embedder) is TextEmbedder and embedder.task.pooling == "max"
    expected = TextEmbedder.from_pretrained(huggingface_dir).predict(TEXTS)
    np.testing.assert_array_equal(embedder.predict(TEXTS), expected)


@pytest.fixture
def model_id(tmp_path, config, vocabulary, monkeypatch):
    """Return the id of a classifier of complaints in a hub, in an empty working directory."""
    path, model_id = tmp_path / "model", "owner/complaints"
    write_head(path, config, vocabulary, "SequenceClassification", 3, id2label=table(*LABELS))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with hubs.served({model_id: path}) as hub:
        hubs.use(monkeypatch, hub.url, tmp_path / "cache")
        yield model_id


def checked(settings_class, main, **flags):
    """Run a command in this process."""
    settings = settings_class(**flags)
    result = settings.check()
    main(settings) if result is None else main(settings, result)


@pytest.mark.medium
def test_run_of_evaluate_and_predict_takes_an_id(model_id, tmp_path, complaints, capsys):
    origin = f"Hugging Face model {model_id}, revision {hubs.COMMIT}"
    read_pretrained(model_id).save("RUN")
    found = []
    for run in (model_id, "RUN"):
        checked(EvaluateSettings, evaluate, run=run, data=str(complaints["dev"]))
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
        checked(PredictSettings, predict, run=run, text=(TEXTS[0],))
        output = capsys.readouterr()
        found.append(json.loads(output.out))
        assert (origin in output.err) == (run == model_id)
        name = "shards" + run[-3:]
        flags = {
            "input": str(complaints["dev"]),
            "output_dir": name,
            "num_workers": 1,
            "num_shards": 1,
        }
        checked(PredictSettings, predict, run=run, **flags)
        (shard,) = (tmp_path / "here" / name).glob("*.jsonl")
        found.append(shard.read_text())
        assert (origin in capsys.readouterr().err) == (run == model_id)
    assert found[:3] == found[3:]
    with pytest.raises(UserError, match="owner/complaints: no such directory; expected a run"):
        checked(
            EvaluateSettings, evaluate, run=model_id, data=str(complaints["dev"]), checkpoint="x"
        )


@pytest.mark.medium
def test_run_of_export_takes_an_id(model_id, tmp_path):
    from export import LocalClient, publish
    from export.export_saved_model import ExportSettings

    ExportSettings(run=model_id, output_dir=str(tmp_path / "models")).check()
    lines = []
    version = publish(model_id, tmp_path / "models", log=lines.append)
    origin = f"Hugging Face model {model_id}, revision {hubs.COMMIT}"
    assert f"writing the SavedModel of {origin}" in lines
    assert origin in (version / "MODEL_CARD.md").read_text()
    served = LocalClient(version).predict({"text": TEXTS})
    expected = load_model(model_id).predict(TEXTS)
    assert list(served["label"]) == list(expected["label"])


def test_case_that_the_vocabulary_decides_is_a_warning(tmp_path, config, vocabulary):
    entries = [entry.capitalize() if entry.isalpha() else entry for entry in vocabulary.entries]
    cased = Vocabulary(entries)
    path = small.write_huggingface(tmp_path / "model", config, cased)
    (path / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match="model: text keeps its case, unless .* transformers low"):
        assert not read_pretrained(path).config.do_lower_case
