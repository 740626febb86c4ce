"""golden.json: log-probabilities of a short prompt at export, to compare with after loading.

It holds the natural log-probability of each prompt token but the first, given the tokens before it, computed in float32
on the CPU. Weights that are complete but wrong (another head layout, a missing scale factor, a transposed matrix) load
without an error, but yield other values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from msgspec import Meta, Struct

from model.config import ModelConfig
from model.files import CheckpointError, entry_exists, read_struct
from model.weights_version import Directory, File

GOLDEN_FILE = "golden.json"
TOLERANCE = 1e-3
MAX_PROMPT_IDS = 64
"""Maximum length of the prompt."""
_ABSOLUTE_TOLERANCE = 0.05


class _Content(Struct):
    """Content of the file."""

    prompt: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=2, max_length=MAX_PROMPT_IDS)]
    logprobs: list[Annotated[float, Meta(gt=-1e6, lt=1e6)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Content of a golden.json."""

    path: File
    prompt: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token of the prompt but the first."""

    def compare(self, logprobs: Sequence[float]) -> float:
        """The largest difference from a model in float32. Raises CheckpointError beyond TOLERANCE.

        logprobs: of the prompt's tokens from the second on; may be shorter than the prompt.
        """
        largest = max(self._differences(logprobs), key=lambda each: (math.isnan(each), each))
        self._check("by up to", largest, TOLERANCE)
        return largest

    def compare_rounded(self, logprobs: Sequence[float], *, relative_tolerance: float) -> float:
        """The mean difference from a model in reduced precision. Raises CheckpointError.

        Compares means, since a single rare token may be far off. The limit is relative to the mean log-probability,
        plus a constant for tokens that are nearly certain.
        """
        mean = fmean(self._differences(logprobs))
        size = sum(map(abs, self.logprobs[: len(logprobs)])) / len(logprobs)
        self._check("by a mean of", mean, _ABSOLUTE_TOLERANCE + relative_tolerance * size)
        return mean

    def loss(self, logprobs: Sequence[float]) -> float:
        """By which share the text takes more bits than in float32; below 0 if it takes fewer."""
        own = sum(self.logprobs[: len(logprobs)])
        return sum(logprobs) / own - 1 if own else 0.0

    def _differences(self, logprobs: Sequence[float]) -> list[float]:
        return [abs(ours - own) for ours, own in zip(logprobs, self.logprobs, strict=False)]

    def _check(self, label: str, difference: float, tolerance: float) -> None:
        if not difference <= tolerance:  # also true for NaN
            raise CheckpointError(
                f"{self.path}: the log-probabilities differ {label} {difference:.3g}, more than {tolerance:.3g}: these "
                "are not the weights, or not the config.json, that it was made with (remove it if they are meant to "
                "differ)"
            )


def read_golden(directory: Directory, config: ModelConfig) -> Golden | None:
    """golden.json of a model with this config; None without the file. Raises CheckpointError."""
    path = directory / GOLDEN_FILE
    if not entry_exists(path):
        return None
    content = read_struct(path, _Content)
    prompt, logprobs = content.prompt, content.logprobs
    if len(prompt) > config.context or max(prompt) >= config.vocab_size:
        raise CheckpointError(f"{path}: prompt must be of ids below {config.vocab_size}, at most {config.context}")
    if len(logprobs) != len(prompt) - 1:
        raise CheckpointError(f"{path}: {len(prompt)} ids have {len(prompt) - 1} logprobs, not {len(logprobs)}")
    return Golden(path=path, prompt=tuple(prompt), logprobs=tuple(logprobs))
