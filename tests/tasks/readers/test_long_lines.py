"""Lines of megabytes, which are read in linear time; quadratic time would be hours."""

import json

import pytest

from bert_tf import UserError
from bert_tf.data import documents
from bert_tf.storage.files import TextFile
from bert_tf.text.vocabulary import Vocabulary
from tasks.data.readers.choices import read_choices
from tasks.data.readers.glue import read_glue
from tasks.data.readers.rows import BadRow, read_rows
from tasks.data.readers.squad import read_questions
from tasks.data.readers.tagged import read_tagged
from tasks.metrics.squad import f1
from tests.fuzzing import watchdog
from tests.rows import WORDS

SHAPES = (
    *(" ", "\t", " \t", '"', '",', "[", '{"a":', "a", "a ", "\u0301", "a\u0301", "\\", "&", "&#"),
    *("中", "[MASK]", "##", "a. ", ".", "the ", "1", "-", "\0", "\\ud800", "'", "("),
)


def spans(path, input_format):
    return documents.spans(TextFile(path), input_format, "text")


READERS = {
    "columns": (".conll", "a\tO\n{}\n", read_tagged),
    "a column": (".conll", "a\tO\nx{}x\tO\n", read_tagged),
    "spaced columns": (".conll", "a O\nx {} O\n", read_tagged),
    "a tag": (".conll", "a\tO\nx\tB-{}\n", read_tagged),
    "a .csv row": (".csv", "text,label\n{}\n", lambda path: read_rows(path, ["text"])),
    "a .csv field": (".csv", 'text\n"{}"\n', lambda path: read_rows(path, ["text"])),
    "a .csv header": (".csv", "{}\na\n", lambda path: read_rows(path, ["text"])),
    "a .tsv row": (".tsv", "text\tlabel\n{}\n", lambda path: read_rows(path, ["text"])),
    "a .jsonl line": (".jsonl", "{}\n", lambda path: read_rows(path, ["text"])),
    "a text": (".jsonl", '{{"text": "{}"}}\n', lambda path: read_rows(path, ["text"])),
    "a context": (
        ".jsonl",
        '{{"question": "q", "context": "{0}", "answer": "{0}"}}\n',
        read_questions,
    ),
    "SQuAD": (".json", "{}", read_questions),
    "choices": (".jsonl", '{{"prompt": "{}", "choices": ["a", "b"], "label": 0}}\n', None),
    "ARC": (".csv", "{}\n", lambda path: read_choices(path, file_format="arc")),
    "GLUE": (".tsv", "sentence\tlabel\n{}\t1\n", lambda path: read_glue(path, file_format="sst2")),
    "GLUE's header": (".tsv", "{}\n", lambda path: read_glue(path, file_format="sst2")),
    "a vocabulary": (
        ".txt",
        "\n".join(WORDS) + "\n{}\n",
        lambda path: Vocabulary.load(path).entries,
    ),
    "a document": (".txt", "{}\n", lambda path: spans(path, "lines")),
    "a JSON document": (".jsonl", '{{"text": "{}"}}', lambda path: spans(path, "jsonl")),
}


def check(tmp_path, name, shape, size):
    suffix, form, read = READERS[name]
    read = read or read_choices
    text = shape * (size // len(shape))
    path = tmp_path / f"a{suffix}"
    path.write_text(form.format(json.dumps(text)[1:-1] if '"text"' in form else text))
    with watchdog():
        try:
            found = read(str(path))
            message = "".join(str(item) for item in found if hasattr(item, "message"))
        except UserError as error:
            message = str(error)
    assert "\n" not in message and len(message) < 1_000


@pytest.mark.parametrize("shape", [" ", " \t", '"'])
@pytest.mark.parametrize("name", READERS)
def test_a_line_of_half_a_megabyte_is_read_or_rejected(tmp_path, name, shape):
    check(tmp_path, name, shape, 500_000)


def test_a_word_of_megabytes_of_spaces_is_refused(tmp_path):
    """Detect a pattern that rescans at each space, which would take minutes."""
    path = tmp_path / "a.conll"
    path.write_text(f"a\tO\nx{' ' * 4_000_000}x\tO\n")
    with watchdog():
        (sentence,) = read_tagged(path)
    assert isinstance(sentence, BadRow) and len(str(sentence)) < 1_000


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", READERS)
def test_a_line_of_ten_megabytes_is_read_or_rejected(tmp_path, name, shape):
    check(tmp_path, name, shape, 10_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_of_megabytes_is_scored(shape):
    with watchdog():
        assert f1(shape * (2_000_000 // len(shape)), ["a", "x"]) <= 1
