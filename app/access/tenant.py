"""A tenant: the owner of an API key, its cache namespace and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limits of one tenant; 0 means unlimited."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and generated tokens together."""
    concurrency: int = 0
    """Concurrent requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The owner of an API key. Without keys all clients share one tenant."""

    name: str = ""
    cache_namespace: str = ""
    """Tenants share cached prompt blocks only within a namespace, and take turns by it."""
    limits: RateLimits = RateLimits()
    reads_usage: bool = False
    """Whether it may read the usage of all tenants."""


ANONYMOUS = Tenant(reads_usage=True)
"""Tenant of all requests to a service without keys."""
