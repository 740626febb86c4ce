"""Grammars of one key slow the streams of another only slightly, whatever they are (issue 19)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.armed_faults import Faults
from tests.support.engine.grammar_corpus import BOMBS, Guided
from tests.support.keyed_server import Keyring
from tests.support.load.noisy_neighbor import Load, running_load
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

pytest.importorskip("llguidance")

_CONCURRENCY = 31
_WORST = (
    *("ambiguous words", "ambiguous behind 40", "ambiguous behind 120", "three hundred names behind 60"),
    *("hundred names of one thing", "palindromes", "ambiguous sums", "the n-th from the end, 60"),
)
"""The most costly bombs that pass the trial run: they use all the time allowed, or end after their prefix."""
_ORDINARY = Guided("json_schema", {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 90})


class _Service:
    """A service with the repository's weights, and keys for a victim and an attacker."""

    def __init__(self, folder: Path, server: Server, ring: Keyring, faults: Faults) -> None:
        self.folder, self.server, self.ring, self.faults = folder, server, ring, faults

    def metric(self, name: str) -> float:
        """A gauge of the service."""
        return self.server.metric(name, self.ring.headers("victim"))

    def tokens_left(self, name: str, fields: dict[str, object]) -> int:
        """Tokens left in a key's quota after a request of 200 tokens."""
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": False, **fields}
        answer = httpx.post(f"{self.server.url}/complete", json=body, headers=self.ring.headers(name), timeout=120)
        return int(answer.headers.get("x-ratelimit-remaining-tokens", 0))

    def gaps(self, tokens: int, **fields: object) -> list[float]:
        """Seconds between the tokens of one stream of the victim."""
        body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "seed": 1, **fields}
        headers, times = self.ring.headers("victim"), list[float]()
        with httpx.stream("POST", f"{self.server.url}/complete", json=body, headers=headers, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data:") and '"text"' in line:
                    times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    @contextmanager
    def load(self, bodies: list[dict[str, object]]) -> Iterator[Counter[str]]:
        """A separate process keeps one request of the attacker running per body.

        Yields the counts of outcomes by status and message; filled when the block ends.
        """
        outcomes, file = Counter[str](), self.folder / f"outcomes-{time.monotonic_ns()}"
        requests = [("/complete", body) for body in bodies]
        attacker = self.ring.keys["attacker"]
        load = Load(
            url=self.server.url, key=attacker, requests=requests, clients=len(bodies), pause=0.1, outcomes=str(file)
        )
        with running_load(load, warm_up=1.0):  # trial runs are finished, and all requests are in the engine
            yield outcomes
        outcomes.update(file.read_text().splitlines() if file.exists() else [])
        assert self.server.wait_for(lambda: self.metric("requests_running") == 0)


def _attack(names: list[str], tokens: int = 200) -> list[dict[str, object]]:
    """One request per concurrent client, with these bombs in turn."""
    guided = [BOMBS[names[index % len(names)]] for index in range(_CONCURRENCY)]
    return [
        {"prompt": "The fox", "max_tokens": tokens, "stream": False, "seed": index, bomb.field: bomb.value}
        for index, bomb in enumerate(guided)
    ]


_PLAIN: list[dict[str, object]] = [
    {"prompt": "The fox", "max_tokens": 200, "stream": False, "seed": index, "ignore_eos": True}
    for index in range(_CONCURRENCY)
]


def _p99(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100)[98]


@pytest.fixture(scope="module")
def service(
    serve_module: Services, tmp_path_factory: pytest.TempPathFactory, ring: Keyring, faults: Faults
) -> _Service:
    environment, weights = faults.removing("engine.masks_in_step"), ROOT / "weights"
    server = serve_module("--max-running", "40", ring=ring, weights=weights, environment=environment, is_killed=True)
    service = _Service(tmp_path_factory.mktemp("s26-masks"), server, ring, faults)
    service.gaps(20)
    return service


@dataclass(slots=True)
class _Measured:
    """Seconds between tokens of the victim: alone, while 31 plain requests run, and while 31 bombs run."""

    alone: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    bombs: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def time_to_alone(self) -> float:
        return statistics.fmean(self.bombs) / statistics.fmean(self.alone)

    @property
    def p99_to_alone(self) -> float:
        return _p99(self.bombs) / _p99(self.alone)

    @property
    def to_plain(self) -> float:
        return _p99(self.bombs) / _p99(self.plain)


def _measure(service: _Service, names: list[str], rounds: int) -> _Measured:
    """Alternates the three measurements, so that a slow machine affects all of them."""
    found = _Measured()
    for _ in range(rounds):
        found.alone += service.gaps(200)
        with service.load(_PLAIN):
            found.plain += service.gaps(200)
        with service.load(_attack(names)) as outcomes:
            found.bombs += service.gaps(200)
        found.outcomes += outcomes
    return found


def _check_outcomes(outcomes: Counter[str]) -> None:
    """Every request of the attacker ends with a completion or a client error."""
    assert {outcome[:3] for outcome in outcomes} <= {"200", "400"}, outcomes
    assert all("complex" in outcome or "guide" in outcome for outcome in outcomes if outcome[:3] == "400"), outcomes


@pytest.mark.timed
def test_stream_beside_31_grammar_bombs_of_another_key(service: _Service, promise: Promise) -> None:
    names, rounds = (list(BOMBS), 5) if promise.full else (list(_WORST), 1)
    for start in range(0, len(names), _CONCURRENCY):
        found = promise.measured(
            lambda group=names[start : start + _CONCURRENCY]: _measure(service, group, rounds),  # type: ignore[misc]
            lambda found: found.to_plain <= 2 and found.time_to_alone <= 3,
        )
        _check_outcomes(found.outcomes)
        n = sum(found.outcomes.values())
        bombs = f"bombs {start + 1} to {min(start + _CONCURRENCY, len(names))}"
        what = f"p99 between tokens while 31 {bombs} of another key run, against 31 plain requests"
        promise.at_most(what, found.to_plain, target=2, floor=3, n=n)
        what = f"time of a stream while 31 {bombs} of another key run, against alone"
        promise.at_most(what, found.time_to_alone, target=3, floor=5, n=n)
        # With the load generator on one of two cores, any 31 requests make the slowest of 100 steps three to five times
        # as long as alone; the ratio to plain requests bounds the effect of bombs.
        if promise.full:
            what = f"p99 between tokens while 31 {bombs} of another key run, against alone"
            promise.at_most(what, found.p99_to_alone, target=3, floor=5, n=n)
    assert httpx.get(f"{service.server.url}/health/ready", timeout=30).status_code == 200
    assert service.server.wait_for(lambda: service.metric("kv_cache_usage_ratio") == 0), "leaked blocks"


@pytest.mark.timed
def test_masks_computed_in_the_step_are_detected(service: _Service) -> None:
    """Positive control: masks that take 10 ms, while steps run and then in them."""

    def p99() -> float:
        with service.load(_attack(["hundred names of one thing", "overlapping lexemes"], tokens=20)):
            return _p99(service.gaps(12))

    service.faults.arm("engine.mask", "sleep", seconds=0.01)
    try:
        concurrent = p99()
        service.faults.arm("engine.masks_in_step", "wait")
        in_step = p99()
    finally:
        service.faults.disarm("engine.masks_in_step")
        service.faults.disarm("engine.mask")
    assert in_step > 3 * _p99(service.gaps(100)) and in_step > 1.5 * concurrent, (in_step, concurrent)


@pytest.mark.timed
def test_guided_stream_beside_31_grammar_bombs_of_another_key(service: _Service, promise: Promise) -> None:
    def measure() -> float:
        with service.load(_PLAIN):
            alone = sum(service.gaps(100, **{_ORDINARY.field: _ORDINARY.value}))
        with service.load(_attack(list(_WORST))):
            attacked = sum(service.gaps(100, **{_ORDINARY.field: _ORDINARY.value}))
        return attacked / alone

    ratio = promise.measured(measure, lambda ratio: ratio <= 3)
    promise.at_most(
        "time of a guided stream beside 31 grammar bombs, against beside 31 plain", ratio, target=3, floor=5, n=100
    )


def test_grammar_computation_is_charged_to_its_key(service: _Service) -> None:
    service.ring.add("limited", tokens_per_minute=100_000)
    assert service.server.wait_for(lambda: service.tokens_left("limited", {}) > 0)
    bomb = BOMBS["ambiguous words"]
    left = [service.tokens_left("limited", fields) for fields in ({}, {bomb.field: bomb.value}, {})]
    guided, plain = left[0] - left[1], left[1] - left[2]
    assert guided > plain + 20, left
