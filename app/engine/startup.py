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
from app.common.types import sampling_defaults
from app.engine.backends import BackendRunners, ChosenBackend, TritonBackend, choose_way
from app.engine.checks.batch_invariance_check import DeviceUnderTest, prove_rows
from app.engine.checks.golden_check import prove, prove_finite
from app.engine.cpu.program import BLOCK, head_numbers
from app.engine.cpu.toolchain.backend_selection import Libraries, SelectedBackend, choose
from app.engine.execution.engine import Engine
from app.engine.gpu.linears import check_quantize, what_stays
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.device_errors import broken_capture, lacked_device_memory
from app.engine.memory.device_memory import releaser
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, blocks_on_cpu, blocks_on_gpu, choose_context, table
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.worker_loop import Assembled, EngineStartError
from model.checkpoint.checkpoint import Checkpoint, load
from model.checkpoint.manifest import MANIFEST_FILE, check_manifest
from model.config import ModelConfig
from model.device import choose_device, choose_dtype, describe
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("inkstream")
_SHARED_PROMPT_TOKENS = 64
"""Of a step on a CPU while API keys are in use, unless --tokens-per-step is given. Eight long prompts of one key made
another key's first token wait 51 ms with 256, 13 ms with 64. Prompts are read as fast with the default weights, and 0
to 13 % slower with 130 million parameters (2026-11-23)."""


def assemble(
    config: WorkerConfig, announce: Callable[[str], None] = lambda _phase: None, read: Callable[..., Checkpoint] = load
) -> Assembled:
    """Loads the weights, takes the cache's memory, warms up; `announce` hears of each step. Raises EngineStartError.

    read: load(), or what a benchmark has in its place, whose weights lie in no file.
    """
    announce(LOADING_WEIGHTS)
    with _refusing(f"{config.weights}: the weights do not fit into what is free of the GPU's memory"):
        if config.threads:
            torch.set_num_threads(config.threads)
        device = _device(config)
        dtype = choose_dtype(config.dtype, device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        check_quantize(config.quantize, device.type, dtype, capability)
        checkpoint = read(Path(config.weights), device=device, dtype=dtype)
        defaults = sampling_defaults(checkpoint.generation, Path(config.weights) / "generation_config.json")
        tokenizer = Tokenizer.reader(Path(config.weights))  # the files may be others when a guide asks for it
        limits = _limits(config, device)
        libraries = Libraries.of(config.library, config.cache_dir)
        choice = choose(config.kernels, _name(dtype), device.type, checkpoint.decoder.config, libraries, announce)
        room = _room(config, checkpoint.decoder.config, dtype, device, choice)
        if told := what_stays(checkpoint.decoder, config.quantize):
            announce(told)
        chosen = choose_way(
            choice,
            config.kernels,
            checkpoint.decoder,
            room,
            limits,
            quantize=config.quantize,
            deterministic=config.deterministic,
        )
        blocks = _blocks(config, room, checkpoint.decoder, chosen.peaks, announce)
    guides = GrammarTracker(lambda: tokenizer().bytes_of, vocab_size=room.shape.vocab_size, most=config.max_running)
    size = "--kv-blocks" if config.kv_blocks else "--gpu-memory-utilization"
    with _refusing(
        f"beside a cache of {blocks} blocks the steps no longer fit: give a smaller {size} or --max-running"
    ):
        running = chosen.way.start(blocks, guides, announce)
    pool = BlockPool(blocks, room.block_size)
    ready = _ready(checkpoint, room, defaults, device, pool, chosen, config, waits=choice.waits_for_build)
    engine = Engine(Scheduler(limits, pool, checkpoint.version), *running, release=releaser(device), masks=guides)
    announce(PROVING)
    if config.deterministic:
        announce(_rows_proven(running, limits, room, blocks))
    announce(_proven(engine, config, checkpoint, room))
    return Assembled(engine, guides, ready)


@contextlib.contextmanager
def _refusing(too_large: str) -> Iterator[None]:
    """Errors of the configuration, as an EngineStartError; `too_large`: the message where memory is missing."""
    try:
        yield
    except ValueError as error:
        raise EngineStartError(str(error)) from None
    except Exception as error:
        if lacked_device_memory(error):
            raise EngineStartError(too_large) from None
        if words := broken_capture(error):
            _log.debug("a capture broke off", exc_info=error)
            raise EngineStartError(
                f"{too_large}; or --kernels torch, which captures no steps (CUDA: {words})"
            ) from None
        raise


def _limits(config: WorkerConfig, device: torch.device) -> StepLimits:
    is_cpu = device.type == "cpu"
    return StepLimits(
        tokens_per_step=config.tokens_per_step or max(config.max_running, _tokens_per_step(config, device)),
        max_running=config.max_running,
        # A CPU takes as long for each of 32 rows as for each of 256: a larger piece only makes streams wait.
        prompt_tokens_beside=config.prompt_tokens_beside or (32 if is_cpu else None),
        prompt_tokens_shared=_SHARED_PROMPT_TOKENS if is_cpu and not config.tokens_per_step else None,
    )


def _tokens_per_step(config: WorkerConfig, device: torch.device) -> int:
    """A GPU's matrix units need some hundred rows to be the limit themselves; of one shape, every step pays for all."""
    return 256 if device.type == "cpu" or config.deterministic else 2048


def _numerics(config: WorkerConfig, chosen: ChosenBackend, dtype: torch.dtype) -> str:
    """Whatever changes bits: what computes, in which format; with Triton also in which shapes."""
    rounded = [] if config.quantize == "none" else [config.quantize]
    shapes = ["deterministic"] if config.deterministic and isinstance(chosen.way, TritonBackend) else []
    return "-".join((chosen.numerics, _name(dtype), *rounded, *shapes))


def _device(config: WorkerConfig) -> torch.device:
    """Its own GPU, where there are several engines. Raises ValueError."""
    device = choose_device(config.device)
    if device.type != "cuda" or config.replicas == 1:
        return device
    if config.replicas > (count := torch.cuda.device_count()):
        raise ValueError(f"--replicas {config.replicas}: each takes a GPU, and there are {count}; give at most {count}")
    device = torch.device("cuda", config.replica)
    torch.cuda.set_device(device)
    return device


def _proven(engine: Engine, config: WorkerConfig, checkpoint: Checkpoint, room: CacheShape) -> str:
    """What came of the files' own proofs, for the log. Raises EngineStartError."""
    directory, shape = Path(config.weights), checkpoint.decoder.config
    number = config.quantize if config.quantize != "none" else _name(room.dtype)
    try:
        is_whole = check_manifest(directory, checkpoint.hashes)
        start_id = _start_id(checkpoint)
        prove_finite(engine, directory, shape, context=room.context, number=number, start_id=start_id)
        golden = prove(engine, directory, shape, context=room.context, number=number)
    except ValueError as error:
        raise EngineStartError(str(error)) from None
    return f"{golden}, {MANIFEST_FILE} met" if is_whole else golden


def _rows_proven(running: BackendRunners, limits: StepLimits, room: CacheShape, blocks: int) -> str:
    """That no row hangs on its neighbours, for the log. Raises EngineStartError."""
    device = DeviceUnderTest(
        make_engine=lambda most: Engine(Scheduler(most, BlockPool(blocks, room.block_size)), *running),
        limits=limits,
        context=room.context,
        vocab_size=room.shape.vocab_size,
        has_encoder=room.shape.n_encoder_layers > 0,
    )
    try:
        return prove_rows(device)
    except ValueError as error:
        raise EngineStartError(str(error)) from None


def _room(
    config: WorkerConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device, choice: SelectedBackend
) -> CacheShape:
    return CacheShape(
        shape=replace(shape, head_dim=head_numbers(shape)) if choice.library else shape,
        context=choose_context(shape, config.max_context),
        block_size=BLOCK if device.type == "cpu" else 64,
        max_running=config.max_running,
        dtype=dtype,
    )


def _blocks(
    config: WorkerConfig,
    room: CacheShape,
    decoder: Decoder,
    peaks: Callable[[], MemoryPeaks] | None,
    announce: Callable[[str], None],
) -> int:
    """Number of cache blocks; logs the reason. peaks: of ChosenBackend. Raises ValueError."""
    if peaks is None:
        blocks = blocks_on_cpu(room, decoder, wanted=config.kv_blocks, engines=1 + config.concurrent_loaders)
    else:
        announce(PLANNING_MEMORY)
        share = config.gpu_memory_utilization
        device = decoder.embedding.device
        blocks = blocks_on_gpu(room, device, wanted=config.kv_blocks, utilization=share, peaks=peaks())
    for line in table(blocks.rows):
        _log.info("%s: memory: %s", config.name, line)
    return blocks.number


def _ready(
    checkpoint: Checkpoint,
    room: CacheShape,
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
        context=room.context,
        vocab_size=shape.vocab_size,
        n_params=checkpoint.decoder.n_params,
        dtype=_name(room.dtype),
        device=describe(device),
        weights_version=checkpoint.version,
        eos_ids=checkpoint.eos_ids,
        sampling_defaults=defaults,
        start_id=_start_id(checkpoint),
        blocks_total=blocks.total,
        block_size=blocks.block_size,
        has_encoder=shape.n_encoder_layers > 0,
        numerics=_numerics(config, chosen, room.dtype),
        numerics_reason=chosen.reason,
        waits_for_build=waits,
    )


def _start_id(checkpoint: Checkpoint) -> int | None:
    """The token that an empty prompt stands for: BOS, else EOS."""
    return checkpoint.bos_id if checkpoint.bos_id is not None else next(iter(checkpoint.eos_ids), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
