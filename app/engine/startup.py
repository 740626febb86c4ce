"""Builds an engine from a configuration: weights, memory, kernels, warm-up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from app.common.ipc import Ready, WorkerConfig
from app.common.startup_timer import LOADING_WEIGHTS, PLANNING_MEMORY, PROVING
from app.common.terminal_log import START
from app.common.types import sampling_defaults
from app.engine.backends import ChosenBackend, choose_backend
from app.engine.cpu.program import BLOCK, padded_head_dim
from app.engine.cpu.toolchain.backend_selection import Libraries, SelectedBackend, select_backend
from app.engine.execution.engine import Engine
from app.engine.gpu.linears import check_quantize, describe_unquantized
from app.engine.gpu.setup import TritonBackend
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.device_errors import broken_capture, lacked_device_memory
from app.engine.memory.memory_plan import (
    CacheShape,
    MemoryPeaks,
    blocks_on_cpu,
    blocks_on_gpu,
    choose_context,
    format_table,
    memory_releaser,
)
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.startup_checks import check_batch_invariance, check_finite_logits, check_golden
from app.engine.worker_loop import BuiltEngine, EngineStartError
from model.checkpoint.checkpoint import Checkpoint, load
from model.checkpoint.manifest import MANIFEST_FILE, check_manifest
from model.config import ModelConfig
from model.device import choose_device, choose_dtype, describe, use_row_invariant_products
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer

_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)
_SHARED_PROMPT_TOKENS = 64
"""Prompt tokens of a step on a CPU while API keys are in use, unless --tokens-per-step is given. Eight long prompts of
one key made another key's first token wait 51 ms with 256, 13 ms with 64. Prefill is as fast with the default weights,
and 0 to 13 % slower with 130 million parameters (2026-11-23)."""


def build_engine(
    config: WorkerConfig, announce: Callable[[str], None] = lambda _phase: None, read: Callable[..., Checkpoint] = load
) -> BuiltEngine:
    """Loads the weights, allocates the cache, warms up; reports each phase to `announce`. Raises EngineStartError.

    read: load(), or a replacement by benchmarks whose weights are not in a file.
    """
    announce(LOADING_WEIGHTS)
    use_row_invariant_products()
    with _as_start_error(f"{config.weights}: the weights do not fit into the free memory of the GPU"):
        if config.threads:
            torch.set_num_threads(config.threads)
        device = _device(config)
        dtype = _dtype(config, device)
        checkpoint = read(Path(config.weights), device=device, dtype=dtype, lazy=device.type == "cpu")
        defaults = sampling_defaults(checkpoint.generation, Path(config.weights) / "generation_config.json")
        tokenizer = Tokenizer.reader(Path(config.weights))  # the files may have changed when the first grammar needs it
        limits = _limits(config, device)
        libraries = Libraries.of(config.library, config.cache_dir)
        selected = select_backend(
            config.kernels, _name(dtype), device.type, checkpoint.decoder.config, libraries, announce
        )
        cache_shape = _cache_shape(config, checkpoint.decoder.config, dtype, device, selected)
        if unquantized := describe_unquantized(checkpoint.decoder, config.quantize):
            announce(unquantized)
        chosen = choose_backend(
            selected,
            config.kernels,
            checkpoint,
            cache_shape,
            limits,
            quantize=config.quantize,
            deterministic=config.deterministic,
        )
        blocks = _blocks(config, cache_shape, checkpoint.decoder, chosen.peaks, announce)
    grammars = GrammarTracker(
        lambda: tokenizer().bytes_of, vocab_size=cache_shape.shape.vocab_size, max_states=config.max_running
    )
    flag = "--kv-blocks" if config.kv_blocks else "--gpu-memory-utilization"
    with _as_start_error(
        f"a cache of {blocks} blocks leaves too little memory for the steps: give a smaller {flag} or --max-running"
    ):
        runners = chosen.backend.start(blocks, grammars, announce)

        def make_engine(limits: StepLimits) -> Engine:
            scheduler = Scheduler(limits, BlockPool(blocks, cache_shape.block_size), checkpoint.version)
            return Engine(scheduler, *runners, release=memory_releaser(device), masks=grammars)

        engine = make_engine(limits)
        announce(PROVING)
        if config.deterministic:
            shape = checkpoint.decoder.config
            announce(check_batch_invariance(make_engine, limits, shape, context=cache_shape.context))
        announce(_check_weights(engine, config, checkpoint, cache_shape))
    ready = _ready(
        checkpoint, cache_shape, defaults, device, engine.scheduler.pool, chosen, config, waits=selected.waits_for_build
    )
    return BuiltEngine(engine, grammars, ready)


def _dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    """The number format of the weights. Raises ValueError if --quantize cannot be combined with it, or the device."""
    dtype = choose_dtype(config.dtype, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_quantize(config.quantize, device.type, dtype, capability)
    return dtype


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


def _limits(config: WorkerConfig, device: torch.device) -> StepLimits:
    is_cpu = device.type == "cpu"
    return StepLimits(
        # A GPU needs several hundred rows to be compute-bound; with constant shapes every step pays for all rows.
        tokens_per_step=config.tokens_per_step
        or max(config.max_running, 256 if is_cpu or config.deterministic else 2048),
        max_running=config.max_running,
        # On a CPU a row takes as long in a chunk of 32 as of 256: larger chunks would only delay streams.
        prompt_tokens_with_decodes=config.prompt_tokens_beside or (32 if is_cpu else None),
        prompt_tokens_shared=_SHARED_PROMPT_TOKENS if is_cpu and not config.tokens_per_step else None,
    )


def _numerics(config: WorkerConfig, chosen: ChosenBackend, dtype: torch.dtype) -> str:
    """Everything that affects bits: backend, dtype, quantization; with Triton also constant shapes."""
    rounded = [] if config.quantize == "none" else [config.quantize]
    shapes = ["deterministic"] if config.deterministic and isinstance(chosen.backend, TritonBackend) else []
    return "-".join((chosen.numerics, _name(dtype), *rounded, *shapes))


def _device(config: WorkerConfig) -> torch.device:
    """The device of this engine; with several engines each has its own GPU. Raises ValueError."""
    device = choose_device(config.device)
    if device.type != "cuda" or config.replicas == 1:
        return device
    if config.replicas > (count := torch.cuda.device_count()):
        raise ValueError(f"--replicas {config.replicas}: each takes a GPU, and there are {count}; give at most {count}")
    device = torch.device("cuda", config.replica)
    torch.cuda.set_device(device)
    return device


def _check_weights(engine: Engine, config: WorkerConfig, checkpoint: Checkpoint, cache_shape: CacheShape) -> str:
    """Checks manifest, finite logits and golden answers; returns the result for the log. Raises ValueError."""
    directory, shape, context = Path(config.weights), checkpoint.decoder.config, cache_shape.context
    number_format = config.quantize if config.quantize != "none" else _name(cache_shape.dtype)
    is_whole = check_manifest(directory, checkpoint.hashes)
    start_id = _start_id(checkpoint)
    check_finite_logits(engine, directory, shape, context=context, number_format=number_format, start_id=start_id)
    golden = check_golden(engine, directory, shape, context=context, number_format=number_format)
    return f"{golden}, {MANIFEST_FILE} passed" if is_whole else golden


def _cache_shape(
    config: WorkerConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device, selected: SelectedBackend
) -> CacheShape:
    return CacheShape(
        shape=replace(shape, head_dim=padded_head_dim(shape)) if selected.library else shape,
        context=choose_context(shape, config.max_context),
        block_size=BLOCK if device.type == "cpu" else 64,
        max_running=config.max_running,
        dtype=dtype,
    )


def _blocks(
    config: WorkerConfig,
    cache_shape: CacheShape,
    decoder: Decoder,
    peaks: Callable[[], MemoryPeaks] | None,
    announce: Callable[[str], None],
) -> int:
    """Number of cache blocks; logs the memory plan. peaks: from ChosenBackend. Raises ValueError."""
    if peaks is None:
        blocks = blocks_on_cpu(cache_shape, decoder, requested=config.kv_blocks, engines=1 + config.concurrent_loaders)
    else:
        announce(PLANNING_MEMORY)
        share = config.gpu_memory_utilization
        device = decoder.embedding.device
        blocks = blocks_on_gpu(cache_shape, device, requested=config.kv_blocks, utilization=share, peaks=peaks())
    for line in format_table(blocks.rows):
        _start_log.info("%s: memory: %s", config.name, line)
    return blocks.number


def _ready(
    checkpoint: Checkpoint,
    cache_shape: CacheShape,
    defaults: dict[str, float],
    device: torch.device,
    blocks: BlockPool,
    chosen: ChosenBackend,
    config: WorkerConfig,
    *,
    waits: bool,
) -> Ready:
    shape = checkpoint.decoder.config
    return Ready(
        context=cache_shape.context,
        vocab_size=shape.vocab_size,
        n_params=checkpoint.decoder.n_params,
        dtype=_name(cache_shape.dtype),
        device=describe(device),
        weights_version=checkpoint.version,
        eos_ids=checkpoint.eos_ids,
        sampling_defaults=defaults,
        start_id=_start_id(checkpoint),
        blocks_total=blocks.total,
        block_size=blocks.block_size,
        has_encoder=shape.n_encoder_layers > 0,
        numerics=_numerics(config, chosen, cache_shape.dtype),
        numerics_reason=chosen.reason,
        waits_for_build=waits,
    )


def _start_id(checkpoint: Checkpoint) -> int | None:
    """The token that replaces an empty prompt: BOS, else EOS."""
    return checkpoint.bos_id if checkpoint.bos_id is not None else next(iter(checkpoint.eos_ids), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
