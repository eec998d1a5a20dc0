"""Pretrained weights of any supported source, recognized by its files."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.runs import checkpoints
from bert_tf.runs.run import Run
from bert_tf.storage import files
from bert_tf.text.vocabulary import Vocabulary
from bert_tf.weights import (
    google,
    heads,
    huggingface,
    keras_preset,
    name_map,
    sentence_transformers,
    tokenizer_files,
)
from bert_tf.weights.name_map import StoredModel

if TYPE_CHECKING:
    import keras

_CLASSIFIER = {heads.KERNEL, heads.BIAS}
_ADAPTER = "adapter_config.json"
# Files of models that are not read, by pattern.
_OTHER_FORMATS = {
    _ADAPTER: "an adapter, which changes the weights of another model; merge it into that model "
    "(merge_and_unload of PEFT) and save the model",
    "*.gguf": "a GGUF file of llama.cpp",
    "*.onnx": "an ONNX graph",
    "onnx/*.onnx": "an ONNX graph",
    "openvino_model*.xml": "an OpenVINO graph",
    "flax_model*.msgpack": "a Flax model",
    "rust_model.ot": "a model of rust-bert",
    "*.tflite": "a LiteRT graph",
}
# Formats of directories and their readers, in the order of preference.
_DIRECTORIES = (
    ("sentence-transformers directory", sentence_transformers),
    ("Hugging Face directory", huggingface),
    ("keras-hub preset", keras_preset),
)


@dataclasses.dataclass(frozen=True)
class PretrainedWeights:
    """Configuration, vocabulary and weights of an encoder, with or without heads.

    The head of a fine-tuned model is the head "classifier", and `task` describes it.

    Attributes:
        config: Configuration of the encoder.
        vocabulary: Vocabulary of the encoder.
        weights: float32 arrays by our names.
        source: Description of the source, such as "run PATH".
        unused_tensors: Names of tensors in the source that are not in `weights`; for a head of an
            unsupported task with the reason.
        task: Contents of task.json, or `None` for weights without the head of a task.
        initialized: Components that the source does not have and that were initialized.
        embedder: Fields of task.json of the task type similarity, if the source is an embedder. Its
            dense layers are in `weights`.
        unsupported_embedder: Why the source is an embedder whose vectors cannot be computed here.
        has_new_head: Whether the head was never trained, as in a run that `save_run` has written.
        has_trained_pooler: Whether the pooler was trained. That of an embedder was not, nor was a
            new one of a run that was pretrained without next sentences, or trained without it.
    """

    config: BertConfig
    vocabulary: Vocabulary
    weights: dict[str, np.ndarray]
    source: str
    unused_tensors: tuple[str, ...] = ()
    task: dict[str, Any] | None = None
    initialized: tuple[str, ...] = ()
    embedder: dict[str, Any] | None = None
    unsupported_embedder: str | None = None
    has_new_head: bool = False
    has_trained_pooler: bool = True

    @property
    def run_task(self) -> dict[str, Any] | None:
        """Return the contents of task.json of a run of these weights, or `None`."""
        return self.task or self.embedder

    @property
    def sha256(self) -> str:
        """Hash of the configuration, the vocabulary and the weights."""
        described = json.dumps([self.config.to_dict(), self.vocabulary.sha256, self.run_task])
        weights = checkpoints.sha256_of(self.weights)
        return hashlib.sha256(f"{described} {weights}".encode()).hexdigest()

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the heads in the source: of "masked_lm", "next_sentence" and "classifier"."""
        return self._heads_in(self.weights)

    @property
    def saved_weights(self) -> dict[str, np.ndarray]:
        """The weights that `save` writes: the model of a task has no pretraining heads."""
        unused = name_map.HEADS if self.run_task else ()
        return {
            name: array for name, array in self.weights.items() if name.split("/")[0] not in unused
        }

    @property
    def origin(self) -> str:
        """Return the source and its unused tensors, as text."""
        return self._origin(self.unused_tensors)

    def origin_in(
        self,
        model: "keras.Model | keras.layers.Layer",
        head: Mapping[str, np.ndarray] | None = None,
    ) -> str:
        """Return the source and what is unused after `assign_to(model, head)`, as text."""
        used = checkpoints.model_variables(model).keys() - ({} if head else _CLASSIFIER)
        there = self._heads_in(used)
        unused = [f"{part} head" for part in self.heads if part not in there]
        dense = sentence_transformers.dense_names(self.embedder or {})
        if dense and not set(dense) <= (head or {}).keys():
            unused.append("dense layers of the embedder")
        return self._origin([*unused, *self.unused_tensors])

    def assign_to(
        self,
        model: "keras.Model | keras.layers.Layer",
        head: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Assign the encoder, and the pretraining heads that the model has too, to its variables.

        `head` are arrays of `head_for` for the model's task; by default its head is not assigned.

        Raises:
            UserError: A shape differs.
        """
        variables = checkpoints.model_variables(model)
        parts = self._heads_in((self.weights.keys() & variables.keys()) - _CLASSIFIER)
        used = [
            name for part in ("bert", *parts) for name in name_map.weight_shapes(self.config, part)
        ]
        values = {**{name: self.weights[name] for name in used}, **(head or {})}
        checkpoints.assign({name: variables[name] for name in values}, values, self.origin)

    def head_for(
        self, task: Mapping[str, Any], keep: bool | None = None
    ) -> dict[str, np.ndarray] | None:
        """Return the source's head for a task, as in task.json, or `None` for a new head.

        The labels may have another order than the source's. `keep` is whether to keep the head; by
        default it is kept if task type and labels match.

        Raises:
            UserError: `keep` is true and there is no head for this task.
        """
        is_embedder = task["kind"] == sentence_transformers.KIND
        if keep is False or (keep is None and self.task is None and not is_embedder):
            return None
        try:
            if is_embedder:
                return sentence_transformers.match_dense(
                    self.embedder, self.weights, task, self.config
                )
            if self.task is None:
                raise UserError("expected weights with the head of a task, received none")
            return heads.match_head(self.task, self.weights, task)
        except UserError as error:
            if keep is None:
                return None
            raise UserError(f"{self.origin}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> Run:
        """Write the weights to a new run directory, as its checkpoint of step 0; return the run."""
        with Run.writing(path):
            train = {"origin": self.origin, "has_new_head": self.has_new_head}
            train["has_trained_pooler"] = self.has_trained_pooler
            run = Run.create(path, self.config, self.vocabulary, train, self.run_task)
            run.checkpoints.save(0, self.saved_weights)
        return run

    def _heads_in(self, there):
        """Return the heads all of whose weights are among the names `there`."""
        return tuple(
            head
            for head in (*name_map.HEADS, "classifier")
            if set(name_map.weight_shapes(self.config, head)) <= set(there)
        )

    def _origin(self, unused):
        """Describe the source, up to three unused items, and what was initialized."""
        notes = []
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            notes.append(f"not used: {', '.join(unused[:3])}{more}")
        if self.initialized:
            notes.append(f"initialized: {', '.join(self.initialized)}")
        return f"{self.source} ({'; '.join(notes)})" if notes else self.source


def read_pretrained(
    path: str | os.PathLike[str],
    do_lower_case: bool | None = None,
    *,
    config_file: str | None = None,
    vocab_file: str | None = None,
    labels: Sequence[str] = (),
    pairs: bool = False,
) -> PretrainedWeights:
    """Read a run, or a directory of another library.

    These are Hugging Face and sentence-transformers directories, TensorFlow checkpoints and
    keras-hub presets.

    Args:
        path: Directory, prefix of a TensorFlow checkpoint, id of a model of the Hugging Face hub,
            such as "google-bert/bert-base-uncased" or "owner/name@revision", or the name of a
            published keras-hub preset. Only runs may be remote.
        do_lower_case: Overrides the source's setting.
        config_file: bert_config.json of a TensorFlow checkpoint, if it is not next to it.
        vocab_file: vocab.txt of a TensorFlow checkpoint, if it is not next to it.
        labels: Names of the labels of a fine-tuned model, in the order of its outputs; by default
            those of its configuration, or the numbers from 0.
        pairs: Whether a fine-tuned sequence classifier or regressor reads pairs of texts.

    Returns:
        `PretrainedWeights`.

    Raises:
        UserError: There is no model, or a tensor is missing, unknown or of the wrong shape.
    """
    return _with_case(_read(path, config_file, vocab_file, labels, pairs), do_lower_case)


def read_checkpoint(run: Run, name: str, do_lower_case: bool | None = None) -> PretrainedWeights:
    """Read a checkpoint of a run by its name, such as "step-00000120"; see `read_pretrained`."""
    return _with_case(_read_run(run, run.checkpoints.step_of(name)), do_lower_case)


def _with_case(pretrained, do_lower_case):
    if do_lower_case is None:
        return pretrained
    config = dataclasses.replace(pretrained.config, do_lower_case=do_lower_case)
    return dataclasses.replace(pretrained, config=config)


def read_stored(path: str | os.PathLike[str]) -> StoredModel:
    """Read a model that is no run, with the names of its format."""
    reader, where, _ = _reader_of(path)
    return reader.read(where)


def check(
    path: str | os.PathLike[str],
    config_file: str | None = None,
    vocab_file: str | None = None,
    *,
    labels: Sequence[str] = (),
    pairs: bool = False,
    as_embedder: bool = False,
) -> BertConfig | None:
    """Check for a model at a path without reading its weights; arguments as of `read_pretrained`.

    With `as_embedder`, also check that the vectors of an embedder can be computed.

    Returns:
        `BertConfig`, or `None` if only TensorFlow can read it (remote paths, published keras-hub
        presets).

    Raises:
        UserError: There is no model, or its other files are invalid.
    """
    if files.is_remote(path):
        return None
    if Run.exists(path):
        _check_of_run(path, config_file, vocab_file, labels, pairs)
        run = Run.open(path)
        run.checkpoints.best_or_latest_step()
        return run.config
    reader, where, _ = _reader_of(path, config_file, vocab_file)
    if as_embedder and reader is sentence_transformers:
        sentence_transformers.settings_of(where)
    found = reader.read_config(where)
    return found and found[0]


def embedder_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of the embedder at a path as in task.json, without reading its weights.

    They are empty for other models, and for embedders whose vectors cannot be computed.
    """
    if Run.exists(path):
        task = Run.open(path).task or {}
        return task if task.get("kind") == sentence_transformers.KIND else {}
    if files.is_remote(path):
        return {}
    reader, where, _ = _reader_of(path)
    if reader is not sentence_transformers:
        return {}
    try:
        return _embedder(where, sentence_transformers.read_config(where)[0])
    except UserError:  # Its encoder is used alone.
        return {}


def _read(path, config_file, vocab_file, labels, pairs):
    """Read the model at a path with the reader of its source."""
    if Run.exists(path):
        _check_of_run(path, config_file, vocab_file, labels, pairs)
        run = Run.open(path)
        return _read_run(run, run.checkpoints.best_or_latest_step())
    reader, where, source = _reader_of(path, config_file, vocab_file)
    stored = reader.read(where)
    weights, unused_tensors = name_map.rename(stored)
    config, is_embedder = stored.config, reader is sentence_transformers
    found: dict[str, Any] = {}  # Further fields of `PretrainedWeights`.
    if name_map.POOLER.isdisjoint(weights):
        weights |= _new_pooler(config)
        found["initialized"] = ("pooler",)
    found["has_trained_pooler"] = not (is_embedder or "initialized" in found)
    if not is_embedder:
        weights |= heads.of_next_sentence(weights, stored.values)
    encoder = {name: array for name, array in weights.items() if name not in _CLASSIFIER}
    has_head = not is_embedder and heads.KERNEL in weights
    limit = min(config.max_position_embeddings, _model_max_length(where)) if has_head else 0
    activation = None
    try:
        if is_embedder:
            settings = _embedder(where, config)
            weights = encoder | sentence_transformers.dense_weights(where)
            found["embedder"] = settings
        elif reader is huggingface:
            activation = sentence_transformers.head_activation(where, stored.values)
        if has_head:
            task, head = heads.read_head(weights, stored.values, limit, labels, pairs, activation)
            if heads.reads_pairs(task) and config.type_vocab_size < 2:
                raise UserError("pairs of texts require two segments; type_vocab_size is 1")
            weights |= head
            found["task"] = task
    except UserError as error:
        # The encoder can be used for another task.
        weights, what = encoder, "embedder" if is_embedder else "classifier head"
        unused_tensors = [f"{what}, {error}", *unused_tensors]
        if is_embedder:
            found["unsupported_embedder"] = str(error)
    return PretrainedWeights(
        config, stored.vocabulary, weights, source, tuple(unused_tensors), **found
    )


def _embedder(path, config):
    """Return the contents of task.json of a sentence-transformers directory."""
    settings = sentence_transformers.settings_of(path)
    length = settings.get(
        "max_seq_length", _model_max_length(sentence_transformers.encoder_directory(path))
    )
    limit = min(config.max_position_embeddings, length)
    return {**settings, "layers": "last", "max_seq_length": limit}


def _check_of_run(path, config_file, vocab_file, labels, pairs):
    """Raise UserError if something is given that the files of a run say."""
    given = {
        "config_file": config_file,
        "vocab_file": vocab_file,
        "labels": labels,
        "pairs": pairs,
    }
    for flag, value in given.items():
        if value:
            raise UserError(
                f"--{flag}: only for weights of other libraries; {path} is a run; its files have it"
            )


def _read_run(run, step):
    """Read the checkpoint of a step of a run."""
    chosen = run.checkpoints.path(step)
    # Optimizer slots, counters, seeds and heads of other kinds are not loaded.
    tensors = checkpoints.read(chosen)
    stored = StoredModel(run.config, run.vocabulary, tensors, "ours", ".*", str(chosen))
    weights, _ = name_map.rename(stored)
    task, embedder, unused = None, None, ()
    if run.task is not None and run.task["kind"] == sentence_transformers.KIND:
        embedder = run.task
        weights |= {name: tensors[name] for name in sentence_transformers.dense_names(embedder)}
    elif heads.KERNEL in weights and run.task is not None:
        task = run.tuned_task(step)
    elif run.task is not None:
        unused = (heads.name_of(run.task["kind"]),)
    return PretrainedWeights(
        *(run.config, run.vocabulary, weights, f"run {chosen}", unused),
        task=task,
        embedder=embedder,
        has_new_head=run.train.get("has_new_head", False),
        has_trained_pooler=embedder is None and run.train.get("has_trained_pooler", True),
    )


def _new_pooler(config):
    """Return the initial weights of a pooler, as in a new model; they are equal in every call."""
    import keras

    initializer = keras.initializers.TruncatedNormal(stddev=config.initializer_range, seed=0)
    return {
        "bert/pooler/kernel": np.asarray(initializer((config.hidden_size,) * 2), np.float32),
        "bert/pooler/bias": np.zeros(config.hidden_size, np.float32),
    }


def _model_max_length(where):
    """Return the maximum length of the tokenizer or preprocessor of a directory, if any."""
    length = None
    if isinstance(where, pathlib.Path):
        values = tokenizer_files.object_in(where / "tokenizer_config.json")
        length = values.get("model_max_length", values.get("max_len"))
        length = keras_preset.max_seq_length(where) if length is None else length
    # transformers writes 1e30 for no limit.
    return int(length) if isinstance(length, int | float) and 4 <= length < 1e9 else int(1e9)


def _reader_of(path, config_file=None, vocab_file=None):
    """Return the reader module, its argument and a description for a path that is no run."""
    if files.is_remote(path):
        raise UserError(
            f"{path}: expected a run; other weights cannot be read from remote paths, copy them to "
            "this machine first"
        )
    directory = pathlib.Path(path)
    name = directory.resolve().name
    known = [(kind, reader) for kind, reader in _DIRECTORIES if reader.is_directory_of(directory)]
    # A directory of other weights is meant as such, unless it has a configuration of Google too.
    is_other = known and not (config_file or vocab_file or google.has_config(directory))
    if not is_other and (location := google.find(directory, config_file, vocab_file)):
        return google, location, f"Google release {name}"
    for flag, value in (("config_file", config_file), ("vocab_file", vocab_file)):
        if value:
            raise UserError(f"--{flag}: only for TensorFlow checkpoints; {path} is none")
    if (directory / _ADAPTER).is_file():  # Also beside the model that it changes.
        raise UserError(f"{directory}: holds {_ADAPTER}, {_OTHER_FORMATS[_ADAPTER]}")
    if known:
        kind, reader = known[0]
        return reader, directory, f"{kind} {name}"
    if directory.is_file():
        raise UserError(
            f"{directory}: is {_other_format(directory) or 'a file'}; expected the directory of a "
            "model"
        )
    if directory.exists():
        found = [path for pattern in _OTHER_FORMATS for path in sorted(directory.glob(pattern))]
        there = f", only {found[0].name}, {_other_format(found[0])}" if found else ""
        raise UserError(
            f"{directory}: no model found{there}; expected a run directory (config.json, "
            "vocab.txt, checkpoints/), a Hugging Face directory (model.safetensors), a Google "
            "release (bert_config.json) or a keras-hub preset"
        )
    if downloaded := huggingface.download(str(path)):
        snapshot, model_id = downloaded
        reader, where, _ = _reader_of(snapshot)
        return reader, where, f"Hugging Face model {model_id}, revision {snapshot.name}"
    return keras_preset, str(path), f"keras-hub preset {path}"


def _other_format(path):
    """Return what a file is, or `None` if its name does not show it."""
    return next((what for pattern, what in _OTHER_FORMATS.items() if path.match(pattern)), None)
