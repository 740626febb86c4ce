"""Backends that compute steps: C++ kernels, torch, Triton on a GPU; each builds a runner from weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from app.common.startup_timer import WARMING_UP
from app.engine.cpu.compute import NativeCompute, ThreadPool
from app.engine.cpu.library import load_library
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.backend_selection import SelectedBackend
from app.engine.execution.runner import BackendRunners, Runner, StepExecutor, TorchExecutor
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step
from app.engine.gpu.kernels.interface import SHARED_BYTES, attention_fits
from app.engine.gpu.linears import Quantize, quantize_decoder
from app.engine.gpu.setup import TritonBackend
from app.engine.gpu.triton_loader import LoadedKernels, check_triton, quantized_kernels, triton_kernels
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.encoder_cache import EncoderCache
from app.engine.memory.kv_cache import KVCache
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, step_peak
from app.engine.quantization.int8_weights import round_weights
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.checkpoint.checkpoint import Checkpoint
from model.config import ModelConfig
from model.nn.transformer import Decoder

Announce = Callable[[str], None]


class Backend(Protocol):
    """Builds and warms up the runner of a model on a device."""

    def start(self, blocks: int, grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """Builds runners with a cache of `blocks` blocks and warms them up; reports phases to `announce`.

        Raises ValueError.
        """
        ...


class CppBackend:
    """Runs on a CPU with the kernels of `library`."""

    def __init__(self, library: Path, checkpoint: Checkpoint, max_running: int, *, int8: bool) -> None:
        self._library, self._max_running, self._int8 = load_library(library), max_running, int8
        self._checkpoint = checkpoint

    def start(self, blocks: int, grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Backend.start."""
        announce(WARMING_UP)
        threads = ThreadPool(self._library, torch.get_num_threads())
        decoder, read = self._checkpoint.decoder, self._checkpoint.read
        compute = NativeCompute(self._library, decoder, threads, blocks=blocks, int8=self._int8, read=read)
        sampler = NativeSampler(self._library, decoder.config.vocab_size, pool=threads)
        return _warmed_up(Runner(compute, sampler=sampler, grammars=grammars), self._max_running)


class TorchBackend:
    """Runs on any device, for any decoder."""

    def __init__(self, decoder: Decoder, cache_shape: CacheShape, limits: StepLimits) -> None:
        self._decoder, self._cache_shape, self._limits = decoder, cache_shape, limits
        self._device = decoder.embedding.device

    def peaks(self) -> MemoryPeaks:
        """Measures the largest step on a GPU with an empty cache. Raises ValueError."""
        permissive = PermissiveGrammars(self._decoder.config.vocab_size)
        runner = Runner(self._compute(0), sampler=TorchSampler(), grammars=permissive)
        source = (0,) if self._decoder.config.n_encoder_layers else ()
        step = costliest_step(self._limits, self._cache_shape.context, source=source)
        return MemoryPeaks(step_peak(lambda: runner.run(step), self._device))

    def start(self, blocks: int, grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Backend.start."""
        announce(WARMING_UP)
        return _warmed_up(
            Runner(self._compute(blocks), sampler=TorchSampler(), grammars=grammars), self._limits.max_running
        )

    def _compute(self, blocks: int) -> StepExecutor:
        decoder, cache_shape, device = self._decoder, self._cache_shape, self._device
        cache = KVCache(
            decoder.config, blocks=blocks, block_size=cache_shape.block_size, dtype=cache_shape.dtype, device=device
        )
        if not decoder.config.n_encoder_layers:
            return TorchExecutor(decoder, cache)
        slots, context = cache_shape.max_running, cache_shape.context
        return TorchExecutor(
            decoder, cache, EncoderCache(decoder, slots=slots, context=context, dtype=cache_shape.dtype, device=device)
        )


class ChosenBackend(NamedTuple):
    """A backend, its name in receipts, and the reason for the log."""

    backend: Backend
    numerics: str
    reason: str
    peaks: Callable[[], MemoryPeaks] | None = None
    """Measures the memory of steps in addition to weights and cache; raises ValueError. None on a CPU: not needed."""


def choose_backend(
    choice: SelectedBackend,
    kernels: str,
    checkpoint: Checkpoint,
    cache_shape: CacheShape,
    limits: StepLimits,
    *,
    quantize: Quantize,
    deterministic: bool,
) -> ChosenBackend:
    """Chooses the backend; also quantizes the weights if requested.

    choice: from app/engine/cpu/toolchain/backend_selection.py.
    """
    if choice.library:
        cpp = CppBackend(choice.library, checkpoint, limits.max_running, int8=quantize == "int8")
        return ChosenBackend(cpp, choice.numerics, choice.reason)
    checkpoint.read_all()
    decoder = checkpoint.decoder
    device = decoder.embedding.device
    if device.type == "cuda" and (kernels != "torch" or quantize != "none"):
        check_triton()
    if device.type == "cuda" and quantize != "none":
        quantize_decoder(decoder, quantize, quantized_kernels(device, cache_shape.dtype))
    elif quantize == "int8":
        round_weights(decoder)
    torch_backend = TorchBackend(decoder, cache_shape, limits)
    if device.type != "cuda":
        return ChosenBackend(torch_backend, choice.numerics, choice.reason)
    loaded = choice.reason if kernels == "torch" else _triton_kernels(decoder.config, cache_shape.dtype, device)
    if isinstance(loaded, str):
        return ChosenBackend(torch_backend, choice.numerics, loaded, torch_backend.peaks)
    triton = TritonBackend(decoder, loaded.kernels, cache_shape, limits, deterministic=deterministic)
    return ChosenBackend(triton, loaded.numerics, "the device is a GPU, and Triton is installed", triton.peaks)


def _triton_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedKernels | str:
    """Triton's kernels, or the reason why they cannot compute this model here."""
    if config.n_encoder_layers:
        return "the model has an encoder, which Triton's kernels do not compute"
    shared_bytes = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)
    if not attention_fits(config.head_dim, dtype.itemsize, shared_bytes):
        return f"a head_dim of {config.head_dim} is too large for Triton's kernels on this GPU"
    return triton_kernels(shared_bytes) or 'Triton is not installed: pip install "inkstream[gpu]"'


def _warmed_up(runner: Runner, max_running: int) -> BackendRunners:
    runner.warm_up(max_running)
    return BackendRunners(runner)
