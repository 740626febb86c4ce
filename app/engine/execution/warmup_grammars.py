"""Guides that allow every token, for steps that only have to be computed. Knows no grammar."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import Sequence
from app.engine.sampling.sampled_token import SampledToken


class PermissiveGrammars:
    """A `TracksGrammars` of app/engine/execution/runner.py, whose masks take what any guide's take."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed_W = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)

    def allowed(self, sequences: Items[Sequence]) -> list[Tensor | SampledToken | None]:
        """All bits set."""
        return [self._allowed_W] * len(sequences)

    def follow(self, _sequences: Items[Sequence], drawn: list[SampledToken]) -> list[SampledToken]:
        """They lead nowhere."""
        return drawn
