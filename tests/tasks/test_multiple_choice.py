"""Multiple choice on literals, rows of varying numbers of choices, from file to prediction."""

import csv
import dataclasses
import json
import math
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError
from bert_tf.model.layout import MASKED_SCORE
from bert_tf.text.encoder_inputs import to_flat, to_padded
from tasks.base.task import task_from_dict
from tasks.data.examples import EncodedExamples, Examples
from tasks.finetuning.recipe import finetune
from tasks.graph.evaluation import Evaluator
from tasks.graph.pipeline import Pipeline, Serving
from tasks.model.labelled_rows import examples_of as examples_from_python
from tasks.model.labelled_rows import read_examples
from tasks.model.loading import load_model
from tasks.prediction.outputs import predict
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.ranking import RankingTask
from tests import small
from tests.shared_graphs import tokenizer_of

# The right choice repeats a word of the prompt, at any position among two to four.
QUESTIONS = [
    ("the bill", ["is too high", "not open"], 0),
    ("my bill", ["broken", "not open", "is high !"], 2),
    ("the screen", ["is high", "is broken"], 1),
    ("my screen", ["is broken !", "too high", "does not open"], 0),
    ("the app", ["is too high", "broken", "a", "does not open"], 3),
    ("my app", ["does not open !", "broken"], 0),
    ("a bill", ["a", "b", "too high", "c"], 2),
    ("a screen", ["b", "broken", "high"], 1),
]


@pytest.fixture(scope="module")
def pipeline(config, vocabulary):
    task = MultipleChoiceTask(max_seq_length=10)
    model = task.build_model(config)
    rng = np.random.default_rng(0)
    for variable in model.variables:  # So large that choices differ.
        variable.assign(variable + rng.normal(0.0, 0.3, variable.shape))
    return Pipeline(task, tokenizer_of(vocabulary, True), model)


@pytest.fixture(scope="module")
def signatures(pipeline):
    return pipeline.signatures


def write(path, questions=QUESTIONS):
    lines = [
        {"prompt": prompt, "choices": choices, "label": label}
        for prompt, choices, label in questions
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def examples_of(questions=QUESTIONS):
    prompts, choices, labels = zip(*questions, strict=True)
    return Examples({"prompt": list(prompts), "choices": list(choices)}, list(labels))


def test_the_prediction_by_hand():
    scores = tf.constant(
        [
            [0.0, math.log(3), MASKED_SCORE],
            [MASKED_SCORE, MASKED_SCORE, MASKED_SCORE],
            [MASKED_SCORE, 5.0, MASKED_SCORE],
            [0.0, math.log(4.5) + 1e-7, math.log(4.5)],
        ]
    )
    prediction = MultipleChoiceTask(max_seq_length=12).predictions(None, None, {"choice": scores})
    np.testing.assert_allclose(
        prediction["probabilities"],
        [[0.25, 0.75, 0], [0, 0, 0], [0, 1, 0], [0.1, 0.45, 0.45]],
        1e-5,
    )
    # The last two are equal except for rounding: the first is chosen, whatever the rounding.
    assert prediction["choice"].numpy().tolist() == [1, -1, 1, 1]
    swapped = MultipleChoiceTask(max_seq_length=12).predictions(
        None, None, {"choice": tf.gather(scores, [0, 2, 1], axis=1)}
    )
    assert swapped["choice"].numpy().tolist() == [2, -1, 2, 1]


def test_metrics_are_computed_from_the_predictions():
    task = MultipleChoiceTask(max_seq_length=12)
    scores = np.array([[0, 2, 1], [3, 1, MASKED_SCORE], [1, 1, 1], [0, 1, 2]], np.float32)
    labels = {"choice": np.array([1, 1, 0, 2], np.int32)}
    data = types.SimpleNamespace(labels=labels, windows=None)
    assert task.metrics(data, {"choice": scores}) == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("task", "output"),
    [
        (MultipleChoiceTask(max_seq_length=12), "probabilities"),
        (RankingTask(max_seq_length=12), "scores"),
    ],
)
def test_missing_texts_of_several_calls_have_the_score_0(task, output):
    def serve(text, texts):
        return {output: tf.cast(texts != "", tf.float32)}

    columns = dict(zip(task.input_names, (["a", "b"], [["c", "d"], ["e"]]), strict=True))
    for batch_size in (1, 2):
        found = Serving(task, {"served": serve}).call("served", columns, batch_size)
        assert found[output].tolist() == [[1, 1], [1, 0]]


def test_padding_of_longer_questions_is_removed():
    """A row has as many probabilities as choices, whatever is predicted with it."""

    def serve(prompt, choices):
        probabilities = tf.cast(choices != "", tf.float32)
        return {"choice": tf.zeros_like(prompt == "", tf.int32), "probabilities": probabilities}

    task = MultipleChoiceTask(max_seq_length=12)
    columns = {"prompt": ["a", "b"], "choices": [["c", "", "d"], ["e", "f"]]}
    for batch_size in (1, 2):
        rows = Serving(task, {"serving_default": serve}).predict_rows(columns, batch_size)
        assert [row["probabilities"] for row in rows] == [[1, 0, 1], [1, 1]]
        assert [row["choice"] for row in rows] == [0, 0]
    assert task.strip_padding({"choice": -1, "probabilities": [0.0]})["probabilities"] == []
    row = {"choice": 0, "probabilities": [math.nan, 0.0]}  # Reported as an error later.
    assert len(task.strip_padding(row)["probabilities"]) == 1


@pytest.mark.medium
def test_each_choice_follows_the_prompt(signatures):
    prediction = signatures["tokenize"](
        tf.constant(["the bill", "app"]), tf.constant([["is high", "", "a"], ["", "", ""]])
    )
    assert prediction["input_ids"].numpy().tolist() == [
        [[2, 5, 6, 3, 7, 9, 3], [0] * 7, [2, 5, 6, 3, 22, 3, 0]],
        [[0] * 7] * 3,
    ]
    assert prediction["segment_ids"][0].numpy().tolist() == [
        [0, 0, 0, 0, 1, 1, 1],
        [0] * 7,
        [0, 0, 0, 0, 1, 1, 0],
    ]
    assert prediction["start"][0, 0].numpy().tolist() == [-1, 0, 4, -1, 0, 3, -1]
    assert prediction["end"][0, 0].numpy().tolist() == [-1, 3, 8, -1, 2, 7, -1]
    assert (prediction["input_mask"].numpy() == (prediction["input_ids"].numpy() != 0)).all()


@pytest.mark.slow
def test_a_prediction_does_not_depend_on_the_batch(pipeline, signatures):
    """Compare with encoder, pooler and head on one pair at a time."""
    prediction = signatures["serving_default"]
    prompts = [prompt for prompt, *_ in QUESTIONS] + ["the bill", ""]
    rows = [choices for _, choices, _ in QUESTIONS] + [["", "broken", ""], ["a", "b"]]
    complete = prediction(tf.constant(prompts), tf.ragged.constant(rows).to_tensor(""))
    for number, (prompt, choices) in enumerate(zip(prompts, rows, strict=True)):
        scores = []
        for choice in choices:
            if choice:
                windows = pipeline.encode(prompt=[prompt], choices=[[choice]])
                inputs = to_padded(windows.packed, pipeline.vocabulary)
                pooled = pipeline.model.encoder(inputs)["pooled"]
                scores.append(float(pipeline.model.head(pooled)[0, 0]))
            else:
                scores.append(-math.inf)
        expected = np.exp(scores) / np.sum(np.exp(scores))
        found = complete["probabilities"][number].numpy()
        np.testing.assert_allclose(found[: len(expected)], expected, atol=1e-6)
        assert not found[len(expected) :].any() and complete["choice"][number] == np.argmax(
            expected
        )
        alone = prediction(tf.constant([prompt]), tf.constant([choices]))
        np.testing.assert_allclose(alone["probabilities"][0], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (1, 0), (2, 2), (17, 5)])
def test_rows_without_a_choice_have_no_prediction(signatures, shape):
    prompts, choices = tf.fill(shape[:1], "the bill"), tf.fill(shape, "")
    tokens = signatures["tokenize"](prompts, choices)
    assert {tuple(values.shape) for values in tokens.values()} == {(*shape, 0)}
    prediction = signatures["serving_default"](prompts, choices)
    assert prediction["choice"].numpy().tolist() == [-1] * shape[0]
    assert (
        prediction["probabilities"].shape == shape and not prediction["probabilities"].numpy().any()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "rows"), [(2, 1), (1, 2)])
def test_a_prompt_without_choices_and_choices_without_a_prompt_are_rejected(
    signatures, prompts, rows
):
    with pytest.raises(tf.errors.InvalidArgumentError, match="inputs: numbers of rows differ"):
        signatures["serving_default"](tf.fill([prompts], "a"), tf.fill([rows, 2], "b"))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_rows_without_a_choice_are_ordered_by_length(pipeline, empty):
    choices = [["is high", "a"], ["a", "b"]]
    choices.insert(empty, ["", ""])
    examples = Examples({"prompt": ["the bill"] * 3, "choices": choices}, [])
    order = EncodedExamples.encode(examples, pipeline, to_flat).by_length()
    assert sorted(order.tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("choices", "label", "message"),
    [
        (["a", ""], 1, r"y\[0\]: choice 1: expected one that is not empty"),
        (["", ""], 0, r"y\[0\]: choices: expected at least one that is not empty, received none"),
        ([], 0, r"y\[0\]: choices: expected at least one that is not empty, received none"),
        (["a", "b"], 2, r"y\[0\]: choice 2: expected an integer from 0 to 1"),
    ],
)
def test_a_label_is_the_index_of_a_choice(choices, label, message):
    task = MultipleChoiceTask(max_seq_length=10)
    rows = {"prompt": ["x"], "choices": [choices]}
    with pytest.raises(UserError, match=message):
        examples_from_python(task, rows, [label])


def test_the_longer_of_prompt_and_choice_is_truncated(pipeline):
    windows = pipeline.encode(prompt=["the bill is too high !"], choices=[["a b c a b c a b", "a"]])
    assert windows.packed.input_ids.to_list() == [
        [2, 5, 6, 7, 8, 3, 22, 23, 24, 3],
        [2, 5, 6, 7, 8, 9, 19, 3, 22, 3],
    ]


@pytest.mark.parametrize("layout", [to_flat, to_padded])
def test_a_batch_holds_complete_questions(pipeline, layout):
    encoded = EncodedExamples.encode(examples_of(), pipeline, layout)
    assert len(encoded) == len(QUESTIONS)
    (inputs, labels, weights), *_ = encoded.training_batches(
        global_batch_size=8, num_epochs=1, seed=3
    )
    assert sorted(labels["choice"].numpy()) == sorted(label for *_, label in QUESTIONS)
    assert weights["choice"].numpy().tolist() == [1.0] * 8
    lengths = (inputs["windows"].numpy() >= 0).sum(axis=1)
    assert sorted(lengths) == sorted(len(choices) for _, choices, _ in QUESTIONS)
    (inputs, _), *_ = encoded.evaluation_batches([4, 0], 2)
    assert inputs["windows"].numpy().tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]


@pytest.mark.slow
def test_evaluation_on_replicas_yields_the_served_probabilities(pipeline, signatures, mirrored):
    encoded = EncodedExamples.encode(examples_of(), pipeline, to_flat)
    served = signatures["serving_default"](
        tf.constant([prompt for prompt, *_ in QUESTIONS]),
        tf.ragged.constant([choices for _, choices, _ in QUESTIONS]).to_tensor(""),
    )
    with mirrored.scope():
        copy = pipeline.task.build_model(pipeline.model.config)
    for variable, value in zip(copy.variables, pipeline.model.variables, strict=True):
        variable.assign(value)
    for model, strategy in ((pipeline.model, tf.distribute.get_strategy()), (copy, mirrored)):
        evaluator = Evaluator(pipeline.task, model, strategy, 3)
        outputs = evaluator.outputs(encoded)
        found = pipeline.task.predictions(None, None, outputs)
        np.testing.assert_allclose(found["probabilities"], served["probabilities"], atol=1e-6)
        metrics = evaluator.metrics(encoded)
        of_label = served["probabilities"].numpy()[range(8), [label for *_, label in QUESTIONS]]
        assert metrics["loss"] == pytest.approx(-np.log(of_label).mean(), abs=1e-5)
        right = served["choice"].numpy() == [label for *_, label in QUESTIONS]
        assert metrics["accuracy"] == right.mean()


@pytest.mark.slow
def test_it_learns_and_the_run_predicts_and_is_restored_from_json(huggingface_dir, tmp_path):
    """Double the questions to 16 by permuting choices: the position alone cannot be learned."""
    reversed_ones = [(p, c[::-1], len(c) - 1 - label) for p, c, label in QUESTIONS]
    files = {
        "train": write(tmp_path / "train.jsonl", QUESTIONS + reversed_ones),
        "dev": write(tmp_path / "dev.jsonl", reversed_ones),
    }
    said = []
    run = finetune(
        small.settings(
            huggingface_dir,
            files,
            tmp_path / "run",
            task="multiple_choice",
            epochs=20,
            global_batch_size=4,
        ),
        said.append,
    )
    assert "multiple_choice: 16 rows, 8 dev rows" in said
    best = run.checkpoints.info(run.checkpoints.best_step())["metrics"]
    assert best["dev_accuracy"] == 1.0 and best["dev_loss"] < 0.3
    assert run.task == {"kind": "multiple_choice", "file_format": "rows", "max_seq_length": 12}

    trained = load_model(run.path)
    assert trained.task == task_from_dict(run.task)
    output = tmp_path / "answers.jsonl"
    with open(files["dev"], "a") as file:
        file.write('{"prompt": "the bill", "choices": ["a"]}\n')
    assert predict(trained, files["dev"], output, 3, said.append) == (9, 1)
    predictions = [json.loads(line) for line in output.read_text().splitlines()]
    assert [prediction["choice"] for prediction in predictions[:-1]] == [
        label for *_, label in reversed_ones
    ]
    assert set(predictions[0]) == {"choice", "probabilities"}
    assert predictions[-1] == {
        "error": f"{files['dev']}:9: expected at least two choices, received 1"
    }


def test_reading_in_python_warns_of_known_bad_rows(tmp_path):
    path = tmp_path / "arc.csv"
    path.write_text("the bill,is high,broken,b,c,A\nthe screen,,,,,2\n")
    with pytest.warns(UserWarning, match="^1 bad rows skipped, first: .*arc.csv:2: exp") as warned:
        rows = read_examples(path, "multiple_choice", file_format="arc")
    assert rows.y == [0] and len(rows) == 1 and warned[0].filename == __file__


@pytest.mark.slow
def test_known_bad_rows_of_arc_are_skipped_with_a_message(huggingface_dir, tmp_path):
    """Use rows of the published files: without choices, or with an answer that is none of them."""
    path = tmp_path / "arc.csv"
    rows = [
        ("the bill", "is high", "broken", "b", "c", "A"),
        ("the screen", "", "", "", "", "2"),
        ("my app", "high", "broken", "a", "b", "E"),
        ("my screen", "high", "broken", "c", "", "B"),
    ]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    task = MultipleChoiceTask.from_data(path, file_format="arc", max_seq_length=12)
    examples = task.load_examples(path)
    assert examples.labels == [0, 1]
    assert [row.location for row in examples.skipped_rows] == [f"{path}:2", f"{path}:3"]
    line = f"2 bad rows skipped, first: {path}:2: expected at least two choices, received none"
    assert examples.skipped_rows_message() == examples.filter(bool).skipped_rows_message() == line
    assert [len(choices) for choices in examples.texts["choices"]] == [4, 3]

    said = []
    files = {"train": path, "dev": small.same_rows(path)}
    settings = small.settings(huggingface_dir, files, tmp_path / "run", task="arc", epochs=1)
    finetune(settings, said.append)
    of_dev = line.replace(str(path), settings.dev[0])
    assert said[:3] == [line, of_dev, "multiple_choice: 2 rows, 2 dev rows"]
    path.write_text("Q,a,b,C\n")
    with pytest.raises(
        UserError, match=r"arc.csv: expected at least one good row. First bad row: .*:1: the ans"
    ):
        task.load_examples(path)
    path.write_text("Q,a,b,A\nQ,a,b,A or B\n")
    with pytest.raises(UserError, match="arc.csv:2: the answer 'A or B': expected one of the 2"):
        task.load_examples(path)
    with pytest.raises(UserError, match="arc.csv: expected a file that ends in .jsonl"):
        MultipleChoiceTask(max_seq_length=12).load_examples(path)


@pytest.mark.parametrize(
    "flag",
    [{"text_column": "a"}, {"labels": ("a", "b")}, {"doc_stride": 4}, {"truncation": "tail"}],
)
def test_flags_of_other_tasks_are_rejected(huggingface_dir, complaints, tmp_path, flag):
    settings = small.settings(huggingface_dir, complaints, tmp_path / "run")
    for name in ("multiple_choice", "swag"):
        with pytest.raises(
            UserError, match=f"--{next(iter(flag))}: not supported by --task={name}"
        ):
            dataclasses.replace(settings, task=name, **flag)


@pytest.mark.slow
def test_published_questions_are_encoded_completely(data_dir, pretrained_dir):
    from bert_tf import read_pretrained

    task = MultipleChoiceTask(max_seq_length=128, file_format="arc")
    examples = task.load_examples(data_dir / "multiple_choice" / "arc_challenge_dev.csv")
    assert (len(examples), len(examples.skipped_rows)) == (1_096, 23)
    tokenizer = Tokenizer(read_pretrained(str(pretrained_dir), None).vocabulary, True)
    encoded = EncodedExamples.encode(examples, Pipeline(task, tokenizer, None), to_flat)
    counts = np.diff(encoded.sample_splits)
    assert counts.tolist() == [len(choices) for choices in examples.texts["choices"]]
    assert set(counts) == {3, 4}
