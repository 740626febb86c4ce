"""Whether a request gets the same bits alone, in a batch, and again: the check of --deterministic, and more.

The report includes the engine's default mode too; on a GPU that mode may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.worker_loop import EngineStartError
from benchmarks.gpu.drive import Texts, prompt_of, request, run_all
from benchmarks.gpu.engines import engine_of
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.parity import LAYOUTS, smaller
from model.config import ModelConfig


def run(bench: Bench) -> Iterator[Finding]:
    """By default, then as asked for."""
    yield from _way(bench, "by default", {}, law=bench.device == "cpu")
    yield from _way(bench, "deterministic", {"deterministic": True}, law=True)


def _way(bench: Bench, name: str, knobs: dict[str, Any], *, law: bool) -> Iterator[Finding]:
    shape = smaller(LAYOUTS["llama"]) if bench.tiny else LAYOUTS["llama"]
    requests, heard = _requests(shape, bench.tiny), list[str]()
    sizes: dict[str, Any] = {"max_running": 40, "tokens_per_step": 256, "cache_tokens": 32_768}
    try:
        engines = [engine_of(bench, shape, announce=heard.append, **sizes, **knobs) for _ in range(2)]
    except EngineStartError as error:
        yield Finding(what=f"{name}: starts", value="refused", ok=False, note=str(error))
        return
    yield Finding(what=f"{name}: starts", value="yes", note=next((one for one in heard if "proven" in one), ""))
    together = run_all(engines[0], requests)
    ways = {
        "again, in a fresh engine": run_all(engines[1], requests),
        "again, from the cache": run_all(engines[0], requests),
        "alone": _alone(engines[1], requests),
    }
    for what, texts in ways.items():
        yield _compare(f"{name}: {what}", requests, together, texts, law)


def _alone(engine: Engine, requests: list[Request]) -> Texts:
    """Every fourth of them."""
    texts = Texts()
    for one in requests[::4]:
        texts.events |= run_all(engine, [one]).events
    return texts


def _compare(what: str, requests: list[Request], one: Texts, other: Texts, law: bool) -> Finding:
    names = [r.id for r in requests if r.id in other.events]
    same = [one.events.get(name) == other.events.get(name) for name in names]
    tokens = [one.tokens(name) == other.tokens(name) for name in names]
    return Finding(
        what=what,
        value=sum(same),
        unit=f"of {len(same)} texts the same to the last bit",
        ok=bool(names) and all(same) if law else None,
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
