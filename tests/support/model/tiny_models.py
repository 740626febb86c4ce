"""Tiny random models for tests: a few kilobytes, made in milliseconds, with grouped heads like real ones."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextvars import ContextVar
from ctypes import CDLL
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from app.common.types import Request, SampledEvent
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.library import load_library
from app.engine.cpu.packed_decoder import BLOCK
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.execution.encoder_cache import EncoderCache
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner, StepExecutor
from app.engine.execution.torch_executor import TorchExecutor
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.cache_groups import block_counts, cache_groups
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.block_pool import BlockPool, blocks_in_window
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.shapes import DenseWeights, parameter_reader
from model.cache_formats import KvCache
from model.checkpoint.checkpoint import weights_files
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.golden_export import golden_file
from model.config import Experts, LayerKind, ModelConfig, Rope
from model.files import write_files
from model.nn.transformer import Decoder
from model.number_formats import Array
from model.packed_matrix import PackedFormat
from model.quantize import QuantizedKind, QuantizedWeights, packed_kind
from model.tokenizer.tokenizer import Tokenizer
from model.weight_formats import QUANTIZE, Quantize, needs_gpu

GPT2: dict[str, Any] = {
    "norm": "layernorm", "norm_bias": True, "gated": False, "activation": "gelu_tanh", "positions": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "n_kv_heads": 4,
}  # fmt: skip
"""Changes to tiny_config() that give the architecture of GPT-2."""
TEXT = (
    "Once upon a time there was a fox who sang to the moon. The moon answered him, and the night was long.\n"
    "\u201cWho are you?\u201d asked the owl, caf\u00e9 in claw \U0001f98a\U0001f989. \u2018I,\u2019 said the fox.\n"
) * 20
VOCAB = 320
WAY: ContextVar[str] = ContextVar("WAY", default="torch")
"""The backend of tiny_engine(): torch, native or int8."""
KV_CACHE: ContextVar[KvCache] = ContextVar("KV_CACHE", default="auto")
"""The format of its cache, which the fixture `int8_cache` sets."""
CPU_QUANTIZE = [quantize for quantize in QUANTIZE if not needs_gpu(quantize)]
"""Values of --quantize for which the C++ kernels have a format."""
ROPE = Rope()


def tiny_config(*, window: int | None = None, rope: Rope | None = ROPE, **changes: Any) -> ModelConfig:
    """2 layers, width 64, 4 query and 2 kv heads of 16, context 256.

    window, rope: of all layers; with added positions, rope is None.
    """
    rope = None if changes.get("positions", "none") != "none" else rope
    changes = {"layer_kinds": (LayerKind(window=window, rope=rope),)} | changes
    shape = {"vocab_size": VOCAB, "width": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    return ModelConfig(**{**shape, "mlp_width": 176, "context": 256, **changes})


def mixture_config(**changes: Any) -> ModelConfig:
    """tiny_config() with experts in every layer: 3 of 12 with 24 hidden numbers; `changes` are of Experts."""
    experts = Experts(**{"count": 12, "chosen": 3, "width": 24, **changes})
    return tiny_config(layer_kinds=(LayerKind(rope=ROPE, mlp="experts"),), mlp_width=0, experts=experts)


def tiny_decoder(config: ModelConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder with random weights, large enough for varied text."""
    decoder = Decoder(config or tiny_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 2.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return decoder.to(dtype).requires_grad_(False).eval()


def tiny_files(
    decoder: Decoder, golden: list[int] | None = None, *, dtype: torch.dtype = torch.float32, **generation: Any
) -> dict[str, bytes]:
    """The files of a weights directory, by name, with a tokenizer of VOCAB tokens trained on TEXT.

    golden: prompt of golden.json. generation: fields of generation_config.json.
    """
    tokenizer = Tokenizer.train([TEXT], VOCAB)
    files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
    files |= {name: text.encode() for name, text in tokenizer.files().items()}
    return files | {GOLDEN_FILE: golden_file(decoder, golden)} if golden else files


def tiny_weights(directory: Path, **changes: Any) -> Path:
    """Writes a weights directory of tiny_config(**changes)."""
    write_files(directory, tiny_files(tiny_decoder(tiny_config(**changes))))
    return directory


def tiny_engine(
    decoder: Decoder,
    *,
    blocks: int | Items[int] = 64,
    block_size: int = 16,
    tokens_per_step: int = 128,
    max_running: int = 32,
    guides: GrammarTracker | None = None,
) -> Engine:
    """An engine around `decoder` in this process, with the backend of the fixture `way`.

    blocks: see block_counts().
    """
    limits = StepLimits(tokens_per_step=tokens_per_step, max_running=max_running)
    scheduler = Scheduler(limits, *block_pools(decoder.config, blocks, block_size))
    if WAY.get() != "torch" and can_be_native(decoder):
        assert block_size == BLOCK
        quantize: Quantize = "int8" if WAY.get() == "int8" else "none"
        executor: StepExecutor = native_executor(decoder, blocks, quantize=quantize, kv_cache=KV_CACHE.get())
        sampler = NativeSampler(kernels(), decoder.config.vocab_size)
        return Engine(scheduler, Runner(executor, sampler=sampler, grammars=guides), masks=guides)
    attend = None
    if decoder.config.n_encoder_layers:
        attend = EncoderCache(decoder, slots=max_running, context=decoder.config.context).attend
    executor = TorchExecutor(
        decoder, blocks=blocks, block_size=block_size, kv_cache=KV_CACHE.get(), attend_sources=attend
    )
    return Engine(scheduler, Runner(executor, sampler=TorchSampler(), grammars=guides), masks=guides)


PoolType = TypeVar("PoolType", bound=BlockPool)


def block_pools(
    config: ModelConfig, blocks: int | Items[int], block_size: int, *, pool_type: type[PoolType] = BlockPool
) -> list[PoolType]:
    """A pool for each cache group of a decoder. blocks: see block_counts()."""
    groups = cache_groups(config, "float32")
    sizes = zip(block_counts(blocks, groups), groups, strict=True)
    return [pool_type(count, block_size, window=group.window) for count, group in sizes]


def least_counts(config: ModelConfig, blocks: int, block_size: int, *, sequences: int = 1) -> list[int]:
    """Numbers of blocks for block_pools(): `blocks`, and for windows beside other layers the claims of sequences."""
    windows = [group.window for group in cache_groups(config, "float32")]
    return [
        blocks if window is None or len(windows) == 1 else min(blocks, sequences * blocks_in_window(window, block_size))
        for window in windows
    ]


def can_be_native(decoder: Decoder) -> bool:
    """Whether the C++ kernels support the decoder (app/engine/cpu/toolchain/backend_selection.py)."""
    return not decoder.config.n_encoder_layers and decoder.config.n_heads * decoder.config.head_dim % 2 == 0


def round_weights_for(way: str, decoder: Decoder) -> None:
    """Rounds the decoder's weights as this backend does, for comparison of an oracle with its engine."""
    if way == "int8":
        round_weights(decoder, "int8")


def round_weights(decoder: Decoder, kind: QuantizedKind, *, embedding: bool = True) -> Decoder:
    """Gives the matrices the numbers that their quantized ones stand for; embedding: whether that has them, too."""
    reader = quantized_weights(decoder, kind)
    for name, parameter in decoder.named_parameters():
        if reader.packed_formats(name) and (embedding or name != "embedding"):
            numbers = torch.from_numpy(reader.read(name, "float32"))
            parameter.data = numbers.to(parameter.dtype)
    return decoder


class _WithDenseEmbedding(QuantizedWeights):
    """Keeps an embedding dense that quantization refuses, because it is not finite."""

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        return () if name == "embedding" else super().packed_formats(name)

    def read(self, name: str, dtype: str) -> Array:
        """See PackedWeights."""
        return self._source.read(name, dtype) if name == "embedding" else super().read(name, dtype)


def quantized_weights(decoder: Decoder, kind: QuantizedKind) -> QuantizedWeights:
    """The decoder's parameters as --quantize has them."""
    kept = QuantizedWeights if decoder.embedding.isfinite().all() else _WithDenseEmbedding
    return kept(DenseWeights(parameter_reader(decoder)), decoder.config, kind)


def native_executor(
    decoder: Decoder,
    blocks: int | Items[int],
    *,
    quantize: Quantize = "none",
    kv_cache: KvCache = "auto",
    threads: int = 2,
    **options: Any,
) -> NativeExecutor:
    """Runs `decoder` in the kernels of this machine."""
    options |= {"blocks": blocks, "quantize": quantize, "kv_cache": kv_cache}
    return native_executor_of(kernels(), decoder, ThreadPool(kernels(), threads), **options)


def native_executor_of(
    library: CDLL, decoder: Decoder, pool: ThreadPool, *, quantize: Quantize = "none", **options: Any
) -> NativeExecutor:
    """Runs `decoder` in the kernels of `library`."""
    dtype = str(decoder.embedding.dtype).removeprefix("torch.")
    kind = packed_kind(quantize)
    weights = quantized_weights(decoder, kind) if kind else DenseWeights(parameter_reader(decoder))
    return NativeExecutor(library, decoder.config, weights, pool, **({"dtype": dtype} | options))


@cache
def kernels() -> CDLL:
    """The library for this machine, built if necessary. Raises BuildError if it cannot be built."""
    return load_library(find_or_build())


def run_all(engine: Engine, requests: list[Request], *, max_steps: int = 20_000) -> dict[str, list[SampledEvent]]:
    """Runs concurrent requests to completion; checks the block invariants after every step."""
    for request in requests:
        engine.add(request)
    events: dict[str, list[SampledEvent]] = {request.id: [] for request in requests}
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        report = engine.step()
        assert not engine.scheduler.violations()
        assert not report.failed
        for event in report.events:
            events[event.request_id].append(event)
    raise AssertionError("the engine does not come to an end")
