"""Use with Keras and pandas: tables, callbacks, optimizers and metrics of their own."""

import copy
import inspect
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tasks
from bert_tf import AdamW, FitSchedule, UserError
from tasks import TextRegressor
from tasks.model import task_model
from tasks.model.labelled_rows import Rows, evaluation_examples, examples_of
from tests import small
from tests.tasks.test_task_model import CASES, LABELS, NAMES, ROWS, compiled, create
from tests.tasks.test_task_model_training import weights_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    return small.write_huggingface(tmp_path_factory.mktemp("usage") / "hf", config, vocabulary)


@pytest.fixture(scope="module")
def model(weights):
    return compiled("TextClassifier", weights)


# Tables.


@pytest.fixture
def table():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame({"text": ROWS, "text_b": ROWS[::-1], "intent": NAMES})


def test_columns_of_a_table_are_rows(model, table):
    expected = examples_of(model.task, ROWS, NAMES)
    for x, y in (
        (table["text"], table["intent"]),
        (table, table["intent"].astype("category")),
        (table[::-1][["text"]][::-1], table["intent"].map(LABELS.index)),
        (table["text"].to_numpy(), table["intent"].to_numpy()),
    ):
        assert examples_of(model.task, x, y) == expected
    assert model.predict_rows(table.query("intent == 'billing'")) == model.predict_rows(ROWS[:3])
    with pytest.raises(UserError, match=r"x: text\[1\]: expected a string, received float nan"):
        model.predict(table["text"].where(table.index != 1))
    with pytest.raises(UserError, match="x: expected the columns text, received body, text_b"):
        model.predict(table.rename(columns={"text": "body"}))
    with pytest.raises(UserError, match="y: expected a list, a NumPy array or a pandas column"):
        model.evaluate(table["text"], table[["intent"]])


def test_a_table_of_multi_hot_labels_is_matched_by_name(weights, table):
    import pandas

    model = create_multi_label(weights, LABELS)
    one_hot = pandas.get_dummies(table["intent"])
    expected = examples_of(model.task, ROWS, [[name] for name in NAMES])
    for y in (one_hot, one_hot[list(LABELS[::-1])].astype(int), one_hot.astype("Int64")):
        assert examples_of(model.task, table["text"], y) == expected
        assert evaluation_examples(model.task, (table["text"], y)) == expected
    # Integers of two labels could be ids in a list.
    two = create_multi_label(weights, ["1", "0"])
    y = pandas.DataFrame([[1, 0], [0, 1]], columns=[0, 1])
    assert examples_of(two.task, ROWS[:2], y).labels == [(1,), (0,)]
    for wrong in (one_hot.astype(float) / 2, one_hot.astype("Int64").where(one_hot)):
        with pytest.raises(UserError, match="expected 3 values, one per label, 0 or 1"):
            examples_of(model.task, table["text"], wrong)


def create_multi_label(weights, labels):
    return tasks.TextClassifier.from_pretrained(
        weights, labels=labels, multi_label=True, max_seq_length=12
    )


def test_messages_about_tables_have_one_line_and_name_columns(model, weights, table):
    import pandas

    one_hot, numbers = pandas.get_dummies(table["intent"]), pandas.Series([1.0, 2.0])
    columns = "received a DataFrame with the columns "
    for message, call in {
        f"{columns}billing, hardware, software; pass one": lambda: model.evaluate(ROWS, one_hot),
        f"{columns}intent; pass one of them": lambda: model.evaluate(ROWS, table[["intent"]]),
        "y: expected a table with the columns billing, hardware, software, received billing": (
            lambda: create_multi_label(weights, LABELS).evaluate(ROWS, one_hot[["billing"]])
        ),
        "labels: expected each label once, received 3 values": lambda: create_multi_label(
            weights, pandas.Series(["a", "b", "a"])
        ),
        "class_weight: expected a dict": lambda: model.fit(ROWS, NAMES, class_weight=numbers),
        "seed=0    1.0 1    2.0 dtype: float64: expected an integer": lambda: (
            tasks.TextRegressor.from_pretrained(weights, seed=numbers)
        ),
        "expected 3 values, one per label": lambda: model.evaluate(ROWS[:1], [np.zeros((30, 1))]),
    }.items():
        with pytest.raises(UserError) as raised:
            call()
        assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.medium
def test_rows_of_a_file_have_vectors(model):
    rows = Rows({"text": ROWS}, NAMES, tuple(LABELS), "rows.csv")
    np.testing.assert_array_equal(model.embed(rows)["pooled"], model.embed(ROWS)["pooled"])


@pytest.mark.slow
def test_tables_of_pairs_and_validation_split(weights, table):
    model = TextRegressor.from_pretrained(weights, pairs=True, max_seq_length=12)
    table = table.rename(columns={"text": "text_a"})
    history = model.fit(
        *(table, np.arange(9) / 3),
        epochs=1,
        validation_split=0.25,
        verbose=0,
    ).history
    assert "val_spearman" in history


# Datasets.


def test_a_shuffled_dataset_is_drawn_anew_in_each_epoch(model, monkeypatch):
    dataset = tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).shuffle(9999, seed=0).batch(4)
    received = []

    def keras_fit(model, x, **options):
        received.extend(np.concatenate([y["label"] for _, y, _ in x]) for _ in range(2))

    monkeypatch.setattr(keras.Model, "fit", keras_fit)
    model.fit(dataset, epochs=2)
    first, second = (labels.tolist() for labels in received)
    assert sorted(first) == sorted(second) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert first != second


@pytest.mark.medium
def test_arguments_of_keras_about_batches_and_validation(model):
    """Columns in a list, one callback, and the batches of infinite datasets that are read."""
    dataset = tf.data.Dataset.from_tensor_slices((ROWS, NAMES)).batch(4)
    log = keras.callbacks.History()
    history = model.fit(
        *(ROWS, NAMES, 8, 1, 0, log),
        validation_data=dataset.repeat(),
        validation_steps=1,
        validation_batch_size=3,
    ).history
    assert log.history == history
    first = model.evaluate(ROWS[:4], NAMES[:4])
    assert history["val_macro_f1"] == [first["macro_f1"]]
    assert model.evaluate(dataset.repeat(), steps=1) == first
    model.evaluator().metrics = lambda encoded: {"rows": float(len(encoded))}
    found = model.fit(ROWS, NAMES, epochs=1, verbose=0, validation_data=[ROWS[:3], NAMES[:3]])
    del model.evaluator().metrics
    assert found.history["val_rows"] == [3.0]
    assert len(model.predict(dataset.repeat(), steps=2)["label"]) == 8


@pytest.mark.parametrize("name", ["TokenClassifier", "QuestionAnswerer", "TextEmbedder"])
def test_token_ids_without_a_mask_are_all_tokens(weights, name):
    options, *_ = CASES.get(name, ({},))
    model = getattr(tasks, name).from_pretrained(weights, max_seq_length=12, **options)
    ids = np.array([[2, 5, 6, 3], [2, 7, 8, 3]], np.int32)
    found = model.predict({"input_ids": ids}, verbose=0)
    expected = model.predict({"input_ids": ids, "input_mask": np.ones_like(ids)}, verbose=0)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


# Datasets of unknown length.


def generated(*columns, count=3):
    """Return a dataset of batches that does not tell their number."""

    def batches():
        for _ in range(count):
            yield columns

    signature = tuple(tf.TensorSpec([None], tf.string) for _ in columns)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


@pytest.mark.filterwarnings("ignore:.*untrained head")
def test_datasets_of_unknown_length_are_warned_of_before_they_are_read(model, weights):
    message = "^reading a dataset of unknown length into memory; pass {} if it has no end$"
    texts = generated(ROWS[:3]).map(lambda x: x)
    with pytest.warns(UserWarning, match=message.format("steps")):
        assert len(model.predict(texts, verbose=0)["label"]) == 9
    rows = generated(ROWS[:3], NAMES[:3])
    with pytest.warns(UserWarning, match=message.format("steps")):
        model.evaluate(rows, verbose=0)
    with pytest.warns(UserWarning, match=message.format("validation_steps")):
        dev = model._dev_rows(rows, None)
    assert len(dev) == 9
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "reading a dataset")
        assert len(model._dev_rows(rows, 2)) == 6
        assert len(model.predict(texts, steps=2, verbose=0)["label"]) == 6
    for call in (
        lambda: model.predict(texts.repeat()),
        lambda: model.evaluate(rows.repeat()),
        lambda: model.fit(ROWS, NAMES, validation_data=rows.repeat()),
    ):
        with pytest.raises(UserError, match="x: expected a finite dataset, received one that rep"):
            call()


@pytest.mark.medium
def test_a_stream_of_unknown_length_trains_at_a_constant_rate(weights):
    model = create("TextClassifier", weights)
    model.compile(AdamW(1e-3))
    model.fit(generated(ROWS[:3], NAMES[:3]), epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 6
    model.compile()
    with pytest.raises(UserError) as raised:
        model.fit(generated(ROWS[:3], NAMES[:3]), epochs=2, verbose=0)
    assert str(raised.value) == (
        "steps_per_epoch: expected a number for a dataset of unknown length, which the learning "
        "rate decays over; or compile with an optimizer of constant rate"
    )


@pytest.mark.filterwarnings("ignore:.*untrained head")
def test_predictions_and_evaluations_of_strings_show_the_bar_of_keras(model, capsys):
    model.predict(ROWS, batch_size=4, verbose=1)
    assert "3/3" in capsys.readouterr().out
    model.evaluate(ROWS, NAMES, batch_size=4, verbose=1)
    assert "3/3" in capsys.readouterr().out
    model.predict(ROWS, verbose=0)
    model.evaluate(ROWS, NAMES, verbose=0)
    assert capsys.readouterr().out == ""


def test_a_model_with_nothing_to_tune_says_so(model):
    with pytest.raises(UserError) as raised:
        model.tune(ROWS, NAMES)
    assert str(raised.value) == (
        "tune: TextClassifier has nothing to tune; pass an option such as threshold_objective or "
        "calibrate to from_pretrained, if it has one"
    )


# Callbacks.


@pytest.mark.slow
def test_event_files_have_the_metrics_of_the_task(model, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    model.fit(
        *(ROWS, NAMES),
        epochs=1,
        validation_data=(ROWS, NAMES),
        callbacks=[keras.callbacks.TensorBoard(str(tmp_path))],
        verbose=0,
    )
    (path,) = (tmp_path / "validation").glob("events*")
    assert b"epoch_macro_f1" in path.read_bytes()


@pytest.mark.medium
def test_callbacks_are_called_around_a_validation(weights):
    """As in Keras, where SwapEMAWeights puts the weights to evaluate into the model."""
    events, model = [], create("TextClassifier", weights)
    model.evaluator().metrics = lambda encoded: events.append("evaluate") or {"rows": 9.0}
    log = keras.callbacks.LambdaCallback(
        on_test_begin=lambda logs: events.append("begin"),
        on_test_end=lambda logs: events.append(logs),
        on_epoch_end=lambda epoch, logs: events.append(logs["val_rows"]),
    )
    model.fit(ROWS, NAMES, epochs=1, validation_data=(ROWS, NAMES), callbacks=log, verbose=0)
    assert events == ["begin", "evaluate", {"rows": 9.0}, 9.0]


# Optimizers, losses and metrics of Keras.


@pytest.mark.slow
def test_a_schedule_and_metrics_of_keras(weights):
    model = create("TextClassifier", weights)
    model.compile(
        keras.optimizers.Adam(FitSchedule(3e-5, 0.06)),
        metrics=[keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    history = model.fit(ROWS, NAMES, epochs=2, verbose=0).history
    assert history["sparse_top_k_categorical_accuracy"] == [1.0, 1.0]  # Of three labels.
    assert float(model.optimizer.learning_rate.numpy()) == 0.0


@pytest.mark.medium
def test_an_evaluation_has_the_loss_of_compile(weights):
    model, (_, x, y) = create("TextRegressor", weights), CASES["TextRegressor"]
    errors = np.abs(np.array(y) - model(model.preprocessor(x))["value"].numpy()[:, 0])
    assert model.evaluate(x, y)["loss"] == pytest.approx(np.mean(errors**2), rel=1e-4)
    for weight in (1.0, 0.5):
        loss = keras.losses.MeanAbsoluteError()
        model.compile(loss=loss, loss_weights=weight)
        found = model.evaluate(x, y)
        assert found["loss"] == pytest.approx(weight * np.mean(errors), rel=1e-4)
        assert found["mean_squared_error"] == pytest.approx(np.mean(errors**2), rel=1e-4)


@pytest.mark.slow
def test_an_optimizer_a_loss_and_class_weights(weights):
    def fit(class_weight):
        model = create("TextClassifier", weights)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(2e-5), loss=loss)
        history = model.fit(ROWS, NAMES, epochs=1, class_weight=class_weight, verbose=0).history
        return history["loss"][0], weights_of(model)["classifier/bias"]

    (loss, bias), (weighted_loss, weighted_bias) = fit(None), fit({"billing": 5.0, 1: 0.5})
    assert loss != weighted_loss and (bias != weighted_bias).any()


# Limits of Keras.


@pytest.mark.slow
def test_a_copy_without_its_vocabulary_says_so(model):
    clone = keras.models.clone_model(model)
    with pytest.raises(UserError, match="has no vocabulary, since it was copied without its asse"):
        clone.predict(ROWS)
    assert copy.deepcopy(model).predict_rows(ROWS[:1]) == model.predict_rows(ROWS[:1])


def test_private_names_of_keras_exist():
    """Names without a documented replacement; setup.py pins the minor version of Keras."""
    trainer = inspect.getsource(keras.Model.fit)
    assert "initial_epoch = self._initial_epoch or initial_epoch" in trainer
    assert "self._maybe_symbolic_build(iterator=epoch_iterator)" in trainer
    schedule = FitSchedule(1e-3)
    assert keras.optimizers.Adam(schedule)._learning_rate is schedule


@pytest.mark.slow
def test_evaluations_share_a_graph(model):
    traces = []
    for _ in range(2):
        model.evaluate(ROWS, NAMES)
        model.report(ROWS[:4], NAMES[:4])
        traces.append(model.evaluator()._forward.experimental_get_tracing_count())
    assert traces[0] == traces[1]
    serving = model.serving
    model.fit(ROWS, NAMES, epochs=1, verbose=0)
    assert model.serving is serving


def test_rows_of_several_sequences_are_refused_in_one_line(weights):
    model = create("QuestionAnswerer", weights)
    for x in (CASES["QuestionAnswerer"][1], keras.Input((), dtype="string")):
        with pytest.raises(UserError) as raised:
            model.preprocessor(x)
        assert str(raised.value).startswith("preprocessor: a row of span_qa becomes several seq")
        assert "\n" not in str(raised.value)


def test_tokens_of_several_calls_are_padded_as_those_of_one(model):
    columns = {"text": ["the", "the bill is too high"]}
    expected = model.serving.call("tokenize", columns)
    found = model.serving.call("tokenize", columns, batch_size=1)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_functions_of_one_trace_cause_no_warning_of_retracing(model, caplog):
    for _ in range(6):
        traced = model.serving.pipeline._traced(lambda text: tf.strings.length(text), ("text",))
        traced(tf.constant(ROWS))
    assert "retracing" not in caplog.text


@pytest.mark.parametrize("name", ["serving", "evaluator"])
def test_threads_build_one_graph(model, monkeypatch, name):
    """Let another thread ask for the graph while the first one builds it."""
    built, others = [], []

    class Built:
        task, signatures = model.task, {}

        def __init__(self, *args):
            built.append(self)
            if len(built) == 1:
                others.append(threading.Thread(target=lambda: get()))
                others[0].start()
                others[0].join(timeout=0.1)  # It waits, or has built another one by then.

    def get():
        found = getattr(model, name)
        return found() if name == "evaluator" else found

    monkeypatch.setattr(task_model, {"serving": "ServingFunctions"}.get(name, "Evaluator"), Built)
    kept = getattr(model, f"_{name}")
    object.__setattr__(model, f"_{name}", None)
    try:
        assert get() is built[0]
        others[0].join()
        assert len(built) == 1
    finally:
        object.__setattr__(model, f"_{name}", kept)
