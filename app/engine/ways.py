"""The ways to compute steps: native kernels, torch, Triton on a GPU. Each from weights to a runner; no pipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from app.engine.compute import Compute, TorchCompute
from app.engine.dummy import costliest_step
from app.engine.gpu.install import install
from app.engine.gpu.linears import Quantize
from app.engine.gpu.parts import GpuParts
from app.engine.guides import Guides
from app.engine.isolation import Runs, RunsAhead
from app.engine.kernels.door import check_triton, rounded_kernels, triton_kernels
from app.engine.kernels.tiling import SHARED_BYTES, attention_fits
from app.engine.kv_cache import KVCache
from app.engine.limits import SchedulerLimits
from app.engine.memory import CacheRoom
from app.engine.native.choice import Choice
from app.engine.native.compute import NativeCompute, Threads
from app.engine.native.library import Library
from app.engine.native.sampler import NativeSampler
from app.engine.open_guides import OpenGuides
from app.engine.quantize import round_weights
from app.engine.rooms import Peaks, step_peak
from app.engine.runner import Runner
from app.engine.sampler import TorchSampler
from app.engine.source_cache import SourceCache
from app.engine.start_clock import CAPTURING_GRAPHS, WARMING_UP
from model.transformer import Decoder

Announce = Callable[[str], None]


class Running(NamedTuple):
    """What an engine needs (app/engine/engine.py)."""

    runner: Runs
    ahead: RunsAhead | None = None


class Way(Protocol):
    """One of them, chosen for a model on a device."""

    def start(self, blocks: int, guides: Guides, announce: Announce) -> Running:
        """With a cache of so many blocks, warmed up; `announce` hears what else is done. Raises ValueError."""
        ...


class NativeWay:
    """On a CPU, by the kernels of `library`."""

    def __init__(self, library: Path, decoder: Decoder, max_running: int, *, int8: bool) -> None:
        self._library, self._decoder, self._max_running, self._int8 = Library(library), decoder, max_running, int8

    def start(self, blocks: int, guides: Guides, announce: Announce) -> Running:
        """See Way.start."""
        announce(WARMING_UP)
        threads = Threads(self._library, torch.get_num_threads())
        compute = NativeCompute(self._library, self._decoder, threads, blocks=blocks, int8=self._int8)
        sampler = NativeSampler(self._library.loaded, self._decoder.config.vocab_size, pool=threads)
        return _warm(Runner(compute, sampler=sampler, guides=guides), self._max_running)


class TorchWay:
    """On any device, for any decoder."""

    def __init__(self, decoder: Decoder, room: CacheRoom, limits: SchedulerLimits) -> None:
        self._decoder, self._room, self._limits = decoder, room, limits
        self._device = decoder.embedding.device

    def peaks(self) -> Peaks:
        """On a GPU, with a cache of no blocks. Raises ValueError."""
        open_guides = OpenGuides(self._decoder.config.vocab_size)
        runner = Runner(self._compute(0), sampler=TorchSampler(), guides=open_guides)
        source = (0,) if self._decoder.config.n_encoder_layers else ()
        step = costliest_step(self._limits, self._room.context, source=source)
        return Peaks(step_peak(lambda: runner.run(step), self._device))

    def start(self, blocks: int, guides: Guides, announce: Announce) -> Running:
        """See Way.start."""
        announce(WARMING_UP)
        return _warm(Runner(self._compute(blocks), sampler=TorchSampler(), guides=guides), self._limits.max_running)

    def _compute(self, blocks: int) -> Compute:
        decoder, room, device = self._decoder, self._room, self._device
        cache = KVCache(decoder.config, blocks=blocks, block_size=room.block_size, dtype=room.dtype, device=device)
        if not decoder.config.n_encoder_layers:
            return TorchCompute(decoder, cache)
        slots, context = room.max_running, room.context
        return TorchCompute(
            decoder, cache, SourceCache(decoder, slots=slots, context=context, dtype=room.dtype, device=device)
        )


class TritonWay:
    """On a GPU: steps are launched one ahead."""

    def __init__(self, parts: GpuParts) -> None:
        self._parts = parts

    def peaks(self) -> Peaks:
        """See TorchWay.peaks."""
        return Peaks(self._parts.activations(), self._parts.graph_bytes())

    def start(self, blocks: int, guides: Guides, announce: Announce) -> Running:
        """See Way.start."""
        announce(WARMING_UP)
        runner = self._parts.runner(blocks, guides)
        announce(CAPTURING_GRAPHS)
        self._parts.capture(runner)
        return Running(runner, runner)


class Chosen(NamedTuple):
    """A way, what receipts call it, and why, for the log."""

    way: Way
    numerics: str
    reason: str
    peaks: Callable[[], Peaks] | None = None
    """Measures what steps take beside weights and cache; raises ValueError. None on a CPU, where nobody asks."""


def choose_way(
    choice: Choice,
    kernels: str,
    decoder: Decoder,
    room: CacheRoom,
    limits: SchedulerLimits,
    *,
    quantize: Quantize,
    deterministic: bool,
) -> Chosen:
    """Rounds the weights, too, where they are to be. choice: of app/engine/native/choice.py."""
    if choice.library:
        native = NativeWay(choice.library, decoder, limits.max_running, int8=quantize == "int8")
        return Chosen(native, choice.numerics, choice.reason)
    device = decoder.embedding.device
    if device.type == "cuda" and (kernels != "torch" or quantize != "none"):
        check_triton()
    if device.type == "cuda" and quantize != "none":
        install(decoder, quantize, rounded_kernels(device, room.dtype))
    elif quantize == "int8":
        round_weights(decoder)
    plain = TorchWay(decoder, room, limits)
    if device.type != "cuda":
        return Chosen(plain, choice.numerics, choice.reason)
    if kernels == "torch":
        return Chosen(plain, choice.numerics, choice.reason, plain.peaks)
    if decoder.config.n_encoder_layers:
        return Chosen(
            plain, choice.numerics, "the model has an encoder, which Triton's kernels do not compute", plain.peaks
        )
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)
    if not attention_fits(decoder.config.head_dim, room.dtype.itemsize, shared):
        told = f"heads of {decoder.config.head_dim} numbers are too wide for Triton's kernels on this GPU"
        return Chosen(plain, choice.numerics, told, plain.peaks)
    found = triton_kernels(shared)
    if found is None:
        return Chosen(plain, choice.numerics, 'Triton is not installed: pip install "inkstream[gpu]"', plain.peaks)
    parts = GpuParts(decoder, found.kernels, room, limits, deterministic=deterministic)
    ours = TritonWay(parts)
    return Chosen(ours, found.numerics, "a GPU, and Triton is there", ours.peaks)


def _warm(runner: Runner, max_running: int) -> Running:
    runner.warm_up(max_running)
    return Running(runner)
