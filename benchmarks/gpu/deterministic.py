"""Bitwise reproducibility of a request: alone, in a batch, and again, with --deterministic and without.

On a GPU only --deterministic guarantees it; the report shows the default mode too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.worker_loop import EngineStartError
from benchmarks.engine_driver import Outputs, random_prompt, request, run_all
from benchmarks.gpu.engines import build_engine
from benchmarks.gpu.parity import LAYOUTS, smaller
from benchmarks.gpu.results import Finding, StageContext
from model.config import ModelConfig


def run(context: StageContext) -> Iterator[Finding]:
    """Checks the default mode, then --deterministic."""
    yield from _check_mode(context, "by default", {}, is_required=context.device == "cpu")
    yield from _check_mode(context, "deterministic", {"deterministic": True}, is_required=True)


def _check_mode(context: StageContext, name: str, options: dict[str, Any], *, is_required: bool) -> Iterator[Finding]:
    shape = smaller(LAYOUTS["llama"]) if context.tiny else LAYOUTS["llama"]
    requests, reported = _requests(shape, context.tiny), list[str]()
    sizes: dict[str, Any] = {"max_running": 40, "tokens_per_step": 256, "cache_tokens": 32_768}
    try:
        engines = [build_engine(context, shape, announce=reported.append, **sizes, **options) for _ in range(2)]
    except EngineStartError as error:
        yield Finding(what=f"{name}: starts", value="refused", ok=False, note=str(error))
        return
    yield Finding(
        what=f"{name}: starts",
        value="yes",
        note=next((reference for reference in reported if "proven" in reference), ""),
    )
    batched = run_all(engines[0], requests)
    reruns = {
        "again, in a fresh engine": run_all(engines[1], requests),
        "again, from the cache": run_all(engines[0], requests),
        "alone": _alone(engines[1], requests),
    }
    for what, outputs in reruns.items():
        yield _compare(f"{name}: {what}", requests, batched, outputs, is_required)


def _alone(engine: Engine, requests: list[Request]) -> Outputs:
    """Runs every fourth request alone."""
    outputs = Outputs()
    for reference in requests[::4]:
        outputs.events |= run_all(engine, [reference]).events
    return outputs


def _compare(what: str, requests: list[Request], reference: Outputs, rerun: Outputs, is_required: bool) -> Finding:
    names = [r.id for r in requests if r.id in rerun.events]
    same = [reference.events.get(name) == rerun.events.get(name) for name in names]
    tokens = [reference.tokens(name) == rerun.tokens(name) for name in names]
    return Finding(
        what=what,
        value=sum(same),
        unit=f"of {len(same)} texts the same to the last bit",
        ok=bool(names) and all(same) if is_required else None,
        note=f"tokens the same in {sum(tokens)}",
    )


def _requests(shape: ModelConfig, tiny: bool) -> list[Request]:
    lengths = range(3, 60, 19) if tiny else range(3, 600, 18)
    sampled = {"temperature": 0.9, "top_p": 0.95}
    return [
        request(
            f"{length}",
            random_prompt(length, shape.vocab_size, length),
            5 if tiny else 40,
            logprobs=2,
            **({**sampled, "seed": length} if length % 2 else {}),
        )
        for length in lengths
    ]
