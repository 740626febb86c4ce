"""Builds an engine from a configuration: weights, memory, kernels, warm-up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from app.common.cpu_topology import bind_process
from app.common.ipc import Ready, WorkerConfig
from app.common.logs import START
from app.common.model_version import Version
from app.common.startup_timer import LOADING_WEIGHTS, PROVING
from app.common.types import sampling_defaults
from app.common.weights_store import FileHashes, WeightsStore
from app.engine.backends import (
    Announce,
    Backend,
    CppBackend,
    Placement,
    packed_bytes,
    place_without_torch,
)
from app.engine.cpu.packed_decoder import BLOCK, padded_head_dim
from app.engine.cpu.toolchain.backend_selection import Libraries, SelectedBackend, select_backend
from app.engine.execution.engine import Engine
from app.engine.execution.warmup_batches import verifying
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.device_errors import broken_capture, lacked_device_memory
from app.engine.memory.memory_plan import CacheShape, cache_share_on_cpu, cache_share_on_gpu, choose_context, mib
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.speculation.lookup import LookupProposer
from app.engine.speculation.speculation import Speculation
from app.engine.speculation.step_costs import measure
from app.engine.startup_checks import check_batch_invariance, check_finite_logits, check_golden
from app.engine.worker_loop import BuiltEngine, EngineStartError
from model.checkpoint.manifest import MANIFEST_FILE, check_manifest
from model.checkpoint.stored_weights import StoredWeights, find_weights
from model.config import ModelConfig
from model.machine import INSTALL_TORCH, free_memory
from model.quantize import describe_unquantized, packed_kind
from model.tokenizer.tokenizer import Tokenizer
from model.weight_formats import QUANTIZE, needs_gpu, weight_format
from model.weights_version import Directory

_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)
_FOR_GPU = " or ".join(quantize for quantize in QUANTIZE if needs_gpu(quantize))
_NEEDS_TORCH = f"a GPU and --quantize {_FOR_GPU} need torch; --device cpu leaves a GPU aside"
TOKENS_PER_STEP = 256
"""Default on a CPU."""
_SHARED_PROMPT_TOKENS = 64
"""Prompt tokens of a step on a CPU while API keys are in use, unless --tokens-per-step is given. Eight long prompts of
one key made another key's first token wait 51 ms with 256, 13 ms with 64. Prefill is as fast with the default weights,
and 0 to 13 % slower with 130 million parameters (2026-11-23)."""

_STEPS_AT_ONCE = 3
"""On a GPU: while one step runs and the next is planned, the blocks that the last one has left may still be in use."""


def build_engine(
    config: WorkerConfig,
    announce: Announce = lambda _phase: None,
    find: Callable[[Directory], StoredWeights] | None = None,
) -> BuiltEngine:
    """Loads the weights, allocates the cache, warms up; reports each phase to `announce`. Raises EngineStartError.

    find: replaces find_weights() in benchmarks whose weights are not in a file.
    """
    announce(LOADING_WEIGHTS)
    with _as_start_error(f"{config.weights}: the weights do not fit into the free memory of the GPU"):
        placement = place_without_torch(config) or _torch_backends(config, _NEEDS_TORCH).place(config)
        speculates = _speculates(config, placement)
        if placement.device == "cpu" and (problem := bind_process(config.cpus)):
            _log.warning("%s: %s", config.name, problem)
        directory = config.directory
        weights, hashes, store = _find_weights(config, placement, find)
        defaults = sampling_defaults(weights.generation, directory / "generation_config.json")
        tokenizer = Tokenizer.reader(directory)  # the files may have changed when the first grammar needs it
        limits = _limits(config, placement)
        libraries = Libraries.of(config.library, config.cache_dir, config.has_torch)
        selected = select_backend(
            config.kernels, placement.dtype, placement.device, weights.config, libraries, announce
        )
        _announce_unquantized(config, weights.config, announce)
        cache_shape = _cache_shape(config, weights, placement, selected, limits)
        model, weights = weights.config, _served(weights, cache_shape.context)
        backend: Backend
        if selected.library:
            backend = CppBackend(selected, weights, cache_shape, config, hashes, store)
        else:
            hashes.verify(weights.version)
            backends = _torch_backends(config, selected.reason)
            backend = backends.choose_backend(selected, weights, cache_shape, limits, config, announce)
        blocks, plan = backend.plan_memory(config, announce)
        _start_log.info("%s: memory: %s", config.name, plan)
    grammars = GrammarTracker(
        lambda: tokenizer().bytes_of, vocab_size=weights.config.vocab_size, max_states=config.max_running
    )
    flag = "--kv-blocks" if config.kv_blocks else "--gpu-memory-utilization"
    with _as_start_error(
        f"a cache of {max(blocks)} blocks leaves too little memory for the steps: "
        f"give a smaller {flag} or --max-running"
    ):
        runners = backend.start(blocks, grammars, announce)

        def make_engine(limits: StepLimits) -> Engine:
            sizes, size = zip(blocks, cache_shape.groups, strict=True), cache_shape.block_size
            pools = [BlockPool(count, size, window=group.window) for count, group in sizes]
            scheduler = Scheduler(limits, *pools, version=Version(weights.version))
            return Engine(scheduler, *runners, release=backend.release, masks=grammars)

        engine = make_engine(limits)
        announce(PROVING)
        if config.deterministic:
            announce(check_batch_invariance(make_engine, limits, weights.config, context=cache_shape.context))
        announce(_check_weights(engine, config, directory, weights, model, cache_shape))
        if speculates:
            engine.speculate(
                _speculation(config, engine, replace(weights.config, context=cache_shape.context), grammars)
            )
    facts = (cache_shape, placement, engine.scheduler.pools, backend)
    ready = _ready(weights, model, *facts, defaults=defaults, waits=selected.waits_for_build)
    return BuiltEngine(engine, grammars, ready)


def _speculates(config: WorkerConfig, placement: Placement) -> bool:
    """Whether steps verify drafts. Raises ValueError."""
    if placement.device != "cpu" and config.speculate == "lookup":
        raise ValueError(
            "--speculate lookup: a GPU computes one step ahead of the host, which looks up drafts: use --speculate "
            "auto or off, or --device cpu"
        )
    return placement.device == "cpu" and config.speculate != "off"


def _speculation(config: WorkerConfig, engine: Engine, shape: ModelConfig, grammars: GrammarTracker) -> Speculation:
    """Measures steps, which decide how many drafts pay."""
    source = (0,) if shape.n_encoder_layers else ()
    most_rows = min(shape.context, engine.scheduler.limits.tokens_per_step)
    costs = measure(lambda rows: engine.runner.run(verifying(rows, source=source)), most_rows)
    _start_log.info("%s: speculation: lookup; %s", config.name, costs)
    return Speculation(LookupProposer(), costs, allow=grammars.allow_drafts)


def _find_weights(
    config: WorkerConfig, placement: Placement, find: Callable[[Directory], StoredWeights] | None
) -> tuple[StoredWeights, FileHashes, WeightsStore | None]:
    """The weights, the hashes of their files, and the store that keeps packed ones. Raises ValueError."""
    directory, limit = config.directory, 0 if find else config.packed_cache_bytes
    store = WeightsStore.of(config.cache_dir, limit) if limit else None
    hashes, check = FileHashes(directory, store), partial(_check_memory, config, placement)
    return (find or partial(find_weights, digest=hashes.digest, check=check))(directory), hashes, store


def _announce_unquantized(config: WorkerConfig, shape: ModelConfig, announce: Announce) -> None:
    if (kind := packed_kind(config.quantize)) and (unquantized := describe_unquantized(shape, kind)):
        announce(unquantized)


def _check_memory(config: WorkerConfig, placement: Placement, weights: StoredWeights) -> None:
    """Raises ValueError if the weights are larger than the free memory: the system would end some process.

    Files may have holes: 300 GB of zeros take 4 KB of disk.
    """
    needed = packed_bytes(weights, placement.dtype, config)  # torch needs as much, or more
    if placement.device == "cpu" and needed > (free := free_memory()):
        raise ValueError(
            f"{config.weights}: the weights take {mib(needed)} of memory, and {mib(free)} are free: free some, or "
            "serve a smaller model"
        )


def _torch_backends(config: WorkerConfig, reason: str) -> Any:
    """Imported by name: an engine that computes in C++ needs no torch, which takes a second and 200 MB.

    reason: why the native kernels do not compute. Raises ValueError if torch is not installed, or was not when the
    service started: an engine that comes back must not compute in another way than the one before it.
    """
    if not config.has_torch or find_spec("torch") is None:
        raise ValueError(
            f"torch is not installed, and without it only the native kernels compute: {reason}; or {INSTALL_TORCH}"
        )
    return import_module("app.engine.torch_backends")


@contextlib.contextmanager
def _as_start_error(too_large: str) -> Iterator[None]:
    """Converts configuration errors to EngineStartError; `too_large`: the message for a lack of memory."""
    try:
        yield
    except ValueError as error:
        raise EngineStartError(str(error)) from None
    except Exception as error:
        if lacked_device_memory(error):
            raise EngineStartError(too_large) from None
        if message := broken_capture(error):
            _log.debug("a graph capture failed", exc_info=error)
            raise EngineStartError(
                f"{too_large}; or --kernels torch, which captures no steps (CUDA: {message})"
            ) from None
        raise


def _limits(config: WorkerConfig, placement: Placement) -> StepLimits:
    is_cpu = placement.device == "cpu"
    return StepLimits(
        # A GPU needs several hundred rows to be compute-bound; with constant shapes every step pays for all rows.
        tokens_per_step=config.tokens_per_step
        or max(config.max_running, TOKENS_PER_STEP if is_cpu or config.deterministic else 2048),
        max_running=config.max_running,
        # On a CPU a row takes as long in a chunk of 32 as of 256: larger chunks would only delay streams.
        prompt_tokens_with_decodes=config.prompt_tokens_beside or (32 if is_cpu else None),
        prompt_tokens_shared=_SHARED_PROMPT_TOKENS if is_cpu and not config.tokens_per_step else None,
    )


def _check_weights(
    engine: Engine,
    config: WorkerConfig,
    directory: Directory,
    weights: StoredWeights,
    model: ModelConfig,
    cache_shape: CacheShape,
) -> str:
    """Checks manifest, finite logits and golden answers; returns the result for the log. Raises ValueError."""
    context = cache_shape.context
    number_format = weight_format(cache_shape.dtype, config.quantize).kind
    is_whole = check_manifest(directory, weights.hashes)
    check_finite_logits(
        engine, directory, model, context=context, number_format=number_format, start_id=weights.start_id
    )
    golden = check_golden(
        engine, directory, model, context=context, number_format=number_format, kv_cache=config.kv_cache
    )
    return f"{golden}, {MANIFEST_FILE} passed" if is_whole else golden


def _cache_shape(
    config: WorkerConfig, stored: StoredWeights, placement: Placement, selected: SelectedBackend, limits: StepLimits
) -> CacheShape:
    shape = stored.config
    if config.kv_cache != "auto" and shape.n_encoder_layers:
        raise ValueError(
            f"--kv-cache {config.kv_cache} does not serve a model with an encoder, and {config.weights} has one: use "
            "--kv-cache auto"
        )
    cache_shape = CacheShape(
        shape=replace(shape, head_dim=padded_head_dim(shape)) if selected.library else shape,
        context=choose_context(shape, config.max_context),
        block_size=BLOCK if placement.device == "cpu" else 64,
        max_running=config.max_running,
        dtype=placement.dtype,
        kv_cache=config.kv_cache,
        tokens_per_step=limits.tokens_per_step,
        steps_at_once=1 if placement.device == "cpu" else _STEPS_AT_ONCE,
    )
    if config.max_context:
        return cache_shape
    in_dtype = weight_format(placement.dtype, "none")
    if placement.device == "cpu":
        free = free_memory() - config.reserved_bytes
        is_packed = selected.library is not None  # torch has rounded numbers on a CPU
        weights = packed_bytes(stored, placement.dtype, config) if is_packed else in_dtype.n_bytes(stored.n_params)
        share = cache_share_on_cpu(free, weights, 1 + config.concurrent_loaders)
    else:
        weights = _torch_backends(config, _NEEDS_TORCH).weight_bytes_on_gpu(config, stored, placement.dtype)
        total = _torch_backends(config, _NEEDS_TORCH).device_memory()
        share = cache_share_on_gpu(total, config.gpu_memory_utilization, weights)
    fitting = cache_shape.fitting(share)
    if fitting.context < cache_shape.context:
        _start_log.warning(
            "%s: a context of %d tokens instead of the model's %d, whose cache would take %s of the %s that it may: "
            "--max-context asks for another",
            *(config.name, fitting.context, cache_shape.context),
            *(mib(cache_shape.least_cache_bytes), mib(share)),
        )
    return fitting


def _served(weights: StoredWeights, context: int) -> StoredWeights:
    """The weights with tables of positions for the served context only; learned ones are weights."""
    if weights.config.positions == "learned":
        return weights
    return replace(weights, config=replace(weights.config, context=context))


def _ready(
    weights: StoredWeights,
    model: ModelConfig,
    cache_shape: CacheShape,
    placement: Placement,
    pools: Items[BlockPool],
    backend: Backend,
    *,
    defaults: dict[str, float],
    waits: bool,
) -> Ready:
    counts = [pool.total for pool in pools]
    return Ready(
        context=cache_shape.context,
        model_context=model.context,
        vocab_size=weights.config.vocab_size,
        n_params=weights.n_params,
        dtype=placement.dtype,
        weights=", ".join(backend.weight_kinds),
        weight_bits=8 * backend.weight_bytes / weights.n_params,
        device=placement.description,
        model_version=Version(weights.version),
        eos_ids=weights.eos_ids,
        named_eos_ids=weights.named_eos_ids,
        sampling_defaults=defaults,
        start_id=weights.start_id,
        blocks_total=max(counts),
        block_size=cache_shape.block_size,
        has_encoder=weights.config.n_encoder_layers > 0,
        numerics=backend.numerics,
        numerics_reason=backend.reason,
        waits_for_build=waits,
        cache_bytes=cache_shape.cache_bytes(counts) if placement.device == "cpu" else 0,
    )
