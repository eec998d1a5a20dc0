"""The commands and snippets of the migration pages, run with a tiny BERT.

Commands run in this process, and training is shortened. Each block of commands runs in a directory
of its own, with the files that the page names.
"""

import importlib
import json
import os
import re
import shlex
import shutil

import pytest

from bert_tf import BertConfig, Vocabulary, command
from tests.conftest import ROOT
from tests.corpus import ENTRIES, write_corpus
from tests.test_docs import command_lines, settings_class, split_fences

PAGES = ("from-google-research", "from-transformers", "from-keras-hub")
SHORTER = {"num_train_steps": 2, "warmup_steps": 1, "epochs": 1, "global_batch_size": 4}
TEXTS = ("a bill.", "b screen.", "c app is out.", "d bill again.")
LABELS = ("billing", "hardware", "software", "billing")


def run(line):
    """Run a command line in this process."""
    module, words = shlex.split(line)[2], shlex.split(line)[3:]
    for name, value in SHORTER.items():
        words = [re.sub(rf"^--{name}=.*", f"--{name}={value}", word) for word in words]
    settings, _ = command.parse(settings_class(module), [module, *words])
    if hasattr(settings, "check"):
        settings.check()
    importlib.import_module(module).main(settings)


def write_table(path, columns, rows):
    path.write_text("\n".join("\t".join(row) for row in (columns, *rows)) + "\n")


def write_data(directory):
    rows = list(zip(TEXTS, LABELS, strict=True))
    for name in ("train", "dev", "rows"):
        lines = [("text", "label"), *rows]
        (directory / f"{name}.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    write_table(directory / "rows.tsv", ("text_a", "text_b"), [("a bill.", "b.")])
    (directory / "MRPC").mkdir()
    for number, name in enumerate(("train", "dev", "test")):
        pairs = [
            (str(id % 2), str(id), str(id), f"{text} {number}", TEXTS[0])
            for id, text in enumerate(TEXTS)
        ]
        columns = ("index" if name == "test" else "Quality", "#1 ID", "#2 ID")
        write_table(directory / "MRPC" / f"{name}.tsv", (*columns, "#1 String", "#2 String"), pairs)
        own = [(f"{text} {number}", text, ("no", "yes")[id % 2]) for id, text in enumerate(TEXTS)]
        write_table(directory / f"{name}.tsv", ("question", "reply", "is_answer"), own)
        questions = [
            {
                "id": f"{number}{id}",
                "question": f"{text} {number}?",
                "is_impossible": id == 0,
                "answers": [{"text": text.split()[0], "answer_start": 0}] if id else [],
            }
            for id, text in enumerate(TEXTS)
        ]
        for question, text in zip(questions, TEXTS, strict=True):
            question["context"] = text
        paragraphs = [{"context": q.pop("context"), "qas": [q]} for q in questions]
        data = {"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]}
        (directory / f"{name}-v2.0.json").write_text(json.dumps(data))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a directory with all files that the pages name."""
    here = tmp_path_factory.mktemp("files")
    previous = os.getcwd()
    os.chdir(here)
    write_data(here)
    Vocabulary(ENTRIES).save(here / "vocab.txt")
    (here / "corpus").mkdir()
    write_corpus(here / "corpus" / "a.txt", num_documents=400)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = BertConfig(len(ENTRIES), 8, intermediate_size=16, **sizes)
    (here / "config.json").write_text(json.dumps(config.to_dict()))
    write = "python -m bert_tf.write_shards --input='corpus/*.txt' --vocab=vocab.txt --num_shards=1"
    run(f"{write} --output_dir=SHARDS --num_workers=1")
    shutil.copytree("SHARDS", "HELD_OUT")
    shutil.copytree("SHARDS", "OLD_SHARDS", ignore=shutil.ignore_patterns("*.json", ".*"))
    run(
        "python -m bert_tf.pretrain --shards=SHARDS --config=config.json --output_dir=BASE "
        "--num_train_steps=1 --warmup_steps=1 --global_batch_size=4"
    )
    for name, file_format in (
        ("BERT_BASE_DIR", "google"),
        ("DIR", "huggingface"),
        ("PRESET", "keras"),
    ):
        run(f"python -m bert_tf.convert --from=BASE --to={name} --format={file_format}")
    os.chdir(previous)
    return here


def blocks(page):
    """Return the commands of each block of a page, in order, continuation lines joined."""
    fences = split_fences((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))[1]
    return [
        command_lines(f"```bash\n{chr(10).join(lines)}\n```")
        for language, lines in fences
        if language == "bash"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in PAGES for number in range(len(blocks(page)))]
)
def test_commands_of_migration_pages_run(files, page, number, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    commands = blocks(page)[number]
    if "model.ckpt" in commands[0]:  # Fine-tuned in google-research/bert.
        run(
            "python -m tasks.finetune --task=mrpc --train=MRPC/train.tsv --init_from=BERT_BASE_DIR "
            "--output_dir=TUNED --epochs=1"
        )
        shutil.rmtree("DIR")
        run("python -m bert_tf.convert --from=TUNED --to=DIR --format=google")
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
    if page == "from-transformers":
        run(
            "python -m tasks.finetune --task=classification --train=train.csv --init_from=DIR "
            "--output_dir=RUN --epochs=1"
        )
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
    else:
        assert len(names["outputs"]["attentions"]) == 4
