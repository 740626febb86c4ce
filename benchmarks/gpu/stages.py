"""The stages, their order, and the share of time of each. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENGINE = ("torch", "numpy", "safetensors", "tokenizers", "msgspec")
"""Packages that an engine needs."""
HTTP = ("fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "pydantic_settings", "jinja2", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One measurement or check: a module with run(context), a generator of findings; runs in its own process."""

    name: str
    module: str
    weight: float
    """Share of the time: about the seconds that it gets in a run of eight minutes."""
    needs: tuple[str, ...] = ENGINE
    variant: str = ""
    tiny: bool = True
    """Whether a --tiny run includes it by default."""


_RENAMED = {"roofs": "roofline", "hugging": "transformers_baseline"}
"""Modules named more clearly than their stages, whose names commands and committed reports use."""


def _stage(name: str, weight: float, *, variant: str = "", needs: tuple[str, ...] = ENGINE, tiny: bool = True) -> Stage:
    noun = name.partition("-")[0]
    module = f"benchmarks.gpu.{_RENAMED.get(noun, noun)}"
    return Stage(name=name, module=module, weight=weight, needs=needs, variant=variant, tiny=tiny)


STAGES = (
    _stage("machine", 10, needs=("torch",)),
    _stage("roofs", 10, needs=("torch",)),
    # Correctness matters more than speed: checks come first.
    _stage("conform", 70, needs=("torch", "msgspec")),
    _stage("parity", 45),
    _stage("graphs", 30),
    _stage("syncs", 15),
    _stage("memory", 15),
    _stage("speed-default", 12, variant="default", tiny=False),
    _stage("speed-gpt2", 15, variant="gpt2"),
    _stage("speed-1b", 20, variant="1b", tiny=False),
    _stage("speed-8b", 50, variant="8b", tiny=False),
    _stage("batch-8b", 80, variant="8b"),
    _stage("hugging", 40, needs=("torch", "transformers"), tiny=False),
    _stage("quantized-int8", 20, variant="int8"),
    _stage("quantized-fp8", 20, variant="fp8"),
    _stage("deterministic", 20),
    _stage("http", 25, needs=(*ENGINE, *HTTP), tiny=False),
)
NAMES = tuple(stage.name for stage in STAGES)


def choose(only: Sequence[str], *, tiny: bool) -> tuple[Stage, ...]:
    """The requested stages in their order; `speed` selects all whose name starts with it. Raises ValueError."""
    for name in only:
        if not any(_selects(name, stage) for stage in STAGES):
            raise ValueError(f"no stage is called {name!r}; there are {', '.join(NAMES)}")
    if only:
        return tuple(stage for stage in STAGES if any(_selects(name, stage) for name in only))
    return tuple(stage for stage in STAGES if stage.tiny or not tiny)


def seconds_for(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """The stage's share of the remaining seconds: unused time goes to all later stages."""
    return left * stage.weight / (stage.weight + sum(other.weight for other in later))


def _selects(name: str, stage: Stage) -> bool:
    return stage.name == name or stage.name.partition("-")[0] == name
