"""How many bytes a run takes: in memory, on the disk. Arithmetic over parameters; knows no text and no device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.describe import describe_bytes
from model.train.recipes import Optimizer
from model.transformer import Decoder

_FLOAT = 4
_STORED = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATES = {"muon": 1, "adamw": 2}
"""Numbers that the optimiser keeps for each number of a matrix; for the others it is always AdamW's two."""
_PARTS = {
    "embedding": "embedding",
    "position_embedding": "embedding",
    "attention": "attention",
    "cross": "attention",
    "mlp": "feed-forward",
    "untied_head": "head",
    "head_bias": "head",
}
_REST = "norms"
_SLACK = 4 << 20
"""Tokenizer, card, curve, log."""


class DoesNotFit(ValueError):
    """A run that this machine has no room for; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes."""

    weights: int
    gradients: int
    optimiser: int
    average: int
    """Of --ema; 0 without."""
    result: int
    """The weights as they are written in the end."""

    @property
    def in_memory(self) -> int:
        """Without activations, which depend on the batch."""
        return self.weights + self.gradients + self.optimiser + self.average

    @property
    def snapshot(self) -> int:
        """Weights, optimiser, average, and the best weights so far."""
        return 2 * self.weights + self.optimiser + self.average

    @property
    def on_disk(self) -> int:
        """The most at any time: a snapshot is whole before the one before it goes."""
        return 2 * self.snapshot + self.result + _SLACK


def sizes(decoder: Decoder, optimizer: Optimizer, *, ema: float, export_dtype: str) -> Sizes:
    """Of a run that trains `decoder`, which may be without numbers (device meta)."""
    n, n_matrices = decoder.n_params, sum(p.numel() for p in _matrices(decoder))
    return Sizes(
        weights=_FLOAT * n,
        gradients=_FLOAT * n,
        optimiser=_FLOAT * (_STATES[optimizer] * n_matrices + _STATES["adamw"] * (n - n_matrices)),
        average=_FLOAT * n if ema else 0,
        result=_STORED[export_dtype] * n,
    )


def require_memory(n_bytes: int, free: int) -> None:
    """Whether a run has so much memory, before it takes it. Raises DoesNotFit."""
    if n_bytes > free:
        raise DoesNotFit(
            f"weights, gradients and optimiser need {describe_bytes(n_bytes)} of memory, {describe_bytes(free)} are "
            "free; take a smaller --preset, or less of --width, --layers or --vocab-size"
        )


def parts(decoder: Decoder) -> dict[str, int]:
    """Parameters by what they belong to, the norms last."""
    found = dict.fromkeys((*_PARTS.values(), _REST), 0)
    for name, parameter in decoder.named_parameters():
        first, *_, third = [*name.split("."), "", ""][:3]
        found[_PARTS.get(third if first.endswith("blocks") else first, _REST)] += parameter.numel()
    return {name: n for name, n in found.items() if n}


def _matrices(decoder: Decoder) -> list[Tensor]:
    return [p for blocks in (decoder.blocks, decoder.encoder_blocks) for p in blocks.parameters() if p.ndim == 2]
