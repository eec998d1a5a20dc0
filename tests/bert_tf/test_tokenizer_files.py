"""Tokenizers of Hugging Face directories: settings that change ids are honoured or rejected."""

import dataclasses
import json
import warnings

import pytest
import tokenizers

from bert_tf import Tokenizer, UserError, Vocabulary, read_pretrained
from tests import small
from tests.conftest import WORDS
from tests.huggingface_files import tokenizer_json, write_json


@pytest.fixture
def modern_dir(huggingface_dir, vocabulary):
    """Return a Hugging Face directory as transformers 5 saves it, without vocab.txt."""
    (huggingface_dir / "vocab.txt").unlink()
    write_json(huggingface_dir / "tokenizer.json", tokenizer_json(vocabulary))
    return huggingface_dir


def edit(path, change):
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    write_json(path, values)


def case(directory):
    config = read_pretrained(directory).config
    return config.do_lower_case, config.strip_accents


def test_the_vocabulary_is_read_from_tokenizer_json_alone(modern_dir, vocabulary):
    assert read_pretrained(modern_dir).vocabulary.lines == vocabulary.lines
    edit(modern_dir / "tokenizer.json", lambda values: values["model"].pop("type"))
    assert read_pretrained(modern_dir).vocabulary.lines == vocabulary.lines


@pytest.mark.parametrize("index", [4, 28])
def test_special_tokens_may_be_among_the_added_ones_only(modern_dir, vocabulary, index):
    """[MASK] was added to a vocabulary that was trained without it."""
    lines = [line for line in vocabulary.lines if line != "[MASK]"]
    lines.insert(index, "[MASK]")
    values = tokenizer_json(Vocabulary(lines))
    del values["model"]["vocab"]["[MASK]"]
    write_json(modern_dir / "tokenizer.json", values)
    assert read_pretrained(modern_dir).vocabulary.lines == tuple(lines)


def test_old_files_name_the_tokens_of_the_post_processor(modern_dir, vocabulary):
    processor = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    edit(modern_dir / "tokenizer.json", lambda values: values.update(post_processor=processor))
    assert read_pretrained(modern_dir).vocabulary.lines == vocabulary.lines


@pytest.mark.parametrize(
    ("settings", "normalizer", "expected"),
    [
        # The classes of BERT lower-case by default, whatever tokenizer.json says.
        (None, {"lowercase": False}, (True, None)),
        ({}, {"lowercase": False, "strip_accents": False}, (True, None)),
        ({"do_lower_case": False}, {}, (False, None)),
        ({"do_lower_case": True}, {"lowercase": False}, (True, None)),
        ({"do_lower_case": True, "strip_accents": False}, {}, (True, False)),
        ({"strip_accents": None}, {"strip_accents": False}, (True, None)),
        (
            {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True},
            {"lowercase": False, "strip_accents": True},
            (False, True),
        ),
        ({"tokenizer_class": "TokenizersBackend"}, {"lowercase": False}, (False, None)),
        (
            {"tokenizer_class": "BertTokenizerFast", "tokenize_chinese_chars": True},
            {"handle_chinese_chars": False},
            (True, None),
        ),
    ],
)
def test_tokenizer_config_overrides_tokenizer_json_unless_it_is_generic(
    modern_dir, settings, normalizer, expected
):
    (modern_dir / "tokenizer_config.json").unlink()
    if settings is not None:
        write_json(modern_dir / "tokenizer_config.json", settings)
    edit(modern_dir / "tokenizer.json", lambda values: values["normalizer"].update(normalizer))
    assert case(modern_dir) == expected


def test_the_class_may_be_in_config_json_alone(modern_dir):
    def write(of_config, of_tokenizer):
        edit(modern_dir / "config.json", lambda values: values.update(tokenizer_class=of_config))
        write_json(modern_dir / "tokenizer_config.json", of_tokenizer)

    edit(modern_dir / "tokenizer.json", lambda values: values["normalizer"].update(lowercase=False))
    write("PreTrainedTokenizerFast", {"do_lower_case": True})
    assert case(modern_dir) == (False, None)
    write("BertJapaneseTokenizer", {"tokenizer_class": "BertTokenizer"})
    assert case(modern_dir) == (True, None)
    for settings in ({}, {"tokenizer_class": None, "do_lower_case": False}):
        write("BertJapaneseTokenizer", settings)
        with pytest.raises(UserError, match="is 'BertJapaneseTokenizer', in .* or config.json"):
            read_pretrained(modern_dir)


def test_a_cased_vocabulary_decides_only_without_tokenizer_json(huggingface_dir):
    (huggingface_dir / "tokenizer_config.json").unlink()
    cased = Vocabulary([*WORDS[:-1], "The"])
    cased.save(huggingface_dir / "vocab.txt")
    assert case(huggingface_dir) == (False, None)
    write_json(huggingface_dir / "tokenizer.json", tokenizer_json(cased, lowercase=False))
    assert case(huggingface_dir) == (True, None)


def test_sentence_transformers_lower_case_before_the_tokenizer(huggingface_dir):
    write_json(huggingface_dir / "sentence_bert_config.json", {"do_lower_case": True})
    assert case(huggingface_dir) == (True, None)
    write_json(huggingface_dir / "tokenizer_config.json", {"do_lower_case": False})
    assert case(huggingface_dir) == (True, False)
    write_json(huggingface_dir / "sentence_bert_config.json", {"do_lower_case": False})
    assert case(huggingface_dir) == (False, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["normalizer"].update(type="NFKC"), "normalizer.type='NFKC'"),
        (lambda v: v["normalizer"].update(clean_text=False), "normalizer.clean_text=False"),
        (
            lambda v: v["normalizer"].update(handle_chinese_chars=False),
            "normalizer.handle_chinese_chars=False",
        ),
        (lambda v: v.update(normalizer=None), '"normalizer" is None'),
        (
            lambda v: v["pre_tokenizer"].update(type="WhitespaceSplit"),
            "pre_tokenizer.type='WhitespaceSplit'",
        ),
        (lambda v: v["model"].update(type="BPE"), "model.type='BPE'"),
        (lambda v: v["model"].update(unk_token="<unk>"), "model.unk_token='<unk>'"),
        (
            lambda v: v["model"].update(continuing_subword_prefix="__"),
            "model.continuing_subword_prefix='__'",
        ),
        (
            lambda v: v["model"].update(max_input_chars_per_word="5"),
            "tokenizer: configuration: max_input_chars_per_word is '5'; expected an integer >= 1",
        ),
        (
            lambda v: v["model"].update(max_input_chars_per_word=10**9),
            "max_input_chars_per_word is 1e\\+09; expected at most",
        ),
        (lambda v: v.update(post_processor=None), '"post_processor" is None'),
        (
            lambda v: v["post_processor"].update(type="RobertaProcessing"),
            "post_processor 'RobertaProcessing' is not supported",
        ),
        (lambda v: v["post_processor"]["single"].pop(), "post_processor 'TemplateProcessing'"),
        (lambda v: v["post_processor"].update(pair=[3]), "post_processor 'TemplateProcessing'"),
        (
            lambda v: v["added_tokens"].append({"id": 28, "content": "my"}),
            "tokenizer.json: the added token 'my' with id 28 is not supported",
        ),
        (lambda v: v["added_tokens"][0].update(id=1), "the added token '\\[PAD\\]' with id 1"),
        (lambda v: v.update(added_tokens=[1]), "malformed added tokens"),
        (lambda v: v["model"]["vocab"].update(more=29), "'more' has the id 29; expected 0 to 28"),
        (lambda v: v["model"]["vocab"].update(more=-1), "'more' has the id -1"),
        (lambda v: v["model"]["vocab"].update(the="5"), "'the' has the id '5'"),
        (lambda v: v["model"]["vocab"].update(more=5), "'more' and 'the' have the same id 5"),
        (lambda v: v["model"].update(vocab={}), "0 entries without \\[PAD\\]"),
        (lambda v: v.pop("model"), 'tokenizer.json: no "model"'),
    ],
)
def test_an_unusual_tokenizer_json_is_rejected_by_name(modern_dir, change, message):
    write_json(modern_dir / "tokenizer_config.json", {})
    edit(modern_dir / "tokenizer.json", change)
    with pytest.raises(UserError, match=message) as raised:
        read_pretrained(modern_dir)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer_class": "BertJapaneseTokenizer"},
            "tokenizer_class is 'BertJapaneseTokenizer'",
        ),
        ({"tokenizer_class": ["x"]}, "tokenizer_class is \\['x'\\]"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "tokenizer.json: no such file"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars=False is not supported"),
        ({"do_basic_tokenize": False}, "do_basic_tokenize=False is not supported"),
        ({"never_split": ["x"]}, "never_split=\\['x'\\] is not supported"),
        ({"unk_token": {"content": "<unk>"}}, "unk_token='<unk>' is not supported"),
        ({"auto_map": {"AutoTokenizer": "x.Y"}}, "auto_map={'AutoTokenizer': 'x.Y'} is not supp"),
        ({"truncation_side": "left"}, "truncation_side='left' is not supported"),
        ({"word_tokenizer_type": "mecab"}, "word_tokenizer_type='mecab' is not supported"),
        ({"subword_tokenizer_type": "character"}, "subword_tokenizer_type='character' is not su"),
        ({"additional_special_tokens": ["[E1]"]}, "the added token '\\[E1\\]'"),
        ({"additional_special_tokens": [{"content": "my"}]}, "the added token 'my'"),
        ({"extra_special_tokens": {"entity": "[E1]"}}, "the added token '\\[E1\\]'"),
        ({"added_tokens_decoder": {"28": {"content": "my"}}}, "the added token 'my' with id 28"),
        ({"added_tokens_decoder": {"x": {"content": "my"}}}, "malformed added tokens"),
        ({"do_lower_case": "yes"}, "do_lower_case='yes'"),
    ],
)
def test_settings_that_change_ids_are_rejected_by_name(huggingface_dir, settings, message):
    write_json(huggingface_dir / "tokenizer_config.json", settings)
    with pytest.raises(UserError, match=message) as raised:
        read_pretrained(huggingface_dir)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("added_tokens.json", {"[E1]": 29}),
        ("special_tokens_map.json", {"additional_special_tokens": ["[E1]"]}),
    ],
)
def test_added_tokens_of_older_files_are_rejected(huggingface_dir, name, values):
    write_json(huggingface_dir / name, values)
    with pytest.raises(UserError, match=rf"{name}: the added token '\[E1\]'"):
        read_pretrained(huggingface_dir)


def test_other_special_tokens_of_older_files_are_rejected(huggingface_dir):
    write_json(huggingface_dir / "special_tokens_map.json", {"unk_token": "<unk>"})
    with pytest.raises(UserError, match="special_tokens_map.json: unk_token='<unk>' is not supp"):
        read_pretrained(huggingface_dir)


def test_settings_without_an_effect_on_ids_are_accepted(huggingface_dir):
    write_json(
        huggingface_dir / "tokenizer_config.json",
        {
            "do_lower_case": True,
            "tokenizer_class": "BertTokenizer",
            "model_max_length": 10**30,
            "never_split": None,
            "pad_token": {"content": "[PAD]", "lstrip": False},
            "added_tokens_decoder": {"4": {"content": "[MASK]", "special": True}},
            "name_or_path": "x",
            "word_tokenizer_type": "basic",
            "subword_tokenizer_type": "wordpiece",
        },
    )
    write_json(huggingface_dir / "added_tokens.json", {"[MASK]": 4})
    assert case(huggingface_dir) == (True, None)


def test_both_vocabularies_have_to_agree(huggingface_dir, vocabulary):
    values = tokenizer_json(vocabulary)
    write_json(huggingface_dir / "tokenizer.json", values)
    assert read_pretrained(huggingface_dir).vocabulary.lines == vocabulary.lines
    entries = values["model"]["vocab"]
    entries["the"], entries["bill"] = entries["bill"], entries["the"]
    write_json(huggingface_dir / "tokenizer.json", values)
    with pytest.raises(UserError, match="entry 5 is 'bill', but 'the' in vocab.txt"):
        read_pretrained(huggingface_dir)


def test_a_directory_without_a_vocabulary_is_rejected(huggingface_dir):
    (huggingface_dir / "vocab.txt").unlink()
    with pytest.raises(UserError, match="vocab.txt: no such file; expected vocab.txt or"):
        read_pretrained(huggingface_dir)


@pytest.mark.medium
@pytest.mark.parametrize("limit", [None, 100, 9])
def test_words_are_as_long_as_in_hugging_face(modern_dir, limit):
    """Compare with the tokenizers library around the limit, in ASCII and in other characters."""
    vocabulary = Vocabulary([*WORDS[:-4], "##a", "##b", "e", "##e"])
    path = write_json(modern_dir / "tokenizer.json", tokenizer_json(vocabulary))
    if limit is None:  # Old files do not say it, and a vocab.txt alone cannot.
        edit(path, lambda values: values["model"].pop("max_input_chars_per_word"))
    else:
        edit(path, lambda values: values["model"].update(max_input_chars_per_word=limit))
    lengths = [n for of in (9, 100, 200) for n in (of, of + 1)]
    texts = [unit * n for unit in ("a", "ab", "\u00e9", "A\u0301") for n in lengths]
    texts += [f"the {text} bill" for text in texts]
    ids = {entry: number for number, entry in enumerate(vocabulary.entries)}
    options = {} if limit is None else {"max_input_chars_per_word": limit}
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]", **options))
    theirs.normalizer = tokenizers.normalizers.BertNormalizer()
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    pretrained = read_pretrained(modern_dir)
    tokenizer = Tokenizer.from_config(pretrained.config, pretrained.vocabulary)
    assert {len(ids) for ids in expected} > {1, limit or 100}
    assert tokenizer.tokenize(texts).ids.to_list() == expected
    assert tokenizer.tokenize_with_offsets(texts).ids.to_list() == expected


@pytest.mark.parametrize("has_json", [False, True])
def test_rows_beyond_the_vocabulary_get_placeholders(huggingface_dir, has_json):
    short = Vocabulary(WORDS[:-3])
    short.save(huggingface_dir / "vocab.txt")
    if has_json:
        (huggingface_dir / "vocab.txt").unlink()
        write_json(huggingface_dir / "tokenizer.json", tokenizer_json(short))
    pretrained = read_pretrained(huggingface_dir)
    assert pretrained.vocabulary.lines == (*WORDS[:-3], "[unused26]", "[unused27]", "[unused28]")
    assert pretrained.config.vocab_size == 29


@pytest.mark.parametrize("has_json", [False, True])
@pytest.mark.parametrize(("num_rows", "warns"), [(128, False), (129, True)])
def test_a_table_of_many_more_rows_than_entries_is_reported(
    tmp_path, config, has_json, num_rows, warns
):
    """For example a cased vocab.txt of 28,996 lines next to an uncased model of 30,522 rows."""
    vocabulary = Vocabulary(WORDS)
    config = dataclasses.replace(config, vocab_size=len(WORDS) + num_rows)
    directory = small.write_huggingface(tmp_path / "model", config, vocabulary)
    if has_json:
        write_json(directory / "tokenizer.json", tokenizer_json(vocabulary))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_pretrained(directory)
    messages = [str(one.message) for one in caught if "entries" in str(one.message)]
    assert (
        any(
            f"{directory / 'vocab.txt'}: 29 entries, but the model's embedding has 158 rows"
            in message
            for message in messages
        )
        is warns
    )
    # The other way round it is an error.
    config = dataclasses.replace(config, vocab_size=len(WORDS) - 1)
    directory = small.write_huggingface(tmp_path / "less", config, vocabulary)
    with pytest.raises(UserError, match="29 entries, but the configuration's vocab_size is 28"):
        read_pretrained(directory)


def test_ids_without_an_entry_and_entries_that_match_no_text_get_placeholders(modern_dir):
    def change(values):
        entries = values["model"]["vocab"]
        del entries["the"], entries["bill"], entries["is"]
        entries.update({"": 6, "a\nb": 7})

    edit(modern_dir / "tokenizer.json", change)
    lines = read_pretrained(modern_dir).vocabulary.lines
    assert lines[4:9] == ("[MASK]", "[unused5]", "[unused6]", "[unused7]", "too")


def test_a_table_of_unlimited_size_is_rejected(huggingface_dir):
    edit(huggingface_dir / "config.json", lambda values: values.update(vocab_size=10**9))
    with pytest.raises(
        UserError, match="29 entries, but the configuration's vocab_size is 1000000"
    ):
        read_pretrained(huggingface_dir)
