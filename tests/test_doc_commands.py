"""All commands of README.md and of the pages about tasks, run in order with a tiny BERT.

Each page runs in a directory of its own with the files that it names. Commands that query a server,
and pages with tests of their own, are left out.
"""

import pathlib
import re
import shutil

import pytest

from tests import small
from tests.conftest import ROOT
from tests.doc_pages import LABELS, TEXTS, run, write_files
from tests.test_docs import PAGES, command_lines, read

# make demo runs the demo; tests/test_migration_docs.py runs the migration pages, and
# tests/test_python_docs.py a head of one's own; the reference has one example per command; other
# pages have commands of make and pytest.
LEFT_OUT = {"docs/demo.md", "docs/commands.md", "docs/own-head.md"}
NOT_RUN = ("--url=", "--grpc=", "--help", "--version", "--beam_args=", "...")
WORDS = {"PATH": "DIR", "novels.txt": "corpus/a.txt", "MODELS/": "models/"}
WORDS |= {"sentence-transformers/all-MiniLM-L6-v2": "DIR", "google-bert/bert-base-uncased": "DIR"}
WORDS |= {
    "ProsusAI/finbert": "THEIR_CLASSIFIER",
    "held_out.txt": "corpus/a.txt",
    "SHARDS128,SHARDS512": "SHARDS,HELD_OUT",
}
WORDS |= {"--model_size=base": "--config=config.json", "--model_size=mini": "--config=config.json"}
WORDS |= {
    "--phase_steps=900000,100000": "--phase_steps=1,1",
    "--vocab_size=30522": "--vocab_size=90",
}
WORDS |= {"--devices=8": "--devices=4", "=SMALL": "=DIR"}
WORDS |= {"--seeds=1,2,3": "--seeds=1", "--vocab_size=8000": "--vocab_size=59"}
WORDS |= {"--layer=2 --head=8": "--layer=0 --head=1"}
WORDS |= {"--normal_labels=neither": "--normal_labels=neither --latent_dim=4"}
WORDS |= {"--save_every=200": "--save_every=2", "--eval_every=1000": "--eval_every=2"}
WORDS |= {"--num_shards=64": "--num_shards=2", "--num_shards=16": "--num_shards=2"}


def commands(page):
    return [
        line
        for line in command_lines(read(page))
        if line.startswith("bert-tf ") and not any(word in line for word in NOT_RUN)
    ]


RUN_HERE = [
    page
    for page in PAGES
    if page not in LEFT_OUT and not page.startswith("docs/from-") and commands(page)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    here = tmp_path_factory.mktemp("files")
    write_files(here)
    shutil.copytree(ROOT / "examples" / "complaints", here / "examples" / "complaints")
    (here / "words.txt").write_text("abc\n")
    (here / "models").mkdir()
    return here


def fine_tune(task="classification", **flags):
    words = "".join(f" --{name}={value}" for name, value in flags.items())
    train = "" if "train" in flags else " --train=train.csv"
    run(f"bert-tf finetune --task={task}{train} --init_from=DIR --output_dir=RUN{words}")


def write_both(columns, rows, names=("train.csv", "dev.csv", "val.csv")):
    """Write files of different content."""
    for number, name in enumerate(names):
        changed = [(f"{row[0]} {number}", *row[1:]) for row in rows]
        small.write_rows(pathlib.Path(name), changed, columns)


def write_conll(names=("train.conll", "dev.conll")):
    for number, name in enumerate(names):
        lines = ["a B-PER", "b O", "c B-LOC", f"{'d' * (number + 1)} I-LOC"]
        pathlib.Path(name).write_text("\n".join(lines * 2) + "\n\n")


def write_search_data():
    """Write vectors of rows.csv, pairs of them, and a directory of BEIR."""
    run("bert-tf extract --model=DIR --input=rows.csv --output=vectors.npy")
    small.write_rows("pairs.csv", [("a bill", TEXTS[0])], ("anchor", "positive"))
    documents = {str(number): text for number, text in enumerate(TEXTS)}
    beir = small.write_beir(pathlib.Path("scifact"), documents, {"q": "a bill"}, {"q": {"0": 1}})
    shutil.copy(beir / "qrels" / "test.tsv", beir / "qrels" / "dev.tsv")


def prepare(page):
    """Write what a page assumes, in the working directory."""
    labels = [(text, label) for text, label in zip(TEXTS, LABELS, strict=True)]
    shutil.copy("dev.csv", "test.csv")
    for number, name in enumerate(("dev.csv", "test.csv"), start=1):  # No two files are equal.
        with open(name, "a") as lines:
            lines.write("a b.,billing\n" * number)
    match page:
        case "docs/checkpoints.md":
            write_conll()
            fine_tune("tagging", train="train.conll", max_seq_length=16)
            run("bert-tf convert --from=RUN --to=THEIR_NER_MODEL --format=huggingface")
            shutil.rmtree("RUN")
            fine_tune(max_seq_length=16)
            run("bert-tf convert --from=RUN --to=THEIR_CLASSIFIER --format=huggingface")
        case "docs/data-formats.md":
            write_both(("body", "topic"), labels)
        case "docs/distillation.md":
            fine_tune(max_seq_length=16)
            shutil.copy("rows.csv", "more.csv")
        case "docs/tasks/similarity.md":
            fine_tune("similarity", train="pairs.csv", max_seq_length=16)
            pathlib.Path("RUN").rename("TEACHER")
            small.write_rows("texts.csv", [(text,) for text in TEXTS], ("text",))
        case "docs/domain-adaptation.md":
            pathlib.Path("texts.txt").write_text("\n".join(TEXTS) + "\n")
        case "docs/pretraining-data.md":
            shutil.copy("corpus/a.txt", "texts.txt")
        case (
            "docs/litert.md"
            | "docs/plots.md"
            | "docs/prediction.md"
            | "docs/serving.md"
            | "docs/tensorflow-serving.md"
        ):
            fine_tune(max_seq_length=16)
        case "docs/signatures.md":
            fine_tune(max_seq_length=16)
            run("bert-tf export_saved_model --run=RUN --output_dir=models/name")
        case "docs/tasks/masked-lm.md":
            shutil.copytree("BASE", "RUN")
        case "docs/tasks/anomaly-detection.md":
            write_both(("text", "label"), [(text, "neither") for text in TEXTS] + [("a", "other")])
        case "docs/tasks/class-imbalance.md":
            write_both(("text", "label"), [*labels, ("a b", "fraud"), ("c", "fraud")])
        case "docs/tasks/classification.md":
            pairs = [(text, text, label) for text, label in labels]
            write_both(("premise", "hypothesis", "relation"), pairs, ("pairs.csv",))
        case "docs/tasks/glue.md":
            labels = ("neutral", "entailment", "contradiction")
            for number, name in enumerate(("train", "dev_matched", "dev_mismatched", "test")):
                rows = [("index", "sentence1", "sentence2", "gold_label")]
                rows += [(str(id), f"a {number}", "b", labels[id % 3]) for id in range(6)]
                width = 3 if name == "test" else 4  # Test files have no labels.
                lines = ["\t".join(row[:width]) for row in rows]
                pathlib.Path(f"{name}.tsv").write_text("\n".join(lines) + "\n")
        case "docs/sweeps.md":
            for number, name in enumerate(("train", "dev")):
                labels = ("entailment", "not_entailment") * 2
                rows = [f"{id}\ta {number}\tb\t{label}" for id, label in enumerate(labels)]
                header = "index\tsentence1\tsentence2\tlabel"
                pathlib.Path(f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
        case "docs/search.md" | "docs/tasks/ranking.md":
            write_both(("query", "text", "relevance"), [("a", "b", "1"), ("a", "c", "0")])
            fine_tune("ranking", max_seq_length=16)
            pathlib.Path("RUN").rename("RANKER")
            write_search_data()
        case "docs/search-service.md":
            write_both(("query", "text", "relevance"), [("a", "b", "1"), ("a", "c", "0")])
            fine_tune("ranking", max_seq_length=16)
            pathlib.Path("RUN").rename("RANKER")
            fine_tune("similarity", train="pairs.csv", max_seq_length=16)
            pathlib.Path("RUN").rename("EMBEDDER")
        case "docs/tasks/multiple-choice.md":
            columns = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label")
            write_both(columns, [("a", "b", "c", "d", "e", "f", "1")] * 4)
        case "docs/tasks/regression.md":
            write_both(
                ("text", "label"), [(text, str(number)) for number, text in enumerate(TEXTS)]
            )
        case "docs/tasks/tagging.md":
            write_conll()


def remove_output(line):
    """Remove what a command before it on the page wrote to the same place."""
    for name in re.findall(r"--(?:output_dir|to|output)=(\S+)", line):
        path = pathlib.Path(name)
        if path.is_dir() and "export_saved_model" not in line:  # Exports add a version.
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    if "--write_manifest" in line:  # For shards of other programs, which have none.
        pathlib.Path("SHARDS/manifest.json").unlink()


@pytest.mark.slow
@pytest.mark.plots
@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_of_a_page_run(files, page, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    prepare(page)
    for line in commands(page):
        for word, replacement in WORDS.items():
            line = line.replace(word, replacement)
        remove_output(line)
        run(line)
