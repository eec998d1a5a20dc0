"""Learning a vocabulary: word counts, entries checked by hand, identical bytes in any process."""

import gzip
import itertools
import json
import re

import numpy as np
import pytest
from absl import flags

from bert_tf import Tokenizer, UserError, Vocabulary, learn_vocab
from bert_tf.data import vocabulary_learning as learning
from bert_tf.system import command, progress
from bert_tf.text.normalizer import NEVER
from bert_tf.text.vocabulary import SPECIALS
from tests.rows import as_others_write

# c once, abc twice, ab three times: a and ##b merge 5 times, then ab and ##c twice.
SMALL = "ab abc\n\nabc ab ab\nc\n"
SMALL_ENTRIES = [*SPECIALS, "a", "b", "c", "##b", "##c", "ab", "abc"]


def learn(*paths, size, do_lower_case=True, strip_accents=None, input_format="lines"):
    """Return a function that learns a vocabulary and returns (entries, log lines)."""
    said = []
    vocabulary = learning.learn(
        sorted(map(str, paths)),
        input_format,
        "text",
        size,
        do_lower_case,
        strip_accents,
        said.append,
    )
    return list(vocabulary.entries), said


def count(lines):
    """Return a function that counts words and returns ({word: count}, log lines)."""
    said = []
    unique_words = learning.make_unique_words(do_lower_case=True)
    return learning.count_words(map(str.encode, lines), unique_words, said.append), said


def most_entries(error):
    return int(re.search("the text only gives ([0-9]+) entries", str(error))[1])


@pytest.fixture
def write(tmp_path):
    def write(text, name="text.txt"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        return path

    return write


def test_entries_of_a_text_equal_those_counted_by_hand(write):
    path = write(SMALL)
    assert learn(path, size=12)[0] == SMALL_ENTRIES
    assert learn(path, size=11)[0] == SMALL_ENTRIES[:11]
    assert learn(path, size=10)[0] == SMALL_ENTRIES[:10]


@pytest.mark.medium
def test_the_format_of_files_does_not_affect_the_entries(write):
    documents = [{"text": "ab abc\n\nabc ab"}, {"text": " "}, {"text": "ab\nc", "more": 1}]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    for path, input_format in (
        (write(SMALL, "text.gz"), "lines"),
        (write(SMALL), "text"),
        (write(lines, "text.jsonl"), "jsonl"),
        (write(lines + "\n", "text.jsonl.gz"), "jsonl"),
    ):
        assert learn(path, size=12, input_format=input_format)[0] == SMALL_ENTRIES


@pytest.mark.medium
def test_mark_and_line_ends_do_not_affect_the_entries(write, tmp_path):
    path = write(SMALL)
    for name, data in as_others_write(SMALL).items():
        path.write_bytes(data)
        assert learn(path, size=12)[0] == SMALL_ENTRIES, name


def test_a_lone_surrogate_in_json_is_dropped(write):
    path = write('{"text": "a\\ud83db"}\n{"text": "ab"}\n')
    assert learn(path, size=9, input_format="jsonl")[0] == [*SPECIALS, "a", "b", "##b", "ab"]


def test_too_little_text_and_too_small_a_vocabulary_are_rejected_with_the_number(write):
    path = write(SMALL)
    with pytest.raises(UserError, match="--vocab_size=13: the text only gives 12 entries; use "):
        learn(path, size=13)
    with pytest.raises(UserError, match="--vocab_size=9: .* alone are 10 entries; use"):
        learn(path, size=9)
    with pytest.raises(UserError, match="no text in 1 files, the first is .*text.txt"):
        learn(write("\n \n\x00\n"), size=12)


def test_ideographs_get_the_entries_that_merges_leave(monkeypatch):
    counts = dict.fromkeys(map(chr, range(0x4E00, 0x4E00 + 4000)), 1)
    assert learning.train(counts, 4005) == [*SPECIALS, *counts]
    with pytest.raises(UserError, match="--vocab_size=4006: the text only gives 4005 entries"):
        learning.train(counts, 4006)
    monkeypatch.setattr(learning, "MIN_ALPHABET", 2)
    mixed = {"ab": 5000, "中": 4, "文": 3, "cd": 2}
    assert learning.train(mixed, 12) == [*SPECIALS, "a", "b", "c", "中", "文", "##b", "ab"]


def test_the_number_in_the_error_works(monkeypatch):
    """Check it with all characters as entries, and where the next one would take two entries."""
    monkeypatch.setattr(learning, "MIN_ALPHABET", 2)
    ideographs = {chr(code): 1 for code in range(0x4E00, 0x4E00 + 60)}
    for counts, vocab_size, expected in (
        ({**ideographs, "ab": 5000, "abab": 5000}, 200, 72),
        ({"中": 9, "a": 5, "ba": 1}, 7, 6),
    ):
        with pytest.raises(UserError) as caught:
            learning.train(counts, vocab_size)
        assert most_entries(caught.value) == expected
        assert len(learning.train(counts, expected)) == expected


def test_the_alphabet_holds_the_most_frequent_characters():
    counts = {"ab": 5, "é": 3, "ñ": 3, "ba": 1, "中": 1}
    assert learning.alphabet(counts, 4) == ["a", "b", "##a", "##b"]
    # Only one of é and ñ fits.
    assert learning.alphabet(counts, 5) == ["a", "b", "é", "##a", "##b"]
    assert learning.alphabet(counts, 10) == ["a", "b", "é", "ñ", "中", "##a", "##b"]


def test_words_with_a_character_outside_the_alphabet_contribute_no_piece():
    counts = {"ab": 5, "aa": 3, "aaé": 4}
    assert learning.merge(counts, 20, 256)[11:] == ["aa", "ab", "aaé"]
    assert learning.merge(counts, 20, 5)[5:] == ["a", "b", "##a", "##b", "ab", "aa"]


def test_words_are_weighted_by_their_count():
    assert learning.merge({"ab": 20_001, "cd": 20_002}, 20, 256)[11:] == ["cd", "ab"]


def test_case_and_accents_follow_the_normalizer(write):
    path = write("Ä Ä ä\n")
    for do_lower_case, strip_accents, expected in (
        (True, None, ["a"]),
        (True, False, ["ä"]),
        (False, None, ["Ä", "ä"]),
        (False, True, ["A", "a"]),
    ):
        size = len(SPECIALS) + len(expected)
        entries, _ = learn(
            path, size=size, do_lower_case=do_lower_case, strip_accents=strip_accents
        )
        assert entries[len(SPECIALS) :] == expected


def test_words_that_no_vocabulary_can_hold_are_skipped():
    counts, _ = count(["ab " + "x" * 201, "y" * 200])
    assert counts == {"ab": 1, "y" * 200: 1} and NEVER not in counts
    # Blanks of any kind are skipped, too.
    blanks = "".join(filter(str.isspace, map(chr, range(0x11000))))
    assert count([f"a{blank}b" for blank in blanks if blank != "\n"])[0].keys() <= {"a", "b", "ab"}


def test_no_entry_is_longer_than_the_limit_of_the_tokenizer(write, tmp_path, monkeypatch):
    letters = "".join(map(chr, range(0x12000, 0x12000 + 100)))  # Each character takes 4 bytes.
    # The held-out line is the last one.
    path = write("\n".join(letters[:end] for end in range(100, 0, -1)))
    with pytest.raises(UserError) as caught:
        learn(path, size=5000, do_lower_case=False)
    entries, _ = learn(path, size=most_entries(caught.value), do_lower_case=False)
    assert max(len(entry.removeprefix("##")) for entry in entries) == 63
    # Without the limit, the error is raised before anything is written.
    monkeypatch.setattr(learning, "MAX_ENTRY_CHARACTERS", 1000)
    settings = learn_vocab.LearnVocabSettings(
        (str(path),), str(tmp_path / "vocab.txt"), vocab_size=len(entries), do_lower_case=False
    )
    with pytest.raises(UserError, match="exceeds the max supported"):
        learn_vocab.main(settings)
    assert [found.name for found in tmp_path.iterdir()] == ["text.txt"]


def test_word_counts_do_not_depend_on_the_batch_size(monkeypatch):
    words = [f"w{number % 97}" for number in range(5000)]
    lines = [" ".join(words[begin : begin + 7]) for begin in range(0, len(words), 7)]
    expected = {word: words.count(word) for word in {*words}}
    assert count(lines)[0] == expected
    monkeypatch.setattr(learning, "BATCH_BYTES", 100)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    counts, said = count(lines)
    assert counts == expected and list(counts) == list(dict.fromkeys(words))
    assert "counted 0.0 MB, 97 distinct words" in said[-1] and len(said) > 10


@pytest.mark.slow
def test_over_the_cap_the_rarest_words_are_dropped_with_a_warning(monkeypatch):
    monkeypatch.setattr(learning, "MAX_WORDS", 4)
    monkeypatch.setattr(learning, "BATCH_BYTES", 1)  # One batch per line.
    assert not any("dropped" in line for line in count(["a a a b b", "c d"])[1])
    # e is the fifth word and drops words seen once; so does d, which is new again.
    counts, said = count(["a a a b b", "c d e", "f g", "a d", "d"])
    assert counts == {"a": 4, "b": 2, "d": 1}
    # Of five words at most two stay, so there is space again.
    assert count(["a a a b b c c d d e"])[0] == {"a": 3}
    expected = "over 4 distinct words: dropped the rarest, seen up to 1 times by then"
    assert said[-1] == expected


def test_every_100th_line_is_held_out(monkeypatch):
    held_out = []
    assert list(learning.hold_out(range(1, 100), held_out)) == list(range(1, 100))
    assert held_out == []
    lines = [str(number).encode() for number in range(1, 1101)]
    assert len(list(learning.hold_out(lines, held_out))) == 1089
    assert held_out == lines[99::100]
    for name, value in (("MAX_HELD_OUT_LINES", 3), ("MAX_HELD_OUT_BYTES", 11)):
        with monkeypatch.context() as patch:
            patch.setattr(learning, name, value)
            held_out = []
            counted = list(learning.hold_out(lines, held_out))
            assert held_out == [b"400", b"800"]
            assert sorted([*counted, *held_out]) == sorted(lines)


@pytest.mark.medium
def test_pieces_per_word_and_unknown_tokens_are_measured_on_held_out_text(write):
    text = "ab abb\n" * 99
    # ab, ab ##b, [UNK], b: five tokens of four words.
    entries, said = learn(write(text + "ab abb zz b\n"), size=9)
    assert entries == [*SPECIALS, "a", "b", "##b", "ab"]
    assert said[-3:-1] == [
        "merging: 2 distinct words",
        "9 entries, uncased; 2 distinct words; 1.250 pieces per word and 20.000% [UNK] on 4 "
        "held-out words",
    ]
    assert said[-1].startswith("warning: --input: held-out lines: 20.0% of 5 tokens are [UNK]: ")
    _, said = learn(write("Äb ab\n" * 100), size=10, do_lower_case=False, strip_accents=True)
    assert said[-1].endswith("1.500 pieces per word and 0.000% [UNK] on 2 held-out words")
    assert "[UNK] not measured: under 100 lines" in learn(write(text), size=9)[1][-1]


def test_entries_that_no_held_out_line_has_are_not_written(write, tmp_path):
    path = write("a b\n" + "ab" * 150 + "\n" + ("ba" * 150 + "\n") * 98)
    output = tmp_path / "vocab.txt"
    settings = learn_vocab.LearnVocabSettings(input=(str(path),), output=str(output), vocab_size=7)
    with pytest.raises(UserError, match=r"held-out lines: all 1 tokens are \[UNK\]"):
        learn_vocab.main(settings)
    assert not output.exists()


@pytest.mark.slow
def test_the_bytes_are_the_same_in_any_process(run_command, tmp_path):
    """Use many equally frequent words, so that only alphabetical order decides between them."""
    letters = "abcdefghijklmnopqrstuvwxyzéßжя"
    words = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    words = np.random.default_rng(0).permutation([word + end for word in words for end in "qkи"])
    for number, part in enumerate(np.split(words, 2)):
        (tmp_path / f"{number}.txt").write_text("\n".join(part) + "\n")
    found = []
    for seed, order in (("1", "01"), ("2", "10")):
        output = tmp_path / f"vocab{seed}.txt"
        done = run_command(
            "bert_tf.learn_vocab",
            "--input=" + ",".join(f"{tmp_path}/{number}.t*t" for number in order),
            f"--output={output}",
            "--vocab_size=900",
            "--strip_accents=false",
            env={"PYTHONHASHSEED": seed},
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert done.stderr.endswith(f"{output}: 900 entries\n")
        found.append(output.read_bytes())
    assert found[0] == found[1]
    assert Vocabulary.load(output).entries == tuple(
        learn(*tmp_path.glob("?.txt"), size=900, strip_accents=False)[0]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "setup.py"}, "--output=setup.py: is part of the input setup.py; name"),
        ({"output": "Makefile"}, "--output=Makefile: already exists; name another --output"),
        (
            {"output": "absent/vocab.txt"},
            "--output=absent/vocab.txt: expected a file in an",
        ),
        ({"input": "setup.py,absent*"}, "--input=absent*: no such file"),
        ({"input": ""}, "--input is required: text files"),
        ({"vocab_size": 5}, "--vocab_size=5: expected an integer > 5"),
        ({"input_format": "pdf"}, "should be one of"),
    ],
)
def test_impossible_flags_are_rejected(changes, message):
    values = {"input": "setup.py", "output": "/absent", "vocab_size": 100, **changes}
    arguments = [f"--{name}={value}" for name, value in values.items()]
    with pytest.raises((UserError, flags.Error)) as caught:
        command.parse(learn_vocab.LearnVocabSettings, ["learn_vocab", *arguments])
    assert message in str(caught.value)


def test_flags_are_rejected_before_tensorflow_is_imported(run_command, tmp_path):
    (tmp_path / "tensorflow.py").write_text("import os\nos._exit(77)\n")
    done = run_command(
        "bert_tf.learn_vocab",
        "--input=setup.py",
        "--output=setup.py",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--output=setup.py: is part of the input" in done.stderr


def test_an_output_that_appears_meanwhile_is_not_overwritten(write, tmp_path):
    settings = learn_vocab.LearnVocabSettings(
        (str(write(SMALL)),), str(tmp_path / "vocab.txt"), vocab_size=12
    )
    learn_vocab.main(settings)
    assert (tmp_path / "vocab.txt").read_text() == "\n".join(SMALL_ENTRIES) + "\n"
    with pytest.raises(UserError, match="already exists"):
        learn_vocab.main(settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "vocab.txt"]


@pytest.mark.medium
@pytest.mark.parametrize("do_lower_case", [True, False])
def test_a_vocabulary_of_novels_has_the_requested_size_and_its_entries_are_used(
    data_dir, write, do_lower_case
):
    with open(data_dir / "text/books.txt", encoding="utf-8") as file:
        path = write(file.read(1_000_000))
    entries, said = learn(path, size=4000, do_lower_case=do_lower_case)
    assert len(entries) == len({*entries}) == 4000 and tuple(entries[:5]) == SPECIALS
    vocabulary = Vocabulary(entries)
    assert vocabulary.looks_cased() == (not do_lower_case)
    lines = path.read_text(encoding="utf-8").split("\n")
    ids = Tokenizer(vocabulary, do_lower_case).tokenize(lines).ids.flat_values.numpy()
    used = np.unique(ids)
    # Unused entries are pieces that were merged into longer ones at every occurrence.
    assert len(used) > 0.9 * 4000
    assert np.mean(ids == vocabulary["[UNK]"]) < 1e-3
    pieces = float(said[-1].split(" pieces per word")[0].split("; ")[-1])
    assert 1.05 < pieces < 1.5
