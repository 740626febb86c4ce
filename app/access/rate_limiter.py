"""Tenants and their rate limits: requests, tokens and concurrency. Time is an argument.

A limit per minute holds for every window of 60 seconds: a token bucket would let twice as much through in its first
minute. Usage is counted in slots of a tenth of a second, so that a tenant costs 601 numbers at most and Retry-After is
exact.

Tokens are charged before the work, as many as the request may take (its prompt, and max_tokens for each text); unused
ones are refunded when it ends. A stream whose client is disconnected does not count as concurrent: it is suspended.

Host work for one request (reading long texts, compiling grammars, computing masks) is charged in tokens as well, one
for each millisecond beyond the first 50 ms, so that requests of few tokens cannot take the workers that all keys share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from app.common.errors import InvalidRequest, QuotaUsedUp


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
    salt: str = ""
    """Cache namespace: only tenants with an equal one share cached prompt blocks; also the fair queue's key."""
    quota: RateLimits = RateLimits()


EVERYBODY = Tenant()


_WINDOW, _SLOT = 60.0, 0.1
_FREE_WORK_SECONDS = 0.05
"""Host work that is included in a request's token charge; all but a few requests need less."""
_TOKENS_PER_WORK_SECOND = 1000


class SlidingWindow:
    """Usage in the last 60 to 60.1 seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._slots: deque[list[int]] = deque()  # [slot, amount], the oldest first

    def seconds_until(self, amount: int, now: float) -> float:
        """Seconds until `amount`, which must not exceed the limit, fits; 0.0 means now."""
        self._forget(now)
        excess = self.used + amount - self.limit
        if excess <= 0:
            return 0.0
        for slot, there in self._slots:
            excess -= there
            if excess <= 0:
                return _end(slot) - now
        raise AssertionError("an amount above the limit never fits")

    def add(self, amount: int, now: float) -> list[int]:
        """Records usage now; returns the slot for give_back()."""
        slot = math.floor(now / _SLOT)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append([slot, 0])
        self._slots[-1][1] += amount
        self.used += amount
        return self._slots[-1]

    def give_back(self, place: list[int], amount: int) -> None:
        """Refunds a part of the usage recorded in the slot `place`, if it is still in the window."""
        if self._slots and place[0] >= self._slots[0][0]:
            place[1] -= amount
            self.used -= amount

    def _forget(self, now: float) -> None:
        while self._slots and _end(self._slots[0][0]) <= now:
            self.used -= self._slots.popleft()[1]


class Reservation:
    """One request's share of its tenant's rate limits; this base class is for unlimited tenants and does nothing."""

    def charge(self, tokens: int, now: float) -> None:
        """Charges the exact number of tokens that the request may take. Raises InvalidRequest, QuotaUsedUp."""

    def charge_work(self, seconds: float, now: float) -> None:
        """Adds CPU time that shared workers spent on this request; never refunded, and never refuses this request.

        A charge may exceed the limit: the key's next requests then wait until the window has capacity again.
        """

    def settle(self, used: int) -> None:
        """Records the tokens used; the request counts as concurrent until its client has the whole response."""

    def pause(self, used: int) -> None:
        """Suspends the request, whose client disconnected after `used` tokens."""

    def go_on(self, tokens: int, now: float) -> None:
        """Resumes the request for a reconnected client; charges `tokens`, where generated text counts as prompt.

        Raises QuotaUsedUp.
        """

    def undo(self) -> None:
        """Refunds everything: the service did not admit the request."""

    def end(self, used: int) -> None:
        """Ends the request, which used `used` tokens; idempotent."""

    def headers(self, now: float) -> Mapping[str, str]:  # noqa: ARG002 - no limits, no headers
        """Rate limit headers in OpenAI's format."""
        return {}


FREE = Reservation()


class RateLimiter:
    """Accounts of all tenants that have limits, by name."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def take(self, caller: Tenant, least: int, now: float) -> Reservation:
        """Reserves capacity for a request of at least `least` tokens. Raises InvalidRequest, QuotaUsedUp."""
        if caller.quota == RateLimits():
            return FREE
        account = self._accounts.setdefault(caller.name, _Account())
        account.limit(caller.quota)
        account.check_tokens(least, now)
        account.check_running()
        account.check_requests(now)
        return _Held(account, least, now)


class _Account:
    """One tenant's usage. Changed limits apply from the next request on."""

    def __init__(self) -> None:
        self.requests = SlidingWindow(0)
        self.tokens = SlidingWindow(0)
        self.running = 0
        self._concurrency = 0

    def limit(self, quota: RateLimits) -> None:
        self.requests.limit, self.tokens.limit = quota.requests_per_minute, quota.tokens_per_minute
        self._concurrency = quota.concurrency

    def check_running(self) -> None:
        if 0 < self._concurrency <= self.running:
            raise QuotaUsedUp(
                f"this key may have {self._concurrency} requests at a time, and has them: wait for one to end", 1
            )

    def check_requests(self, now: float) -> None:
        if self.requests.limit and (wait := self.requests.seconds_until(1, now)):
            raise _used_up(f"this key may send {self.requests.limit} requests a minute, and has", wait)

    def check_tokens(self, tokens: int, now: float) -> None:
        limit = self.tokens.limit
        if not limit:
            return
        if tokens > limit:
            raise InvalidRequest(
                f"the request may take {tokens} tokens (its prompt, and max_tokens for each text), this key may take "
                f"at most {limit} a minute: ask for less",
                "max_tokens",
            )
        if wait := self.tokens.seconds_until(tokens, now):
            raise _used_up(
                f"this key may take {limit} tokens a minute, and {max(0, limit - self.tokens.used)} are left", wait
            )


class _Held(Reservation):
    """A reservation that counts against the limits until it ends."""

    def __init__(self, account: _Account, tokens: int, now: float) -> None:
        self._account = account
        self._request = account.requests.add(1, now)
        self._place = account.tokens.add(tokens, now)
        self._tokens = tokens
        self._work_seconds, self._work_tokens = 0.0, 0
        self._runs = self._is_open = True
        account.running += 1

    def charge(self, tokens: int, now: float) -> None:
        self._account.tokens.give_back(self._place, self._tokens)
        self._tokens = 0
        self._account.check_tokens(tokens, now)
        self._place, self._tokens = self._account.tokens.add(tokens, now), tokens

    def charge_work(self, seconds: float, now: float) -> None:
        self._work_seconds += seconds
        due = math.floor(max(0.0, self._work_seconds - _FREE_WORK_SECONDS) * _TOKENS_PER_WORK_SECOND)
        if due > self._work_tokens:
            self._account.tokens.add(due - self._work_tokens, now)
            self._work_tokens = due

    def settle(self, used: int) -> None:
        if self._runs:
            self._account.tokens.give_back(self._place, self._tokens - used)
            self._tokens = used

    def pause(self, used: int) -> None:
        if self._runs:
            self._runs = False
            self._account.running -= 1
            self._account.tokens.give_back(self._place, self._tokens - used)

    def go_on(self, tokens: int, now: float) -> None:
        if self._is_open and not self._runs:
            self._account.check_tokens(tokens, now)
            self._account.check_running()
            self._account.check_requests(now)
            self._account.requests.add(1, now)
            self._place, self._tokens = self._account.tokens.add(tokens, now), tokens
            self._runs = True
            self._account.running += 1

    def undo(self) -> None:
        if self._is_open:
            self._account.requests.give_back(self._request, 1)
        self.end(0)

    def end(self, used: int) -> None:
        if self._is_open:
            self._is_open = False
            self.pause(used)

    def headers(self, now: float) -> Mapping[str, str]:
        found = {}
        for name, window in (("requests", self._account.requests), ("tokens", self._account.tokens)):
            if window.limit:
                found[f"x-ratelimit-limit-{name}"] = str(window.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, window.limit - window.used))
                found[f"x-ratelimit-reset-{name}"] = f"{window.seconds_until(window.limit, now):.1f}s"
        return found


def _used_up(why: str, wait: float) -> QuotaUsedUp:
    seconds = max(1, math.ceil(wait))
    return QuotaUsedUp(f"{why}: try again in {seconds} s", seconds)


def _end(slot: int) -> float:
    """When the usage of this slot leaves the window."""
    return (slot + 1) * _SLOT + _WINDOW
