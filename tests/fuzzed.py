"""A valid file of each format, how the commands read it, and an independent reader where cheap.

FORMATS maps a name to a function from a directory to (path, function that reads the path), with an
optional third item: a function of path and result that checks the result. TensorFlow is imported
only by formats that need it.
"""

import csv
import json

from tests import fuzzed_runs, fuzzed_weights
from tests.rows import SENTENCES, WORDS

ROWS = [(text, "ab"[number % 2]) for number, text in enumerate(SENTENCES)]


def _written(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return path


def _rows(path):
    from tasks.data.readers.rows import BadRow, read_rows

    rows = list(read_rows(path, ("text", "label")))
    return [None if isinstance(row, BadRow) else (row.texts, row.location) for row in rows]


def csv_rows(directory):
    path = directory / "rows.csv"
    with open(path, "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *ROWS])

    def check(path, rows):
        """Return whether the good rows are a subsequence of the rows of Python's reader."""
        with open(path, newline="", encoding="utf-8-sig") as stream:
            csv.field_size_limit(2**27)
            header, *others = [fields for fields in csv.reader(stream) if fields]
        others = [dict(zip(header, fields, strict=False)) for fields in others]
        return len(others) == len(rows) and all(
            row is None or {name: other[name] for name in row[0]} == row[0]
            for row, other in zip(rows, others, strict=True)
        )

    return path, _rows, check


def tsv_rows(directory):
    path = _written(
        directory / "rows.tsv", "".join(f"{a}\t{b}\n" for a, b in [("text", "label"), *ROWS])
    )

    def check(path, rows):
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
        lines = [line.removesuffix("\r").split("\t") for line in lines]
        header = next(line for line in lines if line != [""])
        return all(
            row is None
            or row[0]
            == {
                name: lines[int(row[1].rpartition(":")[2]) - 1][header.index(name)]
                for name in row[0]
            }
            for row in rows
        )

    return path, _rows, check


def jsonl_rows(directory):
    lines = (json.dumps({"text": text, "label": label, "id": 7}) + "\n" for text, label in ROWS)
    path = _written(directory / "rows.jsonl", "".join(lines))

    def as_text(line):
        return json.loads(line.strip(), parse_int=str, parse_float=str)

    def check(path, rows):
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
        return all(
            row is None
            or row[0].items() <= as_text(lines[int(row[1].rpartition(":")[2]) - 1]).items()
            for row in rows
        )

    return path, _rows, check


def conll(directory):
    from tasks.data.readers.tagged import read_tagged

    words = [
        [f"{word}\t{'B-X' if word == 'bill' else 'O'}" for word in text.split()]
        for text in SENTENCES
    ]
    path = _written(
        directory / "words.conll", "\n\n".join("\n".join(lines) for lines in words) + "\n"
    )

    def read(path):
        items = list(read_tagged(path))
        list(read_tagged(path, labelled=False))
        return items

    return path, read


def tagged_jsonl(directory):
    from tasks.data.readers.tagged import read_tagged

    entity = {"start": 0, "end": 3, "type": "X"}
    lines = (json.dumps({"text": text, "entities": [entity]}) + "\n" for text in SENTENCES)
    return _written(directory / "spans.jsonl", "".join(lines)), lambda path: list(read_tagged(path))


def squad(directory):
    from tasks.data.readers.squad import read_questions

    questions = [
        {
            "id": f"q{number}",
            "question": "what is it",
            "answers": [{"text": text[:3], "answer_start": 0}],
        }
        for number, text in enumerate(SENTENCES)
    ]
    paragraphs = [
        {"context": text, "qas": [question]}
        for text, question in zip(SENTENCES, questions, strict=True)
    ]
    data = {"version": "1.1", "data": [{"title": "a", "paragraphs": paragraphs}]}
    return _written(directory / "dev.json", json.dumps(data)), lambda path: list(
        read_questions(path)
    )


def choices(directory):
    from tasks.data.readers.choices import read_choices

    lines = (
        json.dumps({"prompt": text, "choices": ["a", "b", "c"], "label": 1}) + "\n"
        for text in SENTENCES
    )
    path = _written(directory / "choices.jsonl", "".join(lines))
    return path, lambda path: list(read_choices(path))


def arc(directory):
    from tasks.data.readers.choices import read_choices

    path = _written(
        directory / "arc.csv", "".join(f'"{text}","a","b","c","B"\n' for text in SENTENCES)
    )
    return path, lambda path: list(read_choices(path, file_format="arc"))


def vocabulary(directory):
    from bert_tf.text.vocabulary import Vocabulary

    path = directory / "vocab.txt"
    Vocabulary(WORDS).save(path)

    def read(path):
        found = Vocabulary.load(path)
        found.looks_cased()
        return found

    def check(path, found):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        if "\n" not in text:
            text = text.replace("\r", "\n")
        lines = text.removesuffix("\n").split("\n")
        return list(found.entries) == [line.strip() for line in lines] and all(
            found[entry] == number for number, entry in enumerate(found.entries)
        )

    return path, read, check


def documents_jsonl(directory):
    from bert_tf.data import documents

    lines = (json.dumps({"text": text, "id": 5}) + "\n" for text in SENTENCES)
    path = _written(directory / "documents.jsonl", "".join(lines))
    return path, lambda path: documents.index([str(path)], "jsonl", "text", "").sha256


def documents_gzip(directory):
    import gzip

    from bert_tf.data import documents

    path = directory / "documents.gz"
    path.write_bytes(gzip.compress("\n\n".join(SENTENCES).encode()))
    spill = str(directory / "unpacked")
    return path, lambda path: documents.index([str(path)], "lines", "text", spill).sha256


def rest_answer(directory):
    """Write responses of a server, which a client reads."""
    from export.clients.rest_client import RestClient

    shape = {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False}
    text = {"dtype": "DT_STRING", "tensor_shape": shape, "name": "a:0"}
    value = {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": "b:0"}
    signature = {"inputs": {"text": text}, "outputs": {"label": text, "score": value}}
    signatures = {"serving_default": {**signature, "method_name": "predict"}}
    answers = {
        "/metadata": {"metadata": {"signature_def": {"signature_def": signatures}}},
        ":predict": {"outputs": {"label": ["a", "b"], "score": [0.5, 1.0]}},
    }
    path = _written(directory / "answers.json", "\n".join(map(json.dumps, answers.values())))

    def read(path):
        metadata, _, answer = path.read_bytes().partition(b"\n")
        bodies = {"/metadata": metadata, ":predict": answer}

        class Answered(RestClient):
            def _exchanged(self, path, request):
                return 200, "application/json", bodies[path]

        found = Answered("http://127.0.0.1:1/v1/models/m").predict({"text": ["x", "y"]})
        # The comparison is of printed values.
        return json.dumps(found, ensure_ascii=False).encode()

    return path, read


def manifest(directory):
    from bert_tf.text.vocabulary import Vocabulary
    from tests.corpus import ENTRIES, config_of

    _make_shards(directory)

    def read(path):
        from bert_tf.config import read_json_object
        from bert_tf.data.batches import PretrainingDataset
        from bert_tf.data.manifest import Manifest

        found = Manifest.load(path.parent)
        found.vocabulary()
        found.check_files()
        data = PretrainingDataset(path.parent, Vocabulary(ENTRIES), config_of())
        plan_sha256 = found.plan_sha256 if "corpus" in read_json_object(path) else ""
        return found.sha256, plan_sha256, len(data)

    return directory / "shards" / "manifest.json", read


def shard(directory):
    from bert_tf.data import inspection
    from bert_tf.text.vocabulary import Vocabulary
    from tests.corpus import ENTRIES

    _make_shards(directory)
    (directory / "shards" / "manifest.json").unlink()
    path = next(directory.glob("shards/*.tfrecord"))

    def read(path):
        adopted = path.parent / "manifest.json"
        try:
            found = inspection.write_manifest(path.parent, Vocabulary(ENTRIES))
            return list(inspection.inspect(found, Vocabulary(ENTRIES)).lines(32))
        finally:
            adopted.unlink(missing_ok=True)

    return path, read


def _make_shards(directory):
    from bert_tf.data.manifest import Manifest
    from bert_tf.data.writing import write_shards
    from bert_tf.text.vocabulary import Vocabulary
    from tests.corpus import ENTRIES, settings_of, write_corpus

    assert Manifest
    Vocabulary(ENTRIES).save(directory / "vocab.txt")
    corpus = {
        "input": str(write_corpus(directory / "corpus.txt")),
        "vocab": str(directory / "vocab.txt"),
    }
    write_shards(settings_of(corpus, directory / "shards", num_shards=1, num_workers=1))


FORMATS = {
    "CSV": csv_rows,
    "TSV": tsv_rows,
    "JSONL": jsonl_rows,
    "CoNLL": conll,
    "tagged JSONL": tagged_jsonl,
    "SQuAD JSON": squad,
    "multiple choice": choices,
    "ARC": arc,
    "vocab.txt": vocabulary,
    "documents JSONL": documents_jsonl,
    "documents gzip": documents_gzip,
    "REST answer": rest_answer,
    "manifest": manifest,
    "TFRecord shard": shard,
    **fuzzed_weights.FORMATS,
    "config.json": fuzzed_runs.config,
    "task.json": fuzzed_runs.task,
    "train.json": fuzzed_runs.train,
    "metrics.jsonl": fuzzed_runs.metrics,
    "checkpoint.json": fuzzed_runs.checkpoint_json,
    "checkpoint index": fuzzed_runs.checkpoint_index,
    "checkpoint data": fuzzed_runs.checkpoint_data,
    "REST request": fuzzed_runs.rest_request,
}
