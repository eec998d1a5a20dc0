"""A shallower BERT for the tests of tasks, most of which build the graphs of whole trainings."""

import dataclasses

import pytest


@pytest.fixture(scope="session")
def config(config):
    """Return the configuration with one layer; tests of layers replace it by one with more."""
    return dataclasses.replace(config, num_hidden_layers=1)
