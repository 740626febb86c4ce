"""The stages, their order, and the share of the time that each gets. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENGINE = ("torch", "numpy", "safetensors", "tokenizers", "msgspec")
"""Packages without which no engine can be built."""
HTTP = ("fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "pydantic_settings", "jinja2", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One question. Its module has run(bench), a generator of findings, and is loaded in the stage's own process."""

    name: str
    module: str
    weight: float
    """Its part of the time: seconds, about, where there are eight minutes for all."""
    needs: tuple[str, ...] = ENGINE
    subject: str = ""
    tiny: bool = True
    """Whether a run with --tiny takes it without being asked to."""


def _stage(name: str, weight: float, *, subject: str = "", needs: tuple[str, ...] = ENGINE, tiny: bool = True) -> Stage:
    noun = name.partition("-")[0]
    return Stage(name=name, module=f"benchmarks.gpu.{noun}", weight=weight, needs=needs, subject=subject, tiny=tiny)


STAGES = (
    _stage("machine", 10, needs=("torch",)),
    _stage("roofs", 10, needs=("torch",)),
    # What is wrong is worth more than how fast it is: laws first.
    _stage("conform", 70, needs=("torch", "msgspec")),
    _stage("parity", 45),
    _stage("graphs", 30),
    _stage("syncs", 15),
    _stage("memory", 15),
    _stage("speed-default", 12, subject="default", tiny=False),
    _stage("speed-gpt2", 15, subject="gpt2"),
    _stage("speed-1b", 20, subject="1b", tiny=False),
    _stage("speed-8b", 50, subject="8b", tiny=False),
    _stage("batch-8b", 80, subject="8b"),
    _stage("hugging", 40, needs=("torch", "transformers"), tiny=False),
    _stage("quantized-int8", 20, subject="int8"),
    _stage("quantized-fp8", 20, subject="fp8"),
    _stage("deterministic", 20),
    _stage("http", 25, needs=(*ENGINE, *HTTP), tiny=False),
)
NAMES = tuple(stage.name for stage in STAGES)


def choose(only: Sequence[str], *, tiny: bool) -> tuple[Stage, ...]:
    """Those asked for, in their order; `speed` stands for all whose name begins so. Raises ValueError."""
    for name in only:
        if not any(_means(name, stage) for stage in STAGES):
            raise ValueError(f"no stage is called {name!r}; there are {', '.join(NAMES)}")
    if only:
        return tuple(stage for stage in STAGES if any(_means(name, stage) for name in only))
    return tuple(stage for stage in STAGES if stage.tiny or not tiny)


def seconds_for(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """Its share of the seconds that are left: what one does not take goes to all that follow."""
    return left * stage.weight / (stage.weight + sum(other.weight for other in later))


def _means(name: str, stage: Stage) -> bool:
    return stage.name == name or stage.name.partition("-")[0] == name
