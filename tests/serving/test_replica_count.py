"""--replicas auto: NUMA nodes, memory, and the estimate of a step's time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from app.common.cpu_topology import Core, Topology
from app.common.settings import Settings
from app.engine_client.engine_pool import EnginePool
from app.serving import replica_count
from app.serving.instance_factory import make_engine_pool
from app.serving.replica_count import Rates, choose_replicas, operations, step_seconds, tokens_per_second
from app.start import StartError, serve
from model.checkpoint.config_file import load_config
from model.parameter_shapes import count_parameters
from tests.support import ROOT
from tests.support.async_test import async_test
from tests.support.model.tiny_models import tiny_config, tiny_weights

DEFAULT = load_config(ROOT / "weights")
FREE = 64 << 30


@pytest.fixture(autouse=True)
def _machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_count, "may_have_gpu", lambda: False)
    monkeypatch.setattr(replica_count, "free_memory", lambda: FREE)


def _machine(cores: int, nodes: int = 1) -> Topology:
    return Topology(tuple(Core((cpu,), cpu * nodes // cores) for cpu in range(cores)))


def _settings(**more: Any) -> Settings:
    return Settings(weights=ROOT / "weights", dtype="bfloat16", **more)


@pytest.mark.parametrize("changes", [{}, {"gated": False, "mlp_width": 0}, {"parallel_residual": True, "head_dim": 32}])
def test_operations_read_every_weight_once(changes: dict[str, Any]) -> None:
    """Matrices only; the tied embedding counts as the LM head."""
    config = tiny_config(**changes)
    read = sum(one.weight_bytes for one in operations(config, 8, 2))
    assert read == pytest.approx(2 * count_parameters(config), rel=0.01)
    assert sum(one.products for one in operations(config, 8, 2)) == 8 * read // 2
    assert sum(one.cache_bytes for one in operations(config, 8, 2, 100)) == 8 * 100 * 2 * config.kv_elements_per_token


def test_threads_help_until_tasks_or_bandwidth_run_out() -> None:
    free = Rates(synchronization=0, host=0, host_row=0, node=1e15)
    seconds = [step_seconds(DEFAULT, 32, threads, free) for threads in (1, 2, 4, 8, 64, 1024)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.05)
    assert seconds[0] / seconds[4] < 20  # 384 outputs are six tasks
    slow_memory = Rates(synchronization=0, host=0, host_row=0, node=free.weights)
    assert step_seconds(DEFAULT, 1, 64, slow_memory) > 0.8 * step_seconds(DEFAULT, 1, 1, slow_memory)
    waiting = Rates(synchronization=1e-3)
    assert step_seconds(DEFAULT, 1, 2, waiting) > step_seconds(DEFAULT, 1, 1, waiting)


def test_api_process_limits_all_engines_together() -> None:
    assert tokens_per_second(DEFAULT, _machine(64), 64, 32, Rates(api=1e-4)) == 10_000


@pytest.mark.parametrize(
    ("machine", "rates", "chosen"),
    [
        (_machine(1), Rates(), 1),
        (_machine(2), Rates(), 1),
        (_machine(64), Rates(), 1),  # limit of the API process
        (_machine(64, 2), Rates(), 2),
        (_machine(64, 4), Rates(), 4),
        (_machine(2), Rates(host=1e-2), 2),  # the host's share dominates
        (_machine(64), Rates(api=1e-9), 4),
        (_machine(2, 2), Rates(host=1e-2), 2),  # no more engines than threads
    ],
)
def test_replica_count_depends_on_nodes_and_model(machine: Topology, rates: Rates, chosen: int) -> None:
    assert choose_replicas(_settings(), machine, rates) == chosen


def test_engines_that_do_not_fit_in_memory_are_not_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    size = 2 * count_parameters(DEFAULT) + 2 * DEFAULT.kv_elements_per_token * DEFAULT.context * 32
    for free, chosen in ((8 * size, 4), (5 * size, 2), (size, 1)):
        monkeypatch.setattr(replica_count, "free_memory", lambda free=free: free)
        assert choose_replicas(_settings(), _machine(64, 4)) == chosen
    assert "--replicas auto: 2 (each takes 56 MiB of weights and cache, and more do not fit" in caplog.text


def test_smaller_cache_allows_more_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_count, "free_memory", lambda: 5 * 56 << 20)
    assert choose_replicas(_settings(), _machine(64, 4)) == 2
    assert choose_replicas(_settings(kv_blocks=8), _machine(64, 4)) == 4


def test_unsupported_weights_are_one_line(tmp_path: Path) -> None:
    (directory := tmp_path / "w").mkdir()
    (directory / "config.json").write_text('{"model_type": "bert"}')
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (directory / "tokenizer.json").write_text("{}")
    settings = Settings(weights=directory, replicas="auto", port=0)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="bert"):
        serve(settings)


def test_each_gpu_gets_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_count, "may_have_gpu", lambda: True)
    assert choose_replicas(_settings(), _machine(64, 4)) == 1
    assert choose_replicas(_settings(device="cpu"), _machine(64, 4)) == 4
    assert choose_replicas(_settings(device="cuda"), _machine(64, 4)) == 1


@async_test
async def test_auto_starts_the_estimated_number_of_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.serving.instance_factory.read_topology", lambda: _machine(8, 2))
    settings = Settings(weights=tiny_weights(tmp_path / "w"), replicas="auto", kernels="torch")  # type: ignore[arg-type]
    pool: EnginePool = make_engine_pool(settings)
    configs = [engine.supervisor._config for engine in pool.engines]
    assert [config.cpus for config in configs] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [config.threads for config in configs] == [3, 3]


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas"):
        Settings(replicas="many")  # type: ignore[arg-type]
