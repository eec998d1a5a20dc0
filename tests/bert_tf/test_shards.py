"""Shards: bytes that only text and settings decide, the released form, interruptions, faults."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, UserError, Vocabulary
from bert_tf.data import dealing, documents, masking, records, shards, writing
from bert_tf.data.inspection import read_shard
from bert_tf.data.instances import make_instances, to_examples
from bert_tf.data.manifest import Manifest
from bert_tf.data.sentences import split_sentences, tokenize_documents
from bert_tf.files import sole_user
from tests.conftest import ROOT
from tests.corpus import ENTRIES, SMALL, contents, settings_of, write_corpus, write_here


@pytest.fixture
def corpus(tmp_path):
    """{input, vocab}: flags of a small corpus and its vocabulary."""
    Vocabulary(ENTRIES).save(tmp_path / "vocab.txt")
    path = write_corpus(tmp_path / "corpus.txt")
    return {"input": str(path), "vocab": str(tmp_path / "vocab.txt")}


def arguments(corpus, folder, **changes):
    flags = {**SMALL, **corpus, "output_dir": folder, "num_workers": 1, **changes}
    return [f"--{name}={value}" for name, value in flags.items()]


def write_command(run_command, corpus, folder, **changes):
    done = run_command("bert_tf.write_shards", *arguments(corpus, folder, **changes), timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_records_are_the_protos_that_protobuf_makes():
    rng = np.random.default_rng(0)
    numbers = np.array([[0, 1, 127, 128, 16383], [16384, 2**21 - 1, 2**21, 2**28 - 1, 5]])
    examples = {
        "input_ids": numbers.astype(np.int32),
        "masked_lm_weights": rng.random((2, 3)).astype(np.float32),
        "long": np.tile(np.arange(400), (2, 1)),  # Sizes of two bytes.
    }
    for row, record in enumerate(records.serialize(examples)):
        example = tf.train.Example()
        for name, values in examples.items():
            feature = example.features.feature[name]
            kind = feature.float_list if name == "masked_lm_weights" else feature.int64_list
            kind.value.extend(values[row].tolist())
        assert record == example.SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match=r"wanted less than 2\*\*28"):
        records.serialize({"input_ids": np.array([[2**28]])})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"whole_word_mask": True, "masked_lm_prob": 0.4},
        {"replace_with_any": True, "masked_lm_prob": 0.5, "max_predictions_per_seq": 16},
        {"short_seq_prob": 1.0},
        {"same_document_next": True, "num_shards": 40},
        {"seed": 5, "dupe_factor": 1},
        {"masking": "dynamic"},
    ],
)
def test_a_shard_is_its_instances_masked_by_their_numbers(corpus, tmp_path, monkeypatch, changes):
    """Put together from the parts, without batches; each part has tests of its own."""
    monkeypatch.setattr(shards, "BATCH_TOKENS", 7 * SMALL["max_seq_length"])
    settings = settings_of(corpus, tmp_path / "shards", **changes)
    written = write_here(settings)
    vocabulary = Vocabulary(ENTRIES)
    index = documents.index(list(settings.input), "lines", "text", "")
    is_static = settings.masking == "static"
    parse = records.parser(settings.max_seq_length, settings.max_predictions_per_seq * is_static)
    for number, name in enumerate(sorted(written)):
        tokenized = tokenize_documents(
            dealing.spans(index, number, settings.num_shards),
            "lines",
            "text",
            Tokenizer(vocabulary, True),
        )
        instances = make_instances(
            tokenized,
            max_seq_length=settings.max_seq_length,
            short_seq_prob=settings.short_seq_prob,
            dupe_factor=settings.dupe_factor,
            seed=settings.seed * 100_000 + number,
            same_document_next=settings.same_document_next,
        )
        assert len(instances) < 5 or (np.diff(instances.a_begin) < 0).any()  # Shuffled.
        wanted = to_examples(instances, tokenized.ids, vocabulary, settings.max_seq_length)
        if is_static:
            mask = masking.Masking(
                vocabulary,
                masked_lm_prob=settings.masked_lm_prob,
                max_predictions_per_seq=settings.max_predictions_per_seq,
                whole_word_mask=settings.whole_word_mask,
                replace_with_any=settings.replace_with_any,
            )
            wanted = mask(wanted, masking.keys(settings.seed, number, np.arange(len(instances))))
        found = list(read_shard(str(tmp_path / "shards" / name), parse))
        for feature, values in wanted.items():
            joined = np.concatenate([part[feature] for part in found])
            np.testing.assert_array_equal(joined, np.asarray(values), err_msg=feature)


def test_a_reader_by_the_released_specification_reads_every_feature(corpus, tmp_path):
    """As google-research/bert's run_pretraining.py and its kin declare them."""
    write_here(settings_of(corpus, tmp_path / "shards"))
    length, predictions = SMALL["max_seq_length"], SMALL["max_predictions_per_seq"]
    specification = {
        "input_ids": tf.io.FixedLenFeature([length], tf.int64),
        "input_mask": tf.io.FixedLenFeature([length], tf.int64),
        "segment_ids": tf.io.FixedLenFeature([length], tf.int64),
        "masked_lm_positions": tf.io.FixedLenFeature([predictions], tf.int64),
        "masked_lm_ids": tf.io.FixedLenFeature([predictions], tf.int64),
        "masked_lm_weights": tf.io.FixedLenFeature([predictions], tf.float32),
        "next_sentence_labels": tf.io.FixedLenFeature([1], tf.int64),
    }
    text = (tmp_path / "corpus.txt").read_text()
    # Every document as one string of characters; what an example says has to be found there.
    plain = ["".join(part.split()) for part in text.split("\n\n")]
    paths = sorted(map(str, (tmp_path / "shards").glob("*.tfrecord")))
    count = 0
    for record in tf.data.TFRecordDataset(paths):
        names = set(tf.train.Example.FromString(record.numpy()).features.feature)
        assert names == set(specification)
        example = {
            name: value.numpy()
            for name, value in tf.io.parse_single_example(record, specification).items()
        }
        ids = example["input_ids"]
        for position, answer, weight in zip(
            example["masked_lm_positions"],
            example["masked_lm_ids"],
            example["masked_lm_weights"],
            strict=True,
        ):
            if weight:
                ids[position] = answer
        size = example["input_mask"].sum()
        assert example["input_mask"].tolist() == [1] * size + [0] * (length - size)
        tokens = [ENTRIES[token] for token in ids[:size]]
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and tokens.count("[SEP]") == 2
        middle = tokens.index("[SEP]")
        assert example["segment_ids"].tolist() == (
            [0] * (middle + 1) + [1] * (size - middle - 1) + [0] * (length - size)
        )
        parts = [
            "".join(token.removeprefix("##") for token in part)
            for part in (tokens[1:middle], tokens[middle + 1 : -1])
        ]
        homes = [{number for number, has in enumerate(plain) if part in has} for part in parts]
        assert homes[0] and homes[1]
        if example["next_sentence_labels"][0] == 0:
            assert homes[0] & homes[1]
        count += 1
    assert count > 200


def test_one_two_four_workers_and_beam_write_the_same_bytes(corpus, tmp_path, run_command):
    pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    here = write_here(settings_of(corpus, tmp_path / "here"))
    assert len(here) == 3 and all(here.values())
    for name, flags in {
        "two": {"num_workers": 2},
        "four": {"num_workers": 4},
        "beam": {"runner": "beam"},
    }.items():
        done = write_command(run_command, corpus, tmp_path / name, **flags)
        assert contents(tmp_path / name) == here, name
        manifest = Manifest.load(tmp_path / name)
        manifest.check_files()
        assert manifest.num_examples == sum(
            1 for _ in tf.data.TFRecordDataset(sorted(map(str, (tmp_path / name).glob("*.tf*"))))
        )
        assert "padding" in done.stderr.splitlines()[-1]
        left = {path.name for path in (tmp_path / name).iterdir()} - set(here)
        assert left == {"manifest.json", "vocab.txt", ".lock"}


def test_gzip_and_any_split_into_files_write_the_same_bytes(corpus, tmp_path, run_command):
    here = write_here(settings_of(corpus, tmp_path / "here"))
    text = pathlib.Path(corpus["input"]).read_text()
    parts = text.split("\n\n")
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "z.txt").write_text("\n\n".join(parts[:7]))
    (folder / "a.gz").write_bytes(gzip.compress("\n\n".join(parts[7:]).encode()))
    split = {**corpus, "input": f"{folder}/a*,{folder}/z*"}
    write_command(run_command, split, tmp_path / "split")
    assert contents(tmp_path / "split") == here
    assert not (tmp_path / "split" / writing.SPILL).exists()


def test_text_and_jsonl_are_split_into_sentences(corpus, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [
        f"Mr. {a} saw {b}. It was\n{b} {a}! Was it?\n\nA title\n\n{a}."
        for a in "abcde"
        for b in "xy"
    ]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "all.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    as_text = write_here(
        settings_of(
            {**corpus, "input": f"{folder}/*"}, tmp_path / "1", input_format="text", num_shards=1
        )
    )
    as_json = write_here(
        settings_of(
            {**corpus, "input": str(tmp_path / "all.jsonl")},
            tmp_path / "2",
            input_format="jsonl",
            text_field="body",
            num_shards=1,
        )
    )
    assert as_text == as_json and as_text


def test_running_text_is_split_as_a_reader_would():
    lines = ["Mr. A. saw 3.5 of", "them. It was", "", "A title", "", "你好。我！ Why?"]
    assert split_sentences(lines) == [
        "Mr. A. saw 3.5 of them.",
        "It was",
        "A title",
        "你好。",
        "我！",
        " Why?",
    ]


def test_killed_and_stopped_it_goes_on_with_what_is_missing(corpus, tmp_path, run_command):
    corpus = {**corpus, "input": str(write_corpus(tmp_path / "more.txt", 400))}
    flags = {"num_shards": 40, "dupe_factor": 20}
    here = write_here(settings_of(corpus, tmp_path / "here", **flags))
    folder = tmp_path / "shards"
    for signum in (signal.SIGKILL, signal.SIGTERM):
        process = start(corpus, folder, **flags)
        wait_until_writing(process, folder)
        process.send_signal(signum)
        output = process.communicate(timeout=60)[1]
        if signum == signal.SIGTERM:
            assert process.returncode == 143 and "the same command goes on" in output
        if not Manifest.load(folder).values["complete"]:
            with pytest.raises(UserError, match="manifest.json: not complete"):
                Manifest.load(folder).check_files()
    there = contents(folder)
    assert there.items() <= here.items()  # Only whole shards have a name.
    done = write_command(run_command, corpus, folder, **flags)
    assert contents(folder) == here
    assert f"{len(there)} of 40 shards are there" in done.stderr or len(there) in (0, 40)
    again = write_command(run_command, corpus, folder, **flags)
    assert "finished, nothing to do" in again.stderr


def start(corpus, folder, **changes):
    command = [sys.executable, "-m", "bert_tf.write_shards", *arguments(corpus, folder, **changes)]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def is_writing(folder):
    return any(".tfrecord." in name for name in os.listdir(folder))


def wait_until_writing(process, folder):
    """Returns while a shard is being written, at most a minute after the workers are ready."""
    assert any(line.startswith("ready") for line in process.stderr)
    deadline = time.monotonic() + 60
    while not is_writing(folder):
        assert time.monotonic() < deadline and process.poll() is None


def test_a_killed_worker_is_one_line_and_loses_no_shard(corpus, tmp_path, run_command):
    corpus = {**corpus, "input": str(write_corpus(tmp_path / "more.txt", 400))}
    flags = {"num_shards": 40, "dupe_factor": 20}
    process = start(corpus, tmp_path / "shards", **flags)
    wait_until_writing(process, tmp_path / "shards")
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    # The tracker of spawned processes is a child, too.
    workers = [
        int(child)
        for child in children
        if "spawn_main" in pathlib.Path(f"/proc/{child}/cmdline").read_text()
    ]
    os.kill(workers[0], signal.SIGKILL)
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "a worker process was killed" in output.splitlines()[-1]
    write_command(run_command, corpus, tmp_path / "shards", **flags)
    Manifest.load(tmp_path / "shards").check_files()


def test_a_full_disk_is_one_line_and_finished_shards_stay(corpus, tmp_path, run_command):
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
        ({"num_shards": 13}, "60 documents, wanted at least 5 a shard, .* --num_shards=12 or less"),
        ({"input": "/nowhere/*.txt"}, "--input=/nowhere/.*: no such file"),
        ({"vocab": "/nowhere/vocab.txt"}, "no such file, wanted a vocab.txt"),
        ({"max_seq_length": 4}, "--max_seq_length=4: wanted 5 to"),
        ({"max_predictions_per_seq": 33}, "--max_predictions_per_seq=33: wanted 1 to 32"),
        ({"masked_lm_prob": 1.5}, "--masked_lm_prob=1.5: wanted a share"),
        ({"beam_args": "--x=1"}, "is for --runner=beam"),
        ({"input": ""}, "--input: wanted files of text"),
        ({"input": "tests"}, "--input=tests: is a folder"),
        ({"runner": "beam", "beam_args": "--runner=Bogus"}, "--beam_args=--runner=Bogus: "),
        ({"runner": "beam", "beam_args": "'x"}, "--beam_args='x: No closing quotation"),
    ],
)
def test_settings_that_cannot_be_are_named(corpus, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", **changes))


def test_specials_alone_are_no_vocabulary_and_a_worker_says_so(corpus, tmp_path):
    Vocabulary(ENTRIES[:6]).save(tmp_path / "specials.txt")
    changes = {"vocab": str(tmp_path / "specials.txt"), "num_workers": 1}
    with pytest.raises(UserError, match="6 entries: only specials"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", **changes))


def test_shards_that_memory_cannot_hold_are_refused_with_a_number(corpus, tmp_path, monkeypatch):
    text = pathlib.Path(corpus["input"])
    monkeypatch.setattr(dealing, "MAX_BYTES", text.stat().st_size // 4)
    with pytest.raises(UserError, match=r"fits in memory; use --num_shards=(\d+)") as caught:
        writing.write_shards(settings_of(corpus, tmp_path / "shards", num_shards=1))
    number = int(re.search(r"use --num_shards=(\d+)", str(caught.value))[1])
    index = documents.index([str(text)], "lines", "text", "")
    dealing.check(index, settings_of(corpus, tmp_path / "shards", num_shards=number))
    text.write_text(text.read_text() + "\n\n" + "a b. " * 2000)
    with pytest.raises(UserError, match="break up the largest document"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards", num_shards=1))


def test_what_is_left_of_other_plans_is_not_taken(corpus, tmp_path):
    """A shard's entry counts under the manifest that it was made for."""
    settings = settings_of(corpus, tmp_path / "shards")
    vocabulary = Vocabulary(ENTRIES)
    plan = Manifest.plan(settings.output_dir, settings, vocabulary, {}, {})
    (tmp_path / "shards").mkdir()
    writing.begin(plan, vocabulary, {})
    write_here(settings, "another plan")
    (tmp_path / "shards" / f".examples-00000.{'0' * 32}").write_text("left by a killed process")
    assert writing.finished_entries(plan, 3) == {}
    assert {path.name[:9] for path in (tmp_path / "shards").glob(".*")} == set()
    write_here(settings, plan.plan_sha256)
    assert sorted(writing.finished_entries(plan, 3)) == [0, 1, 2]
    shard = tmp_path / "shards" / "examples-00001-of-00003.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert sorted(writing.finished_entries(plan, 3)) == [0, 2]
    old = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    old["versions"]["numpy"] = "0.0.1"
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="begun with numpy 0.0.1, here is"):
        writing.finished_entries(plan, 3)
    (tmp_path / "shards" / "manifest.json").unlink()
    with pytest.raises(UserError, match="there is something else there"):
        writing.write_shards(settings)


def test_text_that_changes_meanwhile_is_noticed(corpus, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def runner(settings, vocabulary, tokenizer, plan_sha256, num_tasks):
        def make(tasks):
            write_here(settings, plan_sha256)
            pathlib.Path(corpus["input"]).write_text("other text")
            yield from tasks

        yield make

    monkeypatch.setattr(writing, "_runner", lambda name: runner)
    with pytest.raises(UserError, match="corpus.txt: was changed while it was read"):
        writing.write_shards(settings_of(corpus, tmp_path / "shards"))
    assert not Manifest.load(tmp_path / "shards").values["complete"]


def test_a_mistake_in_a_beam_worker_is_one_line(corpus, tmp_path, run_command):
    pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    (tmp_path / "empty.txt").write_text("\n\n".join(["\x01"] * 20))
    flags = {"input": tmp_path / "empty.txt", "runner": "beam", "num_shards": 1}
    done = run_command("bert_tf.write_shards", *arguments(corpus, tmp_path / "shards", **flags))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "0 documents with tokens, wanted at least 2" in done.stderr.splitlines()[-1]


def test_one_document_is_refused_with_what_to_do(corpus, tmp_path):
    (tmp_path / "one.txt").write_text("a b.\nc d.\n")
    one = {**corpus, "input": str(tmp_path / "one.txt")}
    with pytest.raises(UserError, match="1 documents, wanted at least 5 .* blank lines"):
        writing.write_shards(settings_of(one, tmp_path / "shards", num_shards=1))


def test_other_settings_text_or_vocabulary_are_refused_by_name(corpus, tmp_path, run_command):
    folder = tmp_path / "shards"
    write_command(run_command, corpus, folder)
    for changes, message in (
        ({"seed": 1}, "--seed: was 12345 when .* began, is 1;"),
        ({"num_shards": 4}, "--num_shards: was 3"),
        ({"input": str(write_corpus(tmp_path / "other.txt", seed=1))}, "--input: the text is not"),
    ):
        with pytest.raises(UserError, match=message):
            writing.write_shards(settings_of(corpus, folder, **changes))
    Vocabulary([*ENTRIES, "more"]).save(tmp_path / "more.txt")
    with pytest.raises(UserError, match="--vocab: the vocabulary is not the one"):
        writing.write_shards(settings_of({**corpus, "vocab": str(tmp_path / "more.txt")}, folder))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(UserError, match="there is something else there"):
        writing.write_shards(settings_of(corpus, tmp_path / "full"))


def test_two_commands_in_one_folder_do_not_meet(corpus, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    with sole_user(folder), pytest.raises(UserError, match="another process is at work there"):
        writing.write_shards(settings_of(corpus, folder))


def test_the_parent_imports_no_tensorflow(corpus, tmp_path):
    """It ends with status 77 if it does; its worker may, from another folder of packages."""
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
    folder = tmp_path / "killed"
    for _ in range(20):
        process = start(corpus, folder, **flags)
        wait_until_writing(process, folder)
        moment = time.monotonic() + rng.uniform(0, 0.2)
        while time.monotonic() < moment:
            pass
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        hits += is_writing(folder)
    print(f"{hits} of 20 kills hit a shard that was being written")
    assert hits >= 15
    assert len(contents(folder)) < 128
    write_command(run_command, corpus, folder, **flags)
    assert contents(folder) == contents(tmp_path / "undisturbed")
    shutil.rmtree(tmp_path)
