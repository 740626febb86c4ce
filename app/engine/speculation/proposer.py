"""What a source of drafts is: it guesses the tokens that follow a sequence, and how likely each guess is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from app.engine.scheduling.batch_plan import Sequence


class Proposal(NamedTuple):
    """Drafts of one sequence."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """The chance that a draft and all drafts before it are accepted, one for each draft: it never rises."""


class Proposer(Protocol):
    """Proposes drafts. A wrong draft costs time and changes no token."""

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """At most `most` drafts of the tokens that follow sequence.tokens, fewer if they are unlikely."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: drops what is kept for it."""
        ...
