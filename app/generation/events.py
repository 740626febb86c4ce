"""What there is to say of an answer while it is made. Nouns only."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One token, its log-probability, and the most likely ones in its place."""

    id: int
    logprob: float | None
    """None for the first token of a prompt, which nothing foretells."""
    top: Top
    offset: int
    """Where its text begins, in characters of the whole text."""


class Delta(Struct, frozen=True):
    """New text, with the tokens it ends (empty unless log-probabilities were asked for).

    A struct: made in a fifth of a dataclass' time, and thousands are made each second.
    """

    index: int
    text: str
    tokens: tuple[TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The regular end of a choice."""

    index: int
    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """Still waiting, behind `position` others."""

    position: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing new for a while; the connection should show a sign of life."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has begun with the first choice."""


News = Queued | Heartbeat | Started | Delta | Finished
