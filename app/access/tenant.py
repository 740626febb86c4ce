"""Who asks, as far as the service cares: a name, a salt of its own, and what it may take. No keys, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """What one caller may ask for; 0 is without limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and texts together."""
    concurrency: int = 0
    """Requests at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Frozen. Everybody is the same caller where no keys are set."""

    name: str = ""
    salt: str = ""
    """Cached prompt blocks are shared by callers of equal salt only, and callers take turns by it."""
    quota: RateLimits = RateLimits()


EVERYBODY = Tenant()
