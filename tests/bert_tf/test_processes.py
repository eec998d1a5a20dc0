"""Environments and processes in which TensorFlow would fail or hang are refused in one line."""

import importlib.util
import os
import sys
import threading
import types

import pytest

from bert_tf import UserError
from bert_tf.system import command
from bert_tf.system.lazy_names import lazy_names
from bert_tf.system.processes import FirstCalls, check_backend, check_not_forked


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_another_backend_is_refused(monkeypatch, name):
    message = f"^KERAS_BACKEND={name}: expected tensorflow; set it before Keras is imported, or"
    loaded = types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: name))
    monkeypatch.setitem(sys.modules, "keras", loaded)
    with pytest.raises(UserError, match=message):
        check_backend()
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setenv("KERAS_BACKEND", name)
    with pytest.raises(UserError, match=message):
        check_backend()
    with pytest.raises(UserError, match=message):
        command.import_tensorflow()
    # A name that needs no Keras is imported, and one whose import fails is explained.
    _, attribute, _ = lazy_names("a", {"UserError": "bert_tf.errors", "Other": "a_missing_module"})
    assert attribute("UserError") is UserError
    with pytest.raises(UserError, match=message):
        attribute("Other")


def test_the_former_keras_has_to_be_installed(monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="TF_USE_LEGACY_KERAS=1: requires tf_keras, which is not"):
        check_backend()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_backend()


def test_a_forked_process_is_refused():
    check_not_forked(os.getpid())
    with pytest.raises(UserError, match="before this process was forked, .* would hang; load the"):
        check_not_forked(os.getppid())


def test_one_thread_makes_the_first_call():
    calls, first_calls = [], FirstCalls()

    def second():
        return first_calls.call("graph", calls.append, "second")

    def first():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.1)  # It waits, or has called by then.
        calls.append("first")
        return thread

    first_calls.call("graph", first).join()
    assert calls == ["first", "second"]
    # A call that fails is not the first one.
    with pytest.raises(ZeroDivisionError):
        first_calls.call("other", lambda: 1 / 0)
    assert first_calls.call("other", lambda *args, **kwargs: (args, kwargs), 1, a=2) == (
        (1,),
        {"a": 2},
    )
