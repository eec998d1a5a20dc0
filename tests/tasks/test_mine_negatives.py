"""Mining of hard negatives: which texts are negatives, by hand, and the command's file."""

import json
import types

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.system import command
from bert_tf.text.token_counts import TokenCounts
from tasks import mine_negatives
from tasks.prediction import retrieval
from tests import small


def at(degrees):
    return [np.cos(np.radians(degrees)), np.sin(np.radians(degrees))]


# Angles to the anchor q, at 0 degrees; the vectors have different lengths.
ANGLES = {
    "": 41,
    "q": 0,
    "p1": 40,
    "p2": 5,
    "near": 10,
    "a": 41,
    "b": 50,
    "c": 60,
    "far": 170,
    "r": 90,
}


class Embedder:
    """Known vectors, of texts that are lower-cased; a blank text is nearest to all."""

    task = types.SimpleNamespace(prompts={"query": "", "document": ""})

    serving = types.SimpleNamespace(take_token_counts=TokenCounts)

    def __init__(self):
        self.seen = []

    def predict(self, texts, verbose="auto", prompt=None):
        self.seen.append((prompt, list(texts)))
        vectors = np.array([at(ANGLES[text.strip().lower()]) for text in texts], np.float32)
        return vectors * np.arange(1, len(texts) + 1, dtype=np.float32)[:, np.newaxis]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function from pairs, corpus and options to the negatives of each pair."""
    monkeypatch.setattr(retrieval, "TEXTS_PER_BLOCK", 2)

    def of(pairs, corpus, num_negatives=9, margin=0.0, top_k=9):
        embedder = Embedder()
        mined = list(
            retrieval.mine_negatives(
                *(embedder, corpus, lambda: pairs),
                num_negatives=num_negatives,
                margin=margin,
                top_k=top_k,
                directory=tmp_path,
                log=lambda line: None,
            )
        )
        assert [pair[:2] for pair in mined] == pairs
        return [pair.negatives for pair in mined]

    return of


def test_negatives_are_less_similar_than_the_positive(mine):
    corpus = ["far", "c", "near", "a", "b"]
    pairs = [("q", "p1"), ("q", "p2"), ("far", "r")]
    # The positive of the first row is at 40 degrees, so near is not a negative.
    assert mine(pairs, corpus)[0] == ["a", "b", "c", "far"]
    # That of the second row is at 5 degrees.
    assert mine(pairs, corpus)[1] == ["near", "a", "b", "c", "far"]
    # The anchor of the third row is in the corpus.
    assert mine(pairs, corpus)[2] == ["c", "b", "a", "near"]


def test_negatives_are_less_similar_by_the_margin(mine):
    # Cosines: p1 0.766, a 0.755, b 0.643, c 0.5.
    corpus = ["a", "b", "c"]
    assert mine([("q", "p1")], corpus, margin=0.01) == [["a", "b", "c"]]
    assert mine([("q", "p1")], corpus, margin=0.02) == [["b", "c"]]
    assert mine([("q", "p1")], corpus, margin=0.2) == [["c"]]


def test_top_k_counts_all_texts(mine):
    corpus = ["near", "a", "b", "c"]
    assert mine([("q", "p1")], corpus, top_k=3) == [["a", "b"]]
    assert mine([("q", "p1")], corpus, num_negatives=1) == [["a"]]


def test_texts_of_positives_and_duplicates_are_no_negatives(mine):
    corpus = ["P1", "a", " a", "A", "q", "Q ", "b", "p1", "b"]
    # p1 is the positive of the other row with this anchor; q is the anchor itself.
    pairs = [("q", "p2"), ("Q", "p1")]
    assert mine(pairs, corpus) == [["a", "b"], ["a", "b"]]


def test_blank_texts_are_no_negatives(mine):
    assert mine([("q", "p1")], ["", " ", "a"]) == [["a"]]


def test_anchors_follow_the_prompt_of_queries_and_texts_that_of_documents(tmp_path):
    embedder = Embedder()
    mined = retrieval.mine_negatives(
        *(embedder, ["a", "b"], lambda: [("q", "p1")]),
        num_negatives=1,
        margin=0.0,
        top_k=2,
        directory=tmp_path,
        log=lambda line: None,
    )
    list(mined)
    assert sorted(embedder.seen) == [
        ("document", ["a", "b"]),
        ("document", ["p1"]),
        ("query", ["q"]),
    ]


@pytest.mark.medium
def test_the_command_writes_a_row_per_pair(huggingface_dir, tmp_path):
    pairs = [("the bill", "the bill is high"), ("my app", "my app does not open")]
    small.write_rows(tmp_path / "pairs.csv", pairs, ("question", "answer"))
    texts = [*(text for _, text in pairs), "the screen", "the bill , too high", "my"]
    small.write_rows(tmp_path / "corpus.tsv.csv", [(text,) for text in texts], ("text",))
    flags = [
        f"--run={huggingface_dir}",
        f"--pairs={tmp_path / 'pairs.csv'}",
        f"--corpus={tmp_path / 'corpus.tsv.csv'}",
        f"--output={tmp_path / 'mined.jsonl'}",
        "--anchor_column=question",
        "--positive_column=answer",
        "--num_negatives=2",
    ]

    def run(*more):
        settings, _ = command.parse(
            mine_negatives.MineNegativesSettings, ["mine_negatives", *flags, *more]
        )
        settings.check()
        mine_negatives.main(settings)

    run()
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert [(row["anchor"], row["positive"]) for row in rows] == pairs
    for row in rows:
        assert list(row) == ["anchor", "positive", "negatives"]
        assert len(row["negatives"]) <= 2 and row["positive"] not in row["negatives"]
        assert set(row["negatives"]) < set(texts)
    with pytest.raises(UserError, match="already exists"):
        run()
    with pytest.raises(UserError, match="no column 'q'"):
        run("--overwrite", "--anchor_column=q")


@pytest.mark.parametrize(("row", "column"), [("a, ", "positive"), (",b", "anchor")])
def test_blank_anchors_and_positives_are_refused(tmp_path, row, column):
    """Both task types that read the output refuse them."""
    (tmp_path / "corpus.csv").write_text("text\na\n")
    (tmp_path / "pairs.csv").write_text(f"anchor,positive\na,b\n{row}\n")
    settings = mine_negatives.MineNegativesSettings(
        run=str(tmp_path / "absent"),
        pairs=str(tmp_path / "pairs.csv"),
        corpus=str(tmp_path / "corpus.csv"),
        output=str(tmp_path / "mined.jsonl"),
    )
    with pytest.raises(UserError, match=rf"pairs\.csv:3: column '{column}': expected text, receiv"):
        settings.check()
