"""What tests of the export share: a SavedModel by hand, and a server of it."""

import pytest


@pytest.fixture(scope="session")
def echo_dir(tmp_path_factory):
    """MODELS/name of a SavedModel with each kind of signature, version 3."""
    from tests.export.saved_models import write_echo

    return write_echo(tmp_path_factory.mktemp("models") / "echo")


@pytest.fixture(scope="session")
def addresses(echo_dir):
    """Where the tests' server serves it, by REST and by gRPC."""
    from tests.export.server import serving

    with serving(echo_dir) as found:
        yield found
