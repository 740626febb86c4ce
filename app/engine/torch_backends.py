"""Backends of torch: on any device, and with Triton's kernels on a GPU. Imported only where one of them runs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import torch

from app.common.ipc import WorkerConfig
from app.common.startup_timer import PLANNING_MEMORY, WARMING_UP
from app.engine.backends import (
    Announce,
    Backend,
    Placement,
    full_numerics,
    matrix_kinds,
    parameter_bytes,
    weights_to_serve,
)
from app.engine.cpu.packed_decoder import as_computed
from app.engine.cpu.toolchain.backend_selection import SelectedBackend
from app.engine.execution.encoder_cache import EncoderCache
from app.engine.execution.runner import Runner
from app.engine.execution.step_runner import BackendRunners
from app.engine.execution.torch_executor import TorchExecutor
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step
from app.engine.gpu.format_support import check_quantize, describe_unsupported
from app.engine.gpu.kernels.interface import SHARED_BYTES, attention_fits
from app.engine.gpu.linears import (
    describe_unsupported_by_fp8,
    pack_decoder,
    packed_names,
    placeholder,
    quantize_decoder,
)
from app.engine.gpu.setup import TritonBackend
from app.engine.gpu.triton_loader import LoadedKernels, check_triton, quantized_kernels, triton_kernels
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.memory_plan import (
    BlockBudget,
    CacheShape,
    MemoryPeaks,
    blocks_on_cpu,
    blocks_on_gpu,
    release_memory,
    step_peak,
)
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.cache_formats import check_kv_cache
from model.checkpoint.checkpoint import TorchFormat, load_decoder
from model.checkpoint.stored_weights import StoredWeights
from model.config import ModelConfig
from model.device import choose_device, choose_dtype, describe, use_row_invariant_products
from model.nn.transformer import Decoder
from model.number_formats import ITEM_BYTES
from model.parameter_shapes import parameter_shapes
from model.weight_formats import needs_gpu, weight_format


def place(config: WorkerConfig) -> Placement:
    """The device and the number format of this engine. Raises ValueError."""
    _set_up(config)
    device = _device(config)
    dtype = choose_dtype(config.dtype, device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_quantize(config.quantize, device.type, dtype, capability)
    check_kv_cache(config.kv_cache, device.type)
    return Placement(device.type, str(dtype).removeprefix("torch."), describe(device))


def _set_up(config: WorkerConfig) -> None:
    """Sets up torch's products, before the first one."""
    use_row_invariant_products()
    if config.threads:
        torch.set_num_threads(config.threads)


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


def device_memory() -> int:
    """Bytes of this engine's GPU."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


class TorchBackend:
    """Runs on any device, for any decoder."""

    def __init__(self, decoder: Decoder, cache_shape: CacheShape, limits: StepLimits) -> None:
        self._decoder, self._cache_shape, self._limits = decoder, cache_shape, limits
        self._device = decoder.embedding.device

    def peaks(self) -> MemoryPeaks:
        """Measures the largest step on a GPU with an empty cache. Raises ValueError."""
        permissive = PermissiveGrammars(self._decoder.config.vocab_size)
        runner = Runner(self._executor(0), sampler=TorchSampler(), grammars=permissive)
        source = (0,) if self._decoder.config.n_encoder_layers else ()
        step = costliest_step(self._limits, self._cache_shape.context, source=source)
        return MemoryPeaks(step_peak(lambda: runner.run(step), self._device, torch.cuda))

    def start(self, blocks: Items[int], grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Backend.start."""
        announce(WARMING_UP)
        runner = Runner(self._executor(blocks), sampler=TorchSampler(), grammars=grammars)
        runner.warm_up(self._limits.max_running)
        return BackendRunners(runner)

    def _executor(self, blocks: int | Items[int]) -> TorchExecutor:
        decoder, cache_shape = self._decoder, self._cache_shape
        attend = None
        if decoder.config.n_encoder_layers:
            attend = EncoderCache(decoder, slots=cache_shape.max_running, context=cache_shape.context).attend
        return TorchExecutor(
            decoder,
            blocks=blocks,
            block_size=cache_shape.block_size,
            kv_cache=cache_shape.kv_cache,
            attend_sources=attend,
        )


@dataclass(slots=True, kw_only=True)
class _LoadedBackend:
    """A `Backend` whose weights are loaded."""

    backend: TorchBackend | TritonBackend
    numerics: str
    reason: str
    weight_kinds: list[str]
    weight_bytes: int
    decoder: Decoder
    cache_shape: CacheShape

    def plan_memory(self, config: WorkerConfig, announce: Announce) -> BlockBudget:
        """See Backend.plan_memory."""
        device = self.decoder.embedding.device
        if device.type == "cpu":
            n_bytes = sum(x.nbytes for x in (*self.decoder.parameters(), *self.decoder.buffers()))
            engines = 1 + config.concurrent_loaders
            return blocks_on_cpu(
                self.cache_shape,
                n_bytes,
                are_loaded=True,
                requested=config.kv_blocks,
                engines=engines,
                reserved=config.reserved_bytes,
            )
        announce(PLANNING_MEMORY)
        return blocks_on_gpu(
            self.cache_shape,
            device,
            requested=config.kv_blocks,
            utilization=config.gpu_memory_utilization,
            peaks=self.backend.peaks(),
            meter=torch.cuda,
        )

    def start(self, blocks: Items[int], grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Backend.start."""
        return self.backend.start(blocks, grammars, announce)

    def release(self) -> None:
        """See Backend.release."""
        release_memory(self.decoder.embedding.device, torch.cuda)


def choose_backend(
    choice: SelectedBackend,
    weights: StoredWeights,
    cache_shape: CacheShape,
    limits: StepLimits,
    config: WorkerConfig,
    announce: Announce,
) -> Backend:
    """Loads the weights and chooses the backend; also quantizes the weights if requested.

    choice: from app/engine/cpu/toolchain/backend_selection.py.
    """
    _set_up(config)
    device, kernels = _device(config), config.kernels
    dtype: torch.dtype = getattr(torch, cache_shape.dtype)
    if weights.config.experts and needs_gpu(config.quantize):
        raise ValueError(
            f"--quantize {config.quantize} does not support mixtures of experts, whose kernels multiply with packed or "
            "unquantized weights: use --quantize int8, int4 or none"
        )
    stored = weight_format(cache_shape.dtype, config.quantize)
    if device.type == "cuda" and (kernels != "torch" or stored.is_quantized):
        check_triton()
    loaded = _kernels_of_steps(config, weights.config, dtype, device)
    if stored.facts.codes == "e4m3":
        decoder = load_decoder(weights, device=device, dtype=dtype)
        if unsupported := describe_unsupported_by_fp8(decoder):
            announce(unsupported)
        quantize_decoder(decoder, quantized_kernels(device, dtype))
    else:
        decoder = _load_packed(weights, config, device, dtype, packs_experts=isinstance(loaded, LoadedKernels))
    packs_experts = isinstance(loaded, LoadedKernels)
    dense = _dense_on_gpu(weights, config, packs_experts=packs_experts) if device.type == "cuda" else set()
    kinds = matrix_kinds(weights, cache_shape.dtype, config.quantize, as_computed, dense)
    n_bytes = weights.n_params * ITEM_BYTES[cache_shape.dtype]  # torch on a CPU computes with the numbers
    loaded_backend = partial(
        _LoadedBackend,
        weight_kinds=kinds,
        weight_bytes=weight_bytes_on_gpu(config, weights, cache_shape.dtype) if device.type == "cuda" else n_bytes,
        decoder=decoder,
        cache_shape=cache_shape,
    )
    numerics, reason = full_numerics(choice.numerics, cache_shape, config, kinds=kinds), choice.reason
    if isinstance(loaded, LoadedKernels):
        triton = TritonBackend(decoder, loaded.kernels, cache_shape, limits, deterministic=config.deterministic)
        capability = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        shapes = ["deterministic"] if config.deterministic else []
        numerics = full_numerics(f"{loaded.numerics}-{capability}", cache_shape, config, *shapes, kinds=kinds)
        reason = "the device is a GPU, and Triton is installed"
        return loaded_backend(backend=triton, numerics=numerics, reason=reason)
    reason = loaded or reason
    torch_backend = TorchBackend(decoder, cache_shape, limits)
    return loaded_backend(backend=torch_backend, numerics=numerics, reason=reason)


def _load_packed(
    weights: StoredWeights, config: WorkerConfig, device: torch.device, dtype: torch.dtype, *, packs_experts: bool
) -> Decoder:
    """The decoder with packed matrices on a GPU; on a CPU, with the numbers that they stand for. Raises ValueError."""
    served, shapes = weights_to_serve(weights, config.quantize), parameter_shapes(weights.config)
    if device.type == "cuda":
        packed = packed_names(served, weights.config, packs_experts=packs_experts)
        made = {name: partial(placeholder, shapes[name], device, dtype) for name in packed}
        decoder = load_decoder(weights, device=device, dtype=dtype, replaced=made)
        pack_decoder(decoder, served, quantized_kernels(device, dtype), packs_experts=packs_experts)
        return decoder
    if config.quantize == "none":
        return load_decoder(weights, device=device, dtype=dtype)
    to_torch, dtype_name = TorchFormat(device, dtype), str(dtype).removeprefix("torch.")

    def read(name: str) -> torch.Tensor:
        return to_torch.convert(served.read(name, dtype_name))[0]

    numbers = {name: partial(read, name) for name in shapes if served.packed_formats(name)}
    return load_decoder(weights, device=device, dtype=dtype, replaced=numbers)


def weight_bytes_on_gpu(config: WorkerConfig, weights: StoredWeights, dtype: str) -> int:
    """Bytes of the weights: lookups and routers keep their numbers, and so do experts for torch."""
    shape, shapes = weights.config, parameter_shapes(weights.config)
    if needs_gpu(config.quantize):
        return weight_format(dtype, config.quantize).n_bytes(weights.n_params)
    loaded = _kernels_of_steps(config, shape, getattr(torch, dtype), _device(config)) if shape.experts else ""
    dense = _dense_on_gpu(weights, config, packs_experts=not isinstance(loaded, str))
    return parameter_bytes(weights_to_serve(weights, config.quantize), shapes, dtype, dense)


def _dense_on_gpu(weights: StoredWeights, config: WorkerConfig, *, packs_experts: bool) -> set[str]:
    """Names of the parameters that are not packed in the memory of a GPU."""
    served = weights_to_serve(weights, config.quantize)
    return {*parameter_shapes(weights.config)} - {*packed_names(served, weights.config, packs_experts=packs_experts)}


def _kernels_of_steps(
    config: WorkerConfig, shape: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LoadedKernels | str:
    """Triton's kernels, or the reason why they do not compute this model's steps; empty if nothing asks for them."""
    if device.type != "cuda" or config.kernels == "torch":
        return ""
    return _triton_kernels(shape, dtype, device)


def _triton_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedKernels | str:
    """Triton's kernels, or the reason why they cannot compute this model here."""
    if unsupported := describe_unsupported(config):
        return unsupported
    shared_bytes = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)
    if not attention_fits(config.head_dim, dtype.itemsize, shared_bytes):
        return f"a head_dim of {config.head_dim} is too large for Triton's kernels on this GPU"
    return triton_kernels(shared_bytes) or "Triton is not installed: pip install 'triton>=3.6'"
