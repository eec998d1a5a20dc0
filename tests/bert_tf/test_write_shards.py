"""write_shards: interrupted, on a full disk or with bad settings; one-line errors, no losses."""

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest

from bert_tf import UserError, Vocabulary
from bert_tf.data import documents, jobs, writing
from bert_tf.data.manifest import Manifest
from bert_tf.pretraining import recipe
from bert_tf.storage import files
from bert_tf.storage.ownership import sole_writer
from bert_tf.system import progress
from tests.bert_tf.import_job import open_environment, open_uneven, open_writer
from tests.conftest import READS_PROC, ROOT
from tests.corpus import (
    ENTRIES,
    arguments,
    config_of,
    contents,
    run_here,
    settings_of,
    write_command,
    write_corpus,
    write_here,
    write_shards,
)


@pytest.mark.medium
def test_a_worker_imports_keras_without_its_optional_packages():
    entries = []
    with jobs.run_local(open_writer, "shards", num_workers=1) as make:
        make([()], entries.append)
    assert entries == [["keras"]]


def test_only_the_preparation_of_text_hides_gpus(corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        writing,
        "import_tensorflow",
        lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    vocabulary = Vocabulary.load(corpus["vocab"])
    writing.open_writer(settings_of(corpus, tmp_path), vocabulary, {"do_lower_case": True})
    assert seen == ["-1"] and os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    with jobs.run_local(open_environment, "shards", num_workers=1) as make:
        make([()], seen.append)
    assert seen[1:] == ["7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    writing.open_writer(settings_of(corpus, tmp_path), vocabulary, {"do_lower_case": True})
    assert seen[2:] == ["-1"] and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_after_an_error_the_workers_end_and_other_processes_of_the_caller_go_on():
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=signal.pause)
    other.start()
    try:
        with (
            pytest.raises(UserError, match=r"^a.txt: cannot be read$"),
            jobs.run_local(open_uneven, "shards", num_workers=2) as make,
        ):
            make([(False,), (True,)], print)
        assert multiprocessing.active_children() == [other]
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("input_format", "documents", "random_next", "cause"),
    [
        ("lines", 100, 100, "blank lines separate documents, not sentences"),
        ("text", 90, 100, "one sentence; each file is one document"),
        ("jsonl", 100, 95, "each line is one document, with all sentences of a text"),
        ("lines", 20, 100, "longer than --max_seq_length; write one sentence per line"),
        ("text", 20, 100, "longer than --max_seq_length; they are split at full stops"),
        (None, None, 100, "a document needs several"),
        ("lines", 100, 90, None),
        (None, None, 0, None),
    ],
)
def test_a_warning_names_why_next_sentences_cannot_be_learned(
    input_format, documents, random_next, cause
):
    values = {"settings": {"dupe_factor": 1}, "shards": [{"records": 100}]}
    values["shards"][0]["random_next"] = random_next
    if input_format:
        values["settings"]["input_format"] = input_format
        values["corpus"] = {"documents": documents}
    warning = Manifest("shards", values).next_sentence_warning()
    assert (warning is None) == (cause is None)
    if cause:
        assert f"shards: {random_next}.0% random next, expected about 50%" in warning
        assert cause in warning


def test_documents_of_one_sentence_are_reported_with_the_shards(tmp_path, monkeypatch):
    directory = write_shards(tmp_path)
    said = []
    assert Manifest.load(directory).next_sentence_warning() is None
    text = (tmp_path / "text.txt").read_text().replace("\n\n", "\n").replace("\n", "\n\n")
    (tmp_path / "more.txt").write_text(text)
    corpus = {"input": str(tmp_path / "more.txt"), "vocab": str(tmp_path / "vocab.txt")}
    # No worker, which takes seconds to start.
    monkeypatch.setattr(jobs, "run", run_here)
    writing.write_shards(settings_of(corpus, tmp_path / "more"), said.append)
    assert "100.0% random next" in said[-2]
    assert said[-1].startswith("warning: ") and "most documents have one sentence" in said[-1]


@pytest.mark.parametrize("has_known", [True, False])
def test_unknown_tokens_are_counted_and_no_known_one_is_an_error(
    corpus, tmp_path, monkeypatch, has_known
):
    monkeypatch.setattr(jobs, "run", run_here)
    unknown = "\u1780" * 40
    line = f"{unknown} a b c" if has_known else unknown
    (tmp_path / "text.txt").write_text(f"{line}\n{line}\n\n" * 60)
    settings = settings_of(
        {**corpus, "input": str(tmp_path / "text.txt")}, tmp_path / "shards", num_shards=2
    )
    said = []
    if has_known:
        writing.write_shards(settings, said.append)
        found = [line for line in said if "[UNK]" in line]
        assert len(found) == 1
        assert "shards: 25.0% of 480 tokens are [UNK]" in found[0]
    for _ in range(0 if has_known else 2):  # Also if all shards are complete.
        with pytest.raises(UserError, match=r"shards: all 120 tokens are \[UNK\]"):
            writing.write_shards(settings, said.append)
    counts = Manifest.load(tmp_path / "shards").shards[0]["token_counts"]
    assert (counts["texts"], counts["tokens"], counts["unknown"]) == (
        *(30, 240 if has_known else 60),
        60,
    )


@pytest.fixture
def warnings_before(monkeypatch):
    """Return a function that writes shards and returns the warnings before the first of them."""

    def warnings_before(settings):
        said, found = [], []

        def run(*arguments):
            found.extend(line for line in said if line.startswith("warning: "))
            return run_here(*arguments)

        monkeypatch.setattr(jobs, "run", run)
        writing.write_shards(settings, said.append)
        assert found == [line for line in said if line.startswith("warning: ")]
        return found

    return warnings_before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"strip_accents": True},
            "2 of {} entries cannot occur in text with --do_lower_case=true --strip_accents=true",
        ),
        ({}, None),
    ],
)
def test_entries_that_cannot_occur_are_reported(corpus, tmp_path, warnings_before, flags, message):
    Vocabulary([*ENTRIES, "für", "##가"]).save(tmp_path / "vocab.txt")
    changes = {"vocab": str(tmp_path / "vocab.txt"), **flags}
    found = warnings_before(settings_of(corpus, tmp_path / "shards", **changes))
    assert len(found) == bool(message)
    assert not message or message.format(len(ENTRIES) + 2) in found[0]


@pytest.mark.parametrize(("most", "is_reported"), [(4, True), (5, False)])
def test_too_few_predictions_per_example_are_reported(
    corpus, tmp_path, warnings_before, most, is_reported
):
    settings = settings_of(corpus, tmp_path / "shards", max_predictions_per_seq=most)
    warning = (
        "warning: --max_predictions_per_seq=4: predicts at most 12.5% of 32 tokens; "
        "--masked_lm_prob=0.15 asks for 5 tokens"
    )
    assert warnings_before(settings) == [warning] * is_reported


@pytest.mark.slow
def test_killed_and_stopped_it_resumes_with_the_missing_shards(corpus, tmp_path, run_command):
    corpus = {**corpus, "input": str(write_corpus(tmp_path / "more.txt", 400))}
    flags = {"num_shards": 40, "dupe_factor": 20}
    here = write_here(settings_of(corpus, tmp_path / "here", **flags))
    directory = tmp_path / "shards"
    for signum in (signal.SIGKILL, signal.SIGTERM):
        process = start(corpus, directory, **flags)
        wait_until_writing(process, directory)
        process.send_signal(signum)
        output = process.communicate(timeout=60)[1]
        if signum == signal.SIGTERM:
            assert process.returncode == 143 and "rerun the command to resume" in output
        if not Manifest.load(directory).is_complete:
            with pytest.raises(UserError, match="manifest.json: not complete"):
                Manifest.load(directory).check_files()
    there = contents(directory)
    assert there.items() <= here.items()  # Only complete shards have their final name.
    done = write_command(run_command, corpus, directory, **flags)
    assert contents(directory) == here
    assert f"{len(there)}/40 shards complete" in done.stderr or len(there) in (0, 40)
    again = write_command(run_command, corpus, directory, **flags)
    assert "already complete, nothing to do" in again.stderr


def start(corpus, directory, **changes):
    command = [
        sys.executable,
        "-m",
        "bert_tf.write_shards",
        *arguments(corpus, directory, **changes),
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def is_writing(directory):
    return any(".tfrecord." in name for name in os.listdir(directory))


def wait_until_writing(process, directory):
    """Return once a shard is being written, at most a minute after the workers are ready."""
    assert any(line.startswith("workers ready") for line in process.stderr)
    deadline = time.monotonic() + 60
    while not is_writing(directory):
        assert time.monotonic() < deadline and process.poll() is None


@READS_PROC
@pytest.mark.slow
def test_a_killed_worker_is_reported_in_one_line_and_no_shard_is_lost(
    corpus, tmp_path, run_command
):
    corpus = {**corpus, "input": str(write_corpus(tmp_path / "more.txt", 400))}
    flags = {"num_shards": 40, "dupe_factor": 20}
    process = start(corpus, tmp_path / "shards", **flags)
    wait_until_writing(process, tmp_path / "shards")
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    # The resource tracker of spawned processes is a child process as well.
    pids = [
        int(child)
        for child in children
        if "spawn_main" in pathlib.Path(f"/proc/{child}/cmdline").read_text()
    ]
    os.kill(pids[0], signal.SIGKILL)
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "a worker process was killed" in output.splitlines()[-1]
    write_command(run_command, corpus, tmp_path / "shards", **flags)
    Manifest.load(tmp_path / "shards").check_files()


@pytest.mark.slow
def test_a_full_disk_is_reported_in_one_line_and_finished_shards_stay(
    corpus, tmp_path, run_command
):
    sizes = {
        name: len(data) for name, data in write_here(settings_of(corpus, tmp_path / "1")).items()
    }
    largest = max(sizes, key=sizes.get)
    limit = sizes[largest] - 1
    done = run_command(
        "bert_tf.write_shards",
        *arguments(corpus, tmp_path / "shards"),
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert largest in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not [name for name in os.listdir(tmp_path / "shards") if name.startswith(f".{largest}")]
    write_command(run_command, corpus, tmp_path / "shards")
    assert contents(tmp_path / "shards") == contents(tmp_path / "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 13}, "60 documents, expected at least 5 per shard, .* --num_shards=12 or"),
        ({"input": "/nowhere/*.txt"}, "--input=/nowhere/.*: no such file"),
        ({"vocab": "/nowhere/vocab.txt"}, "no such file; expected a vocab.txt"),
        ({"max_seq_length": 4}, "--max_seq_length=4: expected an integer >= 5 and <= 65536"),
        (
            {"max_predictions_per_seq": 33},
            "max_predictions_per_seq=33: expected an integer <= --max_seq_length=32",
        ),
        ({"masked_lm_prob": 1.5}, "--masked_lm_prob=1.5: expected a number >= 0 and <= 1"),
        ({"beam_args": "--x=1"}, "requires --runner=beam"),
        ({"input": ""}, "--input: expected text files"),
        ({"input": "tests"}, "--input=tests: is a directory"),
        ({"runner": "beam", "beam_args": "--runner=Bogus"}, "--beam_args=--runner=Bogus: "),
        ({"runner": "beam", "beam_args": "'x"}, "--beam_args='x: No closing quotation"),
    ],
)
def test_impossible_settings_are_reported(corpus, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", **changes))


def test_an_option_that_beam_does_not_know_is_reported():
    pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    options = "--runer=FlinkRunner --direct_num_workers=2"
    with (
        pytest.warns(UserWarning, match=f"--beam_args={options}: Beam has no option --runer;"),
        jobs.run_on_beam(open_writer, "shards", options),
    ):
        pass


def test_a_vocabulary_is_no_text(corpus, tmp_path):
    pattern = f"{pathlib.Path(corpus['vocab']).parent}/*.txt"
    with pytest.raises(UserError, match="--vocab=.*vocab.txt: is part of --input; name the text"):
        writing.write_shards(settings_of({**corpus, "input": pattern}, tmp_path / "shards"))


@pytest.mark.slow
def test_a_vocabulary_of_special_tokens_only_is_rejected_by_a_worker(corpus, tmp_path):
    Vocabulary(ENTRIES[:6]).save(tmp_path / "specials.txt")
    changes = {"vocab": str(tmp_path / "specials.txt"), "num_workers": 1}
    with pytest.raises(UserError, match="6 entries: only special tokens"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", **changes))


def test_shards_that_exceed_memory_are_rejected_with_a_number(corpus, tmp_path, monkeypatch):
    text = pathlib.Path(corpus["input"])
    monkeypatch.setattr(writing, "MAX_BYTES", text.stat().st_size // 4)
    with pytest.raises(UserError, match=r"fit in memory; use --num_shards=(\d+)") as caught:
        writing.write_shards(settings_of(corpus, tmp_path / "shards", num_shards=1))
    number = int(re.search(r"use --num_shards=(\d+)", str(caught.value))[1])
    index = documents.index([str(text)], "lines", "text", "")
    writing.check_index(index, settings_of(corpus, tmp_path / "shards", num_shards=number))
    packed = tmp_path / "large.txt.gz"
    packed.write_bytes(gzip.compress(b"c.\n\n" + b"a b. " * 2000))
    corpus = {**corpus, "input": str(tmp_path / "[cl]*.txt*")}
    with pytest.raises(UserError, match=rf"largest document \(0 MB at byte 4 of {packed}, decom"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", num_shards=1))


def test_the_documents_of_all_shards_take_few_bytes(tmp_path):
    """Check the memory of all tasks, which runners of Beam receive at once."""
    (tmp_path / "a").write_text("".join(f"{number}.\n\n" for number in range(5000)))
    (tmp_path / "b").write_text("".join(f"{number}.\n\n" for number in range(5000, 10_000)))
    index = documents.index([str(tmp_path / name) for name in "ab"], "lines", "text", "")
    tracemalloc.start()
    shards = [writing.ShardSpans(index, number, 7) for number in range(7)]
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert num_bytes < 10 * len(index) == 100_000
    columns = (index.files, index.offsets, index.lengths)
    expected = [
        (index.paths[file], offset, length)
        for file, offset, length in zip(*(column.tolist() for column in columns), strict=True)
    ]
    for number, shard in enumerate(pickle.loads(pickle.dumps(shards))):
        assert list(shard) == expected[number::7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 1}, "--seed: was 12345"), ({"max_input_chars_per_word": 9}, "per_word: the token")],
)
def test_other_settings_are_rejected_before_the_text_is_read(
    corpus, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr(jobs, "run", run_here)
    writing.write_shards(settings_of(corpus, tmp_path / "shards"))
    monkeypatch.setattr(documents, "index", lambda *paths: pytest.fail("read the text"))
    with pytest.raises(UserError, match=message):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", **changes))


def test_a_missing_package_is_reported_with_the_flags(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"--runner=beam: apache_beam is not installed; .*'bert_tf\[beam\]'"
    with pytest.raises(UserError, match=message):
        settings_of(corpus, tmp_path / "shards", runner="beam")


@pytest.mark.medium
def test_shards_of_other_plans_are_not_reused(corpus, tmp_path):
    """Check that the entry of a shard is valid only with the manifest that it was made for."""
    settings = settings_of(corpus, tmp_path / "shards")
    vocabulary = Vocabulary(ENTRIES)
    plan = Manifest.planned(settings.output_dir, settings, vocabulary, {}, {})
    (tmp_path / "shards").mkdir()
    plan.save({})
    write_here(settings, "another plan")
    (tmp_path / "shards" / ".writing-examples-00000").write_text("left by a killed process")
    assert plan.finished() == {}
    assert {path.name[:9] for path in (tmp_path / "shards").glob(".*")} == set()
    write_here(settings, plan.plan_sha256)
    assert sorted(plan.finished()) == [0, 1, 2]
    shard = tmp_path / "shards" / "examples-00001-of-00003.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert sorted(plan.finished()) == [0, 2]
    old = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    old["versions"]["numpy"] = "0.0.1"
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="created with numpy 0.0.1, now"):
        plan.finished()
    (tmp_path / "shards" / "manifest.json").unlink()
    with pytest.raises(UserError, match="contains other files"):
        writing.write_shards(settings)


def test_the_length_of_words_is_part_of_the_plan(corpus, tmp_path, monkeypatch):
    received = []

    def run(settings, open_writer, *others):
        received.append(open_writer.args[0].args[2])
        return run_here(settings, open_writer, *others)

    monkeypatch.setattr(jobs, "run", run)
    directory = tmp_path / "shards"
    manifest = writing.write_shards(settings_of(corpus, directory, max_input_chars_per_word=100))
    assert received[0]["max_input_chars_per_word"] == 100
    assert recipe.case_of(manifest)["max_input_chars_per_word"] == 100
    with pytest.raises(UserError, match="--max_input_chars_per_word: the tokenizer is not that"):
        writing.write_shards(settings_of(corpus, directory))
    assert len(received) == 1
    config = config_of()
    (line,) = recipe.word_length_warning(config, manifest)
    assert "words of 101 to 200 characters have other token ids than in the model" in line
    config = dataclasses.replace(config, max_input_chars_per_word=100)
    assert recipe.word_length_warning(config, manifest) == []


def test_verification_of_shards_shows_its_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    manifest, lines = Manifest.load(write_shards(tmp_path)), []
    for entry in manifest.shards:  # As if they were large.
        path = manifest.path(entry["file"])
        os.truncate(path, 2_000_000)
        entry |= {"bytes": 2_000_000, "sha256": files.sha256(path)}
    manifest.check_files(lines.append)
    assert [line.split("  ")[0] for line in lines] == ["2/6 MB", "4/6 MB", "6/6 MB"]


def test_text_that_changes_meanwhile_is_detected(corpus, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def run(*arguments):
        with run_here(*arguments) as make:
            yield make
        pathlib.Path(corpus["input"]).write_text("other text")

    monkeypatch.setattr(jobs, "run", run)
    with pytest.raises(UserError, match="corpus.txt: was changed while it was read"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards"))
    assert not Manifest.load(tmp_path / "shards").is_complete


@pytest.mark.slow
def test_a_user_error_in_a_beam_worker_is_reported_in_one_line(corpus, tmp_path, run_command):
    pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    Vocabulary(ENTRIES[:6]).save(tmp_path / "specials.txt")
    flags = {"vocab": tmp_path / "specials.txt", "runner": "beam", "num_shards": 1}
    done = run_command("bert_tf.write_shards", *arguments(corpus, tmp_path / "shards", **flags))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "6 entries: only special tokens" in done.stderr.splitlines()[-1]


def test_a_single_document_is_rejected_with_a_remedy(corpus, tmp_path):
    (tmp_path / "one.txt").write_text("a b.\nc d.\n")
    one = {**corpus, "input": str(tmp_path / "one.txt")}
    with pytest.raises(UserError, match="1 documents, expected at least 5 .* blank lines"):
        writing.write_shards(settings_of(one, tmp_path / "shards", num_shards=1))


@pytest.mark.slow
def test_other_settings_text_or_vocabulary_are_rejected_by_name(corpus, tmp_path, run_command):
    directory = tmp_path / "shards"
    write_command(run_command, corpus, directory)
    for changes, message in (
        ({"seed": 1}, "--seed: was 12345 when .* was created, is now 1;"),
        ({"num_shards": 4}, "--num_shards: was 3"),
        ({"input": str(write_corpus(tmp_path / "other.txt", seed=1))}, "--input: the text is not"),
    ):
        with pytest.raises(UserError, match=message):
            writing.write_shards(settings_of(corpus, directory, **changes))
    Vocabulary([*ENTRIES, "more"]).save(tmp_path / "more.txt")
    with pytest.raises(UserError, match="--vocab: the vocabulary is not that of"):
        writing.write_shards(
            settings_of({**corpus, "vocab": str(tmp_path / "more.txt")}, directory)
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UserError, match="contains other files"):
        writing.write_shards(settings_of(corpus, tmp_path / "full"))


def test_two_commands_in_one_directory_exclude_each_other(corpus, tmp_path):
    directory = tmp_path / "shards"
    directory.mkdir()
    owner = rf"in use by another process \(PID {os.getpid()} on {socket.gethostname()}\)"
    with sole_writer(directory), pytest.raises(UserError, match=owner):
        writing.write_shards(settings_of(corpus, directory))


@pytest.mark.slow
def test_the_parent_imports_no_tensorflow(corpus, tmp_path):
    """End with status 77 if it does; a worker may, from another directory of packages."""
    code = (
        "import sys; sys.argv[0] = 'x'\n"
        "from bert_tf.data import writing\n"
        "from bert_tf.data.settings import WriteShardsSettings\n"
        "if __name__ == '__main__':\n"
        f"    writing.write_shards(WriteShardsSettings(input=({corpus['input']!r},), "
        f"vocab={corpus['vocab']!r}, output_dir={str(tmp_path / 'shards')!r}, num_shards=2, "
        "max_seq_length=32, num_workers=1))\n"
        "    heavy = {'tensorflow', 'tensorflow_text', 'keras', 'apache_beam'}\n"
        "    print(sorted(heavy & set(sys.modules)))\n"
    )
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]"
    Manifest.load(tmp_path / "shards").check_files()


@pytest.mark.slow
def test_killed_at_twenty_moments_the_bytes_are_the_same(data_dir, tmp_path, run_command):
    corpus = {
        "input": data_dir / "text" / "books.txt",
        "vocab": data_dir / "vocab" / "uncased" / "vocab.txt",
    }
    flags = {"num_shards": 128, "max_seq_length": 128, "dupe_factor": 4, "num_workers": 2}
    write_command(run_command, corpus, tmp_path / "undisturbed", **flags)
    rng, hits = random.Random(0), 0
    directory = tmp_path / "killed"
    for _ in range(20):
        process = start(corpus, directory, **flags)
        wait_until_writing(process, directory)
        moment = time.monotonic() + rng.uniform(0, 0.2)
        while time.monotonic() < moment:
            pass
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        hits += is_writing(directory)
    print(f"{hits} of 20 kills hit a shard that was being written")
    assert hits >= 15
    assert len(contents(directory)) < 128
    write_command(run_command, corpus, directory, **flags)
    assert contents(directory) == contents(tmp_path / "undisturbed")
    shutil.rmtree(tmp_path)
