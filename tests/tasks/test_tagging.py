"""Tagging: targets over windows by hand, metrics by their definitions, predictions in any batch."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError
from bert_tf.text.encoder_inputs import to_flat, to_padded
from bert_tf.train.losses import WeightedMean
from bert_tf.weights.sources import read_pretrained
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples
from tasks.finetuning.recipe import finetune
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types.tagging import TaggingTask
from tests import small
from tests.entities import BIO, ENTRIES, VOCABULARY, found, logits_of
from tests.shared_graphs import tokenizer_of
from tests.tasks.metrics import brute_force

FIELDS = ("entity_text", "entity_type", "entity_start", "entity_end", "entity_score")
# A word and its tag; sentences of different lengths, of one or more windows of 6 tokens.
SENTENCES = [
    [tuple(pair.split("/")) for pair in sentence.split()]
    for sentence in (
        "Anna/B-PER met/O Anna/B-PER in/O Paris/B-LOC",
        "is/O it/O in/O New/B-LOC York/I-LOC City/I-LOC ?/O",
        "the/O U.S./B-LOC is/O great/O !/O",
        "London/B-LOC",
        "I/O met/O Anna/B-PER in/O the/O great/O city/O Berlin/B-LOC ,/O it/O is/O great/O !/O",
        "don't/O",
        "Anna/B-PER ,/O Anna/B-PER ,/O London/B-LOC ,/O Paris/B-LOC ,/O U.S./B-LOC",
        "the/O cafe/O Berlin/B-LOC",
    )
]


def write_columns(path, sentences=SENTENCES):
    path.write_text(
        "".join("".join(f"{word}\t{tag}\n" for word, tag in s) + "\n" for s in sentences)
    )
    return path


def write_spans(path, rows):
    with open(path, "w") as lines:
        for text, spans in rows:
            entities = [dict(zip(("start", "end", "type"), span, strict=True)) for span in spans]
            lines.write(json.dumps({"text": text, "entities": entities}) + "\n")
    return path


def from_data(path, **changes):
    return TaggingTask.from_data(path, **{"max_seq_length": 6, "doc_stride": 2, **changes})


@pytest.fixture(scope="module")
def tiny(config):
    return dataclasses.replace(
        config,
        vocab_size=len(ENTRIES),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


@pytest.fixture
def encoded_of(tiny):
    """Return a function that encodes a file like the recipe: (EncodedExamples, Pipeline).

    Its arguments are the file, the layout and changes to the task.
    """

    def encoded(path, layout=to_flat, **changes):
        task = from_data(path, **changes)
        pipeline = Pipeline(task, tokenizer_of(VOCABULARY, True), task.build_model(tiny))
        return EncodedExamples.encode(task.load_examples(path), pipeline, layout), pipeline

    return encoded


@pytest.fixture
def settings(tiny, tmp_path):
    write_columns(tmp_path / "train.conll")
    return small.settings(
        small.write_huggingface(tmp_path / "bert", tiny, VOCABULARY),
        {"train": tmp_path / "train.conll", "dev": small.same_rows(tmp_path / "train.conll")},
        tmp_path / "run",
        task="conll",
        max_seq_length=6,
        doc_stride=2,
    )


def test_a_file_decides_the_task(tmp_path):
    columns = write_columns(tmp_path / "a.conll")
    spans = write_spans(tmp_path / "a.jsonl", [("Anna in Paris", [(8, 13, "LOC"), (0, 4, "PER")])])
    in_order = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    for path in (columns, spans):
        assert from_data(path).labels == in_order
        assert from_data(path, labels=("PER", "LOC")).labels == BIO.labels
        given = ("O", "I-LOC", "B-LOC", "I-PER", "B-PER")
        assert from_data(path, labels=given).labels == given
        assert task_from_dict(json.loads(json.dumps(from_data(path).to_dict()))) == from_data(path)
    # Half of the 126 tokens of a text, and never none.
    assert from_data(columns, max_seq_length=128, doc_stride=None).doc_stride == 63
    assert from_data(columns, max_seq_length=3, doc_stride=None).doc_stride == 1


def test_inconsistent_tasks_are_rejected(tmp_path):
    columns = write_columns(tmp_path / "a.conll")
    with pytest.raises(UserError, match="bare.conll: expected at least one entity"):
        from_data(write_columns(tmp_path / "bare.conll", [[("the", "O")]]))
    with pytest.raises(
        UserError, match="--labels: O, O: expected O and tags of entity types, each"
    ):
        from_data(columns, labels=("O", "O"))
    with pytest.raises(UserError, match="a.conll:1: entity type 'PER': expected one of LOC"):
        from_data(columns, labels=("LOC",)).load_examples(columns)
    spans = write_spans(tmp_path / "dev.jsonl", [("in", []), ("Anna met", [(5, 8, "VERB")])])
    with pytest.raises(UserError, match="jsonl:2: entity type 'VERB': expected one of LOC,"):
        from_data(columns).load_examples(spans)
    with pytest.raises(UserError, match="expected tags in a column file or in .jsonl, received"):
        from_data(small.write_rows(tmp_path / "a.csv", [("a", "b")]))


def test_targets_by_hand(tmp_path, encoded_of):
    """Use four tokens per window; tokens with more context in another window have weight 0."""
    sentence = [("the", "O"), ("Berliners", "B-LOC"), ("U.S", "B-LOC"), ("met", "O")]
    path = write_columns(tmp_path / "a.conll", [sentence, [("Anna", "B-PER")]])
    data, _ = encoded_of(path, labels=("PER", "LOC"))
    names = [[ENTRIES[i] for i in row] for row in data.windows.packed.input_ids.to_list()]
    assert names == [
        ["[CLS]", "the", "berlin", "##er", "##s", "[SEP]"],
        ["[CLS]", "##er", "##s", "u", ".", "[SEP]"],
        ["[CLS]", "u", ".", "s", "met", "[SEP]"],
        ["[CLS]", "anna", "[SEP]"],
    ]
    assert data.windows.example_W.numpy().tolist() == [0, 0, 0, 1]
    # "u" has a neighbor on either side only in the second window, "." only in the third.
    assert data.labels["tag"].to_list() == [
        [0, 0, 3, 0, 0, 0],
        [0, 0, 0, 3, 0, 0],
        [0, 0, 4, 4, 0, 0],
        [0, 1, 0],
    ]
    assert data.weights["tag"].to_list() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 1, 0],
    ]
    spans = [
        ("the Berliners U.S met", [(4, 13, "LOC"), (14, 17, "LOC")]),
        ("Anna", [(0, 4, "PER")]),
    ]
    same, _ = encoded_of(write_spans(tmp_path / "a.jsonl", spans), labels=("PER", "LOC"))
    for name in ("labels", "weights"):
        assert getattr(same, name)["tag"].to_list() == getattr(data, name)["tag"].to_list()


@pytest.mark.slow
def test_labels_that_cannot_be_encoded_are_reported(tmp_path, encoded_of):
    path = write_columns(
        tmp_path / "a.conll", [[("Anna", "B-PER"), ("\u200b", "O")], [("in", "O")]]
    )
    data, pipeline = encoded_of(path)
    assert pipeline.task.label_warnings(data) == [
        "1 of 3 words have no token; they are predicted as O"
    ]
    spans = [("Berliners and  Anna", [(0, 6, "LOC"), (6, 9, "LOC"), (13, 15, "LOC")])]
    spans.append(("Anna", [(0, 4, "LOC")]))
    data, pipeline = encoded_of(write_spans(tmp_path / "a.jsonl", spans))
    assert pipeline.task.label_warnings(data) == [
        "1 of 4 entities begin or end inside a token; they are extended to all of it",
        "2 of 4 entities have no token of their own; they are skipped",
    ]
    data, pipeline = encoded_of(write_columns(tmp_path / "b.conll"))
    assert pipeline.task.label_warnings(data) == []
    path = write_columns(tmp_path / "c.conll", [[("Anna", "O"), ("in", "O")]])
    data = EncodedExamples.encode(pipeline.task.load_examples(path), pipeline, to_flat)
    assert pipeline.task.label_warnings(data) == [
        "no row has an entity: precision, recall and F1 cannot be measured"
    ]


def test_metrics_by_hand(tmp_path, encoded_of):
    path = write_columns(
        tmp_path / "a.conll",
        [
            [("Anna", "B-PER"), ("in", "O"), ("New", "B-LOC"), ("York", "I-LOC")],
            [("U.S.", "B-LOC"), ("\u200b", "O"), ("Paris", "B-LOC")],
        ],
    )
    data, pipeline = encoded_of(path, labels=("PER", "LOC", "ORG"), max_seq_length=16)
    # Anna I-PER, in O, New B-LOC, York I-LOC; U.S. B-LOC (its "." and S are ignored), Paris O.
    labels_T = np.array([2, 0, 3, 4, 3, 0, 1, 0, 0], np.int32)
    outputs = {"tag": logits_of(data.windows, labels_T, 7)}
    metrics = pipeline.task.metrics(data, pipeline.task.metric_inputs(outputs))
    assert metrics == pytest.approx(
        {
            "f1": 6 / 7,
            "precision": 1,
            "recall": 3 / 4,
            "strict_f1": 2 * 2 / (4 + 2),
            "accuracy": 5 / 7,
            "f1_LOC": 4 / 5,
            "f1_PER": 1,
            "f1_ORG": 0,  # It does not occur.
        }
    )


@pytest.mark.parametrize("form", ["columns", "spans"])
def test_metrics_agree_with_their_definitions_and_with_the_predictions(tmp_path, encoded_of, form):
    """Draw any labels, on sentences of one-token words; entities never span sentences."""
    rng = np.random.default_rng(3)
    sentences = [["paris"] * size for size in rng.integers(1, 12, 60)]
    valid = ["O", "B-PER", "B-LOC"]
    gold = [list(rng.choice(valid, len(words))) for words in sentences]
    if form == "columns":
        rows = [list(zip(*pair, strict=True)) for pair in zip(sentences, gold, strict=True)]
        path = write_columns(tmp_path / "a.conll", rows)
    else:
        rows = [
            (
                " ".join(words),
                [(6 * a, 6 * b - 1, kind) for kind, a, b in brute_force.entities_of(tags)],
            )
            for words, tags in zip(sentences, gold, strict=True)
        ]
        path = write_spans(tmp_path / "a.jsonl", rows)
    data, pipeline = encoded_of(path)
    predicted = [list(rng.choice(pipeline.task.labels, len(words))) for words in sentences]
    ids = [pipeline.task.labels.index(tag) for tags in predicted for tag in tags]
    outputs = {"tag": logits_of(data.windows, np.array(ids, np.int32), 5)}

    metrics = pipeline.task.metrics(data, pipeline.task.metric_inputs(outputs))
    both = [brute_force.entities_of_all(sentences) for sentences in (gold, predicted)]
    expected = brute_force.precision_recall_f1(*both)
    assert [metrics[name] for name in ("precision", "recall", "f1")] == pytest.approx(expected)
    strict = [brute_force.entities_of_all(tags, strict=True) for tags in (gold, predicted)]
    assert metrics["strict_f1"] == pytest.approx(brute_force.precision_recall_f1(*strict)[2])
    assert metrics["strict_f1"] != metrics["f1"]
    assert metrics["accuracy"] == pytest.approx(
        np.mean(np.concatenate(gold) == np.concatenate(predicted))
    )
    for name in ("PER", "LOC"):
        of_type = [{entity for entity in entities if entity[1] == name} for entities in both]
        expected = brute_force.precision_recall_f1(*of_type)[2]
        assert metrics[f"f1_{name}"] == pytest.approx(expected)

    texts = {"text": tf.constant(data.examples.texts["text"])}
    prediction = found(pipeline.task.predictions(texts, data.windows, outputs))
    assert [
        [(kind, start // 6, end // 6 + 1) for start, end, kind, _ in row] for row in prediction
    ] == [brute_force.entities_of(tags) for tags in predicted]


@pytest.mark.slow
def test_a_served_prediction_does_not_depend_on_the_batch(tmp_path, encoded_of):
    _, pipeline = encoded_of(write_columns(tmp_path / "a.conll"))
    texts = ["", " ", "\x00", *(" ".join(word for word, _ in s) for s in SENTENCES)] * 2
    signatures = pipeline.signatures
    serve = signatures["serving_default"]
    each = [serve(tf.constant([text])) for text in texts[:17]]
    for count in (0, 1, 17):
        prediction = serve(tf.constant(texts[:count], tf.string))
        assert set(prediction) == {*FIELDS, "num_entities"}
        assert all(values.shape[0] == count for values in prediction.values())
        rows = found(prediction)
        assert count < 17 or sum(map(len, rows)) > 10
        for number, (row, alone) in enumerate(zip(rows, each, strict=False)):
            assert found(alone) == [row]
            np.testing.assert_allclose(
                prediction["entity_score"][number, : len(row)], alone["entity_score"][0], atol=1e-5
            )
        ids = signatures["tokenize"](tf.constant(texts[:count], tf.string))["input_ids"]
        assert ids.shape.rank == 3 and ids.shape[0] == count


@pytest.mark.slow
def test_it_learns_and_predicts_through_the_run_directory(settings, tmp_path):
    """Use 16 sentences, half of them as spans; each line of predict has only its own entities."""
    write_columns(tmp_path / "train.conll", SENTENCES * 2)
    spans = write_spans(
        tmp_path / "dev.jsonl",
        [("Anna , Anna , London , Paris , U.S.", [(0, 4, "PER"), (7, 11, "PER"), (14, 20, "LOC")])],
    )
    dev = small.same_rows(settings.train)
    changes = {"epochs": 12, "dev": (str(dev), str(spans))}
    said = []
    run = finetune(dataclasses.replace(settings, **changes), said.append)
    metrics = run.checkpoints.info(run.checkpoints.best_step())["metrics"]
    assert metrics["dev_f1"] == 1
    assert min(metrics["dev_strict_f1"], metrics["dev_accuracy"]) > 0.9
    assert metrics["dev2_precision"] == pytest.approx(3 / 5) and metrics["dev2_recall"] == 1
    assert any(line.startswith("tagging: 16 rows in 44 windows, 16 dev rows") for line in said)

    trained = load_model(run.path)
    assert trained.task == from_data(settings.train)
    data = EncodedExamples.encode(
        trained.task.load_examples(settings.train), trained.serving.pipeline, to_flat
    )
    evaluator = Evaluator(trained.task, trained.network, tf.distribute.get_strategy())
    assert evaluator.metrics(data)["f1"] == 1

    rows = tmp_path / "rows.csv"
    small.write_rows(rows, [("",), ("london",), ("is it in New York  City?",)], ("text",))
    for path, expected in (
        (
            rows,
            [
                ([], [], []),
                (["london"], ["LOC"], [[0, 6]]),
                (["New York  City"], ["LOC"], [[9, 23]]),
            ],
        ),
        (
            write_columns(tmp_path / "some.conll", SENTENCES[2:4]),
            [(["U.S."], ["LOC"], [[4, 8]]), (["London"], ["LOC"], [[0, 6]])],
        ),
    ):
        assert predict(trained, path, tmp_path / "out.jsonl", 64, said.append)[1] == 0
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [set(line) for line in lines] == [{*FIELDS, "num_entities"}] * len(expected)
        for line, (texts, types, positions) in zip(lines, expected, strict=True):
            assert all(len(line[name]) == line["num_entities"] == len(texts) for name in FIELDS)
            assert (line["entity_text"], line["entity_type"]) == (texts, types)
            ends = zip(line["entity_start"], line["entity_end"], strict=True)
            assert [list(pair) for pair in ends] == positions


@pytest.mark.slow
def test_two_replicas_train_the_same_run(settings, tmp_path, mirrored):
    """Give one replica longer windows with more labels than the other."""
    settings = dataclasses.replace(settings, global_batch_size=6, learning_rate=1e-3)
    one = finetune(settings)
    two = finetune(
        dataclasses.replace(settings, output_dir=str(tmp_path / "two")), strategy=mirrored
    )
    assert len(one.metrics()) == len(two.metrics()) > 2
    for first, second in zip(one.metrics(), two.metrics(), strict=True):
        first.pop("examples_per_second", None), second.pop("examples_per_second", None)
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
def test_fit_has_the_loss_of_the_train_step(tmp_path, encoded_of):
    data, pipeline = encoded_of(write_columns(tmp_path / "a.conll"), to_padded)
    model, task = pipeline.model, pipeline.task
    evaluator = Evaluator(task, model, tf.distribute.get_strategy())
    expected = evaluator.metrics(data)["loss"]
    model.compile("adam", {"tag": WeightedMean(task.losses["tag"])})
    # A single batch, so that Keras has no means to average.
    batches = small.in_order(data, len(data))
    assert model.evaluate(batches, verbose=0) == pytest.approx(expected, rel=1e-5)
    batches = data.training_batches(global_batch_size=4, num_epochs=8, seed=0)
    model.fit(batches, verbose=0)
    assert evaluator.metrics(data)["loss"] < 0.9 * expected


@pytest.mark.slow
def test_wnut17_is_learned(data_dir, pretrained_dir):
    """Read all of its files; train a real BERT for a few steps on sentences with entities."""
    directory = data_dir / "ner" / "wnut17"
    task = TaggingTask.from_data(directory / "wnut17train.conll", max_seq_length=32)
    assert len(task.labels) == 13
    for name in ("emerging.dev.conll", "emerging.test.annotated"):
        assert len(task.load_examples(directory / name)) > 1000
    source = read_pretrained(str(pretrained_dir))
    model = task.build_model(source.config)
    source.assign_to(model)
    tokenizer = Tokenizer(source.vocabulary, source.config.do_lower_case)
    examples = task.load_examples(directory / "wnut17train.conll")
    some = examples.filter(lambda n: n < 60 and set(examples.labels[n].tags) != {"O"})
    data = EncodedExamples.encode(some, Pipeline(task, tokenizer, model), to_padded)
    evaluator = Evaluator(task, model, tf.distribute.get_strategy())
    before = evaluator.metrics(data)
    model.compile("adam", {"tag": WeightedMean(task.losses["tag"])})
    model.optimizer.learning_rate = 5e-4
    model.fit(data.training_batches(global_batch_size=8, num_epochs=3, seed=0), verbose=0)
    assert evaluator.metrics(data)["loss"] < 0.3 * before["loss"]
