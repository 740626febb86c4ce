"""Captured steps against eager ones, and a step ahead against none: the same tokens, and if possible the same bits.

One engine, in which the one and then the other is switched off; batches whose sizes lie on and next to the borders of
what is captured, and shrink while they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from app.common.types import Request
from app.engine.execution.engine import Engine
from benchmarks.gpu.drive import Texts, prompt_of, request, run_all
from benchmarks.gpu.engines import runs_ahead, without_graphs, without_lead
from benchmarks.gpu.finding import Bench, Finding, Unsupported
from benchmarks.gpu.parity import LAYOUTS, smaller
from benchmarks.gpu.twins import device_engine
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    name: str
    texts: list[Texts]


def run(bench: Bench) -> Iterator[Finding]:
    """Each way against the plainest one."""
    shape = smaller(LAYOUTS["llama"]) if bench.tiny else LAYOUTS["llama"]
    engine = device_engine(
        bench, shape, max_running=40, tokens_per_step=512, cache_tokens=2048 if bench.tiny else 16_384
    )
    batches = [_requests(shape, count, bench.tiny) for count in ((3,) if bench.tiny else (1, 7, 8, 9, 33))]
    *others, plainest = _ways(engine, batches)
    if not others:
        raise Unsupported("this engine neither captures steps nor runs ahead")
    for way in others:
        yield _compare(way, plainest, batches)


def _ways(engine: Engine, batches: list[list[Request]]) -> Iterator[_Way]:
    """As it is served first; the plainest last."""
    ahead = runs_ahead(engine)
    first = _texts(engine, batches, "1")
    waiting = _texts(without_lead(engine), batches, "2") if ahead else first
    if without_graphs(engine):
        yield _Way(name="captured, a step ahead" if ahead else "captured", texts=first)
        if ahead:
            yield _Way(name="captured", texts=waiting)
            yield _Way(name="eager, a step ahead", texts=_texts(engine, batches, "3"))
        yield _Way(name="eager", texts=_texts(without_lead(engine), batches, "4"))
        return
    if ahead:
        yield _Way(name="eager, a step ahead", texts=first)
    yield _Way(name="eager", texts=waiting)


def _texts(engine: Engine, batches: list[list[Request]], salt: str) -> list[Texts]:
    """In a cache namespace of its own, no mode finds cached blocks that another has computed."""
    return [run_all(engine, [msgspec.structs.replace(r, salt=salt) for r in batch]) for batch in batches]


def _compare(way: _Way, plainest: _Way, batches: list[list[Request]]) -> Finding:
    pairs = [
        (ours, theirs, r.id)
        for ours, theirs, batch in zip(way.texts, plainest.texts, batches, strict=True)
        for r in batch
    ]
    failed = [ours.failed[name] for ours, _, name in pairs if name in ours.failed]
    same = [ours.tokens(name) == theirs.tokens(name) for ours, theirs, name in pairs]
    bits = [ours.events.get(name) == theirs.events.get(name) for ours, theirs, name in pairs]
    return Finding(
        what=f"{way.name} against {plainest.name}",
        value=sum(same),
        unit=f"of {len(same)} texts the same",
        ok=all(same) and not failed,
        note=failed[0] if failed else f"{sum(bits)} to the last bit of their log-probabilities",
    )


def _requests(shape: ModelConfig, count: int, tiny: bool) -> list[Request]:
    """Of different lengths, so that the batch shrinks while it runs."""
    drawn = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    return [
        request(
            f"{count}.{i}",
            prompt_of(5 + 13 * i % 90, shape.vocab_size, f"{count} {i}"),
            4 + i % 5 if tiny else 24 + 5 * (i % 9),
            logprobs=1,
            **({**drawn, "seed": i} if i % 2 else {}),
        )
        for i in range(count)
    ]
