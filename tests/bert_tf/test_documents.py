"""Documents of every input format: found, hashed by content and read; bad input by its line."""

import codecs
import gzip
import hashlib
import json
import random

import pytest

from bert_tf import UserError
from bert_tf.data import documents
from bert_tf.storage import files
from tests.rows import as_others_write

LINES = "One.\n  Two.  \n\n \t\nThree.\r\n\u3000\nFour.\nFive."


def index(tmp_path, texts, input_format="lines"):
    """Return (DocumentIndex, [lines of each document in its order]) of {name: text or bytes}."""
    for name, text in texts.items():
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    paths = documents.find_files([str(tmp_path / name) for name in texts])
    found = documents.index(paths, input_format, "text", str(tmp_path / "unpacked"))
    read = [
        documents.read(found.paths[file], offset, length, input_format)
        for file, offset, length in zip(found.files, found.offsets, found.lengths, strict=True)
    ]
    return found, read


def test_blank_lines_of_any_whitespace_separate_documents(tmp_path):
    found, read = index(tmp_path, {"a.txt": LINES})
    assert sorted(read) == [["Four.", "Five."], ["One.", "Two.", ""], ["Three.", ""]]
    assert len(found) == 3


def test_order_and_hash_depend_on_content_only(tmp_path):
    halves = LINES.split("\n\u3000\n")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    complete, read = index(tmp_path / "one", {"a.txt": LINES})
    split, read_split = index(
        tmp_path / "two", {"z.txt": halves[0].replace("\n", "\r\n"), "b.txt.gz": halves[1]}
    )
    assert complete.sha256 == split.sha256

    def content(lines):
        return [line for line in lines if line]

    assert [*map(content, read)] == [*map(content, read_split)]
    assert index(tmp_path / "two", {"a.txt": LINES + "x"})[0].sha256 != complete.sha256


def test_equal_documents_are_ordered_by_file_and_position(tmp_path):
    found, _ = index(tmp_path, {"b": "same\n\nother\n\nsame\n", "a": "same\n"})
    order = list(zip(found.files.tolist(), found.offsets.tolist(), strict=True))
    same = [position for position in order if position != (1, 6)]
    assert same == [(0, 0), (1, 0), (1, 13)]


def test_text_has_one_document_per_file_and_jsonl_one_per_line(tmp_path):
    _, read = index(tmp_path, {"a": "One. Two.\n\nThree.\n"}, "text")
    assert read == [["One. Two.", "", "Three.", ""]]
    rows = [{"text": "One.\nTwo.", "id": 1}, {"text": " "}, {"id": 2, "text": "Drei – drei."}]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    _, read = index(tmp_path, {"b.jsonl": text}, "jsonl")
    assert sorted(read) == [["Drei – drei."], ["One.", "Two."]]


def test_white_space_of_any_kind_may_surround_an_object(tmp_path):
    text = b'\x1e{"text": "One."}\n{"text": "Two."}\xc2\xa0\n'
    _, read = index(tmp_path, {"a.jsonl": text}, "jsonl")
    assert sorted(read) == [["One."], ["Two."]]


def test_paragraph_boundaries_change_the_hash_if_sentences_are_split(tmp_path):
    digests = set()
    for number, text in enumerate(("A.\n\nB.\nC.", "A.\nB.\n\nC.", "A.\n\n\n B. \r\nC.\n\n")):
        (tmp_path / str(number)).mkdir()
        for form, data in (("text", text), ("jsonl", json.dumps({"text": text}))):
            found, _ = index(tmp_path / str(number), {form: data}, form)
            digests.add((number == 1, found.sha256))
    assert len(digests) == 2  # The first and the last document are equal.


def test_a_file_is_read_once_and_the_output_never(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("a.txt", "out/b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/out/../a.txt"]
    found = documents.find_files(patterns, str((tmp_path / "out").resolve()))
    assert len(found) == 1
    with pytest.raises(UserError, match="no files other than those in"):
        documents.find_files([f"{tmp_path}/out/*"], str((tmp_path / "out").resolve()))


@pytest.mark.parametrize(
    ("name", "data", "input_format", "message"),
    [
        ("a", b"good\nbad \xe9\n", "lines", "a: line 2 is not UTF-8 at byte 9 of the file"),
        ("a", b"", "lines", "no text in 1 files"),
        ("a", b"\n \n", "text", "no text in 1 files"),
        ("a", b'{"text": 1}\n', "jsonl", "a: line 1: 'text' is 1; expected a string"),
        ("a", b'{"text": "x"}\n{"t": ""}\n', "jsonl", "line 2: expected an object with the key"),
        ("a", b"{\n", "jsonl", "line 1: not JSON"),
        ("a", b"[1]\n", "jsonl", "line 1: expected an object"),
        ("a", b"[" * 100_000, "jsonl", "line 1: not JSON"),
        ("a", b"ok\n" + b"x" * (1 << 20) + b"y\n", "lines", "line 2 is longer than 1048576 bytes"),
        (
            "a",
            json.dumps({"text": "x" * (1 << 20) + "y"}).encode(),
            "jsonl",
            "has a line of over 1048576 characters",
        ),
    ],
)
def test_bad_input_is_reported_with_file_and_line(tmp_path, name, data, input_format, message):
    with pytest.raises(UserError, match=message) as caught:
        index(tmp_path, {name: data}, input_format)
    assert "\n" not in str(caught.value)


def test_damaged_gzip_and_missing_files_are_reported(tmp_path):
    path = tmp_path / "a.gz"
    for data in (gzip.compress(b"text\n" * 1000)[:-9], b"no gzip"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="a.gz: damaged gzip file"):
            documents.index([str(path)], "lines", "text", str(tmp_path / "unpacked"))
    with pytest.raises(UserError, match=r"--input=.*nothing\*: no such file"):
        documents.find_files([str(tmp_path / "nothing*")])


@pytest.mark.parametrize("unit", [b"\n", b"\0", b"a text, line after line\n"])
def test_gzip_that_expands_without_end_is_rejected_before_it_fills_the_disk(
    tmp_path, unit, monkeypatch
):
    monkeypatch.setattr(documents, "FREE_EXPANSION_BYTES", 1 << 18)
    path, spill = tmp_path / "bomb.gz", tmp_path / "unpacked"
    path.write_bytes(gzip.compress(unit * ((6 << 20) // len(unit))))
    with pytest.raises(UserError, match=r"bomb.gz: (line 1 is longer|expands to over)") as raised:
        documents.index([str(path)], "lines", "text", str(spill))
    assert "\n" not in str(raised.value)
    assert (spill / "0").stat().st_size < 4 << 20  # The file expands to 6 MiB.


def test_gzip_of_repetitive_text_is_read(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a text, line after line\n" * (1 << 17)))
    assert path.stat().st_size < 10_000
    found = documents.index([str(path)], "lines", "text", str(tmp_path / "unpacked"))
    assert found.lengths.tolist() == [24 << 17]


def test_a_line_without_end_is_rejected_before_it_fills_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "long"
    with open(path, "wb") as stream:
        # The file holds half a gigabyte of zero bytes; it is sparse, so it takes no disk space.
        stream.truncate(500 << 20)
    tracemalloc.start()
    with pytest.raises(UserError, match="line 1 is longer"):
        documents.index([str(path)], "lines", "text", str(tmp_path / "unpacked"))
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_paths_of_tensorflow_file_systems_are_read(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    paths = documents.find_files([f"file://{tmp_path}/*.txt"])
    assert paths == [f"file://{tmp_path}/a.txt"]
    found = documents.index(paths, "lines", "text", str(tmp_path / "unpacked"))
    here = documents.index([str(tmp_path / "a.txt")], "lines", "text", "")
    assert found.sha256 == here.sha256
    assert documents.read(paths[0], 0, 4, "lines") == ["One."]


def reference(data, input_format, max_bytes):
    """Read a file line by line. Return [(digest, offset, length) per document] or [error]."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\n" not in data and b"\r" in data[:-1]:
        data = data.replace(b"\r", b"\n")
    found, content, begin, end, is_after_blank, offset = [], b"", 0, 0, False, 0
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        if len(line) > max_bytes:
            return [f"line {number} is longer than {max_bytes} bytes"]
        try:
            text = line.decode().strip().encode()
        except UnicodeDecodeError as error:
            at = offset + error.start
            return [f"line {number} is not UTF-8 at byte {at} of the file"]
        if text and not text.decode().strip(NO_TEXT):  # Neither text nor a blank line.
            offset += len(line) + 1
            continue
        if text:
            begin = begin if content else offset
            content += b"\n" * is_after_blank + text + b"\n"
            end = min(offset + len(line) + 1, len(data))
        elif content and input_format == "lines":
            found.append((hashlib.blake2b(content, digest_size=16).digest(), begin, end - begin))
            content = b""
        is_after_blank = bool(content) and not text
        offset += len(line) + 1
    if content:
        found.append((hashlib.blake2b(content, digest_size=16).digest(), begin, end - begin))
    return found


NO_TEXT = "\0\v\f\r\x1c\x85\u2028\ufeff "
PARTS = ["\n"] * 8 + [
    "\n\n",
    "\r\n",
    "\r",
    "\v",
    "\f",
    "\x1c",
    "\x85",
    "\u2028",
    " ",
    "\0",
    "\ufeff",
    "a",
]
PARTS = [part.encode() for part in [*PARTS, "\u00e9", "one line", "\U0001f600", "x" * 40]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("input_format", ["lines", "text"])
@pytest.mark.parametrize("bad", [[], [b"\xe9", b"\xf0\x9f", b"y" * 60, b"y" * 61, b"y" * 140]])
def test_blocks_of_any_size_give_what_reading_line_by_line_gives(
    tmp_path, monkeypatch, suffix, input_format, bad
):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 60 if bad else 10_000)
    draws, path = random.Random(0), tmp_path / f"a{suffix}"
    num_errors = 0
    for _ in range(200):
        monkeypatch.setattr(documents, "BUFFER_BYTES", draws.choice([1, 2, 3, 7, 30, 1000]))
        parts = draws.choices(PARTS, k=draws.randrange(30)) + draws.choices(bad or [b""], k=1)
        data = b"".join(draws.sample(parts, len(parts)))
        path.write_bytes(gzip.compress(data) if suffix else data)
        try:
            found = [
                tuple(span)
                for span in documents.spans(files.TextFile(str(path)), input_format, "text")
            ]
        except UserError as error:
            found = [str(error).removeprefix(f"{path}: ").split(";")[0]]
            num_errors += 1
        assert found == reference(data, input_format, documents.MAX_LINE_BYTES), data
    assert bool(num_errors) == bool(bad)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("input_format", documents.FORMATS)
def test_mark_and_line_ends_do_not_change_documents(tmp_path, input_format, suffix):
    text = "One. Two.\nThree.\n\n\u00e9 four.\n\ufefffive\n"
    if input_format == "jsonl":
        text = "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    expected, read = index(tmp_path, {"expected": text}, input_format)
    for name, data in as_others_write(text).items():
        (tmp_path / name).mkdir()
        found, lines = index(tmp_path / name, {f"a{suffix}": data}, input_format)
        assert found.sha256 == expected.sha256, name
        assert lines == read, name


def test_texts_of_dropped_characters_are_no_documents(tmp_path):
    nothing = "\ufeff\n\n\0\x01 \u200b\n\n"
    found, read = index(tmp_path, {"a": nothing + "\u200b\none\n\u00ad\n" + nothing})
    assert len(found) == 1 and read == [["one", ""]]
    _, read = index(tmp_path, {"b": '{"text": "\\u200b"}\n{"text": "two"}\n'}, "jsonl")
    assert read == [["two"]]
    with pytest.raises(UserError, match="no text in 1 files"):
        index(tmp_path, {"c": nothing}, "text")
