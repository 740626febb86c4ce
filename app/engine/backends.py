"""Backends that compute steps: C++ kernels here; torch, and Triton on a GPU, in torch_backends.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple, Protocol

from app.common.cpu_topology import read_topology
from app.common.ipc import WorkerConfig
from app.common.startup_timer import WARMING_UP
from app.common.weights_store import FileHashes, WeightsStore
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.library import load_library
from app.engine.cpu.packed_cache import PackedEntry
from app.engine.cpu.packed_decoder import StoredFormat
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.backend_selection import SelectedBackend
from app.engine.execution.runner import Runner
from app.engine.execution.step_runner import BackendRunners
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.memory_plan import BlockBudget, CacheShape, blocks_on_cpu
from model.checkpoint.stored_weights import StoredWeights
from model.machine import describe_cpu, has_native_bfloat16, may_have_gpu
from model.number_formats import ITEM_BYTES
from model.packed_matrix import PackedFormat
from model.parameter_shapes import Shapes, parameter_shapes
from model.quantize import PackedWeights, QuantizedWeights, packed_kind
from model.weight_formats import Quantize, needs_gpu

Announce = Callable[[str], None]


class Placement(NamedTuple):
    """Where an engine computes, and in which number format."""

    device: str
    """cpu or cuda."""
    dtype: str
    """float32 or bfloat16."""
    description: str
    """Human-readable name of the device."""


class Backend(Protocol):
    """Builds and warms up the runner of a model on a device."""

    numerics: str
    """Everything that affects bits, for receipts."""
    reason: str
    """Why it was chosen, for the log."""
    weight_kinds: list[str]
    """Kinds of format in which the matrices are stored."""
    weight_bytes: int
    """Of all parameters as they are stored."""

    def plan_memory(self, config: WorkerConfig, announce: Announce) -> BlockBudget:
        """Sizes the cache. Raises ValueError."""
        ...

    def start(self, blocks: Items[int], grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """Builds runners with caches of so many blocks and warms them up; reports phases to `announce`.

        blocks: of each cache group. Raises ValueError.
        """
        ...

    def release(self) -> None:
        """Frees the memory that a failed step held. Raises the device's error if it is lost."""
        ...


def place_without_torch(config: WorkerConfig) -> Placement | None:
    """The CPU, if nothing asks for a GPU and there is none; None where only torch can tell."""
    if needs_gpu(config.quantize) or config.device == "cuda" or (config.device != "cpu" and may_have_gpu()):
        return None
    number_format = "bfloat16" if has_native_bfloat16() else "float32"
    dtype = number_format if config.dtype == "auto" else config.dtype
    return Placement("cpu", dtype, describe_cpu(_threads(config)))


def _threads(config: WorkerConfig) -> int:
    return config.threads or read_topology().compute_threads


class CppBackend:
    """Runs on a CPU with the kernels of a library; reads the weights while it packs them. Needs no torch."""

    def __init__(
        self,
        selected: SelectedBackend,
        weights: StoredWeights,
        cache_shape: CacheShape,
        config: WorkerConfig,
        hashes: FileHashes,
        store: WeightsStore | None,
    ) -> None:
        """selected: has a library. hashes: of the files of `weights`. store: keeps packed weights."""
        assert selected.library
        self.weight_kinds = matrix_kinds(weights, cache_shape.dtype, config.quantize, weights.stored_format)
        self.weight_bytes = packed_bytes(weights, cache_shape.dtype, config)
        self.numerics = full_numerics(selected.numerics, cache_shape, config, kinds=self.weight_kinds)
        self.reason = selected.reason
        self._library, self._weights, self._cache_shape = load_library(selected.library), weights, cache_shape
        self._config = config
        shape = weights.config
        if shape.positions != "learned":  # tables of positions are not kept
            shape = replace(shape, context=1)
        facts = (selected.library.name, shape, cache_shape.dtype, config.quantize)
        self._hashes = hashes
        self._entry = PackedEntry(store, weights.version, hashes, *facts) if store else None

    def plan_memory(self, config: WorkerConfig, announce: Announce) -> BlockBudget:
        """See Backend.plan_memory."""
        del announce
        engines = 1 + config.concurrent_loaders
        return blocks_on_cpu(
            self._cache_shape,
            self.weight_bytes,
            are_loaded=False,
            requested=config.kv_blocks,
            engines=engines,
            reserved=config.reserved_bytes,
        )

    def start(self, blocks: Items[int], grammars: GrammarTracker, announce: Announce) -> BackendRunners:
        """See Backend.start."""
        announce(WARMING_UP)
        config, dtype = self._weights.config, self._cache_shape.dtype
        threads = ThreadPool(self._library, _threads(self._config))
        restored = self._entry.restore(threads.count) if self._entry else None
        if restored is None:
            self._hashes.verify(self._weights.version)
        served = weights_to_serve(self._weights, self._config.quantize)
        executor = NativeExecutor(
            self._library,
            config,
            served,
            threads,
            dtype=dtype,
            blocks=blocks,
            stored_format=self._weights.stored_format,
            kv_cache=self._cache_shape.kv_cache,
            restored=restored,
        )
        sampler = NativeSampler(self._library, config.vocab_size, pool=executor.session.pool)
        runner = Runner(executor, sampler=sampler, grammars=grammars)
        runner.warm_up(self._cache_shape.max_running)
        if self._entry and restored is None:
            self._entry.store_in_background(executor.decoder.memory)
        return BackendRunners(runner)

    def release(self) -> None:
        """See Backend.release: the kernels hold nothing."""


def packed_bytes(weights: StoredWeights, dtype: str, config: WorkerConfig) -> int:
    """Bytes of the weights in the C++ kernels."""
    if config.quantize == "none":
        return weights.stored_bytes(dtype)
    shapes = parameter_shapes(weights.config)
    return parameter_bytes(weights_to_serve(weights, config.quantize), shapes, dtype, ())


def weights_to_serve(weights: StoredWeights, quantize: Quantize) -> PackedWeights:
    """The weights as --quantize has them."""
    kind = packed_kind(quantize)
    return QuantizedWeights(weights, weights.config, kind) if kind else weights


def parameter_bytes(served: PackedWeights, shapes: Shapes, dtype: str, dense: Container[str]) -> int:
    """Bytes of parameters, packed or in `dtype`. dense: names of packed ones that are in `dtype`, too."""
    total = 0
    for name, shape in shapes.items():
        formats = () if name in dense else served.packed_formats(name)
        total += sum(each.n_bytes(rows, shape[-1]) for each, rows in formats)
        total += 0 if formats else ITEM_BYTES[dtype] * math.prod(shape)
    return total


def matrix_kinds(
    weights: StoredWeights, dtype: str, quantize: Quantize, stored_format: StoredFormat, dense: Container[str] = ()
) -> list[str]:
    """Kinds of format in which the matrices are stored: number formats, fp8, and bits and groups of packed ones.

    stored_format: of matrices that are not packed. dense: names of packed ones that are in `dtype`.
    """
    if needs_gpu(quantize):
        return [quantize]
    served, kinds = weights_to_serve(weights, quantize), set[str]()
    for name, shape in parameter_shapes(weights.config).items():
        if name not in dense and (formats := served.packed_formats(name)):
            kinds.update(packed_name(each) for each, _ in formats)
        elif len(shape) > 1:
            kinds.add(dtype if name in dense else stored_format(name, dtype))
    return sorted(kinds)


def packed_name(packed_format: PackedFormat) -> str:
    """The name of a packed format in numerics and the log."""
    return f"int{packed_format.bits}-g{packed_format.group}"


def full_numerics(
    backend: str, cache_shape: CacheShape, config: WorkerConfig, *more: str, kinds: Items[str] = ()
) -> str:
    """Backend, number format, formats of weights and cache that differ from it, and `more` that affects bits.

    kinds: of the weights' formats; none stands for --quantize.
    """
    formats = [kind for kind in kinds or [config.quantize] if kind not in ("none", cache_shape.dtype)]
    if cache_shape.kv_cache != "auto":
        formats.append(f"kv_{cache_shape.kv_cache}")
    return "-".join((backend, cache_shape.dtype, *formats, *_long_rotation(cache_shape), *more))


def _long_rotation(cache_shape: CacheShape) -> list[str]:
    """Which factors a longrope takes: the served context decides, so that no token's bits depend on later ones."""
    ropes = {rope.original_context: rope for rope in cache_shape.shape.ropes if rope.kind == "longrope"}
    return ["long" if rope.is_long(cache_shape.context) else "short" for _, rope in sorted(ropes.items())]
