"""Captured steps against eager ones, and run-ahead against none: the same tokens, and if possible the same bits.

Uses one engine and disables run-ahead, then graphs; batch sizes lie on and next to the captured sizes, and shrink while
they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from app.common.types import Request
from app.engine.execution.engine import Engine
from benchmarks.engine_driver import Outputs, random_prompt, request, run_all
from benchmarks.gpu.engines import build_device_engine, can_run_ahead, disable_graphs, without_run_ahead
from benchmarks.gpu.parity import LAYOUTS, smaller
from benchmarks.gpu.results import Finding, StageContext, Unsupported
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    name: str
    outputs: list[Outputs]


def run(context: StageContext) -> Iterator[Finding]:
    """Compares each mode with the plainest one."""
    shape = smaller(LAYOUTS["llama"]) if context.tiny else LAYOUTS["llama"]
    engine = build_device_engine(
        context, shape, max_running=40, tokens_per_step=512, cache_tokens=2048 if context.tiny else 16_384
    )
    batches = [_requests(shape, count, context.tiny) for count in ((3,) if context.tiny else (1, 7, 8, 9, 33))]
    *others, plainest = _run_modes(engine, batches)
    if not others:
        raise Unsupported("this engine neither captures steps nor runs ahead")
    for mode in others:
        yield _compare(mode, plainest, batches)


def _run_modes(engine: Engine, batches: list[list[Request]]) -> Iterator[_Mode]:
    """All modes, from the service's own to the plainest."""
    is_ahead = can_run_ahead(engine)
    first = _outputs(engine, batches, "1")
    synchronous = _outputs(without_run_ahead(engine), batches, "2") if is_ahead else first
    if disable_graphs(engine):
        yield _Mode(name="captured, a step ahead" if is_ahead else "captured", outputs=first)
        if is_ahead:
            yield _Mode(name="captured", outputs=synchronous)
            yield _Mode(name="eager, a step ahead", outputs=_outputs(engine, batches, "3"))
        yield _Mode(name="eager", outputs=_outputs(without_run_ahead(engine), batches, "4"))
        return
    if is_ahead:
        yield _Mode(name="eager, a step ahead", outputs=first)
    yield _Mode(name="eager", outputs=synchronous)


def _outputs(engine: Engine, batches: list[list[Request]], space: str) -> list[Outputs]:
    """Each mode has its own cache namespace, so that it finds no blocks that another mode has computed."""
    return [run_all(engine, [msgspec.structs.replace(r, cache_namespace=space) for r in batch]) for batch in batches]


def _compare(mode: _Mode, plainest: _Mode, batches: list[list[Request]]) -> Finding:
    pairs = [
        (output, baseline, r.id)
        for output, baseline, batch in zip(mode.outputs, plainest.outputs, batches, strict=True)
        for r in batch
    ]
    failed = [output.failed[name] for output, _, name in pairs if name in output.failed]
    same = [output.tokens(name) == baseline.tokens(name) for output, baseline, name in pairs]
    bits = [output.events.get(name) == baseline.events.get(name) for output, baseline, name in pairs]
    return Finding(
        what=f"{mode.name} against {plainest.name}",
        value=sum(same),
        unit=f"of {len(same)} texts the same",
        ok=all(same) and not failed,
        note=failed[0] if failed else f"{sum(bits)} to the last bit of their log-probabilities",
    )


def _requests(shape: ModelConfig, count: int, tiny: bool) -> list[Request]:
    """Requests of different lengths, so that the batch shrinks while it runs."""
    sampled = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    return [
        request(
            f"{count}.{i}",
            random_prompt(5 + 13 * i % 90, shape.vocab_size, f"{count} {i}"),
            4 + i % 5 if tiny else 24 + 5 * (i % 9),
            logprobs=1,
            **({**sampled, "seed": i} if i % 2 else {}),
        )
        for i in range(count)
    ]
