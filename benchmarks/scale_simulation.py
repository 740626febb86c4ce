"""Simulation of 2 to 64 services behind a proxy: `python -m benchmarks.scale_simulation [--replicas 2,8]`.

Which service should a request go to? Each policy gets the same requests: a Poisson process of turns of conversations,
whose prompt is what was said before. A service runs up to `slots` requests, and others wait in its queue, in order of
arrival. A step takes `step_ms + stream_ms * running`, gives a token to each request whose prompt is computed, and
computes up to `step_tokens` of the first prompt that is not, for `prompt_ms` each. What its prefix cache holds of a
prompt costs nothing. The default times are measured (docs/scale.md).

The load is the rate in percent of what all services can sustain if no cache hits. Goodput is the share of requests
whose first token comes within `--limit-ms`. A run depends on its seed only. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from statistics import fmean

from benchmarks.common import command_line, percentile, print_result

_NEW_SHARE = 0.25
"""Share of requests that begin a conversation: four turns each, on average."""
_PAUSE_SECONDS = 10.0
"""Between two turns of a conversation, on average. The next one does not wait for the service."""
_TURN_TOKENS = 48
"""Tokens that a user adds in a turn, on average."""
_TEXT_TOKENS = 96
"""Tokens of a completion, on average."""
_MOST_PROMPT = 4096
"""A conversation that is longer ends."""
_WARM_UP = 0.4
"""Share of the requests, the first ones, that is not counted: the queues and caches start empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """What one service takes, in milliseconds."""

    slots: int = 32
    step_ms: float = 1.0
    stream_ms: float = 0.1
    prompt_ms: float = 0.1
    """For each prompt token that is not in the prefix cache."""
    step_tokens: int = 256
    """Most prompt tokens of a step."""
    cached_tokens: int = 65_536
    """Of the prefix cache."""

    def step(self, running: int, *, has_prompt: bool = False) -> float:
        """Seconds of a step."""
        prompt_ms = self.prompt_ms * self.step_tokens * has_prompt
        return (self.step_ms + self.stream_ms * running + prompt_ms) / 1000

    def cost(self, prompt: int, text: float) -> float:
        """Seconds that a request takes of a full service; the prefix cache has nothing of it."""
        return prompt * self.prompt_ms / 1000 + text * self.step(self.slots) / self.slots


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request."""

    number: int
    arrival: float
    conversation: int
    prompt: int
    """Tokens before the completion, all of which the next turn repeats."""
    text: float
    """Tokens of the completion, and so steps."""
    cached: int = 0
    """Tokens of the prompt that the prefix cache held."""
    started: float = 0.0
    """Moments, in seconds, as `arrival`: when it left the queue."""
    first_token: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class Replica:
    """A service. `virtual` counts its steps, continuously: what needs n steps is over when it has grown by n."""

    times: ServiceTimes
    waiting: deque[Turn] = field(default_factory=deque)
    prompts: deque[Turn] = field(default_factory=deque)
    """Running requests without a token; the first one's prompt is being computed."""
    texts: list[tuple[float, int, Turn]] = field(default_factory=list)
    """A heap of the other running requests: the step at which they end, and a tie-breaker."""
    prompt_end: float = 0.0
    """The step at which the first prompt is computed."""
    virtual: float = 0.0
    updated: float = 0.0
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Conversation -> its tokens, the least recently used first."""
    cached_tokens: int = 0

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self.prompts) + len(self.texts)

    @property
    def load(self) -> int:
        """Open requests."""
        return self.running + len(self.waiting)

    def next_event(self) -> float | None:
        """When the next request gets its first token or ends; None without requests."""
        if not self.running:
            return None
        ends = ([self.prompt_end] if self.prompts else []) + ([self.texts[0][0]] if self.texts else [])
        return self.updated + max(0.0, min(ends) - self.virtual) * self._step

    def advance(self, now: float) -> None:
        """Computes until `now`, which is at most the next event."""
        if self.running:
            self.virtual += (now - self.updated) / self._step
        self.updated = now

    def add(self, turn: Turn) -> None:
        """Accepts a request; advance() to its arrival comes first."""
        self.waiting.append(turn)
        self._fill_slots()

    def reach(self, now: float) -> None:
        """The next event: a first token, or the end of a text."""
        self.advance(now)
        if self.prompts and not (self.texts and self.texts[0][0] < self.prompt_end):
            self.virtual = max(self.virtual, self.prompt_end)  # despite rounding
            self._begin_text(self.prompts.popleft())
            self._begin_prompt()
        else:
            self.virtual = max(self.virtual, self.texts[0][0])
            _, _, turn = heapq.heappop(self.texts)
            turn.end = now
            self._remember(turn)
            self._fill_slots()

    @property
    def _step(self) -> float:
        return self.times.step(self.running, has_prompt=bool(self.prompts))

    def _fill_slots(self) -> None:
        while self.waiting and self.running < self.times.slots:
            turn = self.waiting.popleft()
            turn.cached, turn.started = min(self.cache.get(turn.conversation, 0), turn.prompt), self.updated
            if turn.prompt == turn.cached:
                self._begin_text(turn)
            else:
                self.prompts.append(turn)
                if len(self.prompts) == 1:
                    self._begin_prompt()

    def _begin_prompt(self) -> None:
        if self.prompts:
            turn = self.prompts[0]
            self.prompt_end = self.virtual + (turn.prompt - turn.cached) / self.times.step_tokens

    def _begin_text(self, turn: Turn) -> None:
        turn.first_token = self.updated
        heapq.heappush(self.texts, (self.virtual + turn.text, turn.number, turn))

    def _remember(self, turn: Turn) -> None:
        size = turn.prompt + round(turn.text)
        self.cached_tokens += size - self.cache.pop(turn.conversation, 0)
        self.cache[turn.conversation] = size
        while self.cached_tokens > self.times.cached_tokens:
            self.cached_tokens -= self.cache.popitem(last=False)[1]


Policy = Callable[[Sequence[Replica], Turn], int]


def _hashed(replicas: Sequence[Replica], turn: Turn) -> int:
    return turn.conversation * 2654435761 % 2**32 * len(replicas) >> 32


def _bounded(replicas: Sequence[Replica], turn: Turn) -> int:
    """The hashed service unless it has more than 1.25 times the mean load, then the least loaded one."""
    chosen = _hashed(replicas, turn)
    if replicas[chosen].load <= 1.25 * (sum(each.load for each in replicas) + 1) / len(replicas):
        return chosen
    return _least_connections(replicas, turn)


def _least_connections(replicas: Sequence[Replica], turn: Turn) -> int:  # noqa: ARG001 - a Policy
    return min(range(len(replicas)), key=lambda index: (replicas[index].load, index))


def policies(seed: int) -> dict[str, Policy]:
    """New policies by name: round robin and random have a state."""
    turns, generator = count(), random.Random(seed)  # nosec B311 - no secret depends on it
    return {
        "random": lambda replicas, _: generator.randrange(len(replicas)),
        "round robin": lambda replicas, _: next(turns) % len(replicas),
        "least connections": _least_connections,
        "hash": _hashed,
        "bounded hash": _bounded,
    }


def conversations(rate: float, turns: int, seed: int) -> Iterator[Turn]:
    """`turns` turns of conversations that begin at random times; after a start, `rate` turns a second."""
    generator = random.Random(seed)  # nosec B311 - no secret depends on it
    names, next_new = count(), 0.0
    following: list[tuple[float, int, int]] = []
    """A heap of later turns: moment, conversation, and the tokens before them."""
    for number in range(turns):
        if following and following[0][0] < next_new:
            now, name, tokens = heapq.heappop(following)
        else:
            now, name, tokens = next_new, next(names), 0
            next_new += generator.expovariate(rate * _NEW_SHARE)
        prompt = tokens + 1 + int(generator.expovariate(1 / _TURN_TOKENS))
        text = 1 + int(generator.expovariate(1 / _TEXT_TOKENS))
        yield Turn(number=number, arrival=now, conversation=name, prompt=prompt, text=text)
        if prompt + text < _MOST_PROMPT and generator.random() >= _NEW_SHARE:
            later = now + generator.expovariate(1 / _PAUSE_SECONDS)
            heapq.heappush(following, (later, name, prompt + text))


def simulate(turns: Iterable[Turn], replicas: Sequence[Replica], policy: Policy) -> list[Turn]:
    """All requests with their moments, in order of arrival."""
    found: list[Turn] = []
    events: list[tuple[float, int, int]] = []
    """A heap: moment, service, and the service's version: an event of an older version is void."""
    versions = Counter[int]()

    def schedule(index: int) -> None:
        versions[index] += 1
        if (moment := replicas[index].next_event()) is not None:
            heapq.heappush(events, (moment, index, versions[index]))

    def run_until(moment: float) -> None:
        while events and events[0][0] <= moment:
            now, index, version = heapq.heappop(events)
            if version == versions[index]:
                replicas[index].reach(now)
                schedule(index)

    for turn in turns:
        run_until(turn.arrival)
        found.append(turn)
        index = policy(replicas, turn)
        replicas[index].advance(turn.arrival)
        replicas[index].add(turn)
        schedule(index)
    run_until(math.inf)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one policy."""

    policy: str
    replicas: int
    load: int
    """Percent."""
    goodput: float
    """Share of requests whose first token came in time."""
    wait_ms_p50: float
    """Until the first token."""
    wait_ms_p99: float
    cache_hits: float
    """Share of the prompt tokens that a prefix cache held."""


def capacity(times: ServiceTimes, sample: int = 20_000) -> float:
    """Requests per second of one full service whose cache never hits."""
    return 1 / fmean(times.cost(turn.prompt, turn.text) for turn in conversations(1.0, sample, seed=0))


def outcome(
    name: str, times: ServiceTimes, *, replicas: int, load: int, requests: int, seed: int, limit_ms: float
) -> Outcome:
    """Simulates one policy."""
    rate = capacity(times) * replicas * load / 100
    turns = conversations(rate, requests * replicas, seed)
    found = simulate(turns, [Replica(times) for _ in range(replicas)], policies(seed)[name])
    counted = found[int(len(found) * _WARM_UP) :]
    waits = [(turn.first_token - turn.arrival) * 1000 for turn in counted]
    return Outcome(
        policy=name,
        replicas=replicas,
        load=load,
        goodput=sum(wait <= limit_ms for wait in waits) / len(waits),
        wait_ms_p50=percentile(waits, 50),
        wait_ms_p99=percentile(waits, 99),
        cache_hits=sum(turn.cached for turn in counted) / sum(turn.prompt for turn in counted),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("scale_simulation", __doc__)
    add, default = parser.add_argument, ServiceTimes()
    add("--replicas", default="2,8,64", metavar="N,N", help="numbers of services (%(default)s)")
    add("--loads", default="50,70,80,90,95", metavar="P,P", help="loads in percent (%(default)s)")
    add("--requests", type=int, default=2000, metavar="N", help="requests for each service (%(default)s)")
    add("--limit-ms", type=float, default=1000, metavar="MS", help="objective of the first token (%(default)s)")
    add("--slots", type=int, default=default.slots, metavar="N", help="requests at a time, --max-running (%(default)s)")
    add("--step-ms", type=float, default=default.step_ms, metavar="MS", help="a step (%(default)s)")
    add("--stream-ms", type=float, default=default.stream_ms, metavar="MS", help="a stream in a step (%(default)s)")
    add("--prompt-ms", type=float, default=default.prompt_ms, metavar="MS", help="a prompt token (%(default)s)")
    add(
        "--step-tokens",
        type=int,
        default=default.step_tokens,
        metavar="N",
        help="prompt tokens of a step (%(default)s)",
    )
    add("--cached-tokens", type=int, default=default.cached_tokens, metavar="N", help="prefix cache (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of arrivals and lengths (%(default)s)")
    flags = parser.parse_args(argv)
    times = ServiceTimes(**{name: getattr(flags, name) for name in asdict(default)})
    print(f"{'replicas':>8}{'load':>6}  {'policy':<18}{'goodput':>8}{'wait p50/p99 ms':>19}{'cache hits':>12}")
    outcomes = []
    run = partial(outcome, times=times, requests=flags.requests, seed=flags.seed, limit_ms=flags.limit_ms)
    for replicas in map(int, flags.replicas.split(",")):
        for load in map(int, flags.loads.split(",")):
            for name in policies(0):
                found = run(name, replicas=replicas, load=load)
                outcomes.append(found)
                waits = f"{found.wait_ms_p50:.0f} / {found.wait_ms_p99:.0f}"
                print(
                    f"{replicas:8}{load:5}%  {name:<18}{found.goodput:8.1%}{waits:>19}{found.cache_hits:12.1%}",
                    flush=True,
                )
    print_result("scale_simulation", times=times, seed=flags.seed, limit_ms=flags.limit_ms, outcomes=outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
