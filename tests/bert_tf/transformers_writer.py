"""Write models and tokenizers with transformers, and what it reads from them.

    python transformers_writer.py DIRECTORY VOCABULARIES TEXTS

Run by the interpreter of BERT_TF_TRANSFORMERS_PYTHON. VOCABULARIES holds NAME/vocab.txt; TEXTS is a
JSON list. DIRECTORY gets models/NAME with tensors.npz, and tokenizers/NAME with ids.json.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}
CLASSES = (
    "BertModel BertForPreTraining BertForMaskedLM BertForNextSentencePrediction "
    "BertForSequenceClassification BertForTokenClassification BertForQuestionAnswering "
    "BertForMultipleChoice"
).split()


def write_models(directory, vocabulary):
    entries = vocabulary.read_text(encoding="utf-8").splitlines()[:2_000]
    config = transformers.BertConfig(vocab_size=2_048, **SIZES)
    for name in CLASSES:
        model = getattr(transformers, name)(config)
        formats = {name: lambda path, model=model: model.save_pretrained(path)}
        if name == "BertForPreTraining":
            formats |= {
                "shards": lambda path, model=model: model.save_pretrained(
                    path, max_shard_size="30KB"
                ),
                "zip": lambda path, model=model: save_pickle(path, model, True),
                "old": lambda path, model=model: save_pickle(path, model, False),
                "half": lambda path, model=model: model.half().save_pretrained(path),
                "bfloat16": lambda path, model=model: model.bfloat16().save_pretrained(path),
            }
        for kind, save in formats.items():
            path = directory / kind
            save(path)
            (path / "vocab.txt").write_text("\n".join([*entries, ""]), encoding="utf-8")
            state = {key: tensor.float().numpy() for key, tensor in model.state_dict().items()}
            np.savez(path / "tensors.npz", **state)


def save_pickle(path, model, is_zip):
    path.mkdir()
    model.config.save_pretrained(path)
    torch.save(
        model.state_dict(), path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip
    )


def write_tokenizers(directory, vocabularies, texts):
    for name in ("uncased", "cased", "chinese", "multi_cased"):
        vocabulary = str(vocabularies / name / "vocab.txt")
        size = len(vocabularies.joinpath(name, "vocab.txt").read_text(encoding="utf-8").split("\n"))
        for lower, strip in ((True, None), (True, False), (False, None), (False, True)):
            tokenizer = transformers.BertTokenizer(
                vocabulary, do_lower_case=lower, strip_accents=strip
            )
            path = directory / f"{name}-{lower}-{strip}"
            tokenizer.save_pretrained(path)
            transformers.BertConfig(vocab_size=size - 1).save_pretrained(path)
            for suffix, settings in (
                ("", None),
                ("-unset", {"tokenizer_class": "BertTokenizer"}),
                ("-generic", {"tokenizer_class": "PreTrainedTokenizerFast"}),
            ):
                other = directory / (path.name + suffix)
                if suffix:
                    shutil.copytree(path, other)
                    (other / "tokenizer_config.json").write_text(json.dumps(settings))
                loaded = transformers.AutoTokenizer.from_pretrained(other)
                ids = [loaded(text, add_special_tokens=False)["input_ids"] for text in texts]
                (other / "ids.json").write_text(json.dumps(ids))


def main(directory, vocabularies, texts):
    directory, vocabularies = pathlib.Path(directory), pathlib.Path(vocabularies)
    for name in ("models", "tokenizers"):
        (directory / name).mkdir()
    write_models(directory / "models", vocabularies / "uncased" / "vocab.txt")
    texts = json.loads(pathlib.Path(texts).read_text(encoding="utf-8"))
    write_tokenizers(directory / "tokenizers", vocabularies, texts)


if __name__ == "__main__":
    main(*sys.argv[1:])
