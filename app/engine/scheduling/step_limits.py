"""Limits of one step (tokens, sequences) and of preemptions per sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step."""

    tokens_per_step: int
    max_running: int
    max_preemptions: int = 4
    prompt_tokens_beside: int | None = None
    """Prompt tokens in a step with decodes; None: as many as fit."""
    prompt_tokens_shared: int | None = None
    """Prompt tokens in any step while API keys are in use: another key's first token may wait for that step."""
    prompt_tokens_per_decode: int = 4
    """Always allowed for each decode: a step of many decodes is long anyway."""

    def __post_init__(self) -> None:
        if self.tokens_per_step < self.max_running:
            raise ValueError(
                f"tokens per step ({self.tokens_per_step}) must be at least the running requests ({self.max_running})"
            )

    def prompt_budget(self, n_decodes: int, *, is_shared: bool = False) -> int:
        """Prompt tokens that fit into a step with so many decodes."""
        budget = self.tokens_per_step - n_decodes
        if is_shared and self.prompt_tokens_shared is not None:
            budget = min(budget, self.prompt_tokens_shared)
        if not n_decodes or self.prompt_tokens_beside is None:
            return budget
        return min(budget, max(self.prompt_tokens_beside, self.prompt_tokens_per_decode * n_decodes))
