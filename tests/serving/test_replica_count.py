"""--replicas auto: one engine for each NUMA node, as far as the memory allows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from app.common.cpu_topology import Core, Topology
from app.common.settings import Settings
from app.engine_client.engine_pool import EnginePool
from app.serving import instance_factory
from app.serving.instance_factory import choose_replicas, make_engine_pool
from tests.support import ROOT
from tests.support.async_test import async_test
from tests.support.model.tiny_models import tiny_weights


@pytest.fixture(autouse=True)
def _machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_factory, "may_have_gpu", lambda: False)
    monkeypatch.setattr(instance_factory, "free_memory", lambda: 64 << 30)


def _machine(cores: int, nodes: int = 1) -> Topology:
    return Topology(tuple(Core((cpu,), cpu * nodes // cores) for cpu in range(cores)))


def _settings(**more: Any) -> Settings:
    return Settings(weights=ROOT / "weights", **more)


@pytest.mark.parametrize(("cores", "nodes"), [(1, 1), (2, 1), (64, 1), (2, 2), (64, 2), (64, 4)])
def test_each_numa_node_gets_one_engine(cores: int, nodes: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_replicas(_settings(), _machine(cores, nodes)) == nodes
    reason = f"one for each of {nodes} NUMA nodes" if nodes > 1 else "one NUMA node"
    assert f"--replicas auto: {nodes} ({reason})" in caplog.text


def test_engines_that_do_not_fit_in_memory_are_not_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    size = (ROOT / "weights" / "model.safetensors").stat().st_size
    for free, chosen in ((8 * size, 4), (5 * size, 2), (size, 1), (0, 1)):
        monkeypatch.setattr(instance_factory, "free_memory", lambda free=free: free)
        assert choose_replicas(_settings(), _machine(64, 4)) == chosen
    assert "--replicas auto: 2 (4 NUMA nodes, but more copies of the weights exceed" in caplog.text


def test_each_gpu_gets_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_factory, "may_have_gpu", lambda: True)
    assert choose_replicas(_settings(), _machine(64, 4)) == 1
    assert choose_replicas(_settings(device="cpu"), _machine(64, 4)) == 4
    assert choose_replicas(_settings(device="cuda"), _machine(64, 4)) == 1


@async_test
async def test_auto_starts_an_engine_on_each_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instance_factory, "read_topology", lambda: _machine(8, 2))
    settings = Settings(weights=tiny_weights(tmp_path / "w"), replicas="auto", kernels="torch")  # type: ignore[arg-type]
    pool: EnginePool = make_engine_pool(settings)
    configs = [engine.supervisor._config for engine in pool.engines]
    assert [config.cpus for config in configs] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [config.threads for config in configs] == [3, 3]


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas"):
        Settings(replicas="many")  # type: ignore[arg-type]
