"""The stages, their order, and the share of time of each. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENGINE = ("torch", "numpy", "safetensors", "tokenizers", "msgspec")
"""Packages that an engine needs."""
HTTP = ("fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "pydantic_settings", "jinja2", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One measurement or check: a generator of findings, called with the context in a process of its own."""

    name: str
    function: str
    """With its module below benchmarks.gpu."""
    weight: float
    """Share of the time: about the seconds that it gets in a run of eight minutes."""
    needs: tuple[str, ...] = ENGINE
    variant: str = ""
    tiny: bool = True
    """Whether a --tiny run includes it by default."""


def _stage(name: str, module: str, weight: float, *, needs: tuple[str, ...] = ENGINE, tiny: bool = True) -> Stage:
    noun, _, variant = name.partition("-")
    return Stage(name=name, function=f"{module}.{noun}", weight=weight, needs=needs, variant=variant, tiny=tiny)


STAGES = (
    _stage("machine", "machine", 10, needs=("torch",)),
    # Before whatever launches kernels: compiled one after another, these took most of conform's time.
    _stage("kernels", "compilation", 40, needs=(*ENGINE, "triton"), tiny=False),
    _stage("roofs", "machine", 10, needs=("torch",)),
    # Correctness matters more than speed: checks come first.
    _stage("conform", "conform", 70, needs=("torch", "numpy", "msgspec")),
    _stage("parity", "parity", 60),
    _stage("graphs", "engine_checks", 30),
    _stage("syncs", "engine_checks", 15),
    _stage("memory", "engine_checks", 15),
    _stage("speed-default", "speed", 12, tiny=False),
    _stage("speed-gpt2", "speed", 15),
    _stage("speed-1b", "speed", 20, tiny=False),
    _stage("speed-8b", "speed", 50, tiny=False),
    _stage("speed-qwen3-8b", "speed", 50, tiny=False),
    _stage("batch-8b", "speed", 70, tiny=False),
    _stage("batch-qwen3-8b", "speed", 70),
    _stage("quantized-int8", "speed", 20),
    _stage("quantized-int4", "speed", 20),
    _stage("quantized-fp8", "speed", 20),
    _stage("deterministic", "engine_checks", 20),
    _stage("train", "training", 45),
    _stage("http", "http", 25, needs=(*ENGINE, *HTTP), tiny=False),
)
NAMES = tuple(stage.name for stage in STAGES)
_DIVIDING = ("speed", "batch", "quantized", "train")
"""Stages that state a share of the roofs."""


def choose(only: Sequence[str], *, tiny: bool) -> tuple[Stage, ...]:
    """The requested stages in their order, and `roofs` if one of them divides by it; `speed` selects all its variants.

    Raises ValueError.
    """
    for name in only:
        if not any(_selects(name, stage) for stage in STAGES):
            raise ValueError(f"no stage is called {name!r}; there are {', '.join(NAMES)}")
    if not only:
        return tuple(stage for stage in STAGES if stage.tiny or not tiny)
    chosen = {stage.name for stage in STAGES if any(_selects(name, stage) for name in only)}
    if any(name.startswith(_DIVIDING) for name in chosen):
        chosen.add("roofs")
    return tuple(stage for stage in STAGES if stage.name in chosen)


def seconds_for(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """The stage's share of the remaining seconds: unused time goes to all later stages."""
    return left * stage.weight / (stage.weight + sum(other.weight for other in later))


def _selects(name: str, stage: Stage) -> bool:
    return stage.name == name or stage.name.partition("-")[0] == name
