"""The commands and snippets of the migration pages, run with a tiny BERT.

Each block of commands runs in a directory of its own, with the files that the page names.
"""

import json
import pathlib
import shutil

import pytest

from tests.conftest import ROOT
from tests.doc_pages import LABELS, TEXTS, blocks, run, write_files
from tests.sentence_transformers_files import OLD_POOLING, write_json
from tests.test_docs import split_fences

PAGES = (
    *("from-google-research", "from-transformers", "from-keras-hub"),
    "from-sentence-transformers",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a directory with all files that the pages name."""
    here = tmp_path_factory.mktemp("files")
    write_files(here)
    return here


def add_modules():
    """Make DIR a directory of sentence-transformers."""
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    entries = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in modules.items()
    ]
    write_json(pathlib.Path("DIR/modules.json"), entries)
    write_json(pathlib.Path("DIR/1_Pooling/config.json"), OLD_POOLING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in PAGES for number in range(len(blocks(f"docs/{page}.md")))],
)
def test_commands_of_migration_pages_run(files, page, number, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    commands = blocks(f"docs/{page}.md")[number]
    if page == "from-sentence-transformers":
        add_modules()
    if "model.ckpt" in commands[0]:  # Fine-tuned in google-research/bert.
        run(
            "bert-tf finetune --task=mrpc --train=MRPC/train.tsv --init_from=BERT_BASE_DIR "
            "--output_dir=TUNED --epochs=1"
        )
        shutil.rmtree("DIR")
        run("bert-tf convert --from=TUNED --to=DIR --format=google")
        for file in (tmp_path / "here" / "DIR").glob("bert_model.ckpt*"):
            file.rename(file.with_name(file.name.replace("bert_model.ckpt", "model.ckpt-343")))
        commands = [commands[0] + " --pairs", *commands[1:]]
    if "write_shards" in commands[0]:
        shutil.rmtree("SHARDS")
    for line in commands:
        run(line)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_migration_pages_run(files, page, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "predictions.jsonl").write_text('{"id": "a", "answer": "b"}\n')
    names = {"PATH": "DIR", "texts": list(TEXTS), "labels": list(LABELS)}
    if page == "from-sentence-transformers":
        add_modules()
    elif page == "from-transformers":
        run(
            "bert-tf finetune --task=classification --train=train.csv --init_from=DIR "
            "--output_dir=RUN --epochs=1"
        )
        shutil.copytree("RUN", "ProsusAI/finbert")  # A path that exists is no id of the hub.
    fences = split_fences((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))[1]
    snippets = ["\n".join(lines) for language, lines in fences if language == "python"]
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)  # A page is one program.
    if page == "from-google-research":
        assert json.loads((tmp_path / "here/predictions.json").read_text()) == {"a": "b"}
        assert len(names["layers"]) == 4
    elif page == "from-keras-hub":
        assert names["own"].output_shape == (None, 3)
    elif page == "from-sentence-transformers":
        assert (names["vectors"] ** 2).sum(axis=1).tolist() == pytest.approx([1.0] * len(TEXTS))
    else:
        assert len(names["outputs"]["attentions"]) == 4
