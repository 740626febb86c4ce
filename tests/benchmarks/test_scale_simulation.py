"""The simulation of several services agrees with formulas of queueing theory, and depends on its seed only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.scale_simulation import (
    Replica,
    ServiceTimes,
    Turn,
    capacity,
    conversations,
    main,
    outcome,
    policies,
    simulate,
)

SECOND = ServiceTimes(slots=1, step_ms=1000, stream_ms=0, prompt_ms=0)
"""One step takes a second, however many requests run: a request's text is its service time."""
SHARED = ServiceTimes(slots=10**9, step_ms=0, stream_ms=1000, prompt_ms=0)
"""All requests share one step a second."""


def exponential(rate: float, number: int, seed: int = 0) -> Iterator[Turn]:
    """Requests without a prompt at random times, whose texts have an exponential length of 1 on average."""
    generator, now = random.Random(seed), 0.0
    for index in range(number):
        now += generator.expovariate(rate)
        yield Turn(number=index, arrival=now, conversation=index, prompt=0, text=generator.expovariate(1))


def erlang_c(servers: int, load: float) -> float:
    """Probability that a request of an M/M/c queue waits. load: arrivals per service time."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


@pytest.mark.parametrize(("slots", "rate"), [(1, 0.7), (4, 3.2), (16, 14.4)])
def test_one_service_with_slots_of_constant_speed_waits_as_erlang_says(slots: int, rate: float) -> None:
    times = ServiceTimes(slots=slots, step_ms=1000, stream_ms=0, prompt_ms=0)
    found = simulate(exponential(rate, 100_000), [Replica(times)], policies(0)["least connections"])[10_000:]
    waits = [turn.started - turn.arrival for turn in found]
    expected = erlang_c(slots, rate)
    assert sum(wait > 1e-9 for wait in waits) / len(waits) == pytest.approx(expected, rel=0.06)
    assert fmean(waits) == pytest.approx(expected / (slots - rate), rel=0.12)


@pytest.mark.parametrize("replicas", [2, 8])
def test_random_choice_gives_as_many_independent_queues(replicas: int) -> None:
    """Poisson arrivals split at random are Poisson arrivals: each service is an M/M/1 queue with its share of them."""
    rate = 0.8
    services = [Replica(SECOND) for _ in range(replicas)]
    found = simulate(exponential(rate * replicas, 100_000), services, policies(0)["random"])[20_000:]
    assert fmean(turn.started - turn.arrival for turn in found) == pytest.approx(rate / (1 - rate), rel=0.12)


def test_requests_that_share_a_service_take_as_long_as_processor_sharing_says() -> None:
    rate = 0.6
    found = simulate(exponential(rate, 100_000), [Replica(SHARED)], policies(0)["random"])[10_000:]
    assert fmean(turn.end - turn.arrival for turn in found) == pytest.approx(1 / (1 - rate), rel=0.1)


def test_a_prompt_delays_its_own_first_token_and_the_steps_of_others() -> None:
    times = ServiceTimes(slots=4, step_ms=1000, stream_ms=0, prompt_ms=100, step_tokens=10)
    first = Turn(number=0, arrival=0.0, conversation=0, prompt=0, text=10)
    second = Turn(number=1, arrival=2.5, conversation=1, prompt=20, text=3)
    simulate(iter([first, second]), [Replica(times)], policies(0)["random"])
    assert (first.first_token, second.started) == (0, 2.5)
    assert second.first_token == pytest.approx(2.5 + 2 * 2)  # two steps of 10 tokens, a second longer than others
    assert second.end == pytest.approx(6.5 + 3)
    assert first.end == pytest.approx(10 + 2)


def test_the_next_turn_of_a_conversation_finds_its_prompt_where_it_was_and_nowhere_else() -> None:
    times = ServiceTimes(slots=4, prompt_ms=1, cached_tokens=100)

    def cached(prompts: list[tuple[int, int]]) -> list[int]:
        turns = [
            Turn(number=index, arrival=index * 100.0, conversation=conversation, prompt=prompt, text=10)
            for index, (conversation, prompt) in enumerate(prompts)
        ]
        return [turn.cached for turn in simulate(turns, [Replica(times)], policies(0)["hash"])]

    assert cached([(0, 20), (0, 50)]) == [0, 30]
    assert cached([(0, 20), (1, 50)]) == [0, 0]
    assert cached([(0, 20), (1, 60), (0, 40)]) == [0, 0, 30]  # 30 and 70 tokens fit
    assert cached([(0, 20), (1, 61), (0, 40)]) == [0, 0, 0]


def test_every_request_is_served_once_in_the_order_of_its_moments() -> None:
    times = ServiceTimes()
    for name, policy in policies(0).items():
        found = simulate(conversations(200.0, 4000, seed=1), [Replica(times) for _ in range(4)], policy)
        assert [turn.number for turn in found] == list(range(4000)), name
        assert all(turn.arrival <= turn.started <= turn.first_token < turn.end for turn in found), name
        # No service is faster than its steps allow.
        busy = sum(turn.text for turn in found) * times.step(times.slots) / times.slots / 4
        assert max(turn.end for turn in found) >= busy, name


def test_the_capacity_is_what_a_service_delivers_that_has_always_work() -> None:
    times = ServiceTimes(cached_tokens=0)
    turns = [replace(turn, arrival=0.0) for turn in conversations(1.0, 5000, seed=0)]
    found = simulate(turns, [Replica(times)], policies(0)["random"])
    assert 5000 / max(turn.end for turn in found) == pytest.approx(capacity(times), rel=0.1)


def test_conversations_come_at_the_rate_with_four_turns_each() -> None:
    turns = list(conversations(50.0, 40_000, seed=0))
    late = turns[10_000:]
    assert len(late) / (late[-1].arrival - late[0].arrival) == pytest.approx(50, rel=0.05)
    assert len(turns) / len({turn.conversation for turn in turns}) == pytest.approx(4, rel=0.1)
    assert [turn.arrival for turn in turns] == sorted(turn.arrival for turn in turns)
    assert fmean(turn.text for turn in turns) == pytest.approx(96, rel=0.05)


def test_same_seed_gives_the_same_outcomes_and_all_policies_the_same_requests() -> None:
    times, plan = ServiceTimes(), {"replicas": 4, "load": 90, "requests": 200, "limit_ms": 1000.0}
    assert outcome("random", times, seed=3, **plan) == outcome("random", times, seed=3, **plan)
    assert outcome("random", times, seed=3, **plan) != outcome("random", times, seed=4, **plan)
    assert list(conversations(5.0, 100, seed=3)) == list(conversations(5.0, 100, seed=3))


def test_hashing_finds_more_of_the_prompts_and_least_connections_waits_less_than_random() -> None:
    times = ServiceTimes()
    found = {
        name: outcome(name, times, replicas=8, load=95, requests=1500, seed=0, limit_ms=1000.0) for name in policies(0)
    }
    assert found["hash"].cache_hits > 2 * found["least connections"].cache_hits
    assert found["least connections"].wait_ms_p99 < found["random"].wait_ms_p99
    assert found["hash"].cache_hits > found["bounded hash"].cache_hits > found["least connections"].cache_hits


def test_output_has_a_row_for_each_policy_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "2", "--loads", "50,90", "--requests", "50", "--slots", "8"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert len(rows) == 1 + 2 * 5 == 1 + len(found["outcomes"])
    assert (found["benchmark"], found["times"]["slots"]) == ("scale_simulation", 8)
