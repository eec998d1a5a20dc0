"""What tests of the export share: a SavedModel by hand."""

import pytest


@pytest.fixture(scope="session")
def echo_dir(tmp_path_factory):
    """MODELS/name of a SavedModel with each kind of signature, version 3."""
    from tests.export.saved_models import write_echo

    return write_echo(tmp_path_factory.mktemp("models") / "echo")
