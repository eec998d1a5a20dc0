"""Fixtures of the export tests: a handwritten SavedModel, and a server of it."""

import pytest


@pytest.fixture(scope="session")
def echo_dir(tmp_path_factory):
    """Return MODELS/name of a SavedModel with each kind of signature, version 3."""
    from tests.export.saved_models import write_echo

    return write_echo(tmp_path_factory.mktemp("models") / "echo")


@pytest.fixture(scope="session")
def addresses(echo_dir):
    """Return the REST and gRPC addresses at which the test server serves it."""
    from tests.export.server import serving

    with serving(echo_dir) as found:
        yield found
