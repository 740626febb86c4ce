"""Opens instances of the weights that are served now, with their engines: at the start, and for each reload."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from app.chat.template_client import ChatTemplate
from app.common import logs
from app.common.cpu_topology import EngineShare, Topology, divide, read_topology
from app.common.ipc import WorkerConfig
from app.common.logs import START
from app.common.settings import Settings
from app.common.weights_store import WeightsStore
from app.engine_client.engine_pool import EnginePool
from app.engine_client.replica import Replica
from app.engine_client.request_queue import RequestQueue
from app.serving.gguf_tokenizers import GgufTokenizers
from app.serving.kernel_prebuild import libraries_at_start
from app.serving.model_instance import ModelInstance
from app.serving.weights_snapshot import WeightsSnapshot, take_fingerprint, without_links
from model.checkpoint.gguf_directory import find_gguf
from model.checkpoint.manifest import read_model_name
from model.checkpoint.tensor_index import check_layout
from model.machine import free_memory, may_have_gpu

_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)


async def open_instance(settings: Settings, reserved_bytes: int = 0) -> ModelInstance:
    """Opens an instance of the current weights directory; a symlink to it may be changed later.

    reserved_bytes: free memory that running engines may need. Raises CheckpointError.
    """
    fingerprint = await asyncio.to_thread(take_fingerprint, settings.weights)
    weights = await asyncio.to_thread(without_links, settings.weights)
    snapshot = await asyncio.to_thread(WeightsSnapshot.open, weights, GgufTokenizers(settings.cache_dir))
    try:
        chat_template, name = await asyncio.to_thread(_load_facts, snapshot)
        engine = make_engine_pool(settings.model_copy(update={"weights": weights}), reserved_bytes)
    except BaseException:
        snapshot.close()
        raise
    return ModelInstance(
        weights,
        fingerprint,
        engine,
        chat_template,
        grammar_seconds=settings.guide_seconds,
        name=name,
        snapshot=snapshot,
        store=WeightsStore.of(settings.cache_dir, settings.packed_cache_bytes),
    )


def _load_facts(snapshot: WeightsSnapshot) -> tuple[ChatTemplate | None, str | None]:
    """Chat template and name of the model. Raises CheckpointError if files are missing or invalid."""
    check_layout(snapshot.directory)
    return ChatTemplate.load(snapshot.directory), read_model_name(snapshot.directory)


def make_engine_pool(settings: Settings, reserved_bytes: int = 0) -> EnginePool:
    """Builds the pool of engine processes from the settings. reserved_bytes: see WorkerConfig."""
    topology = read_topology()
    replicas = settings.replicas or choose_replicas(settings, topology)
    if settings.threads > topology.n_cpus:
        _log.warning(
            "--threads %d exceeds the %d available cores: threads will compete for them",
            settings.threads,
            topology.n_cpus,
        )
    if replicas > (threads := settings.threads or topology.n_cpus):
        _log.warning(
            "--replicas %d exceeds the %d threads (--threads): each replica takes one, and they will compete for cores",
            replicas,
            threads,
        )
    shares = divide(topology, replicas, settings.threads)
    _start_log.info("cores: %s; %d threads for each engine by default", topology, shares[0].threads)
    queue = RequestQueue(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
    configs = _worker_configs(settings, shares, reserved_bytes)
    return EnginePool([Replica(config, silence_seconds=settings.engine_silence) for config in configs], queue)


def choose_replicas(settings: Settings, topology: Topology) -> int:
    """The number of engines for --replicas auto: one for each NUMA node whose engine finds memory. Logs the reason.

    One on a GPU: the number of GPUs is known to torch only, which this process does not import.
    """
    nodes = len(topology.nodes)
    if settings.device == "cuda" or (settings.device == "auto" and may_have_gpu()):
        chosen, reason = 1, "there may be a GPU: give the number of GPUs to use several"
    elif nodes > (most := _copies_in_memory(settings.weights)):
        chosen, reason = most, f"{nodes} NUMA nodes, but more copies of the weights exceed half of the free memory"
    else:
        chosen, reason = nodes, f"one for each of {nodes} NUMA nodes" if nodes > 1 else "one NUMA node"
    _start_log.info("--replicas auto: %d (%s)", chosen, reason)
    return chosen


def _copies_in_memory(weights: Path) -> int:
    """How often half of the free memory holds the weights' files, at least 1; the rest is for caches."""
    files = find_gguf(weights) or weights.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    return max(1, free_memory() // 2 // max(1, size))


def _worker_configs(settings: Settings, shares: Sequence[EngineShare], reserved_bytes: int = 0) -> list[WorkerConfig]:
    libraries = libraries_at_start(settings)

    def config(replica: int, share: EngineShare) -> WorkerConfig:
        return WorkerConfig(
            weights=str(settings.weights),
            device=settings.device,
            dtype=settings.dtype,
            kernels=settings.kernels,
            quantize=settings.quantize,
            kv_cache=settings.kv_cache,
            speculate=settings.speculate,
            deterministic=settings.deterministic,
            has_torch=libraries.has_torch,
            library=str(libraries.found) if libraries.found else None,
            cache_dir=str(libraries.cache_dir) if libraries.cache_dir else None,
            packed_cache_bytes=settings.packed_cache_bytes,
            threads=share.threads,
            cpus=share.cpus,
            replica=replica,
            replicas=len(shares),
            concurrent_loaders=len(shares) - 1,
            reserved_bytes=reserved_bytes,
            kv_blocks=settings.kv_blocks,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_context=settings.max_context,
            tokens_per_step=settings.tokens_per_step,
            prompt_tokens_beside=settings.prompt_tokens_beside,
            max_running=settings.max_running,
            log_level=settings.log_level,
            log_format=logs.resolve_format(settings.log_format),
        )

    return [config(replica, share) for replica, share in enumerate(shares)]
