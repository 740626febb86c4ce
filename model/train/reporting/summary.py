"""What is printed before the first step and after the last one: what will happen, and what is there now. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from model.checkpoint.model_summary import describe_size, shape_lines
from model.config import ModelConfig
from model.train.common.console_messages import python
from model.train.common.formatting import counted, duration
from model.train.reporting.model_card import RunFacts
from model.train.setup.dataset import Dataset
from model.train.step.schedule import Limits


def opening(config: ModelConfig, n_params: int, material: Dataset, limits: Limits, *, machine: str, step: int) -> str:
    """machine: device and number format in words. step: where the run stands already."""
    shape = dict(shape_lines(config))["shape"]
    lines = [
        f"model: {describe_size(n_params)} parameters ({shape}, vocabulary {config.vocab_size}) on {machine}",
        f"data:  {material.corpus}",
        f"plan:  {_plan(material, limits)}" + (f"; goes on at step {step}" if step else ""),
    ]
    return "\n".join(lines)


def closing(out: Path, facts: RunFacts) -> str:
    """The last lines of all; the very last one can be typed."""
    trained = f"after {facts.steps} steps, {duration(facts.seconds)}"
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    where = shlex.quote(str(out))
    lines = [
        f"{facts.measured} bits per byte {facts.bits_per_byte:.4f} {trained}",
        *(f"unseen {name}: {bits:.4f} bits per byte" for name, bits in facts.unseen.items()),
        f"written: {where} ({size / 1e6:.1f} MB); look at loss.svg, samples.md and README.md in it",
        f"serve it: {python()} -m app serve --weights {where}",
    ]
    return "\n".join(lines)


def _plan(material: Dataset, limits: Limits) -> str:
    per_step = material.tokens(1)
    batch = f"{material.rows} rows, about {per_step:,} tokens a step"
    share = limits.done(step=1, epochs=material.rows / material.per_epoch, tokens=per_step, seconds=0.0)
    until = [] if limits.minutes is None else [f"{limits.minutes:g} minutes"]
    if share:
        most = max(1, round(1 / share))
        until.append(f"{most:,} steps, {counted(material.tokens(most))} tokens, {material.epochs(most):.2f} epochs")
    return f"{' or '.join(until)}; {batch}"
