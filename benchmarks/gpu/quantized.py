"""Decoding with weights of eight bits, beside the same with bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.drive import clear
from benchmarks.gpu.engines import engine_of, knows
from benchmarks.gpu.finding import Bench, Finding, Unsupported
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.speed import TINY, Sizes, decode
from benchmarks.gpu.work import Roofs

_SIZES = Sizes(rows=(1, 32), windows=5)


def run(bench: Bench) -> Iterator[Finding]:
    """The subject is how: int8, fp8."""
    if not knows(quantize=bench.subject):
        raise Unsupported(f"this engine has no --quantize {bench.subject}")
    sizes, shape = TINY if bench.tiny else _SIZES, shape_of("8b", tiny=bench.tiny)
    speeds: dict[int, float] = {}
    for how in ("none", bench.subject):
        engine = engine_of(bench, shape, max_running=max(sizes.rows), quantize=how, max_context=shape.context // 2)
        roofs = Roofs.of(bench, shape, "bf16" if how == "none" else "int8")
        for rows in sizes.rows:
            found = decode(engine, replace(shape, context=shape.context // 2), rows, sizes, roofs)
            assert isinstance(found.value, float)
            before = speeds.setdefault(rows, found.value)
            note = found.note if how == "none" else f"{found.value / before:.2f} x bfloat16; {found.note}"
            yield replace(found, what=f"{'bf16' if how == 'none' else how}, {found.what}", note=note)
        clear(engine)
        del engine
