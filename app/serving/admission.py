"""Admission control before tokenization: the tenant's rate limits and the queue's capacity.

Both use cheap estimates, because tokenizing a megabyte of text takes half a second; the exact numbers are checked
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.access.rate_limiter import RateLimiter, Reservation, Tenant
from app.access.tenant_queue import WorkAccount
from app.common.errors import Unavailable
from app.common.types import Request
from app.engine_client.fair_queue import FairQueue
from app.generation.prompt_encoder import tail_length
from app.generation.request import GenerationRequest, Prompt
from app.generation.session import Timeouts
from model.tokenizer.tokenizer import Tokenizer

_FADING = 0.9
_FEW_CHARACTERS = 3.0


class AdmissionControl:
    """Admits requests; owned by the event loop."""

    def __init__(self) -> None:
        self._quotas = RateLimiter()
        self._characters, self._tokens = _FEW_CHARACTERS * 1000, 1000.0
        """Characters and tokens of recent texts."""

    @contextmanager
    def lease(
        self, wish: GenerationRequest, caller: Tenant, tokenizer: Tokenizer, context: int
    ) -> Iterator[Reservation]:
        """Reserves the request's estimated tokens of its tenant's limits; refunded if it is not admitted.

        Raises InvalidRequest if it can never fit, QuotaUsedUp if it does not fit now.
        """
        drawn = wish.n_drawn * wish.max_tokens
        least = sum(min(context, _least(prompt, tokenizer) + drawn) for prompt in wish.prompts)
        lease = self._quotas.take(caller, least, time.monotonic())
        try:
            yield lease
        except Unavailable:
            lease.undo()
            raise
        except BaseException:
            lease.end(0)
            raise

    @contextmanager
    def visit(self, caller: Tenant) -> Iterator[WorkAccount]:
        """Counts a request that generates nothing against the request limits. Raises QuotaUsedUp."""
        lease = self._quotas.take(caller, 0, time.monotonic())
        try:
            yield WorkAccount(caller.salt, lease)
        finally:
            lease.end(0)

    @contextmanager
    def preparing(self, caller: Tenant) -> Iterator[WorkAccount]:
        """Host work before lease(), which counts the request; if the work fails, the request is counted here.

        Raises QuotaUsedUp.
        """
        with self.visit(caller) as account:
            yield account
            account.lease.undo()

    @contextmanager
    def room(self, wish: GenerationRequest, caller: Tenant, patience: Timeouts, queue: FairQueue) -> Iterator[None]:
        """Reserves capacity in `queue` during tokenization; refuses a request whose deadline would pass in the queue.

        Raises QueueFull, and InvalidRequest if it can never fit into the queue.
        """
        longest = min(patience.queue, patience.deadline / 2)
        texts = [*wish.prompts, *([wish.source] if wish.source else []), *([wish.suffix] if wish.suffix else [])]
        longest_text = None if wish.truncate_prompt_tokens is None else tail_length(wish.truncate_prompt_tokens)
        tokens = sum(self._guess(text, longest_text) for text in texts)
        requests = len(wish.prompts) * wish.n_drawn
        with queue.reserved(caller.salt, requests, tokens, time.monotonic(), longest):
            yield

    def charge(self, lease: Reservation, wish: GenerationRequest, requests: Sequence[Request]) -> None:
        """Replaces the estimate by the exact number of tokens. Raises InvalidRequest, QuotaUsedUp."""
        leaders = [request for request in requests if request.leader is None]
        read = sum(len(request.prompt) + len(request.source) for request in leaders)
        lease.charge(read + sum(request.max_tokens for request in requests), time.monotonic())
        if all(isinstance(prompt, str) for prompt in wish.prompts) and wish.truncate_prompt_tokens is None:
            self._characters = self._characters * _FADING + sum(map(len, wish.prompts))
            self._tokens = self._tokens * _FADING + sum(len(request.prompt) for request in leaders)

    def _guess(self, prompt: Prompt, longest: int | None) -> int:
        """Estimated tokens of a prompt, from the characters per token of recent texts."""
        if not isinstance(prompt, str):
            return len(prompt)
        length = len(prompt) if longest is None else min(len(prompt), longest)
        return round(length * self._tokens / self._characters)


def _least(prompt: Prompt, tokenizer: Tokenizer) -> int:
    return tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
