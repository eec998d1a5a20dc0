"""Prediction: rows in order, in batches, bad ones in their position, and atomic output files."""

import json
import tracemalloc
import types

import pytest
import tensorflow as tf

import tasks
from bert_tf import UserError
from bert_tf.storage import files, ownership
from bert_tf.system import command, progress
from tasks.data.readers.choices import read_choices
from tasks.data.readers.glue import read_glue
from tasks.data.readers.rows import raise_bad_rows
from tasks.graph.pipeline import ServingFunctions
from tasks.predict import PredictSettings, main
from tasks.prediction.outputs import predict
from tasks.types.classification.text_classifier import ClassificationTask
from tasks.types.multiple_choice import MultipleChoiceTask
from tasks.types.question_answering import QuestionAnsweringTask
from tests import small


def stub(prediction, **changes):
    """Return an object that `predict` accepts as a TaskModel.

    `prediction` is its model, which returns {name: [B, ...]} of strings.
    """
    task = ClassificationTask(labels=("a", "b"), max_seq_length=12, **changes)
    signatures = {"serving_default": prediction}
    vocabulary = {"[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    pipeline = types.SimpleNamespace(
        task=task, signatures=signatures, token_fillers={}, vocabulary=vocabulary
    )
    return types.SimpleNamespace(task=task, serving=ServingFunctions(pipeline))


def lengths(*texts):
    """Return a prediction that identifies rows: characters of each text, and the text itself."""
    return {
        "length": tf.add_n([tf.strings.length(text, "UTF8_CHAR") for text in texts]),
        "text": tf.strings.join(texts, "|"),
    }


def predictions(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_rows_are_predicted_in_order(tmp_path, batch_size, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    texts = ["é", "", "中 x", "a,b", 'quo"te', "line\nend", " "]
    path = small.write_rows(tmp_path / "in.csv", [(text, "") for text in texts])
    said, output = [], tmp_path / "out.jsonl"
    counts = predict(stub(lengths), path, output, batch_size, said.append)
    assert counts == (7, 0)
    assert predictions(output) == [{"length": len(text), "text": text} for text in texts]
    assert said[-1].startswith("7/7 rows  ") and len(said) == -(-7 // batch_size)
    assert '"é"' in output.read_text(encoding="utf-8")  # The output is readable text.


def test_pairs_are_read_from_the_named_columns(tmp_path):
    path = small.write_rows(tmp_path / "in.csv", [("1", "22"), ("x", "")], ("second", "first"))
    trained = stub(lengths, text_columns=("first", "second"))
    predict(trained, path, tmp_path / "out.jsonl", 8, lambda line: None)
    assert [prediction["text"] for prediction in predictions(tmp_path / "out.jsonl")] == [
        "22|1",
        "|x",
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_bad_row_has_its_error_in_its_position(tmp_path, batch_size):
    lines = ['{"text": "a"}', "{", '{"words": "b"}', '{"text": null}', '{"text": "cc"}', "[]"]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    assert predict(stub(lengths), path, output, batch_size, lambda line: None) == (6, 4)
    first, *bad, good, last = predictions(output)
    assert (first["text"], good["text"]) == ("a", "cc")
    for number, (line, message) in enumerate(
        zip(bad, ("not JSON", "no column 'text'", "expected text, received None"), strict=True),
        start=2,
    ):
        assert list(line) == ["error"]
        assert line["error"].startswith(f"{path}:{number}: ") and message in line["error"], line
    assert last == {"error": f"{path}:6: expected a JSON object, received a list"}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_predictions_are_in_the_lines_of_their_texts(tmp_path, suffix):
    lines = ["a", "", "bb", "", "", "ccc", ""]
    path, output = tmp_path / f"in{suffix}", tmp_path / "out.jsonl"
    path.write_text("".join(f"{line}\n" for line in ["text", *lines]))
    assert predict(stub(lengths), path, output, 2, lambda line: None) == (7, 0)
    assert [prediction["text"] for prediction in predictions(output)] == lines


def write_long(path, rows):
    """Write rows of 1,000 characters that start with their number."""
    with open(path, "w", encoding="utf-8") as lines:
        lines.write("text\n")
        lines.writelines(f"{number:08} {'x' * 990}\n" for number in range(rows))
    return path


@pytest.mark.slow
def test_only_some_of_many_rows_are_in_memory(tmp_path):
    """Read twenty megabytes with a window of a tenth of one."""
    trained, output = stub(lengths), tmp_path / "out.jsonl"
    short, long = write_long(tmp_path / "a.tsv", 300), write_long(tmp_path / "b.tsv", 20_000)
    predict(trained, short, output, 100, lambda line: None)  # This allocates what stays.
    tracemalloc.start()
    try:
        assert predict(trained, long, output, 100, lambda line: None) == (20_000, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    with open(output, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            assert line.startswith(f'{{"length": 999, "text": "{number:08} x')
    assert number == 19_999


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("before", [None, "of before\n"])
def test_a_failed_or_killed_prediction_leaves_no_partial_file(tmp_path, error, before):
    """Raise SystemExit as well, to which the command converts SIGTERM."""
    path = small.write_rows(tmp_path / "in.csv", [("a", ""), ("b", ""), ("c", "")])
    directory = tmp_path / "out"
    directory.mkdir()
    if before:
        (directory / "out.jsonl").write_text(before)
    calls = []

    def prediction(text):
        calls.append(text)
        if len(calls) == 3:
            raise error
        return lengths(text)

    with pytest.raises(type(error)):
        predict(stub(prediction), path, directory / "out.jsonl", 1, lambda line: None)
    left = [entry.name for entry in directory.iterdir()]
    assert left == (["out.jsonl"] if before else [])
    if before:
        assert (directory / "out.jsonl").read_text() == before


@pytest.mark.parametrize("content", ["", "text,label\n"])
def test_a_file_without_rows_is_rejected_and_nothing_is_written(tmp_path, content):
    path = tmp_path / "in.csv"
    path.write_text(content)
    with pytest.raises(UserError, match="in.csv: expected at least one row"):
        predict(stub(lengths), path, tmp_path / "out.jsonl", 999, lambda line: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.csv"]


def test_a_truncated_file_leaves_no_output(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b"text\n" + b"good\n" * 20_000 + b"\xff\n")
    with pytest.raises(UserError, match="not UTF-8: byte 0xff in line 20002"):
        predict(stub(lengths), path, tmp_path / "out.jsonl", 999, lambda line: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.csv"]


def test_predictions_are_written_to_a_remote_path(tmp_path):
    path = small.write_rows(tmp_path / "in.csv", [("a", ""), ("bcd", "")])
    for output in (tmp_path / "out.jsonl", "ram://prediction/out.jsonl"):
        with ownership.sole_output(output):
            assert predict(stub(lengths), path, output, 1, lambda line: None) == (2, 0)
    assert files.read_text("ram://prediction/out.jsonl") == (tmp_path / "out.jsonl").read_text()
    assert files.listdir("ram://prediction") == ["out.jsonl"]


@pytest.mark.parametrize(
    ("task", "texts", "expected"),
    [
        (ClassificationTask(labels=("a", "b"), max_seq_length=12), ["x"], {"text": "x"}),
        (
            QuestionAnsweringTask(max_seq_length=384),
            ["who?", "Ann."],
            {"question": "who?", "context": "Ann."},
        ),
        (
            MultipleChoiceTask(max_seq_length=12),
            ["the bill", "is high", "open", "a"],
            {"prompt": "the bill", "choices": ["is high", "open", "a"]},
        ),
    ],
)
def test_texts_are_the_inputs_of_a_row_in_order(task, texts, expected):
    assert task.row_of(texts) == expected
    with pytest.raises(UserError, match=f"{', '.join(expected)}.*, received {len(expected) - 1}"):
        task.row_of(texts[: len(expected) - 1])


def test_more_texts_than_inputs_are_rejected():
    task = QuestionAnsweringTask(max_seq_length=384)
    with pytest.raises(UserError, match="one text each for question, context, received 3"):
        task.row_of(["a", "b", "c"])


def test_text_is_utf_8():
    with pytest.raises(UserError, match=r"--text: expected UTF-8, received 'caf\\udce9'"):
        PredictSettings("run", text=("the bill", "caf\udce9"))


def test_text_and_files_exclude_each_other(tmp_path):
    path = str(small.write_rows(tmp_path / "in.csv", [("a", "")]))
    for given, message in (
        ({"text": ("a",), "input": path}, "--text: expected without --input, --output and"),
        ({"input": path}, "expected --input and --output or --output_dir, or --text"),
    ):
        with pytest.raises(UserError, match=message):
            PredictSettings("run", **given)


@pytest.mark.medium
def test_the_command_prints_the_prediction_of_a_text(tmp_path, huggingface_dir, capsys):
    model = tasks.TextClassifier.from_pretrained(
        huggingface_dir, labels=["a", "b"], max_seq_length=12
    )
    model.save_run(tmp_path / "run")
    flags = [f"--run={tmp_path / 'run'}", "--text=the bill"]
    settings, _ = command.parse(PredictSettings, ["predict", *flags])
    settings.check()
    main(settings)
    printed = json.loads(capsys.readouterr().out)
    (expected,) = model.predict_rows(["the bill"])
    assert printed["label"] == expected["label"]
    assert printed["probabilities"] == pytest.approx(expected["probabilities"])


@pytest.mark.parametrize(("name", "columns"), [("sst2", ["text"]), ("mrpc", ["text_a", "text_b"])])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_task_of_glue_predicts_rows_with_named_columns(tmp_path, name, columns, suffix):
    values, path = ["a b", "c"][: len(columns)], tmp_path / f"in{suffix}"
    separator = "," if suffix == ".csv" else "\t"
    table = f"{separator.join(columns)}\n{separator.join(values)}\n"
    row = json.dumps(dict(zip(columns, values, strict=True)))
    path.write_text(row if suffix == ".jsonl" else table)
    (found,) = read_glue(path, labelled=False, file_format=name)
    assert list(found.texts.values()) == values


@pytest.mark.parametrize("file_format", ["swag", "arc", "rows"])
def test_any_multiple_choice_task_predicts_json_lines(tmp_path, file_format):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "who?", "choices": ["Ann", "Bo"]}')
    (found,) = read_choices(path, labelled=False, file_format=file_format)
    assert found.texts == {"prompt": "who?", "choices": ["Ann", "Bo"]}
    if file_format != "rows":
        with pytest.raises(UserError):
            list(raise_bad_rows(read_choices(path, file_format=file_format)))
