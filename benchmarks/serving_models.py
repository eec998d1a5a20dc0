"""Texts and expected probabilities of serving.py, and one BERT in all formats.

It has random weights from a fixed seed, three labels and the uncased vocabulary of 30,522 entries.
The activation is the tanh form of gelu, which keras-hub's BERT always has. The texts are those of
examples/complaints, in order of arrival: "short" is one of them, 5 to 60 tokens; "mixed" are one to
four in a row, 20 to 120 tokens; "long" are as many as fit into 400 tokens. All texts are ASCII, for
which all tokenizers return the same tokens.
"""

import csv
import json
import os
import pathlib
import random

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from task_recipes import COMPLAINTS, minilm

from bert_tf import MODEL_SIZES, Tokenizer, UserError, Vocabulary
from bert_tf.conversion import huggingface_export
from bert_tf.conversion.exported_model import from_pretrained
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights, read_pretrained
from export.graph.saved_model import write_saved_model
from export.litert.writer import write_litert
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask, TextClassifier

LABELS = ("negative", "neutral", "positive")
SEED, MAX_LENGTH = 0, 512
# SCALE is the standard deviation of kernels times the square root of the hidden size. It is twice
# that of BERT-base's initialization, so that predictions differ and depend on every layer.
SCALE, HEAD_SCALE = 1.0, 0.1
CHECKED = 4  # Number of texts per kind with expected probabilities.
CALIBRATION = 32  # Number of further texts per kind, for the programs that fit ranges to texts.
# Kind of text: most complaints in a row, least and most tokens.
KINDS = {"short": (1, 5, 60), "mixed": (4, 20, 120), "long": (30, 350, 400)}
QUANTIZED = {"float32": "none", "int8": "dynamic"}  # LiteRT files by precision.


def choose(kind, count, tokenizer):
    """Return texts whose lengths in tokens, with [CLS] and [SEP], are those of a kind."""
    with open(COMPLAINTS / "train.csv", newline="", encoding="utf-8") as lines:
        rows = [row["text"] for row in csv.DictReader(lines) if row["text"].isascii()]
    # The same complaint counts as another one with the next: there are only a few hundred.
    most, shortest, longest = KINDS[kind]
    single = tokenizer.tokenize(tf.constant(rows)).ids.row_lengths().numpy().tolist()
    drawn, texts = random.Random(kind), []
    while len(texts) < count:
        start, run = drawn.randrange(len(rows)), drawn.randint(1, most)
        numbers = [number % len(rows) for number in range(start, start + run)]
        if shortest <= 2 + sum(single[number] for number in numbers) <= longest:
            texts.append(" ".join(rows[number] for number in numbers))
    return texts


def write(directory, counts, programs, model_size, precision):
    """Write texts.json, calibration.json and the models of the programs to a directory.

    Returns "failed", the reason why a program has no model by its name.
    """
    directory, vocabulary = pathlib.Path(directory), Vocabulary.load(str(minilm() / "vocab.txt"))
    config = MODEL_SIZES[model_size]
    tokenizer = Tokenizer.from_config(config, vocabulary)
    pretrained, head = random_weights(config, vocabulary)
    model = our_model(directory / "run", pretrained, head)
    texts, calibration = {}, []
    for kind, count in counts.items():
        chosen = choose(kind, count + CALIBRATION, tokenizer)
        expected = model.predict(chosen[:CHECKED])["probabilities"].tolist()
        texts[kind] = {"texts": chosen[:count], "expected": expected}
        calibration += chosen[count:]
    for name, values in (("texts", texts), ("calibration", calibration)):
        (directory / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    huggingface = directory / "huggingface"
    write_huggingface(huggingface, directory / "run")
    writers = {
        "ours": lambda: write_saved_model(model, directory / "ours", precision),
        "litert": lambda: write_litert(model, directory / "litert", quantize=QUANTIZED[precision]),
        "keras_hub": lambda: [
            write_keras(
                directory / f"keras_hub-{length}", length, str(huggingface), head, precision
            )
            for length in (128, MAX_LENGTH)
        ],
    }
    failed = {}
    for name in set(programs) & set(writers):
        try:
            writers[name]()
        except (ImportError, UserError) as error:  # An optional package is missing.
            failed[name] = str(error)
    return {"failed": failed}


def random_weights(config, vocabulary):
    """Return PretrainedWeights, and the kernel and bias of the head."""
    rng = np.random.default_rng(SEED)
    of_kernels = SCALE / config.hidden_size**0.5

    def draw(shape, mean=0.0, scale=of_kernels):
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    weights = {
        name: draw(shape, mean=float(name.endswith("gamma")))
        for name, shape in name_map.weight_shapes(config).items()
    }
    head = draw((config.hidden_size, len(LABELS)), scale=HEAD_SCALE), draw(len(LABELS))
    return PretrainedWeights(config, vocabulary, weights, "random weights"), head


def our_model(directory, pretrained, head):
    """Write a run and return its model."""
    task = ClassificationTask(labels=LABELS, max_seq_length=MAX_LENGTH)
    model = task.build_model(pretrained.config)
    pretrained.assign_to(model)
    for variable, value in zip((model.head.kernel, model.head.bias), head, strict=True):
        variable.assign(value)
    classifier = TextClassifier(task, pretrained.config, pretrained.vocabulary, network=model)
    return load_model(classifier.save_run(directory).path)


def write_huggingface(directory, run):
    """Write the model for transformers' BertForSequenceClassification."""
    directory.mkdir()
    huggingface_export.write(from_pretrained(read_pretrained(run), run), directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["hidden_act"] = "gelu_pytorch_tanh"  # As "gelu_new", in one kernel.
    config["position_embedding_type"] = "absolute"  # CTranslate2's converter reads it.
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_keras(directory, length, source, head, precision):
    """Write a BertTextClassifier of `length` tokens as keras-hub's users export it."""
    from keras_hub.models import BertTextClassifier, BertTextClassifierPreprocessor

    preprocessor = BertTextClassifierPreprocessor.from_preset(str(source), sequence_length=length)
    classifier = BertTextClassifier.from_preset(
        str(source), num_classes=len(LABELS), preprocessor=preprocessor, dtype=precision
    )
    for variable, value in zip(classifier.output_dense.weights, head, strict=True):
        variable.assign(value)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def serve(text):
        logits = classifier(preprocessor(text), training=False)
        return {"probabilities": tf.nn.softmax(tf.cast(logits, tf.float32))}

    module = tf.Module()
    module.weights = [variable.value for variable in classifier.variables]
    module.serve = serve
    tf.saved_model.save(module, str(directory), signatures=serve)
