"""Decode and prefill with 8-bit weights, compared with bfloat16 weights of the same shape in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from app.engine.worker_loop import EngineStartError
from benchmarks.gpu.engines import StartupPhases, build_engine
from benchmarks.gpu.results import Finding, StageContext, Unsupported
from benchmarks.gpu.roofline import Roofline
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.speed import TINY, Sizes, decode, prefill

_SIZES = Sizes(rows=(1, 8, 32), prompt_lengths=(1000,))


def run(context: StageContext) -> Iterator[Finding]:
    """The stage's variant is the number format: int8, fp8."""
    sizes, shape, phases = TINY if context.tiny else _SIZES, shape_of("8b", tiny=context.tiny), StartupPhases()
    try:
        engine = build_engine(
            context,
            shape,
            announce=phases,
            quantize=context.variant,
            max_running=max(sizes.rows),
            tokens_per_step=64 if context.tiny else 1024,
            cache_tokens=max(sizes.rows) * shape.context if context.tiny else 65_536,
        )
    except EngineStartError as error:
        raise Unsupported(str(error)) from None
    yield Finding(what="engine built", value=phases.seconds, unit="s", note=str(phases))
    roofline = Roofline.of(context, shape, "int8")
    short = replace(shape, context=min(shape.context, 1024))
    for rows in sizes.rows:
        yield _compared_with_bfloat16(decode(engine, short, rows, sizes, roofline), context)
    for length in sizes.prompt_lengths:
        yield _compared_with_bfloat16(prefill(engine, shape, length, sizes, roofline), context)


def _compared_with_bfloat16(finding: Finding, context: StageContext) -> Finding:
    baseline = (context.numbers or {}).get(f"speed-8b: {finding.what}")
    assert isinstance(finding.value, float)
    return replace(finding, note=f"{finding.value / baseline:.2f} x bfloat16; {finding.note}") if baseline else finding
