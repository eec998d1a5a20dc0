"""Texts and expected probabilities of serving.py, and one BERT in all formats.

It has random weights from a fixed seed, three labels and the uncased vocabulary of 30,522 entries.
The activation is the tanh form of gelu, which keras-hub's BERT always has. The texts are those of
examples/complaints, in order of arrival: "short" is one of them, 5 to 60 tokens; "mixed" are one to
four in a row, 20 to 120 tokens; "long" are as many as fit into 400 tokens. All texts are ASCII, for
which all tokenizers return the same tokens.
"""

import json
import pathlib
import random

import numpy as np
import tensorflow as tf
from task_recipes import columns, minilm

from bert_tf import MODEL_SIZES, Tokenizer, Vocabulary
from bert_tf.conversion import huggingface_export
from bert_tf.conversion.exported_model import from_pretrained
from bert_tf.weights.sources import read_pretrained
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
    rows = [text for text in columns("complaints")[0] if text.isascii()]
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


def write(directory, counts, size):
    """Write texts.json, calibration.json, and the model as a run and for transformers."""
    directory, vocabulary = pathlib.Path(directory), Vocabulary.load(str(minilm() / "vocab.txt"))
    config = MODEL_SIZES[size]
    tokenizer = Tokenizer.from_config(config, vocabulary)
    model = random_model(directory / "run", config, vocabulary)
    texts, calibration = {}, []
    for kind, count in counts.items():
        chosen = choose(kind, count + CALIBRATION, tokenizer)
        expected = model.predict(chosen[:CHECKED])["probabilities"].tolist()
        texts[kind] = {"texts": chosen[:count], "expected": expected}
        calibration += chosen[count:]
    for name, values in (("texts", texts), ("calibration", calibration)):
        (directory / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    write_huggingface(directory / "huggingface", directory / "run")
    return {}


def convert(directory, precision, backend):
    """Write the model of a program in its format."""
    directory = pathlib.Path(directory)
    model = load_model(directory / "run")
    if backend == "ours":
        write_saved_model(model, directory / backend, precision)
    elif backend == "litert":
        write_litert(model, directory / backend, quantize=QUANTIZED[precision])
    else:
        for length in (128, MAX_LENGTH):
            write_keras(directory / f"{backend}-{length}", length, model, precision)
    return {}


def random_model(directory, config, vocabulary):
    """Write a run of a model with random weights, and return the model."""
    task = ClassificationTask(labels=LABELS, max_seq_length=MAX_LENGTH)
    classifier = TextClassifier(task, config, vocabulary, has_new_head=False)
    rng, scale = np.random.default_rng(SEED), SCALE / config.hidden_size**0.5
    for variable in classifier.network.trainable_variables:
        mean = float(variable.path.endswith("gamma"))
        variable.assign(mean + scale * rng.standard_normal(variable.shape))
    kernel = classifier.network.head.kernel
    kernel.assign(kernel * HEAD_SCALE / scale)
    return load_model(classifier.save_run(directory).path)


def write_huggingface(directory, run):
    """Write the model for transformers' BertForSequenceClassification."""
    directory.mkdir()
    huggingface_export.write(from_pretrained(read_pretrained(run), run), directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["hidden_act"] = "gelu_pytorch_tanh"  # As "gelu_new", in one kernel.
    config["position_embedding_type"] = "absolute"  # CTranslate2's converter reads it.
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_keras(directory, length, model, precision):
    """Write a BertTextClassifier of `length` tokens as keras-hub's users export it."""
    from keras_hub.models import BertTextClassifier, BertTextClassifierPreprocessor

    source = str(directory.parent / "huggingface")
    preprocessor = BertTextClassifierPreprocessor.from_preset(source, sequence_length=length)
    classifier = BertTextClassifier.from_preset(
        source, num_classes=len(LABELS), preprocessor=preprocessor, dtype=precision
    )
    trained = model.network.head
    for variable, value in zip(classifier.output_dense.weights, trained.weights, strict=True):
        variable.assign(value)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def serve(text):
        logits = classifier(preprocessor(text), training=False)
        return {"probabilities": tf.nn.softmax(tf.cast(logits, tf.float32))}

    module = tf.Module()
    module.weights = [variable.value for variable in classifier.variables]
    module.serve = serve
    tf.saved_model.save(module, str(directory), signatures=serve)
