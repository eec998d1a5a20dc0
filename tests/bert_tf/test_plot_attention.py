"""Plots of attention: values, images, the page in a JavaScript engine, and the command."""

import dataclasses
import json
import pathlib
import re
import shutil
import struct
import subprocess
import warnings

import numpy as np
import pytest

from bert_tf import Encoder, UserError, plot_attention
from bert_tf.attention_maps.plots import (
    LARGEST,
    Attention,
    attention_of,
    head_image,
    layer_image,
    page,
)
from bert_tf.plot_attention import PlotAttentionSettings
from bert_tf.system import command
from bert_tf.weights import sources
from bert_tf.weights.sources import read_pretrained
from tests import small

SCRIPTS = ["[CLS]", "$x", "你", "##好", "مرحبا", "😀", "<b>", "&", "</script>", "[SEP]"]
# A document for the page's script: elements are objects that record what is done to them.
DOCUMENT = """
const made = {};
const create = (name) => ({
  name, children: [], style: {}, listeners: {}, value: "0", textContent: "",
  append(...more) { this.children.push(...more); },
  replaceChildren(...more) { this.children = more; },
  addEventListener(kind, call) { this.listeners[kind] = call; },
});
globalThis.document = {
  createElement: create,
  getElementById: (id) => (made[id] ??= create(id)),
};
"""
LOOK = """
made.layer.value = "1";
made.head.value = "2";
made.layer.listeners.change();
const [top, body] = made.matrix.children;
const cell = body.children[3].children[5];
cell.listeners.mouseenter();
console.log(JSON.stringify({
  layers: made.layer.children.map((option) => option.textContent),
  heads: made.head.children.length,
  names: top.children[0].children.map((name) => name.textContent),
  color: body.children[9].children[0].style.color,
  value: made.value.textContent,
}));
"""


def example(tokens):
    rng = np.random.default_rng(0)
    weights = rng.random((2, 3, len(tokens), len(tokens))).astype(np.float32)
    segments = [0] * (len(tokens) - 2) + [1, 1]
    return Attention(tokens, segments, weights / weights.sum(-1, keepdims=True))


def size_of(image):
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", image[16:24])


def test_the_attention_is_that_of_the_encoder(huggingface_dir, vocabulary):
    pretrained = read_pretrained(huggingface_dir)
    found = attention_of(pretrained, "the bill is", "too high", max_seq_length=16)
    assert found.tokens == "[CLS] the bill is [SEP] too high [SEP]".split()
    assert found.segments == [0] * 5 + [1] * 3
    assert found.weights_NATT.shape == (2, 3, 8, 8)
    encoder = Encoder.from_pretrained(huggingface_dir)
    ids = np.array([[vocabulary[token] for token in found.tokens]], np.int32)
    inputs = {"input_ids": ids, "segment_ids": np.array([found.segments], np.int32)}
    attentions = encoder(inputs, output_hidden_states=True)["attentions"]
    np.testing.assert_allclose(found.weights_NATT[1, 2], attentions[1][0, 2], atol=1e-6)
    with pytest.raises(UserError, match="--max_seq_length=17: expected at most 16"):
        attention_of(pretrained, "a", max_seq_length=17)


@pytest.mark.medium
@pytest.mark.plots
@pytest.mark.parametrize("tokens", [SCRIPTS, ["word"] * 80])
def test_images_of_few_and_many_tokens_in_any_script(tokens):
    attention = example(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, grid = head_image(attention, 1, 2), layer_image(attention, 0)
    width, height = size_of(one)
    assert min(width, height) >= 5 * len(tokens)
    assert size_of(grid)[0] > size_of(grid)[1]  # Three heads beside each other.


@pytest.mark.plots
def test_a_plot_leaves_matplotlib_as_it_is():
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.get_backend()
    try:
        matplotlib.use("svg")  # As a notebook selects its own.
        settings = dict(matplotlib.rcParams)
        head_image(example(SCRIPTS), 0, 0)
        assert dict(matplotlib.rcParams) == settings
    finally:
        matplotlib.use(before)


@pytest.mark.parametrize("task", [None, {"kind": "classification"}])
def test_mask_is_a_token_in_weights_without_the_head_of_a_task(huggingface_dir, task):
    pretrained = dataclasses.replace(read_pretrained(huggingface_dir), task=task)
    found = attention_of(pretrained, "the [MASK]", max_seq_length=16)
    assert ("[MASK]" in found.tokens) == (task is None)


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_page_shows_the_values_of_the_chosen_head(tmp_path):
    attention = example(SCRIPTS)
    text = page(attention)
    assert not re.search(r"(src|href)=|https?:", text)  # Nothing is loaded.
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (tmp_path / "page.js").write_text(DOCUMENT + script + LOOK, encoding="utf-8")
    done = subprocess.run(
        ["node", tmp_path / "page.js"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["layers"], found["heads"]) == (["0", "1"], 3)
    assert found["names"] == ["", *SCRIPTS] and found["color"] == "#935116"
    words, _, number = found["value"].rpartition(": ")
    # The first cell of a row is its name, so that cell 5 is of token 4.
    assert words == f"{SCRIPTS[3]} → {SCRIPTS[4]}"
    assert float(number) == pytest.approx(attention.weights_NATT[1, 2, 3, 4], abs=1e-4)
    assert LARGEST == 65_535


def test_tokens_may_be_the_words_of_the_template():
    text = page(example(["[CLS]", "DATA", "TITLE", "[SEP]"]))
    assert "<title>Attention: [CLS] DATA TITLE [SEP]</title>" in text
    assert '"tokens": ["[CLS]", "DATA", "TITLE", "[SEP]"]' in text


@pytest.mark.plots
@pytest.mark.parametrize(
    ("name", "flags"), [("x.png", ["--layer=0", "--head=1"]), ("x.png", []), ("x.html", [])]
)
def test_the_command_writes_the_file(huggingface_dir, tmp_path, name, flags):
    output = tmp_path / name
    flags = [f"--run={huggingface_dir}", "--text=the bill", "--max_seq_length=8", *flags]
    parse = (PlotAttentionSettings, ["plot_attention", *flags, f"--output={output}"])
    settings, _ = command.parse(*parse)
    settings.check()
    plot_attention.main(settings)
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG" if name == "x.png" else b"<!DOCTYPE html>")
    with pytest.raises(UserError, match="already exists"):
        command.parse(*parse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "x.jpg"}, r"--output=x\.jpg: expected a \.png or \.html file"),
        ({"output": "x.html", "layer": 0}, "--layer, --head: expected with a .png"),
        ({"layer": 2}, r"--layer=2: expected an integer in \[0, 1\]"),
        ({"head": -1}, r"--head=-1: expected an integer in \[0, 2\]"),
        ({"text": "caf\udce9"}, r"--text: expected UTF-8, received 'caf\\udce9'"),
        ({"text_b": "caf\udce9"}, "--text_b: expected UTF-8"),
    ],
)
def test_wrong_flags_are_reported(huggingface_dir, changes, message):
    values = {"run": str(huggingface_dir), "text": "a", "output": "x.png", **changes}
    with pytest.raises(UserError, match=message):
        PlotAttentionSettings(**values).check()


@pytest.mark.parametrize("flag", [{"layer": 2}, {"layer": -1}, {"head": 3}, {"head": -1}])
def test_a_configuration_that_is_read_late_is_checked(huggingface_dir, tmp_path, monkeypatch, flag):
    monkeypatch.setattr(sources, "check", lambda path: None)  # As of a remote path.
    values = {"run": str(huggingface_dir), "text": "a", "output": str(tmp_path / "x.png")}
    settings = PlotAttentionSettings(**values, max_seq_length=8, **flag)
    settings.check()
    ((name, value),) = flag.items()
    with pytest.raises(UserError, match=f"--{name}={value}: expected an integer in"):
        plot_attention.main(settings)
    assert not (tmp_path / "x.png").exists()


def test_without_matplotlib_the_message_names_the_extra():
    with pytest.raises(UserError, match=r"pip install 'bert_tf\[plots\]'"):
        head_image(example(SCRIPTS), 0, 0)


def test_one_segment_refuses_a_second_text(tmp_path, config, vocabulary):
    config = dataclasses.replace(config, type_vocab_size=1)
    path = small.write_huggingface(pathlib.Path(tmp_path / "one"), config, vocabulary)
    with pytest.raises(UserError, match="--text_b: .* has no second segment"):
        attention_of(read_pretrained(path), "a", "b", max_seq_length=8)
