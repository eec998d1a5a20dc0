"""Files and functions to run the commands of the documentation with a tiny BERT.

Commands run in this process, and training is shortened.
"""

import importlib
import json
import os
import re
import shlex
import shutil

from bert_tf import BertConfig, Vocabulary
from bert_tf.__main__ import MODULES
from bert_tf.system import command
from tests.conftest import ROOT
from tests.corpus import ENTRIES, write_corpus
from tests.test_docs import command_lines, settings_class, split_fences

SHORTER = {"num_train_steps": 2, "warmup_steps": 1, "epochs": 1, "global_batch_size": 4}
TEXTS = ("a bill.", "b screen.", "c app is out.", "d bill again.")
LABELS = ("billing", "hardware", "software", "billing")


def run(line):
    """Run a command line in this process."""
    _, name, *words = shlex.split(line)
    module = MODULES[name]
    for name, value in SHORTER.items():
        words = [re.sub(rf"^--{name}=.*", f"--{name}={value}", word) for word in words]
    if module == "bert_tf.pretrain":  # Its defaults are those of weeks of training.
        steps = () if "--phase_steps=" in line else ("num_train_steps",)
        for name in (*steps, "warmup_steps", "global_batch_size"):
            if f"--{name}=" not in line:
                words.append(f"--{name}={SHORTER[name]}")
    settings, _ = command.parse(settings_class(module), [module, *words])
    checked = settings.check() if hasattr(settings, "check") else None
    main = importlib.import_module(module).main
    main(settings) if checked is None else main(settings, checked)


def write_table(path, columns, rows):
    path.write_text("\n".join("\t".join(row) for row in (columns, *rows)) + "\n")


def write_data(directory):
    rows = list(zip(TEXTS, LABELS, strict=True))
    for name in ("train", "dev", "rows"):
        lines = [("text", "label"), *rows]
        (directory / f"{name}.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    for name, other in (("pairs", TEXTS[::-1]), ("dev_pairs", TEXTS)):
        lines = [("anchor", "positive"), *zip(TEXTS, other, strict=True)]
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


def write_files(here):
    """Write the files that several pages name."""
    previous = os.getcwd()
    os.chdir(here)
    write_data(here)
    Vocabulary(ENTRIES).save(here / "vocab.txt")
    (here / "corpus").mkdir()
    write_corpus(here / "corpus" / "a.txt", num_documents=400)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = BertConfig(len(ENTRIES), 8, intermediate_size=16, **sizes)
    (here / "config.json").write_text(json.dumps(config.to_dict()))
    write = "bert-tf write_shards --input='corpus/*.txt' --vocab=vocab.txt --num_shards=1"
    run(f"{write} --output_dir=SHARDS --num_workers=1")
    shutil.copytree("SHARDS", "HELD_OUT")
    shutil.copytree("SHARDS", "OLD_SHARDS", ignore=shutil.ignore_patterns("*.json", ".*"))
    run(
        "bert-tf pretrain --shards=SHARDS --config=config.json --output_dir=BASE "
        "--num_train_steps=1 --warmup_steps=1 --global_batch_size=4"
    )
    for name, file_format in (
        ("BERT_BASE_DIR", "google"),
        ("DIR", "huggingface"),
        ("PRESET", "keras"),
    ):
        run(f"bert-tf convert --from=BASE --to={name} --format={file_format}")
    os.chdir(previous)


def blocks(page):
    """Return the commands of each block of a page, in order, continuation lines joined."""
    fences = split_fences((ROOT / page).read_text(encoding="utf-8"))[1]
    return [
        command_lines(f"```bash\n{chr(10).join(lines)}\n```")
        for language, lines in fences
        if language == "bash"
    ]
