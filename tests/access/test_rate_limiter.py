"""Rate limits of tenants: kept in a sliding minute, refunded in every case, with a correct Retry-After."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.rate_limiter import UNLIMITED, RateLimiter, SlidingWindow
from app.access.tenant import ANONYMOUS, RateLimits, Tenant
from app.common.errors import InvalidRequest, RateLimitExceeded

_ATTEMPTS = st.tuples(st.floats(0, 30), st.integers(1, 60), st.integers(0, 60))


def _tenant(**quota: int) -> Tenant:
    return Tenant(name="ann", cache_namespace="s", limits=RateLimits(**quota))


def test_unlimited_tenants_have_no_account() -> None:
    limiter = RateLimiter()
    assert all(limiter.reserve(ANONYMOUS, 10**9, 0.0) is UNLIMITED for _ in range(1000))
    assert not limiter._accounts


@given(st.lists(_ATTEMPTS, min_size=1, max_size=80))
def test_never_more_than_twice_the_limit_in_any_minute_and_retry_after_is_enough(
    attempts: list[tuple[float, int, int]],
) -> None:
    limiter, tenant, now = RateLimiter(), _tenant(requests_per_minute=5, tokens_per_minute=100), 1000.0
    accepted: list[tuple[float, int]] = []
    longest = 1
    for pause, tokens, unused in attempts:
        now += pause
        try:
            reservation = limiter.reserve(tenant, tokens, now)
        except RateLimitExceeded as refused:
            now += refused.retry_after
            longest = max(longest, refused.retry_after)
            # After the first limit allows the request, only the other one may still refuse it, once.
            try:
                reservation = limiter.reserve(tenant, tokens, now)
            except RateLimitExceeded as again:
                now += again.retry_after
                reservation = limiter.reserve(tenant, tokens, now)
        used = min(tokens, unused)
        reservation.end(used)
        accepted.append((now, used))
        minute = [n for at, n in accepted if now - at < 60]
        assert len(minute) <= 2 * 5 and sum(minute) <= 2 * 100
        assert 1 <= longest <= 60


class ExactWindow:
    """Every use of the last 60 seconds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.uses: list[tuple[float, int]] = []

    def seconds_until(self, amount: int, now: float) -> float:
        self.uses = [(at, n) for at, n in self.uses if at + 60 > now]
        excess = sum(n for _, n in self.uses) + amount - self.limit
        for at, n in self.uses if excess > 0 else ():
            excess -= n
            if excess <= 0:
                return at + 60 - now
        return 0.0


def _compare(limit: int, uses: list[tuple[float, int]], amount: int, now: float) -> tuple[float, float]:
    """Seconds until `amount` fits after `uses`: by the window of two buckets, and exactly."""
    window, exact = SlidingWindow(limit), ExactWindow(limit)
    for at, n in uses:
        window.add(n, at)
    exact.uses = list(uses)
    return window.seconds_until(amount, now), exact.seconds_until(amount, now)


@given(st.floats(0, 1e6), st.integers(1, 300), st.floats(0.05, 60), st.integers(1, 50), st.data())
def test_retry_after_of_an_even_stream_is_within_a_tenth_of_the_exact_one(
    start: float, n: int, gap: float, each: int, data: st.DataObject
) -> None:
    limit = each * (math.floor(60 / gap) + 1)  # as much as the stream uses in a minute
    uses = [(start + gap * i, each) for i in range(n)]
    now = uses[-1][0] + data.draw(st.floats(0, 70))
    estimated, exact = _compare(limit, uses, data.draw(st.integers(1, limit)), now)
    assert math.isclose(estimated, exact, rel_tol=0.1, abs_tol=0.01)


@given(st.floats(0, 1e6), st.lists(st.tuples(st.floats(60, 200), st.lists(st.integers(1, 20), min_size=1)), min_size=1))
def test_retry_after_of_bursts_is_within_a_tenth_of_the_exact_one(
    now: float, bursts: list[tuple[float, list[int]]]
) -> None:
    uses: list[tuple[float, int]] = []
    for pause, amounts in bursts:
        now += pause
        uses += [(now, amount) for amount in amounts]
    limit = max(sum(amounts) for _, amounts in bursts)
    for later in (0.0, 1.0, 30.0, 59.0, 60.0):
        estimated, exact = _compare(limit, uses, limit, now + later)
        assert math.isclose(estimated, exact, rel_tol=0.1, abs_tol=0.01)


def test_uneven_use_is_estimated_as_even() -> None:
    """The price of two buckets: of 100 tokens, 99 at the end of a minute, half have left the window after a minute."""
    estimated, exact = _compare(100, [(0.0, 1), (59.0, 99)], 50, 60.0)
    assert estimated == 0.0 and exact == 59.0


def test_retry_after_is_not_later_than_needed() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=2)
    limiter.reserve(tenant, 1, 0.0).end(0)
    limiter.reserve(tenant, 1, 20.0).end(0)
    with pytest.raises(RateLimitExceeded, match="2 requests a minute") as refused:
        limiter.reserve(tenant, 1, 30.0)
    assert refused.value.retry_after == 30


def test_request_beyond_the_limit_itself_is_invalid_and_names_the_limit() -> None:
    limiter, tenant = RateLimiter(), _tenant(tokens_per_minute=100)
    with pytest.raises(InvalidRequest, match=r"may take 101 tokens.* at most 100 a minute"):
        limiter.reserve(tenant, 101, 0.0)
    reservation = limiter.reserve(tenant, 1, 0.0)
    with pytest.raises(InvalidRequest, match="101"):
        reservation.charge(101, 0.0)
    reservation.cancel()
    limiter.reserve(tenant, 100, 0.0)


def test_unused_tokens_are_refunded_once() -> None:
    limiter, tenant = RateLimiter(), _tenant(tokens_per_minute=100)
    reservation = limiter.reserve(tenant, 10, 0.0)
    reservation.charge(90, 1.0)
    with pytest.raises(RateLimitExceeded, match="10 are left"):
        limiter.reserve(tenant, 11, 1.0)
    for _ in range(3):
        reservation.end(40)
    limiter.reserve(tenant, 60, 1.0)
    with pytest.raises(RateLimitExceeded):
        limiter.reserve(tenant, 1, 1.0)
    limiter.reserve(tenant, 100, 61.2)
    reservation.end(0)  # the reservation expired long ago


def test_concurrency_is_released_at_the_end_and_while_the_client_is_disconnected() -> None:
    limiter, tenant = RateLimiter(), _tenant(concurrency=2)
    first, second = (limiter.reserve(tenant, 1, 0.0) for _ in range(2))
    with pytest.raises(RateLimitExceeded, match="2 requests at a time"):
        limiter.reserve(tenant, 1, 0.0)
    first.end(1)
    third = limiter.reserve(tenant, 1, 0.0)
    for _ in range(2):
        second.pause(1)
    fourth = limiter.reserve(tenant, 1, 0.0)
    with pytest.raises(RateLimitExceeded):
        second.resume(1, 0.0)
    third.end(1)
    second.resume(1, 0.0)
    second.resume(1, 0.0)
    with pytest.raises(RateLimitExceeded):
        limiter.reserve(tenant, 1, 0.0)
    for reservation in (second, fourth):
        reservation.pause(1)
        reservation.end(0)
        reservation.end(0)
        reservation.resume(1, 0.0)
    assert limiter._accounts["ann"].running == 0


def test_recorded_usage_refunds_the_rest_while_the_request_still_counts_as_running() -> None:
    limiter, tenant = RateLimiter(), _tenant(tokens_per_minute=100, concurrency=2)
    sending = limiter.reserve(tenant, 90, 0.0)
    for _ in range(2):
        sending.record_usage(40)
    limiter.reserve(tenant, 60, 0.0)
    with pytest.raises(RateLimitExceeded, match="2 requests at a time"):
        limiter.reserve(tenant, 0, 0.0)
    sending.end(40)
    with pytest.raises(RateLimitExceeded, match="0 are left"):
        limiter.reserve(tenant, 1, 0.0)


def test_cancelled_reservation_does_not_count() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=1, tokens_per_minute=10, concurrency=1)
    for _ in range(10):
        limiter.reserve(tenant, 10, 0.0).cancel()
    limiter.reserve(tenant, 10, 0.0)


def test_request_without_a_reservation_counts_and_is_refused_without_one_left() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=2)
    for _ in range(3):
        limiter.count_request(tenant, 0.0)
    for now in (0.0, 59.0):
        with pytest.raises(RateLimitExceeded, match="2 requests a minute, and 0 are left"):
            limiter.check_requests(tenant, now)
    limiter.check_requests(tenant, 60.2)
    limiter.reserve(tenant, 0, 60.2)


def test_request_without_a_limit_is_not_counted() -> None:
    limiter, tenant = RateLimiter(), _tenant(concurrency=1)
    limiter.count_request(tenant, 0.0)
    limiter.check_requests(tenant, 0.0)
    assert not limiter._accounts


def test_reconnection_counts_as_a_request_while_the_reservation_is_open() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=2, concurrency=1)
    reservation = limiter.reserve(tenant, 0, 0.0)
    reservation.count_reconnection(0.0)
    with pytest.raises(RateLimitExceeded, match="0 are left"):
        reservation.count_reconnection(0.0)
    reservation.end(0)
    reservation.count_reconnection(0.0)


def test_tenants_do_not_share_a_quota_and_changed_limits_apply_at_once() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=1)
    limiter.reserve(tenant, 1, 0.0)
    limiter.reserve(Tenant(name="bob", limits=tenant.limits), 1, 0.0)
    with pytest.raises(RateLimitExceeded):
        limiter.reserve(tenant, 1, 0.0)
    limiter.reserve(_tenant(requests_per_minute=2), 1, 0.0)


def test_headers_report_the_remaining_quota() -> None:
    reservation = RateLimiter().reserve(_tenant(requests_per_minute=3, tokens_per_minute=50), 20, 100.0)
    assert reservation.headers(110.0) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "50.0s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "50.0s",
    }
    assert UNLIMITED.headers(0.0) == {}


def test_pause_refunds_unused_tokens_and_resume_reserves_them_again() -> None:
    limiter, tenant = RateLimiter(), _tenant(requests_per_minute=3, tokens_per_minute=100)
    reservation = limiter.reserve(tenant, 90, 0.0)
    reservation.pause(10)
    other = limiter.reserve(tenant, 60, 1.0)
    with pytest.raises(RateLimitExceeded, match="100 tokens a minute, and 30 are left"):
        reservation.resume(90, 2.0)
    other.end(0)
    reservation.resume(90, 3.0)
    reservation.end(40)
    account = limiter._accounts["ann"]
    assert (account.tokens.used(3.0), account.requests.used(3.0), account.running) == (50, 3, 0)
    reservation.end(40)
    reservation.pause(40)
    assert account.tokens.used(3.0) == 50
    again = limiter.reserve(tenant, 1, 61.0)  # the first of three requests has left the window
    again.pause(1)
    with pytest.raises(RateLimitExceeded, match="3 requests a minute"):
        again.resume(1, 61.0)


def test_host_work_beyond_the_free_share_costs_a_token_a_millisecond() -> None:
    limiter, tenant = RateLimiter(), _tenant(tokens_per_minute=1000)
    cheap = limiter.reserve(tenant, 10, 0.0)
    cheap.charge_work(0.03, 0.0)
    cheap.charge_work(0.02, 0.0)
    assert cheap.headers(0.0)["x-ratelimit-remaining-tokens"] == "990"
    cheap.charge_work(0.1, 0.0)
    cheap.end(10)
    assert cheap.headers(0.0)["x-ratelimit-remaining-tokens"] == "890", "work is not refunded at the end"
    dear = limiter.reserve(tenant, 0, 1.0)
    dear.charge_work(2.0, 1.0)  # beyond the limit: this request continues, the next one waits
    with pytest.raises(RateLimitExceeded, match="1000 tokens a minute, and 0 are left"):
        limiter.reserve(tenant, 1, 2.0)
    limiter.reserve(tenant, 1, 62.0)


def test_host_work_is_free_without_limits() -> None:
    UNLIMITED.charge_work(100.0, 0.0)
    limiter, tenant = RateLimiter(), _tenant(concurrency=1)
    reservation = limiter.reserve(tenant, 0, 0.0)
    reservation.charge_work(100.0, 0.0)
    reservation.end(0)
    limiter.reserve(tenant, 10**9, 0.0)
