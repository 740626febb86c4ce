"""Backends that compute steps: native kernels, torch, Triton on a GPU; each builds a runner from weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from app.common.startup_timer import CAPTURING_GRAPHS, WARMING_UP
from app.engine.cpu.compute import NativeCompute, Threads
from app.engine.cpu.library import Library
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.backend_selection import SelectedBackend
from app.engine.execution.engine import Runs, RunsAhead
from app.engine.execution.runner import Runner, StepExecutor, TorchExecutor
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step
from app.engine.gpu.kernels.interface import SHARED_BYTES, attention_fits
from app.engine.gpu.linears import Quantize, install
from app.engine.gpu.setup import GpuParts
from app.engine.gpu.triton_loader import check_triton, rounded_kernels, triton_kernels
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.encoder_cache import EncoderCache
from app.engine.memory.kv_cache import KVCache
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, step_peak
from app.engine.quantization.int8_weights import round_weights
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.nn.transformer import Decoder

Announce = Callable[[str], None]


class BackendRunners(NamedTuple):
    """What an engine needs (app/engine/execution/engine.py)."""

    runner: Runs
    ahead: RunsAhead | None = None


class Backend(Protocol):
    """One of them, chosen for a model on a device."""

    def start(self, blocks: int, guides: GrammarTracker, announce: Announce) -> BackendRunners:
        """With a cache of so many blocks, warmed up; `announce` hears what else is done. Raises ValueError."""
        ...


class CppBackend:
    """On a CPU, by the kernels of `library`."""

    def __init__(self, library: Path, decoder: Decoder, max_running: int, *, int8: bool) -> None:
        self._library, self._decoder, self._max_running, self._int8 = Library(library), decoder, max_running, int8

    def start(self, blocks: int, guides: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Way.start."""
        announce(WARMING_UP)
        threads = Threads(self._library, torch.get_num_threads())
        compute = NativeCompute(self._library, self._decoder, threads, blocks=blocks, int8=self._int8)
        sampler = NativeSampler(self._library.loaded, self._decoder.config.vocab_size, pool=threads)
        return _warm(Runner(compute, sampler=sampler, guides=guides), self._max_running)


class TorchBackend:
    """On any device, for any decoder."""

    def __init__(self, decoder: Decoder, room: CacheShape, limits: StepLimits) -> None:
        self._decoder, self._room, self._limits = decoder, room, limits
        self._device = decoder.embedding.device

    def peaks(self) -> MemoryPeaks:
        """On a GPU, with a cache of no blocks. Raises ValueError."""
        open_guides = PermissiveGrammars(self._decoder.config.vocab_size)
        runner = Runner(self._compute(0), sampler=TorchSampler(), guides=open_guides)
        source = (0,) if self._decoder.config.n_encoder_layers else ()
        step = costliest_step(self._limits, self._room.context, source=source)
        return MemoryPeaks(step_peak(lambda: runner.run(step), self._device))

    def start(self, blocks: int, guides: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Way.start."""
        announce(WARMING_UP)
        return _warm(Runner(self._compute(blocks), sampler=TorchSampler(), guides=guides), self._limits.max_running)

    def _compute(self, blocks: int) -> StepExecutor:
        decoder, room, device = self._decoder, self._room, self._device
        cache = KVCache(decoder.config, blocks=blocks, block_size=room.block_size, dtype=room.dtype, device=device)
        if not decoder.config.n_encoder_layers:
            return TorchExecutor(decoder, cache)
        slots, context = room.max_running, room.context
        return TorchExecutor(
            decoder, cache, EncoderCache(decoder, slots=slots, context=context, dtype=room.dtype, device=device)
        )


class TritonBackend:
    """On a GPU: steps are launched one ahead."""

    def __init__(self, parts: GpuParts) -> None:
        self._parts = parts

    def peaks(self) -> MemoryPeaks:
        """See TorchBackend.peaks."""
        return MemoryPeaks(self._parts.activations(), self._parts.graph_bytes())

    def start(self, blocks: int, guides: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Way.start."""
        announce(WARMING_UP)
        runner = self._parts.runner(blocks, guides)
        announce(CAPTURING_GRAPHS)
        self._parts.capture(runner)
        return BackendRunners(runner, runner)


class ChosenBackend(NamedTuple):
    """A way, what receipts call it, and why, for the log."""

    way: Backend
    numerics: str
    reason: str
    peaks: Callable[[], MemoryPeaks] | None = None
    """Measures the memory of steps besides weights and cache; raises ValueError. None on a CPU, where it is unused."""


def choose_way(
    choice: SelectedBackend,
    kernels: str,
    decoder: Decoder,
    room: CacheShape,
    limits: StepLimits,
    *,
    quantize: Quantize,
    deterministic: bool,
) -> ChosenBackend:
    """Rounds the weights, too, where they are to be. choice: of app/engine/cpu/toolchain/backend_selection.py."""
    if choice.library:
        native = CppBackend(choice.library, decoder, limits.max_running, int8=quantize == "int8")
        return ChosenBackend(native, choice.numerics, choice.reason)
    device = decoder.embedding.device
    if device.type == "cuda" and (kernels != "torch" or quantize != "none"):
        check_triton()
    if device.type == "cuda" and quantize != "none":
        install(decoder, quantize, rounded_kernels(device, room.dtype))
    elif quantize == "int8":
        round_weights(decoder)
    plain = TorchBackend(decoder, room, limits)
    if device.type != "cuda":
        return ChosenBackend(plain, choice.numerics, choice.reason)
    if kernels == "torch":
        return ChosenBackend(plain, choice.numerics, choice.reason, plain.peaks)
    if decoder.config.n_encoder_layers:
        return ChosenBackend(
            plain, choice.numerics, "the model has an encoder, which Triton's kernels do not compute", plain.peaks
        )
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)
    if not attention_fits(decoder.config.head_dim, room.dtype.itemsize, shared):
        told = f"heads of {decoder.config.head_dim} numbers are too wide for Triton's kernels on this GPU"
        return ChosenBackend(plain, choice.numerics, told, plain.peaks)
    found = triton_kernels(shared)
    if found is None:
        return ChosenBackend(
            plain, choice.numerics, 'Triton is not installed: pip install "inkstream[gpu]"', plain.peaks
        )
    parts = GpuParts(decoder, found.kernels, room, limits, deterministic=deterministic)
    ours = TritonBackend(parts)
    return ChosenBackend(ours, found.numerics, "a GPU, and Triton is there", ours.peaks)


def _warm(runner: Runner, max_running: int) -> BackendRunners:
    runner.warm_up(max_running)
    return BackendRunners(runner)
