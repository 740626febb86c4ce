"""Whether a request gets the same bits alone, beside others, and again: the self-test of --deterministic.

Where the engine has no such knob, the same is told of how it computes by default, and nothing is held against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.engine.engine import Engine
from app.engine.types import Request
from benchmarks.gpu.drive import Texts, prompt_of, request, run_all
from benchmarks.gpu.engines import DETERMINISTIC, engine_of, knows
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.parity import LAYOUTS, smaller
from model.config import ModelConfig


def run(bench: Bench) -> Iterator[Finding]:
    """By default, then as asked for."""
    shape = smaller(LAYOUTS["llama"]) if bench.tiny else LAYOUTS["llama"]
    requests = _requests(shape, bench.tiny)
    ways: dict[str, dict[str, Any]] = {"by default": {}, "deterministic": {DETERMINISTIC: True}}
    for name, knobs in ways.items():
        if not knows(**knobs):
            yield Finding(what=name, value="not there", note=f"this engine has no {DETERMINISTIC}")
            continue
        law = bool(knobs) or bench.device == "cpu"
        engines = [engine_of(bench, shape, max_running=40, tokens_per_step=256, **knobs) for _ in range(2)]
        together = run_all(engines[0], requests)
        yield _compare(f"{name}: again, in a fresh engine", requests, together, run_all(engines[1], requests), law)
        yield _compare(
            f"{name}: in the warm one, from the cache", requests, together, run_all(engines[0], requests), law
        )
        yield _compare(f"{name}: alone", requests[:8], together, _alone(engines[1], requests[:8]), law)


def _alone(engine: Engine, requests: list[Request]) -> Texts:
    texts = Texts()
    for one in requests:
        texts.events |= run_all(engine, [one]).events
    return texts


def _compare(what: str, requests: list[Request], one: Texts, other: Texts, law: bool) -> Finding:
    same = [one.events.get(r.id) == other.events.get(r.id) and r.id in one.events for r in requests]
    tokens = [one.tokens(r.id) == other.tokens(r.id) for r in requests]
    return Finding(
        what=what,
        value=sum(same),
        unit=f"of {len(same)} texts the same to the last bit",
        ok=all(same) if law else None,
        note=f"tokens the same in {sum(tokens)}",
    )


def _requests(shape: ModelConfig, tiny: bool) -> list[Request]:
    lengths = range(3, 60, 19) if tiny else range(3, 600, 18)
    drawn = {"temperature": 0.9, "top_p": 0.95}
    return [
        request(
            f"{length}",
            prompt_of(length, shape.vocab_size, length),
            5 if tiny else 40,
            logprobs=2,
            **({**drawn, "seed": length} if length % 2 else {}),
        )
        for length in lengths
    ]
