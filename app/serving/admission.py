"""Admission control: the rate limits of the tenant and the capacity of the queue, by estimates before tokenization.

The estimates are cheap, because tokenizing a megabyte of text takes half a second; the exact numbers are checked
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.access.rate_limiter import RateLimiter, Reservation
from app.access.tenant import Tenant
from app.access.worker_turns import WorkAccount
from app.common.errors import InvalidRequest, Unavailable
from app.common.types import Request
from app.engine_client.request_queue import RequestQueue, prompt_tokens
from app.generation.completion import Timeouts
from app.generation.prompt_encoder import tail_length
from app.generation.request import GenerationRequest, Prompt
from model.tokenizer.tokenizer import Tokenizer

_DECAY = 0.9
_PRIOR_CHARACTERS_PER_TOKEN = 3.0


class AdmissionControl:
    """Admits requests; owned by the event loop."""

    def __init__(self) -> None:
        self._rate_limiter = RateLimiter()
        self._characters, self._tokens = _PRIOR_CHARACTERS_PER_TOKEN * 1000, 1000.0
        """Characters and tokens of recent texts."""

    @contextmanager
    def reserve_tokens(
        self, request: GenerationRequest, tenant: Tenant, tokenizer: Tokenizer, context: int
    ) -> Iterator[Reservation]:
        """Reserves the request's estimated tokens of its tenant's limits; refunded if it is not admitted.

        Raises InvalidRequest if it can never fit, RateLimitExceeded if it does not fit now.
        """
        max_sampled = request.n_sampled * request.max_tokens
        min_tokens = sum(min(context, _min_tokens(prompt, tokenizer) + max_sampled) for prompt in request.prompts)
        try:
            reservation = self._rate_limiter.reserve(tenant, min_tokens, time.monotonic())
        except InvalidRequest:  # its body was read, and a chat was rendered
            self.count_refused(tenant)
            raise
        try:
            yield reservation
        except Unavailable:
            reservation.cancel()
            raise
        except BaseException:
            reservation.end(0)
            raise

    def check_requests(self, tenant: Tenant) -> None:
        """Raises RateLimitExceeded if the tenant has no requests left, before any work is done for one."""
        self._rate_limiter.check_requests(tenant, time.monotonic())

    def count_refused(self, tenant: Tenant) -> None:
        """Counts a request that was refused for what it sent: reading it took the event loop's time."""
        self._rate_limiter.count_request(tenant, time.monotonic())

    def reserve_delivery(self, tenant: Tenant) -> Reservation:
        """Counts a request for events that were generated before; it is concurrent until the reservation ends.

        Raises RateLimitExceeded.
        """
        return self._rate_limiter.reserve(tenant, 0, time.monotonic())

    @contextmanager
    def count_request(self, tenant: Tenant) -> Iterator[WorkAccount]:
        """Counts a request that generates nothing against the request limits. Raises RateLimitExceeded."""
        reservation = self._rate_limiter.reserve(tenant, 0, time.monotonic())
        try:
            yield WorkAccount(tenant.cache_namespace, reservation)
        finally:
            reservation.end(0)

    @contextmanager
    def prepare(self, tenant: Tenant) -> Iterator[WorkAccount]:
        """Host work before reserve_tokens(), which counts the request; if the work fails, the request is counted here.

        Raises RateLimitExceeded.
        """
        with self.count_request(tenant) as account:
            yield account
            account.reservation.cancel()

    @contextmanager
    def reserve_queue(
        self, request: GenerationRequest, tenant: Tenant, timeouts: Timeouts, queue: RequestQueue
    ) -> Iterator[None]:
        """Reserves capacity in `queue` during tokenization; refuses a request whose deadline would pass in the queue.

        Raises QueueFull, and InvalidRequest if it can never fit into the queue.
        """
        max_wait = min(timeouts.queue, timeouts.deadline / 2)
        others = [text for text in (request.source, request.suffix) if text]
        texts = [*request.prompts, *others]
        max_characters = None if request.truncate_prompt_tokens is None else tail_length(request.truncate_prompt_tokens)
        tokens = sum(self._estimate_tokens(text, max_characters) for text in texts)
        requests = len(request.prompts) * request.n_sampled
        with queue.reserved(tenant.cache_namespace, requests, tokens, time.monotonic(), max_wait):
            yield

    def charge(self, reservation: Reservation, request: GenerationRequest, engine_requests: Sequence[Request]) -> None:
        """Replaces the estimate by the exact number of tokens. Raises InvalidRequest, RateLimitExceeded."""
        leaders = [leader for leader in engine_requests if leader.leader is None]
        # max_tokens includes the tokens from which a resumed choice continues.
        n_read = sum(prompt_tokens(each) - len(each.generated) for each in engine_requests)
        max_sampled = sum(each.max_tokens for each in engine_requests)
        reservation.charge(n_read + max_sampled, time.monotonic())
        if all(isinstance(prompt, str) for prompt in request.prompts) and request.truncate_prompt_tokens is None:
            self._characters = self._characters * _DECAY + sum(map(len, request.prompts))
            self._tokens = self._tokens * _DECAY + sum(len(leader.prompt) for leader in leaders)

    def _estimate_tokens(self, prompt: Prompt, max_characters: int | None) -> int:
        """Estimated tokens of a prompt, from the characters per token of recent texts."""
        if not isinstance(prompt, str):
            return len(prompt)
        length = len(prompt) if max_characters is None else min(len(prompt), max_characters)
        return round(length * self._tokens / self._characters)


def _min_tokens(prompt: Prompt, tokenizer: Tokenizer) -> int:
    return tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
