"""A text of ours for nobody, by which an engine shows that it works after a request was blamed. No queue, no pipe.

owed --an engine is ready--> asked --two tokens--> answered        a crash before that: owed still

It goes first and alone. What crashes with it has no request to blame; what answers it is no engine to give up, although
nobody else may have had a token since: a service where nothing but bad requests come must not end by them.
"""

from __future__ import annotations

from app.common.ipc import Ready
from app.common.types import Request
from app.engine_client.crash_recovery import PROOF
from app.engine_client.token_stream import TokenSource, TokenStream

NAME = "the probe"
"""No caller's request is called so: there is a space in it."""


class CanaryRequest:
    """Owned by the client of one engine."""

    def __init__(self) -> None:
        self._is_owed = False
        self._stream: TokenStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine has it, and nothing else."""
        return self._stream is not None and self._stream.is_open

    def owe(self) -> None:
        """A request is blamed for a crash."""
        self._is_owed = True

    def begin(self, ready: Ready, source: TokenSource) -> TokenStream | None:
        """For an engine that takes requests; None where it owes nothing."""
        if not self._is_owed:
            return None
        request = Request(
            id=NAME,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(PROOF, ready.context - 1),
        )
        self._is_owed, self._stream = False, TokenStream([request], source)
        return self._stream

    def end(self) -> list[str]:
        """The engine is gone; what it has left open."""
        self._is_owed |= self.is_open
        left, self._stream = self._stream.open_ids if self._stream else [], None
        return left
