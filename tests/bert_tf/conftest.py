"""Fixtures of the bert_tf tests."""

import pytest

from bert_tf import Vocabulary
from tests.corpus import ENTRIES, write_corpus


@pytest.fixture
def corpus(tmp_path):
    """Return the flags `input` and `vocab` for a small corpus and its vocabulary."""
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    path = write_corpus(tmp_path / "corpus.txt")
    return {"input": str(path), "vocab": str(tmp_path / "vocab.txt")}
