"""Files of a run and requests to a served model, for tests.fuzzed.

Each function maps a directory to (path, function that reads the path).
"""

import json

from bert_tf.config import BertConfig
from tests.rows import CONFIG, WORDS


def config(directory):
    run = _make_run(directory)
    return run / "config.json", _opened


def task(directory):
    run = _make_run(directory)
    return run / "task.json", _opened


def train(directory):
    run = _make_run(directory)

    def read(path):
        from bert_tf.runs.run import Run
        from export.package.documents import model_card

        assert model_card
        run = Run.open(path.parent)
        run.changes()
        run.check_resumable(run.train.get("settings", {}), run.task)
        return run.train

    return run / "train.json", read


def metrics(directory):
    run = _make_run(directory)
    lines = [{"step": 1, "loss": 0.5}, {"step": 1, "score": 0.7, "dev_accuracy": 0.7}]
    path = run / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(path):
        from bert_tf.runs.run import Run

        run = Run.open(path.parent)
        run.patience_exhausted(2)
        return run.metrics()

    return path, read


def checkpoint_json(directory):
    run = _make_run(directory)
    path = next(run.glob("checkpoints/*/checkpoint.json"))
    path.write_text(json.dumps({"step": 0, "score": 0.5, "metrics": {"dev_accuracy": 0.5}}))
    return path, lambda path: _opened(run / "task.json")


def checkpoint_index(directory):
    run = _make_run(directory)
    return next(run.glob("checkpoints/*/variables.index")), lambda path: _opened(run / "task.json")


def checkpoint_data(directory):
    run = _make_run(directory)
    path = next(run.glob("checkpoints/*/variables.data*"))
    return path, lambda path: _opened(run / "task.json")


def rest_request(directory):
    """Parse a body like TF Serving's REST API and run the graph on it."""
    from bert_tf.errors import UserError
    from export.graph.saved_model import write_saved_model
    from tasks.model.loading import load_model
    from tests.export.c_engine import INVALID_ARGUMENT, Engine, EngineError
    from tests.export.rest_json import predicted

    write_saved_model(load_model(_make_run(directory)), directory / "model")
    engine = Engine(directory / "model")
    path = directory / "request.json"
    request = {"signature_name": "serving_default", "instances": ["the bill is high", "my app"]}
    path.write_text(json.dumps(request))

    def read(path):
        try:
            return predicted(engine, path.read_bytes())
        except EngineError as error:
            if error.code != INVALID_ARGUMENT:
                raise
            # TF Serving sends the message as JSON, so it may have several lines.
            raise UserError(" ".join(str(error).split())[:2_000]) from None

    return path, read


def _make_run(directory):
    from bert_tf.runs import checkpoints
    from bert_tf.runs.run import Run
    from bert_tf.text.vocabulary import Vocabulary
    from tasks.types.classification.text_classifier import ClassificationTask

    bert = BertConfig(**CONFIG)
    task = ClassificationTask(labels=("a", "b", "c"), max_seq_length=12)
    settings = {"seed": 1, "learning_rate": 0.1}
    record = {"settings": settings, "origin": "nowhere", "data": {"a": "b"}}
    run = Run.create(directory / "run", bert, Vocabulary(WORDS), record, task.to_dict())
    run.checkpoints.save(0, checkpoints.model_variables(task.build_model(bert)))
    return directory / "run"


def _opened(path):
    import tensorflow as tf

    from tasks.model.loading import load_model

    trained = load_model(path.parent)
    texts = {name: tf.constant(["the bill is high"]) for name in trained.task.input_names}
    windows = trained.serving.pipeline.encode(**texts)
    return windows.packed.input_ids.to_list()
