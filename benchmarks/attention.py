"""Attention and KV cache benchmark of the course: `python -m benchmarks.attention`.

1. How much faster is one matrix product over all heads than a loop over the heads (CausalAttend, PerHeadAttend)?
2. How much faster is decoding with a KV cache than recomputing the sequence for each token (app.engine,
   model.nn.reference)?

Random weights, float32, one sequence, no gradients; the engine runs in this process, without service and pipe. Both
variants are timed alternately, so that a slow moment of the machine affects both; figures are medians. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec
import torch

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner, TorchExecutor
from app.engine.memory.kv_cache import KVCache
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.machine_info import Machine, this_machine
from model.command_line import OneLineParser
from model.config import ModelConfig
from model.nn.attention import CausalAttend, PerHeadAttend
from model.nn.reference import generate
from model.nn.transformer import Decoder
from model.presets import PRESET_NAMES, preset

_LENGTH_FOR_HEADS = 256
"""Sequence length of the rows in which the number of heads grows."""
_BLOCK = 16
_SHORTEST_CONTEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Measured sizes, and repeats of each."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    repeats: int = 15


_QUICK = Sizes(lengths=(32, 64), heads=(1, 4), repeats=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsRow:
    """Attention over one sequence."""

    heads: int
    length: int
    per_head_ms: float
    fused_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """Decoding one token after a sequence of `tokens`."""

    tokens: int
    uncached_ms: float
    cached_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResult:
    """The whole result."""

    date: str
    machine: Machine
    torch: str
    threads: int
    preset: str
    repeats: int
    heads: tuple[HeadsRow, ...]
    cache: tuple[CacheRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.attention", description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=_presets(), default="gpt", help="shape of the decoder (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few sizes, as a smoke test")
    flags = parser.parse_args(argv)
    result = measure(flags.preset, _QUICK if flags.quick else Sizes())
    print(msgspec.json.encode({"benchmark": "attention", **msgspec.to_builtins(result)}).decode(), flush=True)
    return 0


def measure(name: str, sizes: Sizes) -> AttentionResult:
    """Measures both, and prints each row at once."""
    config = preset(name)
    heads, cache = [], []
    print(f"{'heads':>6}  {'length':>6}  {'head by head':>12}  {'fused':>8}  ms")
    for heads_row in _heads_rows(config, sizes):
        print(
            f"{heads_row.heads:6}  {heads_row.length:6}  {heads_row.per_head_ms:12.3f}  {heads_row.fused_ms:8.3f}",
            flush=True,
        )
        heads.append(heads_row)
    print(f"\n{'tokens':>14}  {'uncached':>12}  {'cached':>8}  ms for one more")
    for cache_row in _cache_rows(config, sizes):
        print(f"{cache_row.tokens:14}  {cache_row.uncached_ms:12.3f}  {cache_row.cached_ms:8.3f}", flush=True)
        cache.append(cache_row)
    return AttentionResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        preset=name,
        repeats=sizes.repeats,
        heads=tuple(heads),
        cache=tuple(cache),
    )


def _presets() -> list[str]:
    """Decoder-only presets whose context is long enough."""
    shapes = {name: preset(name) for name in PRESET_NAMES}
    return [name for name, c in shapes.items() if c.context >= _SHORTEST_CONTEXT and not c.n_encoder_layers]


def _heads_rows(config: ModelConfig, sizes: Sizes) -> Iterator[HeadsRow]:
    """Growing lengths, then growing numbers of heads; as many kv heads as heads."""
    longer = [(config.n_heads, length) for length in sizes.lengths]
    for heads, length in [*longer, *((heads, _LENGTH_FOR_HEADS) for heads in sizes.heads)]:
        q_THC, k_THC, v_THC = torch.randn(3, length, heads, config.head_dim).unbind()
        per_head = partial(PerHeadAttend(length), 0, q_THC, k_THC, v_THC)
        fused = partial(CausalAttend(length), 0, q_THC, k_THC, v_THC)
        per_head_ms, fused_ms = _medians(per_head, fused, sizes.repeats)
        yield HeadsRow(heads=heads, length=length, per_head_ms=per_head_ms, fused_ms=fused_ms)


def _cache_rows(config: ModelConfig, sizes: Sizes) -> Iterator[CacheRow]:
    """Growing lengths, up to the context."""
    decoder = Decoder(config).initialize(0).requires_grad_(False).eval()
    max_tokens = sizes.repeats + 2
    longest = config.context - max_tokens
    for length in [*(n for n in sizes.lengths if n < longest), longest]:
        tokens = torch.randint(config.vocab_size, (length,)).tolist()
        engine = _engine(decoder)
        engine.add(Request(id="1", prompt=tuple(tokens), max_tokens=max_tokens, params=SamplingParams(temperature=0)))
        cached, uncached = partial(_continue, engine, tokens), partial(generate, decoder, tokens, 1)
        cached()  # prefill
        uncached_ms, cached_ms = _medians(uncached, cached, sizes.repeats)
        yield CacheRow(tokens=length, uncached_ms=uncached_ms, cached_ms=cached_ms)


def _engine(decoder: Decoder) -> Engine:
    """An engine with blocks for one sequence of the whole context, which it prefills in one step."""
    config = decoder.config
    blocks = -(-config.context // _BLOCK)
    cache = KVCache(config, blocks=blocks, block_size=_BLOCK, dtype=torch.float32, device=decoder.embedding.device)
    limits = StepLimits(tokens_per_step=config.context, max_running=1)
    return Engine(
        Scheduler(limits, BlockPool(blocks, _BLOCK)), Runner(TorchExecutor(decoder, cache), sampler=TorchSampler())
    )


def _continue(engine: Engine, tokens: list[int]) -> None:
    """Runs one step; the sequence grows for both variants."""
    tokens += [event.token for event in engine.step().events if event.token is not None]


def _medians(slow: Callable[[], object], fast: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median milliseconds of each, after one warm-up call."""
    _, *pairs = [(_milliseconds(slow), _milliseconds(fast)) for _ in range(1 + repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


if __name__ == "__main__":
    sys.exit(main())
