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
    """The fake engine without keys and flags, shared by tests that earlier requests cannot affect."""
    for serve in services(tmp_path_factory.mktemp("services"), weights):
        yield serve(fake_ms=1)


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[tuple[Server, Keyring]]:
    """The fake engine with keys of alice, bob and carol, shared like `fake_server`."""
    folder = tmp_path_factory.mktemp("keyed")
    ring = Keyring.of(folder / "keys.json", "alice", "bob", "carol")
    for serve in services(folder, weights):
        yield serve(ring=ring, fake_ms=1), ring


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Arms faults in a module's services; each test disarms its faults."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def disarm_faults_after_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disarm faults after each test, so that tests can share a service."""
    yield
    if "faults" in request.fixturenames:
        request.getfixturevalue("faults").disarm()


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Two keys without quotas."""
    return Keyring.of(tmp_path_factory.mktemp("keys") / "keys", "victim", "attacker")
