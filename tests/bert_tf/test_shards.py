"""Shards: bytes that depend on text and settings only, in the released format."""

import gzip
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from bert_tf import Tokenizer, Vocabulary
from bert_tf.data import documents, jobs, masking, sharded_output, shards, tf_examples, writing
from bert_tf.data.inspection import read_shards
from bert_tf.data.instances import make_instances, split_sentences, to_examples, tokenize_documents
from bert_tf.data.manifest import Manifest
from bert_tf.storage import files
from tests.corpus import ENTRIES, SMALL, contents, settings_of, write_command, write_here


def test_records_equal_the_serialized_protobuf_messages():
    rng = np.random.default_rng(0)
    numbers = np.array([[0, 1, 127, 128, 16383], [16384, 2**21 - 1, 2**21, 2**28 - 1, 5]])
    examples = {
        "input_ids": numbers.astype(np.int32),
        "masked_lm_weights": rng.random((2, 3)).astype(np.float32),
        "long": np.tile(np.arange(400), (2, 1)),  # Sizes of two bytes.
    }
    for row, record in enumerate(tf_examples.serialize(examples)):
        example = tf.train.Example()
        for name, values in examples.items():
            feature = example.features.feature[name]
            kind = feature.float_list if name == "masked_lm_weights" else feature.int64_list
            kind.value.extend(values[row].tolist())
        assert record == example.SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match=r"expected an integer < 2\*\*28"):
        tf_examples.serialize({"input_ids": np.array([[2**28]])})


@pytest.mark.medium
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"whole_word_mask": True, "masked_lm_prob": 0.4},
        {"replace_with_any": True, "masked_lm_prob": 0.5, "max_predictions_per_seq": 16},
        {"short_seq_prob": 1.0},
        {"same_document_next": True, "num_shards": 20},
        {"seed": 5, "dupe_factor": 1},
        {"masking": "dynamic"},
    ],
)
def test_a_shard_holds_its_instances_masked_by_their_numbers(
    corpus, tmp_path, monkeypatch, changes
):
    """Build the expected shard from its components, without batches; each has tests of its own."""
    monkeypatch.setattr(shards, "BATCH_TOKENS", 7 * SMALL["max_seq_length"])
    settings = settings_of(corpus, tmp_path / "shards", **changes)
    written = write_here(settings)
    vocabulary = Vocabulary(ENTRIES)
    tokenizer = Tokenizer(vocabulary, True)
    index = documents.index(list(settings.input), "lines", "text", "")
    is_static = settings.masking == "static"
    parse = tf_examples.parser(
        settings.max_seq_length, settings.max_predictions_per_seq * is_static
    )
    for number, name in enumerate(sorted(written)):
        tokenized = tokenize_documents(
            writing.ShardSpans(index, number, settings.num_shards),
            "lines",
            "text",
            tokenizer,
        )
        instances = make_instances(
            tokenized,
            max_seq_length=settings.max_seq_length,
            short_seq_prob=settings.short_seq_prob,
            dupe_factor=settings.dupe_factor,
            seed=settings.seed * 100_000 + number,
            same_document_next=settings.same_document_next,
        )
        # The instances are shuffled.
        assert len(instances) < 5 or (np.diff(instances.a_begin) < 0).any()
        expected = to_examples(instances, tokenized.ids, vocabulary, settings.max_seq_length)
        if is_static:
            mask = masking.MaskGenerator(
                vocabulary,
                masked_lm_prob=settings.masked_lm_prob,
                max_predictions_per_seq=settings.max_predictions_per_seq,
                whole_word_mask=settings.whole_word_mask,
                replace_with_any=settings.replace_with_any,
            )
            expected = mask(
                expected, masking.keys(settings.seed, number, np.arange(len(instances)))
            )
        found = [of for _, of in read_shards([str(tmp_path / "shards" / name)], parse)]
        for feature, values in expected.items():
            joined = np.concatenate([part[feature] for part in found])
            np.testing.assert_array_equal(joined, np.asarray(values), err_msg=feature)


def test_a_reader_with_the_released_specification_reads_every_feature(corpus, tmp_path):
    """Declare features like google-research/bert's run_pretraining.py."""
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
    # Each document as one string of characters, in which the text of every example is searched.
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"num_workers": 2}, id="two workers"),
        pytest.param({"num_workers": 4}, id="four workers", marks=pytest.mark.slow),
        pytest.param({"runner": "beam"}, id="beam", marks=pytest.mark.slow),
    ],
)
def test_workers_and_beam_write_the_same_bytes(corpus, tmp_path, run_command, flags):
    if "runner" in flags:
        pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    here = write_here(settings_of(corpus, tmp_path / "here"))
    assert len(here) == 3 and all(here.values())
    done = write_command(run_command, corpus, tmp_path / "there", **flags)
    assert contents(tmp_path / "there") == here
    manifest = Manifest.load(tmp_path / "there")
    manifest.check_files()
    assert manifest.num_examples == sum(
        1 for _ in tf.data.TFRecordDataset(sorted(map(str, (tmp_path / "there").glob("*.tf*"))))
    )
    assert "padding" in done.stderr.splitlines()[-1]
    left = {path.name for path in (tmp_path / "there").iterdir()} - set(here)
    assert left == {"manifest.json", "vocab.txt"}


@pytest.mark.slow
def test_gzip_and_any_split_into_files_yield_the_same_bytes(corpus, tmp_path, run_command):
    here = write_here(settings_of(corpus, tmp_path / "here"))
    text = pathlib.Path(corpus["input"]).read_text()
    parts = text.split("\n\n")
    directory = tmp_path / "parts"
    directory.mkdir()
    (directory / "z.txt").write_text("\n\n".join(parts[:7]))
    (directory / "a.gz").write_bytes(gzip.compress("\n\n".join(parts[7:]).encode()))
    split = {**corpus, "input": f"{directory}/a*,{directory}/z*"}
    write_command(run_command, split, tmp_path / "split")
    assert contents(tmp_path / "split") == here
    assert not (tmp_path / "split" / writing.SPILL).exists()


def test_text_and_jsonl_are_split_into_sentences(corpus, tmp_path):
    directory = tmp_path / "texts"
    directory.mkdir()
    texts = [
        f"Mr. {a} saw {b}. It was\n{b} {a}! Was it?\n\nA title\n\n{a}."
        for a in "abcde"
        for b in "xy"
    ]
    for number, text in enumerate(texts):
        (directory / f"{number}.txt").write_text(text)
    (tmp_path / "all.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    as_text = write_here(
        settings_of(
            {**corpus, "input": f"{directory}/*"}, tmp_path / "1", input_format="text", num_shards=1
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


def test_running_text_is_split_into_sentences():
    lines = ["Mr. A. saw 3.5 of", "them. It was", "", "A title", "", "你好。我！ Why?"]
    assert split_sentences(lines) == [
        "Mr. A. saw 3.5 of them.",
        "It was",
        "A title",
        "你好。",
        "我！",
        " Why?",
    ]


@pytest.mark.parametrize(
    "sentences",
    [
        ["他说：“你好。”", "然后走了。", "真的吗？！", "“是……”"],
        ["「はい。」", "と言った（笑。）", "本当？……", "うん！！』」", "次"],
        ["値は３．５である．", "次に｡", "1．はじめに"],
        ["کیا؟!", " ہاں۔", " نہیں"],
        ['क्या।"', ' "हाँ॥'],
        ["ሰላም።", " ሰላም፧", " ሰላም"],
        ["សួស្តី។", " សួស្តី៕", " ບ"],
        ["မင်္ဂလာ။", "ပါ"],
        ["Բարեւ։»", " Բարեւ։"],
    ],
)
def test_full_stops_of_other_scripts_end_a_sentence_with_the_closing_marks(sentences):
    found = split_sentences(["".join(sentences)])
    assert [*map(str.strip, found)] == [*map(str.strip, sentences)]


def test_entries_appear_once(tmp_path):
    for name in ("examples-00000-of-00002.tfrecord", "examples-00001-of-00002.tfrecord"):
        known = set(files.listdir(tmp_path))
        sharded_output.save_entry(str(tmp_path), {"file": name, "records": 3}, "plan")
        assert [entry["file"] for entry in jobs.appeared(str(tmp_path), known)] == [name]
        assert not list(jobs.appeared(str(tmp_path), known))
