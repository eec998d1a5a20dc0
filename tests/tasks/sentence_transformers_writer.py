"""Write models with sentence-transformers, and the vectors and scores that it computes.

    python sentence_transformers_writer.py DIRECTORY VOCABULARY TEXTS
    python sentence_transformers_writer.py --read DIRECTORY NAMES TEXTS

Run by the interpreter of BERT_TF_SENTENCE_TRANSFORMERS_PYTHON. TEXTS is a JSON list. The first form
writes DIRECTORY/NAME per model; the second one reads the models NAMES, a list with commas. Both
write DIRECTORY/outputs.npz, with an array per name, and fail if the library warns.
"""

import json
import logging
import pathlib
import shutil
import sys
import warnings

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # So large that every component matters.
}
SHORT = 12  # Characters of a text of a pair.
PROMPTS = {"query": "find: ", "document": ""}


def write_all(directory, vocabulary):
    """Write all models."""
    torch.manual_seed(0)
    base = directory / "base"
    write_bert(base, vocabulary, True)
    write_bert(directory / "cased", vocabulary, False)
    save(directory / "cls", base, ["cls"], {"max_seq_length": 64})
    save(directory / "max", base, ["max"], {"max_seq_length": 64}, similarity_fn_name="dot")
    dense = [Dense(24, 10), Dense(10, 6, bias=False, activation_function=torch.nn.Identity())]
    save(directory / "dense", base, ["mean"], {"max_seq_length": 64}, [*dense, Normalize()])
    save(directory / "several", base, ["mean", "cls", "mean_sqrt_len_tokens"], {})
    save(directory / "short", base, ["mean"], {"max_seq_length": 8})
    save(directory / "lower", directory / "cased", ["mean"], {"do_lower_case": True})
    # Version 6 does not find the setting in the files that it writes; earlier ones wrote it here.
    settings = {"max_seq_length": 64, "do_lower_case": True}
    (directory / "lower" / "sentence_bert_config.json").write_text(json.dumps(settings))
    save(directory / "prompts", base, ["mean"], {}, prompts=PROMPTS, default_prompt_name="query")
    to_old_layout(directory / "dense", directory / "old")
    for name, labels, activation in (
        ("sigmoid", 1, torch.nn.Sigmoid()),
        ("identity", 1, torch.nn.Identity()),
        ("three", 3, None),
    ):
        model = CrossEncoder(str(base), num_labels=labels, activation_fn=activation, max_length=32)
        model.save_pretrained(str(directory / f"cross_{name}"))
    shutil.rmtree(base)
    shutil.rmtree(directory / "cased")


def write_bert(directory, vocabulary, lower):
    """Write a BERT with random weights, as transformers does."""
    entries = vocabulary.read_text(encoding="utf-8").splitlines()
    config = transformers.BertConfig(vocab_size=len(entries), **SIZES)
    transformers.BertModel(config).save_pretrained(directory)
    shutil.copy(vocabulary, directory / "vocab.txt")
    tokenizer = transformers.BertTokenizer(
        vocab=str(directory / "vocab.txt"), do_lower_case=lower, model_max_length=64
    )
    tokenizer.save_pretrained(directory)


def save(directory, base, pooling, settings, further=(), **options):
    """Write an embedder."""
    modules = [Transformer(str(base), **settings), Pooling(24, tuple(pooling)), *further]
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    model.save_pretrained(str(directory))


def to_old_layout(source, target):
    """Copy a model as versions before 2 laid it out: a directory per module, other names."""
    shutil.copytree(source, target)
    of_pooling = ("1_Pooling", "2_Dense", "3_Dense", "4_Normalize", "modules.json")
    (target / "0_BERT").mkdir()
    for path in list(target.iterdir()):
        if path.name not in (*of_pooling, "0_BERT"):
            path.rename(target / "0_BERT" / path.name)
    (target / "0_BERT" / "config_sentence_transformers.json").unlink()
    modules = json.loads((target / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].split('.')[-1]}"
    modules[0]["path"] = "0_BERT"
    (target / "modules.json").write_text(json.dumps(modules))
    config = {
        "word_embedding_dimension": 24,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    (target / "1_Pooling" / "config.json").write_text(json.dumps(config))
    settings = {"max_seq_length": 64, "do_lower_case": False}
    (target / "0_BERT" / "sentence_bert_config.json").write_text(json.dumps(settings))
    dense = target / "2_Dense"
    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()


def outputs_of(path, texts):
    """Return what a model computes."""
    if path.name.startswith("cross_"):
        model = CrossEncoder(str(path), device="cpu")
        # It truncates pairs in another way if both texts are long.
        texts = [text[:SHORT] for text in texts]
        return model.predict(list(zip(texts, texts[::-1], strict=True)))
    model = SentenceTransformer(str(path), device="cpu")
    vectors = model.encode(texts, convert_to_numpy=True)
    if path.name == "prompts":
        return np.stack([vectors, model.encode(texts, prompt_name="document")])
    return vectors


class Warned(logging.Handler):
    """Handler that raises what the libraries log as a warning."""

    def emit(self, record):
        """Raise the message, except that a model has a default prompt."""
        if not record.getMessage().startswith("Default prompt name is set"):
            raise RuntimeError(record.getMessage())


def main(*arguments):
    """Write or read the models; see the head of this file."""
    if is_reading := arguments[0] == "--read":
        directory, names, texts = arguments[1:]
        names = names.split(",")
        warnings.simplefilter("error", FutureWarning)
        for name in ("sentence_transformers", "transformers"):
            logging.getLogger(name).addHandler(Warned(logging.WARNING))
    else:
        directory, vocabulary, texts = arguments
        write_all(pathlib.Path(directory), pathlib.Path(vocabulary))
        names = sorted(path.parent.name for path in pathlib.Path(directory).glob("*/modules.json"))
    directory = pathlib.Path(directory)
    texts = json.loads(pathlib.Path(texts).read_text(encoding="utf-8"))
    outputs = {name: outputs_of(directory / name, texts) for name in names}
    np.savez(directory / ("read.npz" if is_reading else "outputs.npz"), **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
