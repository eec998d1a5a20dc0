"""Requests merged along their rows and predictions split, like TF Serving's BatchingSession.

This follows tensorflow_serving/batching/batching_session.cc (ComputeInputSize, MergeInputTensors,
SplitOutputTensors, ProcessBatch) and TensorFlow's shared_batch_scheduler.h (which requests are
rejected on their own): what fails for whom. There is one thread per signature, and no padding.
"""

import contextlib
import re
import threading

import numpy as np

from tests.export.c_engine import INVALID_ARGUMENT, EngineError

FAILED_PRECONDITION = 9


class _Task:
    def __init__(self, inputs):
        self.inputs = inputs
        sizes = {array.shape[0] for array in inputs.values() if array.ndim}
        if len(sizes) != 1 or not all(array.ndim for array in inputs.values()):
            raise EngineError("Batching Run() input tensors must have equal 0th-dimension size")
        (self.size,) = sizes
        self.done, self.answer, self.error = threading.Event(), None, None


class Batching:
    """Engine whose requests are batched as configured by the text of a batching_params.pbtxt."""

    def __init__(self, engine, parameters):
        self.signatures, self._engine = engine.signatures, engine
        (rows,) = re.findall(r"^max_batch_size \{ value: (\d+)", parameters, re.MULTILINE)
        self.max_batch_size = int(rows)
        self.batches = []  # The numbers of rows of the requests in each computed batch.
        self._waiting = {signature: [] for signature in self.signatures}
        self._changed, self._is_held = threading.Condition(), False
        for signature in self.signatures:
            threading.Thread(target=self._run, args=(signature,), daemon=True).start()

    def predict(self, inputs, signature="serving_default"):
        """Return predictions like Engine.predict, once the batch with this request is computed."""
        if signature not in self.signatures:
            raise EngineError(f'Serving signature name: "{signature}" not found in signature def')
        types = self.signatures[signature]["inputs"]
        if set(inputs) != set(types):
            return self._engine.predict(inputs, signature)  # Each request raises its own error.
        task = _Task(
            {
                name: np.asarray(values, object if types[name].dtype == "string" else None)
                for name, values in inputs.items()
            }
        )
        if task.size > self.max_batch_size:
            raise EngineError(
                f"Task size {task.size} is larger than maximum input batch size "
                f"{self.max_batch_size}",
                INVALID_ARGUMENT,
            )
        with self._changed:
            self._waiting[signature].append(task)
            self._changed.notify_all()
        task.done.wait()
        if task.error:
            raise task.error
        return task.answer

    @contextlib.contextmanager
    def held(self, count):
        """Hold requests back until there are `count`, which then form one batch."""
        with self._changed:
            self._is_held = True
        yield
        with self._changed:
            self._changed.wait_for(lambda: sum(map(len, self._waiting.values())) == count, 60)
            self._is_held = False
            self._changed.notify_all()

    def _run(self, signature):
        waiting = self._waiting[signature]

        def is_ready():
            # Requests without rows do not form a batch of their own.
            return not self._is_held and sum(task.size for task in waiting)

        while True:
            with self._changed:
                self._changed.wait_for(is_ready)
                batch = []
                while waiting and sum(t.size for t in [*batch, waiting[0]]) <= self.max_batch_size:
                    batch.append(waiting.pop(0))
                self.batches.append([task.size for task in batch])
            try:
                self._answer(batch, signature)
            except EngineError as error:
                for task in batch:
                    task.error = error
            for task in batch:
                task.done.set()

    def _answer(self, batch, signature):
        first = batch[0].inputs
        for task in batch:
            for name, array in task.inputs.items():
                if array.shape[1:] != first[name].shape[1:]:
                    raise EngineError(
                        f"Tensors with name '{name}' from different tasks have different shapes "
                        "and padding is turned off.",
                        FAILED_PRECONDITION,
                    )
        joined = {name: np.concatenate([task.inputs[name] for task in batch]) for name in first}
        prediction = self._engine.predict(joined, signature)
        ends = np.cumsum([task.size for task in batch])
        for name, array in prediction.items():
            if array.ndim == 0 or array.shape[0] != ends[-1]:
                raise EngineError(
                    f"Batched output tensor {name}'s 0th dimension does not equal the sum of the "
                    "0th dimension sizes of the input tensors",
                    FAILED_PRECONDITION,
                )
        for task, end in zip(batch, ends, strict=True):
            task.answer = {name: array[end - task.size : end] for name, array in prediction.items()}
