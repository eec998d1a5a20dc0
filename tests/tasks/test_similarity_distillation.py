"""Embedders that learn the vectors of another embedder, also from texts without labels."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from bert_tf.errors import UserError
from tasks import TextEmbedder, load_model
from tasks.data.examples import Examples
from tasks.finetuning.recipe import finetune, plan_of
from tasks.finetuning.settings import FinetuneSettings
from tasks.model.labelled_rows import Rows, examples_of
from tasks.training.distillation import read_teacher
from tasks.types.similarity.losses import vector_distance
from tasks.types.similarity.text_embedder import SimilarityTask
from tests import sentence_transformers_files, small

TEXTS = [text for texts in small.TEXTS.values() for text in texts]
SETTINGS = {"global_batch_size": 4, "epochs": 20, "learning_rate": 2e-2}


@pytest.fixture
def teacher(tmp_path, config, vocabulary):
    """Return a directory of sentence-transformers whose vectors have 5 numbers."""
    return sentence_transformers_files.write(
        tmp_path / "teacher", config, vocabulary, kinds=("Transformer", "Pooling", "Dense")
    )


@pytest.fixture
def student(tmp_path, config, vocabulary):
    """Return other weights, of one layer."""
    config = dataclasses.replace(config, num_hidden_layers=1)
    weights = small.random_weights(config, seed=7)
    return small.write_huggingface(tmp_path / "student", config, vocabulary, weights)


def distance(model, expected):
    """Return the mean of 1 - cosine of the vectors of a model and those that are expected."""
    vectors = model.predict(TEXTS)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return float(np.mean(1 - np.sum(vectors * expected, axis=1) / norms))


def test_the_distance_is_1_minus_cosine_or_that_of_the_vectors():
    teacher = tf.constant([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 2.0], [2.0, 0.0]]])
    student = tf.constant([[[3.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]])
    found = vector_distance(teacher, student, 2.0, "cosine").numpy()
    # The second text of the first row is missing.
    np.testing.assert_allclose(found, [1 - 0.6, (0 + 1 - 0.5**0.5) / 2], atol=1e-6)
    found = vector_distance(teacher, student, 2.0, "dot").numpy()
    np.testing.assert_allclose(found, [8.0, (0.5 + 1.0) / 2], atol=1e-6)


@pytest.mark.medium
def test_texts_alone_teach_the_vectors_of_an_embedder(tmp_path, teacher, student):
    model = TextEmbedder.from_pretrained(student, dense_units=(5,))
    expected = TextEmbedder.from_pretrained(teacher).predict(TEXTS)
    model.has_new_head = False  # Nor a warning.
    before = distance(model, expected)
    lines = []
    model.train(TEXTS, teacher=teacher, output_dir=tmp_path / "run", log=lines.append, **SETTINGS)
    assert distance(model, expected) < before / 4
    assert f"teacher: {len(TEXTS)} samples, once; 0 of them without labels" in lines
    assert model.source.run.train["teacher"]["source"] == "sentence-transformers directory teacher"


@pytest.mark.medium
def test_a_file_of_texts_teaches_as_the_same_rows_do(tmp_path, teacher, student):
    small.write_rows(tmp_path / "texts.csv", [(text,) for text in TEXTS], ("text",))
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / "texts.csv"),
        teacher=str(teacher),
        init_from=str(student),
        output_dir=str(tmp_path / "run"),
        dense_units=("5",),
        max_seq_length=16,
        **{**SETTINGS, "epochs": 1},
    )
    settings.check()
    model = load_model(finetune(settings).path)
    other = TextEmbedder.from_pretrained(
        student, dense_units=(5,), dense_activations=("identity",), normalize=True
    )
    other.train(TEXTS, teacher=teacher, output_dir=tmp_path / "other", **{**SETTINGS, "epochs": 1})
    np.testing.assert_array_equal(model.predict(TEXTS), other.predict(TEXTS))
    with pytest.raises(UserError, match="texts.csv: expected the columns anchor and positive, or"):
        dataclasses.replace(settings, teacher=None).check()
    planned = dataclasses.replace(settings, dense_units=(), output_dir=str(tmp_path / "third"))
    with pytest.raises(UserError, match="its vectors have 5 numbers, those of the student 12"):
        plan_of(planned, list)


@pytest.mark.medium
def test_dev_rows_of_texts_for_a_teacher_may_have_scores(tmp_path, teacher, student):
    small.write_rows(tmp_path / "texts.csv", [(text,) for text in TEXTS], ("text",))
    pairs = [(TEXTS[0], text, number) for number, text in enumerate(TEXTS[1:5])]
    small.write_rows(tmp_path / "dev.csv", pairs, ("text_a", "text_b", "score"))
    settings = FinetuneSettings(
        task="similarity",
        train=str(tmp_path / "texts.csv"),
        dev=(str(tmp_path / "dev.csv"),),
        loss="cosent",
        teacher=str(teacher),
        init_from=str(student),
        output_dir=str(tmp_path / "run"),
        dense_units=("5",),
        max_seq_length=16,
        **{**SETTINGS, "epochs": 1},
    )
    settings.check()
    assert any("dev_spearman" in line for line in finetune(settings).metrics())
    rows = small.write_rows(tmp_path / "pairs.csv", [("a", "b")], ("anchor", "positive"))
    with pytest.raises(UserError, match="expected contrastive or triplet for pairs without"):
        SimilarityTask.from_data(rows, max_seq_length=8, loss="cosent")


@pytest.mark.medium
@pytest.mark.parametrize("parts", [1, 2])
def test_pairs_and_texts_teach_together(tmp_path, teacher, student, parts):
    model = TextEmbedder.from_pretrained(student, dense_units=(5,))
    expected = TextEmbedder.from_pretrained(teacher).predict(TEXTS)
    lines = []
    model.train(
        (TEXTS[:3], TEXTS[3:6]),
        teacher=TextEmbedder.from_pretrained(teacher),
        unlabelled=TEXTS,
        distill_alpha=0.9,
        gradient_accumulation_steps=parts,
        output_dir=tmp_path / "run",
        log=lines.append,
        **SETTINGS,
    )
    count = 3 + len(TEXTS)
    assert f"teacher: {count} samples, once; {len(TEXTS)} of them without labels" in lines
    assert distance(model, expected) < 0.3


def test_rows_of_a_file_need_no_labels_with_a_teacher():
    task = SimilarityTask(max_seq_length=8)
    rows = Rows({"text": TEXTS}, [], (), "texts.csv")
    expected = Examples({"text": [[text] for text in TEXTS]}, [])
    assert examples_of(task, rows, has_teacher=True) == expected
    assert examples_of(task, TEXTS, has_teacher=True) == expected
    with pytest.raises(UserError, match="y.0.: expected a pair of texts, received one text"):
        examples_of(task, rows)


def test_texts_alone_train_no_prefixes():
    task = SimilarityTask(max_seq_length=8, matryoshka_dims=(4, 8))
    message = "--matryoshka_dims=4,8: expected none for texts without labels"
    with pytest.raises(UserError, match=message):
        examples_of(task, TEXTS, has_teacher=True)
    assert examples_of(task, (TEXTS[:2], TEXTS[2:4]), has_teacher=True).labels == [None, None]


def test_other_settings_of_a_directory_are_another_teacher(teacher):
    def digest():
        strategy = tf.distribute.get_strategy()
        return read_teacher(str(teacher), "similarity", strategy).record["sha256"]

    before = digest()
    assert digest() == before
    pooling = {**sentence_transformers_files.POOLING, "pooling_mode": "cls"}
    sentence_transformers_files.write_json(teacher / "1_Pooling" / "config.json", pooling)
    assert digest() != before


@pytest.mark.medium
def test_what_cannot_teach_is_refused(tmp_path, teacher, student):
    model = TextEmbedder.from_pretrained(student)
    for other, message in (
        (teacher, "its vectors have 5 numbers, those of the student 12; expected dense_units=5"),
        (student, "teacher=.*student: expected a run of task similarity or a directory of sent"),
    ):
        with pytest.raises(UserError, match=message):
            model.train(TEXTS, teacher=other, output_dir=tmp_path / "run", **SETTINGS)
    with pytest.raises(UserError, match="distill_temperature: not supported by task similarity"):
        model.train(
            TEXTS, teacher=teacher, distill_temperature=1.0, output_dir=tmp_path / "run", **SETTINGS
        )
    with pytest.raises(UserError, match="expected a pair of texts, received one text"):
        model.train(TEXTS, output_dir=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()
