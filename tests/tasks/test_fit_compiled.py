"""`fit` with XLA: packed batches of few shapes, and the same training."""

import pytest

from tests import small
from tests.tasks.test_task_model import NAMES, ROWS, compiled
from tests.tasks.test_task_model_training import NO_DROPOUT, assert_equal_weights, weights_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory, config, vocabulary):
    directory = tmp_path_factory.mktemp("compiled") / "weights"
    return small.write_huggingface(directory, config, vocabulary, **NO_DROPOUT)


def test_fit_compiled_by_xla_packs_rows_and_trains_equally(weights):
    plain, packed = (compiled("TextClassifier", weights, learning_rate=1e-3) for _ in range(2))
    assert not plain.jit_compile  # "auto" on a CPU.
    packed.compile(learning_rate=1e-3, jit_compile=True)
    for model in (plain, packed):
        model.fit(ROWS, NAMES, batch_size=4, epochs=2, verbose=0)
    assert_equal_weights(weights_of(plain), weights_of(packed), rtol=1e-4, atol=2e-6)
