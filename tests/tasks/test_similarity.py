"""Training of embedders on pairs, scored pairs, triplets and classes."""

import contextlib
import dataclasses
import functools
import math
import shutil
import types
import unittest.mock
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf.errors import UserError
from bert_tf.text.encoder_inputs import to_flat
from bert_tf.train.loop import TrainingLoop
from bert_tf.weights.sources import embedder_settings
from tasks import TextEmbedder, load_model, read_examples
from tasks.data.examples import EncodedExamples, Examples
from tasks.finetuning import recipe
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.metrics.retrieval import normalized
from tasks.types.similarity import losses
from tasks.types.similarity.text_embedder import SimilarityTask
from tests import sentence_transformers_files, small

ANCHORS = ["the bill", "screen broken", "app does not open", "too high"]
POSITIVES = ["bill is too high", "the screen", "the app", "is too high"]
NEGATIVES = ["my app", "the bill", "screen is un", "cafe"]


@pytest.fixture
def model(huggingface_dir):
    return TextEmbedder.from_pretrained(huggingface_dir, seed=1)


@pytest.fixture(scope="module")
def untrained(config, vocabulary):
    """Return a model for tests that do not train it."""
    return TextEmbedder(SimilarityTask(max_seq_length=16), config, vocabulary)


@pytest.mark.medium
def test_fit_on_pairs_brings_positives_to_the_front(model):
    before = model.evaluate((ANCHORS, POSITIVES))
    model.compile(learning_rate=1e-2)
    model.fit((ANCHORS, POSITIVES), epochs=12, batch_size=4, verbose=0)
    after = model.evaluate((ANCHORS, POSITIVES))
    assert after["loss"] < before["loss"] / 2
    assert after["recall@1"] == after["mrr@10"] == 1.0


@pytest.mark.medium
def test_hard_negatives_may_be_texts_or_lists(model):
    one = model.evaluate((ANCHORS, POSITIVES, NEGATIVES))
    table = {
        "anchor": ANCHORS,
        "positive": POSITIVES,
        "negatives": [[negative] for negative in NEGATIVES],
    }
    assert model.evaluate(table) == pytest.approx(one, rel=1e-6)
    assert model.evaluate((ANCHORS, POSITIVES))["loss"] < one["loss"]  # Fewer candidates.


@pytest.mark.medium
def test_scores_are_learned_as_cosines(huggingface_dir):
    model = TextEmbedder.from_pretrained(huggingface_dir, seed=1, loss="cosine")
    scores = [0.9, 0.1, 0.8, 0.2]
    model.compile(learning_rate=1e-2)
    model.fit((ANCHORS, POSITIVES), scores, epochs=20, batch_size=4, verbose=0)
    metrics = model.evaluate((ANCHORS, POSITIVES), scores)
    assert metrics["spearman"] > 0.7 and metrics["loss"] < 0.05


@pytest.mark.medium
def test_texts_of_a_class_attract_each_other(huggingface_dir):
    model = TextEmbedder.from_pretrained(huggingface_dir, seed=1, classes=True)
    texts, classes = [*ANCHORS, *POSITIVES], [0, 1, 2, 0, 0, 1, 2, 0]
    model.compile(learning_rate=1e-2)
    model.fit(texts, classes, epochs=40, batch_size=8, verbose=0)
    assert model.evaluate(texts, classes)["recall@1"] == 1.0


@pytest.fixture
def of_triplets(huggingface_dir):
    return TextEmbedder.from_pretrained(huggingface_dir, loss="triplet", triplet_margin=1.0)


@pytest.mark.medium
def test_the_loss_of_triplets_is_a_distance(of_triplets):
    assert 0 < of_triplets.evaluate((ANCHORS, POSITIVES, NEGATIVES))["loss"] < 2


def test_triplets_need_negatives(of_triplets):
    with pytest.raises(UserError, match="triplet.*negatives"):
        of_triplets.evaluate((ANCHORS, POSITIVES))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (ANCHORS, None, "y.0.: expected a pair of texts, received one text and None; pass pairs"),
        (
            ANCHORS,
            POSITIVES,
            "y.0.: expected a pair of texts.* as in fit..questions, answers.., an",
        ),
        ((ANCHORS, POSITIVES), [1.0] * 4, "expected no label for a pair with loss='contrastive'"),
        ((ANCHORS, POSITIVES[:3]), None, "4 of anchor, 3 of positive"),
        ((ANCHORS, POSITIVES, NEGATIVES[:2]), None, "expected 4 of negatives"),
        ((ANCHORS, POSITIVES, NEGATIVES, NEGATIVES), None, "negatives may be lists.* 4 columns"),
        ([ANCHORS, POSITIVES], None, "expected texts, or a tuple of anchors.*a list of lists"),
        ((ANCHORS, [*POSITIVES[:3], " "]), None, "row 3: expected a text, received an empty"),
        (
            {"anchor": ANCHORS, "positive": POSITIVES, "label": [1, 0, 1, 0]},
            None,
            "x: expected no column 'label'; pass it as y",
        ),
    ],
)
def test_wrong_rows_are_refused(untrained, x, y, message):
    with pytest.raises(UserError, match=message):
        untrained.fit(x, y)


@pytest.fixture(scope="module")
def of_classes(config, vocabulary):
    """Return a model of classes for tests that do not train it."""
    return TextEmbedder(SimilarityTask(max_seq_length=16, classes=True), config, vocabulary)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (ANCHORS, POSITIVES, "received 4 classes of one text each; pairs of texts are a tuple"),
        (ANCHORS, ["a"] * 4, "expected texts of two or more classes, received only 'a'"),
        (ANCHORS, ["a", float("nan"), "a", "b"], r"y.1.: expected a class, received nan"),
        # Such as pandas.NA, which is no string either.
        (ANCHORS, ["a", ..., "a", "b"], r"y.1.: expected a class, received Ellipsis"),
        (ANCHORS, ["a", "", "a", "b"], r"y.1.: expected a class, received an empty string"),
        (ANCHORS, None, r"y.0.: expected a class, received None"),
        ((ANCHORS, POSITIVES), None, r"y.0.: expected a class and one text with classes=True, rec"),
    ],
)
def test_wrong_classes_are_refused(of_classes, x, y, message):
    with pytest.raises(UserError, match=message):
        of_classes.fit(x, y)


def test_answers_as_labels_are_no_classes(untrained):
    """Repeated answers could be read as classes; the answers would never be encoded."""
    answers = [*POSITIVES[:2], *POSITIVES[:2]]
    message = r"y\[0\]: expected a pair of texts, .* pass pairs as x, as in fit\(\(questions, answ"
    for use in (untrained.fit, untrained.evaluate):
        with pytest.raises(UserError, match=f"^{message}"):
            use(ANCHORS, answers)
    with pytest.raises(UserError, match=f"^validation_data: {message}"):
        untrained.fit((ANCHORS, POSITIVES), validation_data=(ANCHORS, answers))


def test_a_file_of_classes_makes_a_task_of_classes(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        task = SimilarityTask.from_data(tmp_path / name, max_seq_length=8)
        assert task.classes == (name == "classes.csv")
    with pytest.raises(UserError, match="--loss=triplet: expected contrastive for texts of classe"):
        SimilarityTask.from_data(tmp_path / "classes.csv", max_seq_length=8, loss="triplet")


def encoded_classes(model, labels):
    """Return the encoded rows of as many texts as there are labels."""
    texts = [[f"{ANCHORS[row % 4]} {POSITIVES[row // 4]}"] for row in range(len(labels))]
    examples = Examples({"text": texts}, list(labels))
    return EncodedExamples.encode(examples, model.serving.pipeline, to_flat)


def test_each_epoch_draws_another_text_of_the_class(of_classes):
    data, partners = encoded_classes(of_classes, "aaaaaabbbc"), []
    assert data.labels["embedding"].tolist() == [[0]] * 6 + [[1]] * 3 + [[2]]
    for epoch in range(4):
        order = of_classes.task.epoch_order(data, np.random.default_rng([7, epoch])).tolist()
        assert sorted(order) == list(range(10))
        # Three pairs of class a, which may follow each other, the three texts of b, and c alone.
        places = {number: place for place, number in enumerate(order)}
        assert max(places[number] for number in (6, 7, 8)) == 2 + min(
            places[number] for number in (6, 7, 8)
        )
        of_a = [number for number in order if number < 6]
        pairs = [of_a[first : first + 2] for first in (0, 2, 4)]
        assert all(places[b] == places[a] + 1 for a, b in pairs)
        partners.append(sorted(map(sorted, pairs)))
    assert len({str(pairs) for pairs in partners}) > 1
    again = of_classes.task.epoch_order(data, np.random.default_rng([7, 0]))
    batches = data.training_batches(global_batch_size=4, num_epochs=2, seed=7, first_step=0)
    rows = [labels["embedding"][:, 0].numpy().tolist() for _, labels, _ in batches]
    classes = np.array([0] * 6 + [1] * 3 + [2])
    assert [number for row in rows[:3] for number in row] == classes[again].tolist()
    resumed = data.training_batches(global_batch_size=4, num_epochs=2, seed=7, first_step=3)
    assert [labels["embedding"][:, 0].numpy().tolist() for _, labels, _ in resumed] == rows[3:]


def test_the_loss_of_dev_rows_compares_texts_of_a_class(of_classes, monkeypatch):
    """Batches of two contain pairs of a class, and a text is not compared with itself."""
    seen, loss = [], losses.in_batch_negatives

    def recorded(texts, vectors, *args):
        seen.append(texts[:, 0].tolist())
        return loss(texts, vectors, *args)

    monkeypatch.setattr(losses, "in_batch_negatives", recorded)
    data = encoded_classes(of_classes, "abab")
    assert of_classes.evaluator(2).metrics(data)["loss"] == 0.0  # Without negatives.
    assert sorted(seen) == [[0, 0], [1, 1]]
    vectors = of_classes.predict([text for (text,) in data.examples.texts["text"]])
    cosines = normalized(vectors) @ normalized(vectors).T / 0.05
    expected = [
        math.log(1 + sum(math.exp(cosines[row, other] - cosines[row, own]) for other in others))
        for row, own, others in ((0, 2, (1, 3)), (1, 3, (0, 2)), (2, 0, (1, 3)), (3, 1, (0, 2)))
    ]
    found = of_classes.evaluator(4).metrics(data)["loss"]
    assert found == pytest.approx(np.mean(expected), rel=1e-4)


def test_classes_are_learned_in_batches_with_one_text_more(config, vocabulary):
    """In seven texts of three classes, a batch may have a text without another of its class."""
    task = SimilarityTask(max_seq_length=16, classes=True)
    model = TextEmbedder(task, config, vocabulary)
    history = model.fit([*ANCHORS, *POSITIVES[:3]], list("aabbccc"), batch_size=3, verbose=0)
    assert all(loss > 0 and np.isfinite(loss) for loss in history.history["loss"])


def test_one_compiled_loss_takes_rows_with_and_without_negatives(config, vocabulary):
    model = TextEmbedder(SimilarityTask(max_seq_length=16), config, vocabulary)
    model.fit((ANCHORS, POSITIVES), epochs=1, verbose=0)
    rows = (ANCHORS, POSITIVES, [[NEGATIVES[0], NEGATIVES[1]], *([text] for text in NEGATIVES[1:])])
    assert np.isfinite(model.fit(rows, epochs=1, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_metrics_compare_vectors_as_the_model_does(config, vocabulary, similarity):
    task = SimilarityTask(max_seq_length=16, loss="cosine", similarity=similarity)
    model = TextEmbedder(task, config, vocabulary)
    a, b = model.predict(ANCHORS), model.predict(POSITIVES)
    scores = [0.9, 0.1, 0.8, 0.2]
    found = model.evaluate((ANCHORS, POSITIVES), scores)["pearson"]
    expected = np.corrcoef(np.diag(model.similarity(a, b)), scores)[0, 1]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "scores", "message"),
    [
        ("cosine", [0.5, 0.0, 4.2, -1.0], "score 4.2: expected a number from -1 to 1 with loss="),
        ("cosent", [5.0] * 4, "expected different numbers, .* received 5.0 in every row"),
        (
            "cosent",
            [10**400, 1.0, 2.0, 3.0],
            r"y\[0\]: expected a finite number of float32, received 10000",
        ),
    ],
)
def test_scores_that_a_loss_cannot_learn_are_refused(config, vocabulary, loss, scores, message):
    model = TextEmbedder(SimilarityTask(max_seq_length=16, loss=loss), config, vocabulary)
    with pytest.raises(UserError, match=message):
        model.fit((ANCHORS, POSITIVES), scores)


def test_texts_of_one_class_are_not_evaluated_and_equal_scores_are_reported(of_classes):
    with pytest.raises(UserError, match="expected texts of two or more classes"):
        of_classes.evaluate(ANCHORS, ["a"] * 4)
    scored = SimilarityTask(max_seq_length=16, loss="cosine")
    for labels, count in (([0.5, 0.5], 1), ([0.5, 0.4], 0)):
        data = types.SimpleNamespace(examples=Examples({"text": [ANCHORS[:2]] * 2}, labels))
        assert len(scored.label_warnings(data)) == count


def test_missing_and_numbered_negatives_of_a_table_are_read(model):
    pandas_na = type("NAType", (), {})()
    table = {
        "anchor": ANCHORS,
        "positive": POSITIVES,
        "negative_1": [None, *NEGATIVES[1:]],
        "negative_2": [float("nan"), " ", "cafe", ""],
        "negatives": [pandas_na, ["my app"], [], pandas_na],
    }
    rows = model.task.labelled_columns(table)["text"]
    expected = [[], ["the bill", "my app"], ["screen is un", "cafe"], ["cafe"]]
    assert [row[2:] for row in rows] == expected


def test_rows_of_dev_data_have_to_fit_the_loss(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    pairs, scores = (SimilarityTask(max_seq_length=8, loss=loss) for loss in ("triplet", "cosent"))
    with pytest.raises(UserError, match="scores.tsv:2: expected no label for a pair with loss='tr"):
        pairs.load_examples(tmp_path / "scores.tsv")
    with pytest.raises(UserError, match="pairs.csv:2: expected two texts and a number with loss='"):
        scores.load_examples(tmp_path / "pairs.csv")
    (tmp_path / "ids.csv").write_text("text,label\nthe bill,1\n")
    with pytest.raises(UserError, match="ids.csv:2: expected two texts and a number.*received 1 "):
        scores.load_examples(tmp_path / "ids.csv")


def test_negatives_are_read_from_any_row_and_column(tmp_path):
    (tmp_path / "late.jsonl").write_text(
        '{"anchor": "a", "positive": "b"}\n'
        '{"anchor": "c", "positive": "d", "negatives": ["e", " "], "negative": "g"}\n'
    )
    task = SimilarityTask(max_seq_length=8)
    rows = task.load_examples(tmp_path / "late.jsonl").texts["text"]
    assert rows == [["a", "b"], ["c", "d", "e", "g"]]
    (tmp_path / "many.csv").write_text("anchor,positive,negative_1,negative_2\na,b,c,d\n")
    assert task.load_examples(tmp_path / "many.csv").texts["text"] == [["a", "b", "c", "d"]]
    with pytest.raises(UserError, match="--negatives_column=other: .*many.csv has no row with a t"):
        SimilarityTask.from_data(tmp_path / "many.csv", max_seq_length=8, negatives_column="other")


def test_an_embedder_of_pairs_has_no_labelled_rows(tmp_path):
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    task = SimilarityTask(max_seq_length=8, text_columns=("text_a", "text_b"))
    for read in (
        lambda: task.labelled_columns((ANCHORS, POSITIVES)),
        lambda: task.load_examples(tmp_path / "pairs.csv"),
    ):
        with pytest.raises(UserError, match="^pairs: an embedder of pairs of texts has no"):
            read()


def test_labels_of_a_file_are_stripped(tmp_path):
    (tmp_path / "classes.csv").write_text("text,label\nthe bill,a \nmy app,a\n")
    task = SimilarityTask(max_seq_length=8)
    assert task.load_examples(tmp_path / "classes.csv").labels == ["a", "a"]
    (tmp_path / "classes.csv").write_text("text,label\nthe bill,a\nmy app, \n")
    with pytest.raises(UserError, match="classes.csv:3: expected a class, received an em"):
        task.load_examples(tmp_path / "classes.csv")


def test_texts_of_the_same_tokens_are_equal(model):
    rows = (["The bill", "screen", "app"], ["my app", "the  BILL", "cafe"])
    np.testing.assert_array_equal(
        model._evaluation_rows(rows, None).labels["embedding"], [[0, 1], [2, 0], [3, 4]]
    )


FILES = {
    "pairs.csv": "anchor,positive\nthe bill,bill is too high\nscreen broken,the screen\n",
    "negatives.jsonl": (
        '{"anchor": "the bill", "positive": "bill is too high", "negatives": ["my app", "cafe"]}\n'
        '{"anchor": "screen broken", "positive": "the screen"}\n'
    ),
    "scores.tsv": "text_a\ttext_b\tscore\nthe bill\tthe screen\t0.25\nmy app\tapp\t1\n",
    "classes.csv": "text,label\nthe bill,billing\nscreen broken,hardware\ntoo high,billing\n",
}


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_each_form_trains_a_run(tmp_path, huggingface_dir, name):
    (tmp_path / name).write_text(FILES[name])
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / name),
        init_from=str(huggingface_dir),
        output_dir=str(tmp_path / "run"),
        max_seq_length=16,
        global_batch_size=2,
        gradient_accumulation_steps=2,
        matryoshka_dims=("4", "8"),
    )
    settings.check()
    model = load_model(finetune(settings).path)
    assert model.task.loss == ("cosent" if name == "scores.tsv" else "contrastive")
    np.testing.assert_allclose(np.linalg.norm(model.predict(["my app"]), axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triplet_margin": 1.0}, "triplet_margin=1.0: not used by --loss=contrastive; expected "),
        ({"loss": "triplet", "symmetric": True}, "symmetric=True: not used by --loss=triplet; "),
        ({"loss": "triplet", "loss_temperature": 0.1}, "expected --loss=contrastive or cosent"),
        ({"loss": "triplet", "classes": True}, "classes=True: not used by --loss=triplet; expect"),
    ],
)
def test_options_of_another_loss_are_refused(tmp_path, options, message):
    rows = small.write_rows(tmp_path / "pairs.csv", [("a", "b")], ("anchor", "positive"))
    for create in (functools.partial(SimilarityTask.from_data, rows), SimilarityTask.from_options):
        with pytest.raises(UserError, match=message):
            create(max_seq_length=8, **options)
        used = {**options, "loss": "triplet" if "triplet_margin" in options else "contrastive"}
        assert create(max_seq_length=8, **used).loss == used["loss"]


def test_a_margin_that_vectors_of_length_1_do_not_reach_warns():
    def create(margin, **options):
        SimilarityTask.from_options(
            max_seq_length=8, loss="triplet", triplet_margin=margin, **options
        )

    for options in ({"normalize": True}, {"matryoshka_dims": (4,)}):
        with pytest.warns(UserWarning, match="triplet_margin=2: expected less than 2"):
            create(2.0, **options)
    with warnings.catch_warnings(action="error"):
        create(1.5, normalize=True)
        create(5.0, normalize=False)


@pytest.mark.medium
def test_columns_of_other_names_are_read_and_single_texts_are_embedded(tmp_path, huggingface_dir):
    (tmp_path / "train.csv").write_text("question,answer\nthe bill,too high\nmy app,the screen\n")
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / "train.csv"),
        dev=(),
        init_from=str(huggingface_dir),
        output_dir=str(tmp_path / "run"),
        max_seq_length=16,
        text_column="question",
        text_b_column="answer",
        global_batch_size=2,
    )
    model = load_model(finetune(settings).path)
    assert model.task.input_names == ("text",)
    assert model.predict(["the bill"]).shape == (1, 12)
    assert model.evaluate(
        read_examples(settings.train, "similarity", text_columns=("question", "answer"))
    )


@pytest.mark.medium
def test_an_embedder_keeps_its_pooling_and_dense_layers(tmp_path, config, vocabulary):
    directory = sentence_transformers_files.write(
        tmp_path / "embedder",
        config,
        vocabulary,
        kinds=("Transformer", "Pooling", "Dense"),
        pooling={**sentence_transformers_files.POOLING, "pooling_mode": "cls"},
    )
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / "pairs.csv"),
        init_from=str(directory),
        output_dir=str(tmp_path / "run"),
        max_seq_length=16,
        global_batch_size=2,
        learning_rate=1e-9,
        normalize=False,
    )
    model = load_model(finetune(settings).path)
    assert (model.task.pooling, model.task.dense_units) == ("cls", (5,))
    expected = TextEmbedder.from_pretrained(directory).predict(ANCHORS)
    np.testing.assert_allclose(model.predict(ANCHORS), expected, rtol=1e-4, atol=1e-5)
    assert finetune(settings).path == str(tmp_path / "run")  # Finished: nothing to do.


@pytest.mark.medium
def test_a_run_without_a_checkpoint_leaves_no_options_to_the_next(
    tmp_path, huggingface_dir, monkeypatch
):
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    create = functools.partial(
        FinetuneSettings,
        task="similarity",
        train=str(tmp_path / "pairs.csv"),
        init_from=str(huggingface_dir),
        output_dir=str(tmp_path / "run"),
        global_batch_size=2,
    )
    before = create()
    monkeypatch.setattr(TrainingLoop, "train", unittest.mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        finetune(create(pooling="cls", max_seq_length=12))
    assert (tmp_path / "run" / "task.json").exists()
    settings = create()
    assert settings == before
    settings = dataclasses.replace(settings, precision="float32", max_seq_length=12)
    training, *_ = recipe.prepare(
        settings, settings.read_data(), print, tf.distribute.get_strategy()
    )
    assert training.task.pooling == "mean"


@pytest.mark.parametrize("given", [{}, {"truncation": "head_tail"}])
def test_the_truncation_is_that_of_the_flag(model, tmp_path, given):
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    task = dataclasses.replace(model.task, truncation="tail", pooling="cls")
    run = TextEmbedder(task, model.config, model.vocabulary).save_run(tmp_path / "run")
    options = {"max_seq_length": 8, **SimilarityTask.options_from(run.task, given), **given}
    task = SimilarityTask.from_data(tmp_path / "pairs.csv", **options)
    assert (task.truncation, task.pooling) == (given.get("truncation", "head"), "cls")


def test_dense_layers_of_other_sizes_are_linear(tmp_path, config, vocabulary):
    directory = sentence_transformers_files.write(
        tmp_path / "embedder", config, vocabulary, kinds=("Transformer", "Pooling", "Dense")
    )
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    for units, expected in (("5", "tanh"), ("4", "identity")):
        given = {"dense_units": (units,), "max_seq_length": 8}
        options = {**SimilarityTask.options_from(embedder_settings(directory), given), **given}
        task = SimilarityTask.from_data(tmp_path / "pairs.csv", **options)
        assert (task.dense_units, task.dense_activations) == ((int(units),), (expected,))


@pytest.mark.medium
def test_an_embedder_keeps_its_maximum_length(tmp_path, config, vocabulary):
    directory = sentence_transformers_files.write(
        tmp_path / "embedder", config, vocabulary, encoder={"max_seq_length": 9}
    )
    (tmp_path / "pairs.csv").write_text(FILES["pairs.csv"])
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / "pairs.csv"),
        init_from=str(directory),
        output_dir=str(tmp_path / "run"),
        global_batch_size=2,
    )
    assert settings.max_seq_length == 9
    assert dataclasses.replace(settings, max_seq_length=11).max_seq_length == 11
    settings.check()
    assert load_model(finetune(settings).path).task.max_seq_length == 9
    shutil.rmtree(directory)  # The run itself knows its length.
    assert dataclasses.replace(settings, max_seq_length=None).max_seq_length == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,kind\na,b\n", "expected the columns anchor and positive, or text_a, text_b and sco"),
        ("anchor,positive\nthe bill, \n", "train.csv:2: column 'positive': expected a text"),
        ("text_a,text_b,score\na,b,high\n", "train.csv:2: expected a number as the score, rec"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_examples(tmp_path / "train.csv", "similarity")


@pytest.mark.medium
def test_parts_of_a_batch_train_like_the_whole_batch(tmp_path, without_dropout):
    vectors = []
    for parts in (1, 2):
        model = TextEmbedder.from_pretrained(without_dropout)
        settings = {"global_batch_size": 4, "gradient_accumulation_steps": parts, "epochs": 2}
        rows = (ANCHORS, POSITIVES, NEGATIVES)
        model.train(rows, output_dir=tmp_path / str(parts), learning_rate=1e-3, **settings)
        vectors.append(model.predict(ANCHORS))
    np.testing.assert_allclose(*vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_a_keras_file_keeps_the_compiled_loss(tmp_path, model):
    model.compile()
    model.save(tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(ANCHORS), model.predict(ANCHORS))
    loaded.fit((ANCHORS, POSITIVES), epochs=1, verbose=0)


@pytest.fixture
def without_dropout(tmp_path, config, vocabulary):
    config = dataclasses.replace(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return small.write_huggingface(tmp_path / "no_dropout", config, vocabulary)


def fitted(directory, **options):
    model = TextEmbedder.from_pretrained(directory)
    model.compile(learning_rate=1e-3, **options)
    rows = (ANCHORS[:3], POSITIVES[:3], NEGATIVES[:3])
    history = model.fit(rows, epochs=3, batch_size=2, verbose=0)
    return history.history["loss"], model.predict(ANCHORS)


def test_an_optimizer_that_accumulates_gradients_is_refused(model):
    """Each of its batches has negatives of its own, which are fewer."""
    with pytest.raises(UserError, match="gradient_accumulation_steps: expected none, since the lo"):
        model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2))


@pytest.mark.slow
def test_packed_rows_and_replicas_train_like_flat_ones(without_dropout, mirrored):
    losses, vectors = fitted(without_dropout)
    packed_losses, packed_vectors = fitted(without_dropout, jit_compile=True)
    np.testing.assert_allclose(packed_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(packed_vectors, vectors, rtol=1e-3, atol=1e-4)
    with mirrored.scope():
        losses_of_two, vectors_of_two = fitted(without_dropout)
    np.testing.assert_allclose(losses_of_two, losses, rtol=1e-4)
    np.testing.assert_allclose(vectors_of_two, vectors, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["none", "step"])
def test_runs_on_replicas_and_in_parts_are_equal(tmp_path, without_dropout, mirrored, compile):
    vectors = []
    for strategy, parts in ((None, 1), (None, 2), (mirrored, 2)):
        if strategy and compile == "step":
            continue
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = TextEmbedder.from_pretrained(without_dropout)
            model.train(
                (ANCHORS, POSITIVES, NEGATIVES),
                output_dir=tmp_path / str(len(vectors)),
                global_batch_size=4,
                gradient_accumulation_steps=parts,
                epochs=3,
                learning_rate=1e-3,
                compile=compile,
            )
        vectors.append(model.predict(ANCHORS))
    for others in vectors[1:]:
        np.testing.assert_allclose(others, vectors[0], rtol=1e-3, atol=1e-4)
