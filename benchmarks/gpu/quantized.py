"""Decoding and prefill with 8-bit weights, compared with bfloat16 of the same shape in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from app.engine.worker_loop import EngineStartError
from benchmarks.gpu.engines import Phases, engine_of
from benchmarks.gpu.finding import Bench, Finding, Unsupported
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.speed import TINY, Sizes, decode, prefill
from benchmarks.gpu.work import Roofs

_SIZES = Sizes(rows=(1, 8, 32), read=(1000,))


def run(bench: Bench) -> Iterator[Finding]:
    """The subject is how: int8, fp8."""
    sizes, shape, phases = TINY if bench.tiny else _SIZES, shape_of("8b", tiny=bench.tiny), Phases()
    try:
        engine = engine_of(
            bench,
            shape,
            announce=phases,
            quantize=bench.subject,
            max_running=max(sizes.rows),
            tokens_per_step=64 if bench.tiny else 1024,
            cache_tokens=max(sizes.rows) * shape.context if bench.tiny else 65_536,
        )
    except EngineStartError as error:
        raise Unsupported(str(error)) from None
    yield Finding(what="engine built", value=phases.seconds, unit="s", note=str(phases))
    roofs = Roofs.of(bench, shape, "int8")
    short = replace(shape, context=min(shape.context, 1024))
    for rows in sizes.rows:
        yield _beside(decode(engine, short, rows, sizes, roofs), bench)
    for length in sizes.read:
        yield _beside(prefill(engine, shape, length, sizes, roofs), bench)


def _beside(found: Finding, bench: Bench) -> Finding:
    before = (bench.found or {}).get(f"speed-8b: {found.what}")
    assert isinstance(found.value, float)
    return replace(found, note=f"{found.value / before:.2f} x bfloat16; {found.note}") if before else found
