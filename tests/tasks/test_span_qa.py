"""Question answering: target tokens by hand and by loops, metrics, serving, and training."""

import dataclasses
import json
import math
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from bert_tf import BertConfig, Tokenizer, UserError, Vocabulary
from bert_tf.text.encoder_inputs import to_flat, to_padded
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.data.readers.rows import RowError
from tasks.finetuning.recipe import finetune
from tasks.finetuning.settings import FinetuneSettings
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types import question_answering
from tasks.types.question_answering import QuestionAnswerer, QuestionAnsweringTask
from tests import small
from tests.conftest import WORDS
from tests.shared_graphs import tokenizer_of

NAMES = {"answer", "start", "end", "score", "no_answer_score"}
NAMES |= {"nbest_answer", "nbest_start", "nbest_end", "nbest_score"}
SIZES = {"max_seq_length": 10, "max_query_length": 2, "doc_stride": 2, "max_answer_length": 3}
# Avoid words that the published metrics ignore, such as "the" and "!".
PLAIN = [word for word in WORDS if word.isalnum() and word not in ("a", "the")]


@pytest.fixture(scope="module")
def pipeline(config, vocabulary):
    """Return the pipeline of a task in which questions may have no answer."""
    task = QuestionAnsweringTask(**SIZES, may_be_impossible=True)
    return Pipeline(task, tokenizer_of(vocabulary, True), task.build_model(config))


def examples_of(*rows):
    """Return examples of (question, context, answers); answers are texts, or (text, start)."""
    labels = [
        tuple(
            (answer, context.index(answer)) if isinstance(answer, str) else answer
            for answer in answers
        )
        for _, context, answers in rows
    ]
    questions, contexts, _ = zip(*rows, strict=True)
    return Examples({"question": list(questions), "context": list(contexts)}, labels)


def test_its_head_has_no_dropout(pipeline, inputs_BL):
    """Follow the released run_squad.py and transformers, which have dropout in the encoder only."""
    model, seed = pipeline.model, tf.constant([1, 2], tf.int64)
    sequence_BLH = model.encoder(inputs_BL, training=True, seed=seed)["sequence"]
    expected_BL = np.where(inputs_BL["input_mask"], model.head(sequence_BLH)[:, :, 0], -1e9)
    starts_BL = model(inputs_BL, training=True, seed=seed)["start"]
    np.testing.assert_allclose(starts_BL, expected_BL, rtol=1e-6)


def random_rows(rng, count, most_words=20):
    """Return questions on random words; every fourth has no answer."""
    rows = []
    for number in range(count):
        words = rng.choice([*PLAIN, "unaffable", "Café", "xyz"], rng.integers(2, most_words))
        context = " ".join(words)
        first, last = np.sort(rng.choice(len(context) + 1, 2, replace=False))
        answer = context[first:last]
        answers = [(answer, int(first))] if number % 4 and answer.strip() else []
        rows.append((" ".join(rng.choice(PLAIN, rng.integers(0, 4))), context, answers))
    return rows


def write_squad(path, rows):
    """Write SQuAD's JSON; a question without answers is impossible."""
    examples = examples_of(*rows)
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"q{number}",
                    "question": question,
                    "answers": [{"text": text, "answer_start": start} for text, start in answers],
                    "is_impossible": not answers,
                }
            ],
        }
        for number, (question, context, answers) in enumerate(
            zip(*examples.texts.values(), examples.labels, strict=True)
        )
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return str(path)


@pytest.mark.medium
def test_the_tokens_of_an_answer_by_hand(pipeline):
    context = "The app is broken ! My screen not open"
    encoded = EncodedExamples.encode(
        examples_of(
            ("my bill is high", context, ["broken ! My", "app"]),
            ("my bill", "un unaffable", ["naf"]),
            ("my bill", "un unaffable", ["able"]),
            ("my bill", "a b", []),
            ("my bill", "a b", [("b", 0)]),
        ),
        pipeline,
        to_flat,
    )
    words = [[WORDS[token] for token in row] for row in encoded.windows.packed.input_ids.to_list()]
    assert [row[4:-1] for row in words] == [
        ["the", "app", "is", "broken", "!"],  # Without "My" the answer is not complete.
        ["is", "broken", "!", "my", "screen"],
        ["!", "my", "screen", "not", "open"],
        ["un", "un", "##aff", "##able"],
        ["un", "un", "##aff", "##able"],
        ["a", "b"],
        ["a", "b"],
    ]
    assert all(row[:4] == ["[CLS]", "my", "bill", "[SEP]"] for row in words)
    assert encoded.labels["start"].tolist() == [0, 5, 0, 5, 7, 0, 0]
    assert encoded.labels["end"].tolist() == [0, 7, 0, 6, 7, 0, 0]
    short = dataclasses.replace(pipeline.task, max_answer_length=2)
    assert short.label_warnings(encoded) == [
        "1 of 4 answers are not complete in any window, or not at their offset",
        "1 of 4 answers have over 2 tokens",
    ]
    assert encoded.weights["start"].tolist() == encoded.weights["end"].tolist() == [1.0] * 7


@pytest.mark.medium
def test_the_tokens_of_answers_equal_those_found_by_loops(pipeline):
    rows = random_rows(np.random.default_rng(0), 60)
    encoded = EncodedExamples.encode(examples_of(*rows), pipeline, to_flat)
    windows, of_all = encoded.windows, []
    for _, context, answers in rows:
        tokens = pipeline.tokenizer.tokenize_with_offsets([context])
        spans = list(zip(*(part[0].numpy() for part in tokens[1:3]), strict=True))
        inside = [
            number
            for text, first in answers
            for number, (start, end) in enumerate(spans)
            if set(range(start, end)) & set(range(first, first + len(text)))
        ]
        of_all.append(inside)
    expected = []
    for w, example in enumerate(windows.example_W.numpy()):
        begin, offset = int(windows.begin_W[w]), int(windows.offset_W[w])
        end = begin + windows.packed.input_ids[w].shape[0] - offset - 1
        inside = of_all[example]
        is_complete = inside and begin <= inside[0] and inside[-1] < end
        expected.append([inside[at] - begin + offset if is_complete else 0 for at in (0, -1)])
    assert np.transpose(expected).tolist() == [
        encoded.labels["start"].tolist(),
        encoded.labels["end"].tolist(),
    ]
    assert 10 < np.count_nonzero(encoded.labels["end"]) < len(expected) - 10


def answers_of(task, encoded, outputs):
    texts = {name: tf.constant(values) for name, values in encoded.examples.texts.items()}
    answer = task.predictions(texts, encoded.windows, outputs)["answer"]
    return [text.decode() for text in answer.numpy()]


@pytest.mark.medium
def test_metrics_are_computed_from_the_predictions(pipeline, monkeypatch):
    monkeypatch.setattr(question_answering, "QUESTIONS_PER_BATCH", 7)
    task, rng = pipeline.task, np.random.default_rng(1)
    encoded = EncodedExamples.encode(examples_of(*random_rows(rng, 40)), pipeline, to_flat)
    shape = len(encoded), task.max_seq_length
    outputs = {name: rng.normal(size=shape).astype(np.float32) for name in ("start", "end")}
    for logits in outputs.values():
        logits[:, 0] += 2
    labels = encoded.examples.labels
    logged = answers_of(task, encoded, outputs)
    metrics = task.metrics(encoded, outputs)
    silent = [logged[number] == "" for number, answers in enumerate(labels) if not answers]
    assert metrics["no_answer_exact_match"] == metrics["no_answer_f1"] == np.mean(silent)
    assert 0 < np.mean(silent) < 1

    decided = task.tune(encoded, outputs)
    after = decided.metrics(encoded, outputs)
    assert decided.null_threshold == metrics["best_null_threshold"]
    assert after["f1"] == metrics["best_f1"] == after["best_f1"] > metrics["f1"]
    assert (after["f1_at_0"], after["exact_match_at_0"]) == (metrics["f1"], metrics["exact_match"])
    assert "f1_at_0" not in metrics
    assert answers_of(decided, encoded, outputs) != logged

    # Questions that all have an answer, or none, have their best threshold beyond all scores.
    assert task.check_dev(encoded.examples) == []
    for answers, message in (
        ((("a", 0),), "all questions have an answer"),
        ((), "no question has"),
    ):
        labels[:] = [answers] * len(labels)
        (warning,) = task.check_dev(encoded.examples)
        assert warning.startswith(message) and not task.tuning_warnings(encoded, outputs)
        tuned = task.tune(encoded, outputs)
        assert tuned.null_threshold == 0.0 != task.metrics(encoded, outputs)["best_null_threshold"]

    # A model that always answers is scored on the same texts.
    always = QuestionAnsweringTask(**SIZES)
    logged = answers_of(always, encoded, outputs)
    labels[:] = [((text, 0),) for text in logged[:10]] + [(("no such word", 0),)] * (
        len(logged) - 10
    )
    assert always.metrics(encoded, outputs) == {"exact_match": 0.25, "f1": 0.25}
    assert not always.tunable_fields and always.tune(encoded, outputs) is always


@pytest.mark.parametrize("layout", [to_flat, to_padded])
def test_the_evaluation_loss_covers_the_tokens_of_each_window_only(pipeline, layout):
    rows = [
        ("my bill", "the app is broken ! my screen not open", ["broken ! my"]),
        *[("", "a", ["a"])] * 3,  # One batch is shorter than the others.
    ]
    encoded = EncodedExamples.encode(examples_of(*rows), pipeline, layout)
    expected = []
    for w, ids in enumerate(encoded.windows.packed.input_ids.to_list()):
        segments = encoded.windows.packed.segment_ids[w]
        inputs = {
            "input_ids": [ids],
            "input_mask": [[1] * len(ids)],
            "segment_ids": [segments.numpy()],
        }
        outputs = pipeline.model({name: tf.constant(part) for name, part in inputs.items()})
        for name in ("start", "end"):
            logits = outputs[name][0].numpy().astype(np.float64)
            position = encoded.labels[name][w]
            expected.append(math.log(np.sum(np.exp(logits))) - logits[position])
    evaluator = Evaluator(pipeline.task, pipeline.model, tf.distribute.get_strategy(), 2)
    # Half of the mean of each output, summed, is the mean of both.
    assert evaluator.metrics(encoded)["loss"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_answers_that_no_window_holds_are_reported(pipeline):
    rows = [
        ("a", "b c", [("b", 1)]),
        ("a", "b c", ["b"]),
        ("a", " ".join(PLAIN), [" ".join(PLAIN)]),
    ]
    encoded = EncodedExamples.encode(examples_of(*rows), pipeline, to_flat)
    logged = ["2 of 3 answers are not complete in any window, or not at their offset"]
    assert pipeline.task.label_warnings(encoded) == logged


@pytest.mark.slow
def test_served_predictions_by_hand(pipeline):
    task = dataclasses.replace(pipeline.task, null_threshold=10.0)
    pipeline = Pipeline(task, pipeline.tokenizer, pipeline.model)
    signatures = pipeline.signatures
    for count in (0, 1, 17):
        rows = random_rows(np.random.default_rng(count), count)
        contexts = [context for _, context, _ in rows]
        questions = tf.constant([question for question, _, _ in rows], tf.string)
        answer = signatures["serving_default"](questions, tf.constant(contexts, tf.string))
        assert set(answer) == NAMES
        assert answer["answer"].shape == (count,) and answer["nbest_score"].shape == (count, 20)
        for context, *span in zip(
            contexts, *(answer[name].numpy() for name in ("answer", "start", "end")), strict=True
        ):
            text, start, end = span
            assert context[start:end] == text.decode() != ""
        tokens = signatures["tokenize"](questions, tf.constant(contexts, tf.string))
        assert tokens["start"].shape[0] == count and tokens["start"].shape.rank == 3
    empty = pipeline.predict(question=tf.constant([""]), context=tf.constant([""]))
    assert (empty["answer"][0], empty["start"][0], empty["score"][0]) == (b"", -1, 1)


def test_a_context_of_20000_words_is_answered(pipeline):
    always = QuestionAnsweringTask(**{**SIZES, "doc_stride": 4})
    answer = Pipeline(always, pipeline.tokenizer, pipeline.model).predict(
        question=tf.constant(["my bill"] * 2),
        context=tf.constant(["the app is broken " * 5000, "a"]),
    )
    start, end = int(answer["start"][0]), int(answer["end"][0])
    assert ("the app is broken " * 5000)[start:end].encode() == answer["answer"][0] != b""
    assert answer["answer"][1] == b"a"


def test_the_data_decide_whether_questions_may_have_no_answer(tmp_path):
    some = write_squad(tmp_path / "some.json", [("a", "a b", ["b"]), ("b", "a b", [])])
    none = write_squad(tmp_path / "none.json", [("a", "a b", ["b"])])
    task = QuestionAnsweringTask.from_data(some, **SIZES)
    assert (
        task.may_be_impossible
        and not QuestionAnsweringTask.from_data(none, **SIZES).may_be_impossible
    )
    assert QuestionAnsweringTask.from_data(none, may_be_impossible=True, **SIZES).may_be_impossible
    assert task.load_examples(some).labels == [(("b", 2),), ()]
    with pytest.raises(
        UserError, match="some.json: question q1: expected an answer, .*--task=squad2"
    ):
        QuestionAnsweringTask.from_data(some, may_be_impossible=False, **SIZES).load_examples(some)
    decided = QuestionAnsweringTask(**SIZES, may_be_impossible=True, null_threshold=-1.5)
    for each in (task, decided):
        assert task_from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_answers_in_python_may_have_the_form_of_datasets():
    task = QuestionAnsweringTask(**SIZES, may_be_impossible=True)
    for value in (
        {"text": ["b"], "answer_start": [2]},
        [{"text": "b", "answer_start": 2}],
        [{"text": "b", "start": 2}],
        [("b", 2)],
    ):
        assert task.encode_label(value, {}) == (("b", 2),)
    assert task.encode_label({"text": [], "answer_start": []}, {}) == ()
    for value in ({"text": ["b"]}, {"text": "b", "answer_start": [2]}, {"answer": "b"}):
        with pytest.raises(RowError, match="'answers': expected"):
            task.encode_label(value, {})


def test_no_space_for_the_context_is_reported():
    with pytest.raises(UserError, match="--max_seq_length=67: .* at least 68, .*_query_length=64"):
        QuestionAnsweringTask(max_seq_length=67)
    assert QuestionAnsweringTask(max_seq_length=68).doc_stride == 128


def test_only_answers_found_in_the_context_are_trained_on():
    task = QuestionAnsweringTask(**SIZES, may_be_impossible=True)
    rows = [
        ("a", "a b", [("b", 0)]),
        ("a", "a b", []),
        ("a", "a b", [("c", -1)]),
        ("a", "b", ["b"]),
    ]
    assert task.select_training_examples(examples_of(*rows)).labels == [(), (("b", 0),)]
    with pytest.raises(
        UserError, match="training answers: expected text in its context at answer_start"
    ):
        task.select_training_examples(examples_of(rows[0]))


def test_fit_warns_of_answers_that_it_leaves_out(config, vocabulary):
    model = QuestionAnswerer(QuestionAnsweringTask(**SIZES), config, vocabulary)
    rows = {"question": ["a"] * 3, "context": ["app bill"] * 3}
    message = "x: 1 of 3 rows, whose answer is not in the context, are not used for training"
    with mock.patch.object(keras.Model, "fit"), pytest.warns(UserWarning, match=message):
        model.fit(rows, [[("app", 0)], [("bill", 4)], [("bill", 0)]])


@pytest.mark.slow
def test_it_learns(tmp_path, vocabulary):
    """Train on sixteen questions that name the word before the answer, or an absent word."""
    rng, rows = np.random.default_rng(0), []
    for number in range(16):
        words = list(rng.permutation(PLAIN)[:9])
        position = int(rng.integers(8))
        asked = words.pop(position) if number % 4 == 0 else words[position]
        context = " ".join(words)
        start = sum(len(word) + 1 for word in words[: position + 1])
        answers = [(words[position + 1], start)] if asked in words else []
        rows.append((asked, context, answers))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        hidden_act="gelu",
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    dev, said = write_squad(tmp_path / "dev.json", rows), []
    run = finetune(
        FinetuneSettings(
            task="span_qa",
            train=write_squad(tmp_path / "train.json", [*rows * 25, ("b", "b c", [("c", 0)])]),
            dev=(dev,),
            init_from=str(small.write_huggingface(tmp_path / "tiny", config, vocabulary)),
            output_dir=str(tmp_path / "run"),
            max_seq_length=12,
            max_query_length=2,
            doc_stride=3,
            max_answer_length=3,
            epochs=4,
            learning_rate=1e-2,
        ),
        said.append,
    )
    assert said[0].startswith("span_qa: 400 rows in 700 windows, 1 more whose answer is not")
    assert run.task["may_be_impossible"] and run.task["null_threshold"] is None
    assert load_model(run.path).task.null_threshold is not None

    trained = load_model(run.path)
    count, bad = predict(trained, dev, tmp_path / "answers.jsonl", 5, said.append)
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert (count, bad) == (16, 0)
    assert [next(iter(line.items())) for line in lines] == [("id", f"q{n}") for n in range(16)]
    assert all(-1 not in line["nbest_start"] and line["nbest_start"] for line in lines)
    right = [
        line["answer"] == (answers[0][0] if answers else "")
        for line, (_, _, answers) in zip(lines, rows, strict=True)
    ]
    assert np.mean(right) > 0.9
    encoded = EncodedExamples.encode(
        trained.task.load_examples(dev), trained.serving.pipeline, to_flat
    )
    evaluator = Evaluator(trained.task, trained.network, tf.distribute.get_strategy())
    assert evaluator.metrics(encoded)["exact_match"] == np.mean(right)


@pytest.mark.slow
def test_the_answers_of_squad_are_tokens(data_dir):
    """Check 1,770 answers: all are in a window; 28 start or end in a token ("Sky" in "BSky")."""
    task = QuestionAnsweringTask.from_data(data_dir / "squad/dev-v1.1.json", max_seq_length=384)
    examples = task.load_examples(data_dir / "squad/dev-v1.1.json")
    assert len(task.select_training_examples(examples)) == len(examples) == 1770
    tokenizer = Tokenizer(Vocabulary.load(data_dir / "vocab/uncased/vocab.txt"), True)
    encoded = EncodedExamples.encode(examples, Pipeline(task, tokenizer, None), to_flat)
    packed, example_W = encoded.windows.packed, encoded.windows.example_W.numpy()
    splits = packed.input_ids.row_splits.numpy()
    first_W, last_W = (splits[:-1] + encoded.labels[name] for name in ("start", "end"))
    start_W, end_W = (
        packed.starts.flat_values.numpy()[first_W],
        packed.ends.flat_values.numpy()[last_W],
    )
    found, exact = set(), set()
    for w in np.flatnonzero(encoded.labels["start"]):
        text, _ = examples.labels[example_W[w]][0]
        found.add(example_W[w])
        if examples.texts["context"][example_W[w]][start_W[w] : end_W[w]] == text:
            exact.add(example_W[w])
        else:
            assert text in examples.texts["context"][example_W[w]][start_W[w] : end_W[w]]
    assert (len(found), len(exact)) == (1770, 1742)
    assert task.label_warnings(encoded) == []
