"""Engines as a service would build them, from files or from random weights. The one place that names their knobs.

An engine that does not know a knob yet is no failure: whoever asks for it hears Unsupported. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import msgspec

from app.engine.assembly import assemble
from app.engine.engine import Engine
from app.engine.frames import WorkerConfig
from benchmarks.gpu.finding import Bench, Unsupported
from benchmarks.gpu.shapes import reader
from model.checkpoint import Checkpoint
from model.config import ModelConfig

DEPTH, GRAPHS, DETERMINISTIC = "depth", "graphs", "deterministic"
"""What WorkerConfig calls the steps that are in flight at once, captured steps, and bits that no batch changes."""


def knows(**knobs: Any) -> bool:
    """Whether this engine has these knobs, and takes these values."""
    try:
        _config(weights="", **knobs)
    except Unsupported:
        return False
    return True


def engine_of(
    bench: Bench, shape: ModelConfig | None, read: Callable[..., Checkpoint] | None = None, **knobs: Any
) -> Engine:
    """On the bench's device; of the default weights where there is no shape. Raises Unsupported.

    read: random weights of this shape by default.
    """
    where = {"device": bench.device, "dtype": "float32" if bench.device == "cpu" else "bfloat16"}
    if shape is None:
        return assemble(_config(weights=str(bench.weights), **{**where, **knobs})).engine
    folder = bench.folder / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        for path in bench.weights.glob("tokenizer*.json"):  # of another vocabulary, and never asked
            shutil.copy(path, folder)
    return assemble(_config(weights=str(folder), **{**where, **knobs}), read=read or reader(shape)).engine


def _config(**wanted: Any) -> WorkerConfig:
    unknown = sorted(wanted.keys() - {*WorkerConfig.__struct_fields__})
    if unknown:
        raise Unsupported(f"this engine has no {', '.join(unknown)}")
    try:
        # Structs check nothing that Python code gives them.
        return msgspec.convert(msgspec.to_builtins(WorkerConfig(**wanted)), WorkerConfig)
    except msgspec.ValidationError as error:
        raise Unsupported(f"this engine does not take {wanted}: {error}") from None
