"""Captured steps against eager ones, and a step ahead against none: the same tokens, and if possible the same bits.

Batches whose sizes lie on and beside the borders of what is captured; texts join and leave while others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.engine.types import Request
from benchmarks.gpu.drive import Texts, prompt_of, request, run_all
from benchmarks.gpu.engines import DEPTH, GRAPHS, engine_of, knows
from benchmarks.gpu.finding import Bench, Finding, Unsupported
from benchmarks.gpu.parity import LAYOUTS, smaller
from model.config import ModelConfig

_PLAIN = {DEPTH: 0, GRAPHS: False}
_OTHERS: Mapping[str, dict[str, Any]] = {
    "eager, a step ahead": {DEPTH: 1, GRAPHS: False},
    "captured": {DEPTH: 0, GRAPHS: True},
    "captured, a step ahead": {DEPTH: 1, GRAPHS: True},
}


def run(bench: Bench) -> Iterator[Finding]:
    """Each way against the plain one."""
    lacking = [knob for knob, value in _PLAIN.items() if not knows(**{knob: value})]
    plain = {knob: value for knob, value in _PLAIN.items() if knob not in lacking}
    if not plain:
        raise Unsupported(f"this engine has neither {DEPTH} nor {GRAPHS}")
    shape = smaller(LAYOUTS["llama"]) if bench.tiny else LAYOUTS["llama"]
    batches = [_requests(shape, count, bench.tiny) for count in ((3,) if bench.tiny else (1, 7, 8, 9, 33))]
    expected = _texts(bench, shape, batches, plain)
    for name, knobs in _OTHERS.items():
        known = {knob: value for knob, value in knobs.items() if knob in plain}
        if known != plain:
            yield _compare(name, expected, _texts(bench, shape, batches, known), batches)


def _texts(bench: Bench, shape: ModelConfig, batches: list[list[Request]], knobs: dict[str, Any]) -> list[Texts]:
    engine = engine_of(bench, shape, max_running=40, tokens_per_step=512, **knobs)
    return [run_all(engine, batch) for batch in batches]


def _compare(name: str, expected: list[Texts], texts: list[Texts], batches: list[list[Request]]) -> Finding:
    requests = [(i, r.id) for i, batch in enumerate(batches) for r in batch]
    failed = [texts[i].failed[r] for i, r in requests if r in texts[i].failed]
    same = [texts[i].tokens(r) == expected[i].tokens(r) for i, r in requests]
    bits = [texts[i].events.get(r) == expected[i].events.get(r) for i, r in requests]
    return Finding(
        what=name,
        value=sum(same),
        unit=f"of {len(same)} texts the same",
        ok=all(same) and not failed,
        note=failed[0] if failed else f"log-probabilities of {sum(bits)} the same to the last bit",
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
