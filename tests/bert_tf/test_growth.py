"""Growth of a model: words for [unused] entries and new rows, more positions."""

import dataclasses

import numpy as np
import pytest

from bert_tf import Encoder, UserError, Vocabulary, convert, read_pretrained
from bert_tf.conversion import growth
from bert_tf.text.tokenizer import Tokenizer
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights
from tests import small
from tests.conftest import WORDS
from tests.rows import as_others_write

WORD = "bert/embeddings/word_embeddings"
POSITION = "bert/embeddings/position_embeddings"


@pytest.fixture
def pretrained(config):
    """Return a model with two [unused] entries."""
    vocabulary = Vocabulary([*WORDS, "[unused0]", "[unused7]"])
    config = dataclasses.replace(config, vocab_size=len(vocabulary))
    weights = small.random_weights(config, parts=name_map.COMPONENTS)
    return PretrainedWeights(config, vocabulary, weights, "test")


def ids_of(pretrained, texts):
    tokenizer = Tokenizer.from_config(pretrained.config, pretrained.vocabulary)
    return tokenizer.tokenize(texts).ids.to_list()


@pytest.mark.medium
def test_words_take_unused_entries_first_and_are_means_of_their_pieces(pretrained):
    grown, added = growth.add_tokens(pretrained, ["unable", "cs", "xyz", "bs", "the", "cs"])
    assert added == (
        "4 words added (2 in place of [unused] entries, 2 appended, 1 of them [UNK] before), "
        "2 already present"
    )
    count = len(WORDS) + 4
    assert grown.vocabulary.entries[-4:] == ("unable", "cs", "xyz", "bs")
    assert grown.config.vocab_size == len(grown.vocabulary) == count
    entry = pretrained.vocabulary
    pieces = [
        [entry["un"], entry["##able"]],
        [entry["c"], entry["##s"]],
        [entry["[UNK]"]],
        [entry["b"], entry["##s"]],
    ]
    for name in (WORD, "masked_lm/output_bias"):
        before, after = pretrained.weights[name], grown.weights[name]
        assert after.dtype == np.float32
        assert after.shape == (count, *before.shape[1:])
        np.testing.assert_array_equal(after[: len(WORDS)], before[: len(WORDS)])
        for row, ids in zip(after[-4:], pieces, strict=True):
            np.testing.assert_allclose(row, before[ids].mean(0), rtol=1e-6)
    assert ids_of(grown, ["Unable cs, xyz!"])[0][:2] == [count - 4, count - 3]


@pytest.mark.medium
def test_the_grown_model_gives_other_texts_the_same_outputs(pretrained, inputs_BL):
    grown, _ = growth.add_tokens(pretrained, ["unable", "xyz", "bs"])
    grown = growth.extend_positions(grown, 40)
    outputs = []
    for model in (pretrained, grown):
        encoder = Encoder(model.config)
        encoder.build()
        model.assign_to(encoder)
        outputs.append(encoder(inputs_BL)["pooled"].numpy())
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("word", "reads"),
    [
        ("covid-19", "'covid' '-' '19'"),
        ("Berlin", "'berlin'"),
        ("naïve", "'naive'"),
        ("two words", "'two' 'words'"),
        ("##ing", "'#' '#' 'ing'"),
        ("[NEW]", r"'\[' 'new' '\]'"),
        ("中文", "'中' '文'"),
        ("\u0301", "nothing"),
    ],
)
def test_words_that_the_tokenizer_never_produces_are_refused(pretrained, word, reads):
    with pytest.raises(
        UserError, match=f"words.txt: .* is never a token: the tokenizer reads {reads}"
    ):
        growth.add_tokens(pretrained, ["fine", word], "words.txt")


@pytest.mark.medium
def test_a_cased_model_keeps_case_and_accents(pretrained):
    config = dataclasses.replace(pretrained.config, do_lower_case=False)
    cased = dataclasses.replace(pretrained, config=config)
    grown, _ = growth.add_tokens(cased, ["Zürich"])
    assert ids_of(grown, ["Zürich zürich"])[0] == [grown.vocabulary["Zürich"], 1]


def test_a_word_that_is_too_long_is_refused(pretrained):
    with pytest.raises(UserError, match="words: 'aaa.* of at most 100 characters"):
        growth.add_tokens(pretrained, ["a" * 201])
    config = dataclasses.replace(pretrained.config, max_input_chars_per_word=200)
    with pytest.raises(UserError, match="vocabulary of .* entries: "):  # 300 bytes of UTF-8.
        growth.add_tokens(dataclasses.replace(pretrained, config=config), ["ж" * 150])


def test_positions_repeat_from_the_first(pretrained):
    grown = growth.extend_positions(pretrained, 40)
    before, after = pretrained.weights[POSITION], grown.weights[POSITION]
    assert grown.config.max_position_embeddings == 40
    np.testing.assert_array_equal(after, np.concatenate([before, before, before[:8]]))
    with pytest.raises(UserError, match="--extend_positions=16: the model has 16 positions"):
        growth.extend_positions(pretrained, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no words; expected one word per line"),
        (b"\n \n", "no words; expected one word per line"),
        (b"\xff", "not UTF-8 at byte 0"),
        (None, "no such file; expected a file with one word per line, at most"),
    ],
)
def test_a_file_without_words_is_rejected(tmp_path, content, message):
    if content is not None:
        (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        growth.read_words(tmp_path / "words.txt")


def test_words_of_other_programs_are_read(tmp_path):
    for name, data in as_others_write("zwei\ndrei\n").items():
        (tmp_path / "words.txt").write_bytes(data)
        assert growth.read_words(tmp_path / "words.txt") == ["zwei", "drei"], name


@pytest.mark.medium
@pytest.mark.parametrize("format", ["run", "huggingface", "google"])
def test_every_format_gets_the_words_and_positions(huggingface_dir, tmp_path, format, capsys):
    (tmp_path / "words.txt").write_text("unable\n\nnew\nthe\n")
    settings = convert.ConvertSettings(
        str(huggingface_dir),
        str(tmp_path / "out"),
        format=format,
        add_tokens=str(tmp_path / "words.txt"),
        extend_positions=20,
    )
    settings.check()
    convert.main(settings)
    grown = read_pretrained(tmp_path / "out")
    assert grown.vocabulary.entries == (*WORDS, "unable", "new")
    assert grown.weights[WORD].shape[0] == len(WORDS) + 2
    assert grown.weights[POSITION].shape[0] == 20
    assert (
        "words.txt: 2 words added (0 in place of [unused] entries, 2 appended, 1 of them [UNK] "
        "before), 1 already present\n" in capsys.readouterr().err
    )
