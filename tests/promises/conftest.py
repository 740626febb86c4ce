"""Fixtures that several tests of promises share."""

from __future__ import annotations

import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Arms the faults of the services of a module."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Two keys without quotas."""
    return Keyring.of(tmp_path_factory.mktemp("keys") / "keys", "victim", "attacker")
