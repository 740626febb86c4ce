"""What a report needs to know of a run before its first step. Knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What does not change while a run goes on."""

    title: str
    """The model in a few words."""
    measured: str
    """What is measured beside the training loss: "held-out" or "training" text."""
    bytes_per_target: float
    """Of the text, on average: makes bits per byte of nats per target."""
    rates: Mapping[str, float]
    """Full learning rates, by the names that the log gives them."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Of the device in a second; None where nobody knows."""
