"""Rate limits of tenants: never exceeded in any 60 seconds, refunded in every case, with a correct Retry-After."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.rate_limiter import ANONYMOUS, UNLIMITED, RateLimiter, RateLimits, Tenant
from app.common.errors import InvalidRequest, RateLimitExceeded

_TAKES = st.tuples(st.floats(0, 30), st.integers(1, 60), st.integers(0, 60))


def _caller(**quota: int) -> Tenant:
    return Tenant(name="ann", cache_namespace="s", limits=RateLimits(**quota))


def test_without_limits_nothing_is_kept() -> None:
    quotas = RateLimiter()
    assert all(quotas.reserve(ANONYMOUS, 10**9, 0.0) is UNLIMITED for _ in range(1000))
    assert not quotas._accounts


@given(st.lists(_TAKES, min_size=1, max_size=80))
def test_never_more_than_the_limit_in_any_minute_and_retry_after_is_enough(
    takes: list[tuple[float, int, int]],
) -> None:
    quotas, caller, now = RateLimiter(), _caller(requests_per_minute=5, tokens_per_minute=100), 1000.0
    taken: list[tuple[float, int]] = []
    longest = 1
    for pause, tokens, unused in takes:
        now += pause
        try:
            lease = quotas.reserve(caller, tokens, now)
        except RateLimitExceeded as refused:
            now += refused.retry_after
            longest = max(longest, refused.retry_after)
            # Whichever limit it was, the other may refuse once more, and then no more.
            try:
                lease = quotas.reserve(caller, tokens, now)
            except RateLimitExceeded as again:
                now += again.retry_after
                lease = quotas.reserve(caller, tokens, now)
        used = min(tokens, unused)
        lease.end(used)
        taken.append((now, used))
        minute = [n for at, n in taken if now - at < 60]
        assert len(minute) <= 5 and sum(minute) <= 100
        assert 1 <= longest <= 61


def test_retry_after_is_not_later_than_needed() -> None:
    quotas, caller = RateLimiter(), _caller(requests_per_minute=2)
    quotas.reserve(caller, 1, 0.0).end(0)
    quotas.reserve(caller, 1, 20.0).end(0)
    with pytest.raises(RateLimitExceeded, match="2 requests a minute") as refused:
        quotas.reserve(caller, 1, 30.0)
    assert refused.value.retry_after == math.ceil(60.1 - 30.0)


def test_what_never_fits_is_an_invalid_request_that_names_the_limit() -> None:
    quotas, caller = RateLimiter(), _caller(tokens_per_minute=100)
    with pytest.raises(InvalidRequest, match=r"may take 101 tokens.* at most 100 a minute"):
        quotas.reserve(caller, 101, 0.0)
    lease = quotas.reserve(caller, 1, 0.0)
    with pytest.raises(InvalidRequest, match="101"):
        lease.charge(101, 0.0)
    lease.cancel()
    quotas.reserve(caller, 100, 0.0)


def test_tokens_that_were_not_taken_are_given_back_once() -> None:
    quotas, caller = RateLimiter(), _caller(tokens_per_minute=100)
    lease = quotas.reserve(caller, 10, 0.0)
    lease.charge(90, 1.0)
    with pytest.raises(RateLimitExceeded, match="10 are left"):
        quotas.reserve(caller, 11, 1.0)
    for _ in range(3):
        lease.end(40)
    quotas.reserve(caller, 60, 1.0)
    with pytest.raises(RateLimitExceeded):
        quotas.reserve(caller, 1, 1.0)
    quotas.reserve(caller, 100, 61.2)
    lease.end(0)  # long forgotten


def test_requests_at_a_time_are_released_at_the_end_and_while_the_client_is_away() -> None:
    quotas, caller = RateLimiter(), _caller(concurrency=2)
    first, second = (quotas.reserve(caller, 1, 0.0) for _ in range(2))
    with pytest.raises(RateLimitExceeded, match="2 requests at a time"):
        quotas.reserve(caller, 1, 0.0)
    first.end(1)
    third = quotas.reserve(caller, 1, 0.0)
    for _ in range(2):
        second.pause(1)
    fourth = quotas.reserve(caller, 1, 0.0)
    with pytest.raises(RateLimitExceeded):
        second.resume(1, 0.0)
    third.end(1)
    second.resume(1, 0.0)
    second.resume(1, 0.0)
    with pytest.raises(RateLimitExceeded):
        quotas.reserve(caller, 1, 0.0)
    for lease in (second, fourth):
        lease.pause(1)
        lease.end(0)
        lease.end(0)
        lease.resume(1, 0.0)
    assert quotas._accounts["ann"].running == 0


def test_a_request_that_the_service_refused_counts_as_nothing() -> None:
    quotas, caller = RateLimiter(), _caller(requests_per_minute=1, tokens_per_minute=10, concurrency=1)
    for _ in range(10):
        quotas.reserve(caller, 10, 0.0).cancel()
    quotas.reserve(caller, 10, 0.0)


def test_callers_do_not_share_a_quota_and_a_changed_one_holds_at_once() -> None:
    quotas, caller = RateLimiter(), _caller(requests_per_minute=1)
    quotas.reserve(caller, 1, 0.0)
    quotas.reserve(Tenant(name="bob", limits=caller.limits), 1, 0.0)
    with pytest.raises(RateLimitExceeded):
        quotas.reserve(caller, 1, 0.0)
    quotas.reserve(_caller(requests_per_minute=2), 1, 0.0)


def test_headers_tell_what_is_left() -> None:
    lease = RateLimiter().reserve(_caller(requests_per_minute=3, tokens_per_minute=50), 20, 100.0)
    assert lease.headers(110.0) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "50.1s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "50.1s",
    }
    assert UNLIMITED.headers(0.0) == {}


def test_who_is_away_has_what_was_not_taken_and_who_comes_back_pays_like_any_other() -> None:
    quotas, caller = RateLimiter(), _caller(requests_per_minute=3, tokens_per_minute=100)
    lease = quotas.reserve(caller, 90, 0.0)
    lease.pause(10)
    other = quotas.reserve(caller, 60, 1.0)
    with pytest.raises(RateLimitExceeded, match="100 tokens a minute, and 30 are left"):
        lease.resume(90, 2.0)
    other.end(0)
    lease.resume(90, 3.0)
    lease.end(40)
    account = quotas._accounts["ann"]
    assert (account.tokens.used, account.requests.used, account.running) == (50, 3, 0)
    lease.end(40)
    lease.pause(40)
    assert account.tokens.used == 50
    again = quotas.reserve(caller, 1, 61.0)  # the first of three is forgotten
    again.pause(1)
    with pytest.raises(RateLimitExceeded, match="3 requests a minute"):
        again.resume(1, 61.0)


def test_host_work_beyond_the_free_share_costs_a_token_a_millisecond() -> None:
    quotas, caller = RateLimiter(), _caller(tokens_per_minute=1000)
    cheap = quotas.reserve(caller, 10, 0.0)
    cheap.charge_work(0.03, 0.0)
    cheap.charge_work(0.02, 0.0)
    assert cheap.headers(0.0)["x-ratelimit-remaining-tokens"] == "990"
    cheap.charge_work(0.1, 0.0)
    cheap.end(10)
    assert cheap.headers(0.0)["x-ratelimit-remaining-tokens"] == "890", "work is not refunded at the end"
    dear = quotas.reserve(caller, 0, 1.0)
    dear.charge_work(2.0, 1.0)  # beyond the limit: this request goes on, the next one waits
    with pytest.raises(RateLimitExceeded, match="1000 tokens a minute, and 0 are left"):
        quotas.reserve(caller, 1, 2.0)
    quotas.reserve(caller, 1, 62.0)


def test_host_work_is_free_without_limits() -> None:
    UNLIMITED.charge_work(100.0, 0.0)
    quotas, caller = RateLimiter(), _caller(concurrency=1)
    lease = quotas.reserve(caller, 0, 0.0)
    lease.charge_work(100.0, 0.0)
    lease.end(0)
    quotas.reserve(caller, 10**9, 0.0)
