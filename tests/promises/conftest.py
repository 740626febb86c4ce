"""Fixtures that several tests of promises share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring
from tests.support.servers import Server
from tests.support.services import services


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    """The fake engine without keys and flags, shared by tests that no earlier request can disturb."""
    for serve in services(tmp_path_factory.mktemp("services"), weights):
        yield serve(fake_ms=1)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Arms the faults of the services of a module."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Two keys without quotas."""
    return Keyring.of(tmp_path_factory.mktemp("keys") / "keys", "victim", "attacker")
