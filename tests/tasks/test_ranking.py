"""Ranking on literals: losses, metrics, predictions; from file to run to answer."""

import json
import math
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import UserError, convert
from bert_tf.conversion.exported_model import ExportedModel
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.encoder_inputs import to_flat, to_padded
from bert_tf.train import losses
from bert_tf.weights import heads
from bert_tf.weights.sources import read_pretrained
from tasks import TextRanker, load_model
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.readers.rows import check_good
from tasks.data.windows import Windows
from tasks.finetuning import recipe
from tasks.finetuning.recipe import finetune
from tasks.graph.evaluation import Evaluator
from tasks.prediction.outputs import predict
from tasks.prediction.retrieval import check_ranker, open_ranker, rerank
from tasks.training.distillation import DistilledExamples
from tasks.types.ranking import RankingTask
from tests import small
from tests.bert_tf.test_task_heads import write_head

# A relevant text repeats a word of the query, at any position.
QUERIES = [
    ("the bill", ["not open", "bill too high", "is broken"], [0, 1, 0]),
    ("my screen", ["screen is broken", "too high"], [2, 0]),
    ("a app", ["is high", "a", "broken", "app open"], [0, 0, 0, 1]),
    ("the screen", ["does not open", "high", "my screen"], [0, 0, 1]),
    ("my app", ["the app", "app open", "bill"], [1, 1, 0]),
    ("a bill", ["b", "broken", "the bill"], [0, 0, 1]),
]
TASK = RankingTask(max_seq_length=12)


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def test_losses_by_hand():
    logits = tf.constant([[0.0, math.log(3), MASKED_SCORE], [1.0, MASKED_SCORE, -2.0]])
    relevance = tf.constant([[1.0, 3.0, 5.0], [0.0, 0.0, 0.0]])
    found = losses.listwise_softmax_cross_entropy(relevance, logits).numpy()
    # Shares 1/4 and 3/4 of the relevance; the third text is missing. The second row has none.
    np.testing.assert_allclose(found, [-math.log(0.25) / 4 - 3 * math.log(0.75) / 4, 0], 1e-6)
    relevance = tf.constant([[0.5, 3.0, 5.0], [-1.0, 1.0, 0.0]])
    found = losses.listwise_binary_cross_entropy(relevance, logits).numpy()
    # A grade of 3 counts as 1, one of -1 as 0.
    first = (math.log(2) - math.log(0.75)) / 2
    second = -(math.log(1 - sigmoid(1)) + math.log(1 - sigmoid(-2))) / 2
    np.testing.assert_allclose(found, [first, second], 1e-6)
    for loss in (losses.listwise_softmax_cross_entropy, losses.listwise_binary_cross_entropy):
        # Relevance of fewer texts, as beside queries without labels, is that of the first ones.
        whole = loss(relevance[1:] * [[1, 1, 0]], logits[1:])
        fewer = loss(relevance[1:, :2], logits[1:])
        np.testing.assert_array_equal(whole, fewer)
    missing = tf.fill([1, 3], MASKED_SCORE)
    for loss in (losses.listwise_softmax_cross_entropy, losses.listwise_binary_cross_entropy):
        assert loss(tf.ones([1, 3]), missing).numpy().tolist() == [0.0]


def test_the_divergence_is_the_excess_over_the_teacher():
    """The cross-entropy with the teacher's probabilities, less the teacher's own."""
    logits = tf.constant([[1.0, -2.0, MASKED_SCORE]])
    teacher = tf.constant([[0.5, -1.0, MASKED_SCORE]])
    of_teacher = tf.sigmoid(teacher)
    expected = losses.listwise_binary_cross_entropy(
        of_teacher, logits
    ) - losses.listwise_binary_cross_entropy(of_teacher, teacher)
    found = losses.listwise_binary_divergence(teacher, logits, 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert losses.listwise_binary_divergence(logits, logits, 2.0).numpy().tolist() == [0.0]


@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
def test_predictions_by_hand(activation):
    """Logits that differ by rounding alone are ties, of which the first text comes first."""
    logits = tf.constant(
        [
            [1.0, MASKED_SCORE, 3.0, 1.00001],
            [1.00001, 1.0, -2.0, 0.5],
            [MASKED_SCORE] * 4,
        ]
    )
    task = RankingTask(max_seq_length=12, activation=activation)
    found = task.predictions(None, None, {"score": logits})
    assert found["order"].numpy().tolist() == [[2, 0, 3, -1], [0, 1, 3, 2], [-1] * 4]
    score = sigmoid if activation == "sigmoid" else float
    expected = [[score(1), 0, score(3), score(1)], [score(1), score(1), score(-2), score(0.5)]]
    np.testing.assert_allclose(found["scores"], [*expected, [0] * 4], 1e-4)
    margin = task.margin(found, None, {"score": logits}).numpy()
    if activation == "sigmoid":
        gap = sigmoid(3) - sigmoid(1)
    else:
        gap = (math.exp(3) - math.e) / (math.exp(3) + 2 * math.e)
    np.testing.assert_allclose(margin, [gap, 0, 0], atol=1e-5)


def test_the_margin_of_scores_without_activation_does_not_depend_on_their_level():
    task = RankingTask(max_seq_length=12, ranking_loss="listwise", activation="identity")
    logits = tf.constant([[8.0, 6.0, -3.0], [1.0, -1.0, -10.0], [9.0, MASKED_SCORE, MASKED_SCORE]])
    margin = task.margin({}, None, {"score": logits}).numpy()
    np.testing.assert_allclose(margin, [math.tanh(1), math.tanh(1), 1], atol=1e-4)


def test_padding_is_removed():
    row = {"scores": [0.1, 0.0, 0.7, -1.0], "order": [2, 0, -1, -1]}
    assert TASK.strip_padding(row) == {"scores": [0.1, 0.0, 0.7], "order": [2, 0]}
    row = {"scores": [0.0], "order": [-1]}
    assert TASK.strip_padding(row) == {"scores": [], "order": []}


def windows_of(counts):
    pairs = [(row, column) for row, count in enumerate(counts) for column in range(count)]
    example, choice = np.reshape(pairs, (-1, 2)).T
    return Windows(None, example, choice_W=choice)


def test_metrics_are_of_each_query():
    """Rank the last of equal logits first, as trec_eval does."""
    examples = Examples({"texts": [["a"] * 3, ["a"], ["a"] * 2]}, [[0, 1, 0], [2], [1, 0]])
    labels, weights = TASK.targets(examples, windows_of([3, 1, 2]))
    assert labels["score"].tolist() == [[0, 1, 0], [2, 0, 0], [1, 0, 0]]
    assert weights["score"].tolist() == [3, 1, 2]
    assert TASK.soft_weights(windows_of([3, 0, 2]), 4)["score"].tolist() == [3, 0, 2, 0]
    logits = np.array(
        [[5, 4, 3], [-9, MASKED_SCORE, MASKED_SCORE], [1, 1, MASKED_SCORE]], np.float32
    )
    data = type("Data", (), {"labels": labels})
    metrics = TASK.metrics(data, {"score": logits})
    assert metrics["mrr@10"] == (1 / 2 + 1 + 1 / 2) / 3
    assert metrics["recall@1"] == 1 / 3
    assert TASK.best_metric in metrics
    listwise = RankingTask(max_seq_length=12, ranking_loss="listwise")
    examples = Examples(examples.texts, [[0, 0, 0], [2], [1, 0]])
    assert listwise.targets(examples, windows_of([3, 1, 2]))[1]["score"].tolist() == [0, 1, 1]


def test_a_teacher_teaches_queries_without_a_relevant_text(config, vocabulary):
    task = RankingTask(max_seq_length=12, ranking_loss="listwise")
    pipeline = TextRanker(task, config, vocabulary).serving.pipeline
    texts = {"query": ["a", "b"], "texts": [["app", "bill"], ["open", "high"]]}
    labelled = EncodedExamples.encode(Examples(texts, [[0, 0], [1, 0]]), pipeline, to_flat)
    distilled = DistilledExamples(labelled, [])
    distilled.learn_from({"score": np.zeros((2, 2), np.float32)})
    weights = {name: np.asarray(of_rows).tolist() for name, of_rows in distilled.weights.items()}
    assert weights == {"score": [0, 1], "teacher_score": [1, 1]}
    # A SavedModel has columns for texts that are empty in all rows.
    outputs_23 = np.arange(6, dtype=np.float32).reshape(2, 3)
    distilled.learn_from({"score": outputs_23})
    np.testing.assert_array_equal(distilled.labels["teacher_score"], outputs_23[:, :2])


def test_scores_that_are_not_finite_are_no_good_ranking():
    """Sorting by NaN would keep the order of the file, which often begins with the relevant."""
    logits = np.array([[np.nan, np.nan, MASKED_SCORE]], np.float32)
    relevance = np.array([[1, 0, 0]], np.float32)
    data = type("Data", (), {"labels": {"score": relevance}})
    with pytest.raises(UserError, match="scores: expected finite numbers, received 2 of 3"):
        TASK.metrics(data, {"score": logits})
    for loss in TASK.losses, RankingTask(max_seq_length=12, ranking_loss="listwise").losses:
        assert np.isnan(loss["score"](relevance, tf.constant(logits)))
    assert np.isnan(TASK.soft_losses["score"](tf.zeros([1, 3]), tf.constant(logits), 1.0))


@pytest.mark.parametrize(
    ("labels", "limit", "kept"),
    [
        ([0, 1, 0, 0, 0], 3, [0, 1, 2]),
        ([0, 0, 0, 0, 1], 3, [0, 1, 4]),
        ([1, 1, 2, 1, 0, 0, 0], 4, [0, 2, 4, 5]),
        ([1, 1, 1, 0], 3, [0, 1, 3]),
        ([1, 1, 1, 0, 0, 0], 3, [0, 3, 4]),
        ([1, 1, 1, 0, 0, 0], 5, [0, 1, 3, 4, 5]),
        ([1, 1, 1], 2, [0, 1]),
        ([0, 1], 1, [1]),
        ([0, 1], 9, [0, 1]),
    ],
)
def test_training_uses_the_first_texts_of_a_query(labels, limit, kept):
    task = RankingTask(max_seq_length=12, texts_per_query=limit)
    texts = list(map(str, range(len(labels))))
    chosen = task.select_training_examples(Examples({"query": ["q"], "texts": [texts]}, [labels]))
    assert chosen.texts == {"query": ["q"], "texts": [[texts[index] for index in kept]]}
    assert chosen.labels == [[labels[index] for index in kept]]
    unlabelled = task.as_training_rows(Examples({"query": ["q"], "texts": [texts]}, []))
    assert unlabelled.texts == {"query": ["q"], "texts": [texts[:limit]]}


def test_missing_texts_take_no_place_of_others():
    task = RankingTask(max_seq_length=12, texts_per_query=4)
    rows = {"query": ["q", "r"], "texts": [["a", "", "b", "c", "d", "", "", ""], [""]]}
    chosen = task.select_training_examples(Examples(rows, [[1, 0, 1, 1, 0, 0, 0, 0], [0]]))
    assert chosen.texts["texts"] == [["a", "b", "c", "d"], []]
    assert chosen.labels == [[1, 1, 1, 0], []]
    assert task.as_training_rows(Examples(rows, [])).texts["texts"] == [["a", "b", "c", "d"], []]


def test_queries_that_measure_nothing_are_reported():
    texts = [["a", "b"], ["a", "b"], ["a", ""], ["a", "b"]]
    rows = Examples({"query": list("qrst"), "texts": texts}, [[0, 0], [1, 1], [2, 0], [2, 1]])
    assert TASK.label_warnings(types.SimpleNamespace(examples=rows)) == [
        "1 of 4 queries have no relevant text; they count as 0 in the metrics",
        "2 of 4 queries have only texts of equal relevance; any order of them counts as 1 in ndcg "
        "and mrr",
    ]


def test_options_are_checked():
    assert RankingTask.from_options(max_seq_length=8).activation == "sigmoid"
    listwise = RankingTask.from_options(max_seq_length=8, ranking_loss="listwise")
    assert listwise.activation == "identity"
    assert task_from_dict(listwise.to_dict()) == listwise
    for options in ({"ranking_loss": "x"}, {"activation": 1}, {"texts_per_query": 0}):
        with pytest.raises(UserError, match=f"{next(iter(options))}=.*: expected"):
            RankingTask.from_options(max_seq_length=8, **options)


@pytest.mark.parametrize(
    ("label", "message"),
    [([1], "expected a list of 2 numbers"), (1, "expected a list of 2"), ([1, "x"], "'x'")],
)
def test_a_label_is_a_number_per_text(label, message):
    with pytest.raises(UserError, match=message):
        TASK.encode_labels([label], {"query": ["q"], "texts": [["a", "b"]]})


@pytest.mark.parametrize("label", [[False, True], np.array([False, True]), [0, np.float32(1)]])
def test_relevance_may_be_booleans(label):
    texts = {"query": ["q"], "texts": [["a", "b"]]}
    assert TASK.encode_labels([label], texts) == [[0.0, 1.0]]


@pytest.fixture(scope="module")
def ranker(config, vocabulary, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranker") / "bert"
    small.write_huggingface(path, config, vocabulary)
    return TextRanker.from_pretrained(path, max_seq_length=12)


ROWS = {"query": [row[0] for row in QUERIES], "texts": [row[1] for row in QUERIES]}
RELEVANCE = [row[2] for row in QUERIES]


@pytest.mark.medium
def test_fit_learns(ranker):
    before = ranker.evaluate(ROWS, RELEVANCE)
    ranker.compile(keras.optimizers.Adam(0.01))
    ranker.fit(ROWS, RELEVANCE, epochs=4, batch_size=6, verbose=0)
    assert ranker.evaluate(ROWS, RELEVANCE)["loss"] < before["loss"]
    rows = ranker.predict_rows(ROWS)
    assert [len(row["order"]) for row in rows] == [len(texts) for texts in ROWS["texts"]]
    # The scores of a cross-encoder, one layer after the other.
    query, texts = tf.constant(ROWS["query"][:1]), tf.constant(ROWS["texts"][:1])
    windows = ranker.serving.pipeline.encode(query=query, texts=texts)
    inputs = to_padded(windows.packed, ranker.vocabulary)
    logits = ranker.network.head(ranker.network.encoder(inputs)["pooled"])[:, 0]
    np.testing.assert_allclose(rows[0]["scores"], tf.sigmoid(logits), atol=1e-5)
    assert rows[0]["order"] == np.argsort(-logits.numpy()).tolist()


@pytest.mark.slow
def test_layouts_have_equal_losses_and_files_equal_scores(ranker, tmp_path):
    expected = ranker.evaluate(ROWS, RELEVANCE)["loss"]
    for layout in (to_flat, to_padded):
        encoded = EncodedExamples.encode(Examples(ROWS, RELEVANCE), ranker.serving.pipeline, layout)
        strategy = tf.distribute.get_strategy()
        evaluator = Evaluator(ranker.task, ranker.network, strategy, replica_batch_size=2)
        assert evaluator.metrics(encoded)["loss"] == pytest.approx(expected, abs=1e-5)
    ranker.save(tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    assert type(loaded) is TextRanker
    scores = [model.predict(ROWS)["scores"] for model in (ranker, loaded)]
    np.testing.assert_allclose(*scores, atol=1e-6)


def test_a_query_of_many_texts_is_evaluated_in_parts(ranker, monkeypatch):
    batches_of, sizes = EncodedExamples.evaluation_batches, []

    def batches(self, *args):
        found = batches_of(self, *args)
        sizes.extend(int(tf.size(inputs["row_splits"])) - 1 for inputs, _ in found)
        return found

    monkeypatch.setattr(EncodedExamples, "evaluation_batches", batches)
    rows = {"query": ["a bill", "my app"], "texts": [["bill", "", "broken"] * 20, ["app"]]}
    encoded = EncodedExamples.encode(Examples(rows, []), ranker.serving.pipeline, to_flat)
    evaluator = Evaluator(ranker.task, ranker.network, tf.distribute.get_strategy(), 16)
    logits = evaluator.outputs(encoded)["score"]
    assert sizes == [16, 16, 9]
    assert logits.shape == (2, 60) and np.all((logits == MASKED_SCORE)[0, 1::3])
    scores = tf.where(logits == MASKED_SCORE, 0.0, tf.sigmoid(logits))
    np.testing.assert_allclose(scores, ranker.predict(rows)["scores"], atol=1e-6)


def test_a_cross_encoder_keeps_its_head(huggingface_dir, config):
    pretrained = read_pretrained(huggingface_dir)
    rng = np.random.default_rng(0)
    head = {
        "classifier/kernel": rng.normal(size=(config.hidden_size, 1)).astype(np.float32),
        "classifier/bias": np.array([0.5], np.float32),
    }
    pretrained.weights.update(head)
    columns = {"text_columns": ["text_a", "text_b"], "activation": "identity"}
    object.__setattr__(pretrained, "task", {"kind": "regression", **columns})
    task = TextRanker._create_task(pretrained, 12, {})
    assert task.activation == "identity"
    model = TextRanker.from_weights(pretrained, task)
    np.testing.assert_array_equal(model.network.head.kernel, head["classifier/kernel"])
    # A regressor of one text has read no pairs.
    columns["text_columns"] = ["text"]
    object.__setattr__(pretrained, "task", {"kind": "regression", **columns})
    task = TextRanker._create_task(pretrained, 12, {})
    assert task.activation == "sigmoid"
    model = TextRanker.from_weights(pretrained, task)
    assert not np.array_equal(model.network.head.kernel, head["classifier/kernel"])


@pytest.mark.parametrize(
    ("activation", "ranking_loss", "keep_head", "expected"),
    [
        ("Identity", "binary", True, "identity"),
        ("Identity", "binary", False, "sigmoid"),
        ("Sigmoid", "binary", True, "sigmoid"),
        ("Sigmoid", "listwise", True, "identity"),
    ],
)
def test_commands_and_python_keep_the_activation_of_a_head(
    tmp_path, config, vocabulary, activation, ranking_loss, keep_head, expected
):
    entry = {"sbert_ce_default_activation_function": f"torch.nn.modules.activation.{activation}"}
    path = str(tmp_path / "model")
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 1, **entry)
    options = {"max_seq_length": 12, "ranking_loss": ranking_loss}
    model = TextRanker.from_pretrained(path, keep_head=keep_head, **options)
    files = {"train": write_pairs(tmp_path / "train.csv"), "dev": write(tmp_path / "dev.jsonl")}
    flags = {
        "task": "ranking",
        "precision": "float32",
        "keep_head": "auto" if keep_head else "false",
        **options,
    }
    settings = small.settings(path, files, tmp_path / "run", **flags)
    strategy = tf.distribute.get_strategy()
    training, _, of_command = recipe.prepare(settings, settings.read_data(), print, strategy)
    assert model.task == training.task == of_command.task
    assert model.task.activation == expected
    assert model.has_new_head == of_command.has_new_head != keep_head
    other = TextRanker.from_pretrained(path, activation="sigmoid", **options)
    assert other.task.activation == "sigmoid"


@pytest.mark.medium
def test_a_cross_encoder_and_its_run_rerank_alike(tmp_path, config, vocabulary):
    activation = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    paths = [str(tmp_path / name) for name in ("model", "run")]
    write_head(tmp_path / "model", config, vocabulary, "SequenceClassification", 1, **activation)
    convert.main(convert.ConvertSettings(*paths))
    found = []
    for path in paths:
        check_ranker(path)
        found.append(rerank(open_ranker(path), *QUERIES[0][:2]))
    assert all(0 < score < 1 for _, score in found[0])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_a_converted_ranker_reranks(tmp_path, config, vocabulary):
    of_run = heads.record_of(TASK.to_dict())
    kernel, _ = write_head(
        tmp_path / "model", config, vocabulary, "SequenceClassification", 1, **of_run
    )
    ranker = open_ranker(str(tmp_path / "model"))
    assert ranker.task == TASK
    np.testing.assert_array_equal(ranker.network.head.kernel, kernel)


def test_a_ranker_is_a_regressor_for_other_libraries_and_a_ranker_again(config):
    kernel = np.ones((config.hidden_size, 1), np.float32)
    weights = {heads.KERNEL: kernel, heads.BIAS: np.zeros(1, np.float32)}
    task = RankingTask(max_seq_length=12, ranking_loss="listwise", activation="identity")
    pretrained = types.SimpleNamespace(task=task.to_dict(), weights=weights)
    written = ExportedModel(pretrained, pretrained.task)
    values = {"architectures": [heads.CLASSES["ranking"]], **written.config_values()}
    assert values["problem_type"] == "regression"
    assert task_from_dict(heads.read_head(weights, values, 512)[0]) == task
    del values["task_specific_params"]
    assert heads.read_head(weights, values, 512)[0]["kind"] == "regression"


def write(path, queries=QUERIES):
    lines = [
        {"query": query, "texts": texts, "relevances": relevance}
        for query, texts, relevance in queries
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_pairs(path, queries=QUERIES):
    rows = [
        (query, text, label)
        for query, texts, labels in queries
        for text, label in zip(texts, labels, strict=True)
    ]
    return small.write_rows(path, rows, ("query", "text", "relevance"))


def test_only_training_takes_any_number_of_texts(huggingface_dir, tmp_path):
    many = write(tmp_path / "many.jsonl", [("q", ["a"] * 4097, [0] * 4097)])
    few = write(tmp_path / "few.jsonl")
    options = {"task": "ranking", "unlabelled": (str(many),), "teacher": str(tmp_path)}
    files = {"train": many, "dev": few}
    data = small.settings(huggingface_dir, files, tmp_path / "run", **options).read_data()
    for rows in (data.labelled[str(many)], data.unlabelled[str(many)]):
        check_good(rows)
    files = {"train": few, "dev": many}
    with pytest.raises(UserError, match="many.jsonl:1: expected at most 4,096 texts per query"):
        small.settings(huggingface_dir, files, tmp_path / "run", task="ranking").check()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["binary", "listwise"])
def test_a_run_learns_and_predicts_and_teaches(huggingface_dir, tmp_path, loss):
    files = {
        "train": write_pairs(tmp_path / "train.csv"),
        "dev": write(tmp_path / "dev.jsonl", QUERIES[::-1]),
    }
    said = []
    options = {"task": "ranking", "ranking_loss": loss, "global_batch_size": 3, "epochs": 20}
    settings = small.settings(huggingface_dir, files, tmp_path / "run", **options)
    run = finetune(settings, said.append)
    assert "ranking: 6 rows, 6 dev rows" in said
    best = run.checkpoints.info(run.checkpoints.best_step())["metrics"]
    assert best["dev_ndcg@10"] > 0.95
    activation = {"binary": "sigmoid", "listwise": "identity"}[loss]
    assert run.task["activation"] == activation and run.task["texts_per_query"] == 16

    trained = load_model(run.path)
    output = tmp_path / "answers.jsonl"
    with open(files["dev"], "a") as file:
        file.write('{"query": "the bill", "texts": []}\n')
    assert predict(trained, files["dev"], output, 3, said.append) == (7, 1)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [list(line) for line in lines] == [["scores", "order"]] * 6 + [["error"]]

    # An unlabelled query may have more texts than those with labels.
    more = write(tmp_path / "more.jsonl", [("a bill", ["a", "b", "c", "bill", "app"], [0] * 5)])
    options |= {"teacher": str(run.path), "unlabelled": (str(more),), "epochs": 1}
    files["dev"] = write(tmp_path / "other.jsonl", QUERIES[1:])
    student = small.settings(huggingface_dir, files, tmp_path / "student", **options)
    assert "dev_ndcg@10" in finetune(student, said.append).metrics()[-1]
    assert "teacher: 7 samples, once; 1 of them without labels" in said
