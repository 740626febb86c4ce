"""Rate limits of tenants: requests, tokens and concurrency. The current time is always an argument.

A limit per minute applies to a sliding window of 60 seconds. Two buckets estimate the usage in it; the estimate is
exact for a burst and for an even stream of equal requests. If most of a bucket's usage is at its end, it seems to leave
the window too early: any 60 seconds admit at most twice the limit.

The tokens that a request may take (its prompt, and max_tokens for each text) are charged before the work, and unused
ones are refunded when it ends. A stream whose client is disconnected is paused and does not count as concurrent.

Host work for one request (reading long texts, compiling grammars, computing masks) is charged in tokens as well, one
for each millisecond beyond the first 50 ms, so that requests of few tokens cannot take the workers that all keys share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from app.access.tenant import RateLimits, Tenant
from app.common.errors import InvalidRequest, RateLimitExceeded

_WINDOW = 60.0
_FREE_WORK_SECONDS = 0.05
"""Host work that is included in a request's token charge; all but a few requests need less."""
_TOKENS_PER_WORK_SECOND = 1000
_ROUNDING, _TIME_ROUNDING = 1e-6, 1e-3
"""What floating-point arithmetic may add to a number, and to a time in seconds."""


@dataclass(slots=True)
class _Bucket:
    """A number of uses from `first` to `last`, taken to be equal and evenly spaced."""

    first: float
    last: float
    uses: int = 0
    amount: int = 0

    def left(self, now: float) -> float:
        """The part that is in the window: all of it for 60 s after `first`, none from 60 s after `last` on."""
        since = now - _WINDOW + _TIME_ROUNDING
        if since < self.first:
            return self.amount
        if since >= self.last:
            return 0.0
        gone = math.floor((since - self.first) / (self.last - self.first) * (self.uses - 1)) + 1
        return self.amount * (1 - gone / self.uses)

    def expiry(self, gone: float) -> float:
        """Time at which at least `gone` of the amount has left the window."""
        before = math.ceil(gone * self.uses / self.amount - _ROUNDING) - 1
        return self.first + (self.last - self.first) * before / max(1, self.uses - 1) + _WINDOW


class SlidingWindow:
    """Usage in the last 60 seconds, estimated from two buckets, which the first use after 60 s rotates."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._previous = self._current = _Bucket(-math.inf, -math.inf)

    def used(self, now: float) -> int:
        """The usage in the window, rounded up."""
        return math.ceil(self._previous.left(now) + self._current.left(now) - _ROUNDING)

    def seconds_until(self, amount: int, now: float) -> float:
        """Seconds until `amount`, which must not exceed the limit, fits; 0.0 means now."""
        buckets = self._previous, self._current
        excess = sum(bucket.left(now) for bucket in buckets) + amount - self.limit
        if excess <= _ROUNDING:
            return 0.0
        for bucket in buckets:  # the previous one has left the window before the current one begins to
            left = bucket.left(now)
            if excess <= left + _ROUNDING:
                return max(0.0, bucket.expiry(bucket.amount - left + excess) - now)
            excess -= left
        raise AssertionError("an amount above the limit never fits")

    def add(self, amount: int, now: float) -> _Bucket:
        """Records usage now; returns the bucket for refund()."""
        if now >= self._current.first + _WINDOW:
            self._previous, self._current = self._current, _Bucket(now, now)
        elif not self._current.amount:
            self._current = _Bucket(now, now)
        self._current.last = now
        self._current.uses += 1
        self._current.amount += amount
        return self._current

    def refund(self, bucket: _Bucket, amount: int) -> None:
        """Refunds a part of the usage recorded in `bucket`."""
        bucket.amount -= amount


class _Account:
    """One tenant's usage. Changed limits apply from the next request on."""

    def __init__(self) -> None:
        self.requests = SlidingWindow(0)
        self.tokens = SlidingWindow(0)
        self.running = 0
        self._concurrency = 0

    def set_limits(self, limits: RateLimits) -> None:
        self.requests.limit, self.tokens.limit = limits.requests_per_minute, limits.tokens_per_minute
        self._concurrency = limits.concurrency

    def check_concurrency(self) -> None:
        if 0 < self._concurrency <= self.running:
            raise RateLimitExceeded(
                f"this key may have {self._concurrency} requests at a time, and all are active: wait for one to end", 1
            )

    def check_requests(self, now: float) -> None:
        if self.requests.limit and (wait := self.requests.seconds_until(1, now)):
            raise _exceeded(f"this key may send {self.requests.limit} requests a minute, and 0 are left", wait)

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
            raise _exceeded(
                f"this key may take {limit} tokens a minute, and {max(0, limit - self.tokens.used(now))} are left", wait
            )


class Reservation:
    """One request's share of its tenant's rate limits, until it ends."""

    def __init__(self, account: _Account, tokens: int, now: float) -> None:
        self._account = account
        self._request_bucket = account.requests.add(1, now)
        self._token_bucket = account.tokens.add(tokens, now)
        self._tokens = tokens
        self._work_seconds, self._work_tokens = 0.0, 0
        self._is_running = self._is_open = True
        account.running += 1

    def charge(self, tokens: int, now: float) -> None:
        """Charges the exact number of tokens that the request may take. Raises InvalidRequest, RateLimitExceeded."""
        if self._is_open:
            self._account.tokens.refund(self._token_bucket, self._tokens)
            self._tokens = 0
            self._account.check_tokens(tokens, now)
            self._token_bucket, self._tokens = self._account.tokens.add(tokens, now), tokens

    def charge_work(self, seconds: float, now: float) -> None:
        """Adds CPU time that shared workers spent on this request; never refunded, and never refuses this request.

        A charge may exceed the limit: the key's next requests then wait until the window has capacity again.
        """
        if not self._account.tokens.limit:
            return
        self._work_seconds += seconds
        work_tokens = math.floor(max(0.0, self._work_seconds - _FREE_WORK_SECONDS) * _TOKENS_PER_WORK_SECOND)
        if work_tokens > self._work_tokens:
            self._account.tokens.add(work_tokens - self._work_tokens, now)
            self._work_tokens = work_tokens

    def record_usage(self, used: int) -> None:
        """Records the tokens used; the request counts as concurrent until its client has the whole response."""
        if self._is_running:
            self._account.tokens.refund(self._token_bucket, self._tokens - used)
            self._tokens = used

    def pause(self, used: int) -> None:
        """Pauses the request, whose client disconnected after `used` tokens."""
        if self._is_running:
            self._is_running = False
            self._account.running -= 1
            self._account.tokens.refund(self._token_bucket, self._tokens - used)

    def resume(self, tokens: int, now: float) -> None:
        """Resumes the request for a reconnected client; charges `tokens`, where generated text counts as prompt.

        Raises RateLimitExceeded.
        """
        if self._is_open and not self._is_running:
            self._account.check_tokens(tokens, now)
            self._account.check_concurrency()
            self._account.check_requests(now)
            self._account.requests.add(1, now)
            self._token_bucket, self._tokens = self._account.tokens.add(tokens, now), tokens
            self._is_running = True
            self._account.running += 1

    def count_reconnection(self, now: float) -> None:
        """Counts another request of the client, whose new connection takes over. Raises RateLimitExceeded."""
        if self._is_open:
            self._account.check_requests(now)
            self._account.requests.add(1, now)

    def cancel(self) -> None:
        """Refunds everything: the service did not admit the request."""
        if self._is_open:
            self._account.requests.refund(self._request_bucket, 1)
        self.end(0)

    def end(self, used: int) -> None:
        """Ends the request, which used `used` tokens; idempotent."""
        if self._is_open:
            self._is_open = False
            self.pause(used)

    def headers(self, now: float) -> Mapping[str, str]:
        """Rate limit headers in OpenAI's format."""
        headers = {}
        for name, window in (("requests", self._account.requests), ("tokens", self._account.tokens)):
            if window.limit:
                headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, window.limit - window.used(now)))
                headers[f"x-ratelimit-reset-{name}"] = f"{window.seconds_until(window.limit, now):.1f}s"
        return headers


UNLIMITED = Reservation(_Account(), 0, 0.0)
"""Reservation of all requests without limits: it has ended, and all its methods do nothing."""
UNLIMITED.end(0)


class RateLimiter:
    """Accounts of all tenants that have limits, by name."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def reserve(self, tenant: Tenant, min_tokens: int, now: float) -> Reservation:
        """Reserves capacity for a request of at least `min_tokens` tokens. Raises InvalidRequest, RateLimitExceeded."""
        if tenant.limits == RateLimits():
            return UNLIMITED
        account = self._accounts.setdefault(tenant.name, _Account())
        account.set_limits(tenant.limits)
        account.check_tokens(min_tokens, now)
        account.check_concurrency()
        account.check_requests(now)
        return Reservation(account, min_tokens, now)

    def check_requests(self, tenant: Tenant, now: float) -> None:
        """Raises RateLimitExceeded if the tenant may not send a request now."""
        if account := self._account_of(tenant):
            account.check_requests(now)

    def count_request(self, tenant: Tenant, now: float) -> None:
        """Counts a request that needs no reservation: one that was refused."""
        if account := self._account_of(tenant):
            account.requests.add(1, now)

    def _account_of(self, tenant: Tenant) -> _Account | None:
        """The tenant's account with its current limits; none without a limit of requests."""
        if not tenant.limits.requests_per_minute:
            return None
        account = self._accounts.setdefault(tenant.name, _Account())
        account.set_limits(tenant.limits)
        return account


def _exceeded(problem: str, wait: float) -> RateLimitExceeded:
    seconds = max(1, math.ceil(wait - _TIME_ROUNDING))
    return RateLimitExceeded(f"{problem}: try again in {seconds} s", seconds)
