"""An engine pool with fake engines, which sample by a hash of all previous tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.common.ipc import Cancel, Down, Ready, Submit, WorkerConfig
from app.common.model_version import Version
from app.common.types import Counters, FinishReason, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.engine_pool import EnginePool
from app.engine_client.open_sequences import Writes
from app.engine_client.replica import Replica
from app.engine_client.request_queue import RequestQueue
from app.engine_client.supervisor import EngineStopped, ReadVersion, read_directory
from app.generation.completion import Completion, CompletionTimes, Timeouts
from app.generation.request import CompletionEvent, Delta, Finished, TokenDetail


def ready_message(**changes: Any) -> Ready:
    facts: dict[str, Any] = {"context": 10_000, "vocab_size": 1000, "n_params": 1, "dtype": "none", "device": "a CPU"}
    facts |= {"eos_ids": (), "start_id": 0, "sampling_defaults": {}, "blocks_total": 1000}
    facts |= {"block_size": 4, "has_encoder": False, "numerics": "n", "numerics_reason": "", "waits_for_build": False}
    facts["model_version"] = Version("v")
    return Ready(**{**facts, **changes})


Top = tuple[tuple[int, float], ...]


def _hash(tokens: Iterable[int], state: int = 0) -> int:
    """Hash of all tokens so far, which determines the next token."""
    for token in tokens:
        state = hash((state, token))
    return state


class FakeSupervisor:
    """Replaces a supervisor and its engine process; handles its frames when the test calls step()."""

    def __init__(self, client: Replica, slots: int) -> None:
        self.client = client
        self.slots = slots
        self.ready: Ready | None = None
        self.phase, self.restarts, self.is_stopped = "loading weights", 0, False
        self.report_age = self.progress_age = 0.0
        self.pid: int | None = None
        self.start_seconds: dict[str, float] = {}
        self.frames: list[Down] = []
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._progress: dict[str, tuple[int, int]] = {}
        """Running request -> (number of generated tokens, hash of all tokens)."""
        self.top: Top = ()
        """Top log-probabilities to report with each token."""
        self.seen: list[str] = []
        """Ids of received requests in order; resubmitted ones appear again."""
        self.deadly, self.fuse = "", 0
        """Id of a request that crashes the engine, and how many tokens it gets before each crash."""

    def send(self, frame: Down) -> None:
        self.frames.append(frame)

    def start(self, _version: ReadVersion = read_directory) -> None:
        self.load()

    async def stop(self) -> None:
        self.give_up(EngineStopped("the service is shutting down", 0))

    def load(self, **changes: Any) -> None:
        self.ready = ready_message(**changes)
        self.client.on_ready()

    def crash(self) -> None:
        self.ready, self.restarts = None, self.restarts + 1
        self.frames.clear()
        self.waiting.clear()
        self.running.clear()
        self.client.on_crash()

    def give_up(self, reason: EngineStopped) -> None:
        self.ready, self.is_stopped = None, True
        self.client.on_stopped(reason)

    abandon = give_up

    @property
    def is_busy(self) -> bool:
        return self.ready is not None and bool(self.frames or self.waiting or self.running)

    def step(self) -> None:
        """Handles the received frames, and samples a token for each request in a slot."""
        if self.ready is None:
            return
        for frame in self.frames:
            if isinstance(frame, Submit):
                self.waiting[frame.request.id] = frame.request
                self.seen.append(frame.request.id)
            elif isinstance(frame, Cancel):
                self.waiting.pop(frame.request_id, None)
                self.running.pop(frame.request_id, None)
        self.frames.clear()
        started = []
        while self.waiting and len(self.running) < self.slots:
            name = next(iter(self.waiting))
            self.running[name] = request = self.waiting.pop(name)
            self._progress[name] = len(request.generated), _hash((*request.prompt, *request.generated))
            started.append(RequestStarted(name, 0))
        if self._is_killed():
            self._report(StepReport(started=tuple(started), counters=self.counters))
            self.crash()
            return
        events = [self._sample(request) for request in list(self.running.values())]
        self._report(StepReport(events=tuple(events), started=tuple(started), counters=self.counters, at=1.0))

    def _report(self, report: StepReport) -> None:
        self.client.on_report(report)
        self.client._flush()  # as the event loop does after each read

    def _is_killed(self) -> bool:
        deadly = self.running.get(self.deadly)
        return deadly is not None and self._progress[deadly.id][0] - len(deadly.generated) >= self.fuse

    def _sample(self, request: Request) -> SampledEvent:
        index, state = self._progress[request.id]
        token = state % 1000
        self._progress[request.id] = index + 1, _hash([token], state)
        finish = FinishReason.LENGTH if index + 1 == request.max_tokens else None
        if finish:
            del self.running[request.id]
        return SampledEvent(request.id, index, token, -0.5 if self.top else None, self.top, finish)

    @property
    def counters(self) -> Counters:
        return Counters(running=len(self.running), waiting=len(self.waiting), blocks_total=100)


class TokenChoice:
    """Stands in for an OutputChoice: each token is a Delta with its log-probabilities, and its index as the start."""

    echo = None
    first = ()

    def __init__(self, index: int) -> None:
        self.index = index
        self.first: tuple[Delta, ...] = ()
        self.n_tokens = 0
        self.last_token_at: float | None = None
        self.ended: Finished | None = None

    def add(self, event: SampledEvent) -> list[Delta]:
        if event.finish:
            self.ended = Finished(self.index, str(event.finish))
        if event.token is None:
            return []
        self.n_tokens += 1
        details = tuple(TokenDetail(token, logprob, (), 0) for token, logprob in event.top)
        return [Delta(self.index, str(event.token), details, event.index)]

    def finish(self, reason: str) -> list[Delta]:
        self.ended = Finished(self.index, reason)
        return []


class PoolHarness:
    """An engine pool, its fake engines, and its completions."""

    def __init__(self, n: int = 2, *, slots: int = 4, capacity: int = 1000, load: bool = True) -> None:
        queue = RequestQueue(max_requests=capacity, max_prompt_tokens=100_000)
        configs = [WorkerConfig(weights="", replica=index, replicas=n, max_running=slots) for index in range(n)]
        self.pool = EnginePool([Replica(config) for config in configs], queue)
        self.engines = [FakeSupervisor(client, slots) for client in self.pool.engines]
        for client, engine in zip(self.pool.engines, self.engines, strict=True):
            client.supervisor = engine  # type: ignore[assignment]
        self.completions: list[Completion] = []
        if load:
            self.pool.start()

    def submit(self, prompt: tuple[int, ...], n: int = 1, max_tokens: int = 12, **fields: Any) -> Completion:
        names = [f"r{len(self.completions)}/{i}" for i in range(n)]
        return self.submit_all(
            [
                Request(id=name, prompt=prompt, max_tokens=max_tokens, leader=names[0] if i else None, **fields)
                for i, name in enumerate(names)
            ]
        )

    def submit_all(self, requests: list[Request], timeouts: Timeouts | None = None) -> Completion:
        choices: Any = [TokenChoice(index) for index in range(len(requests))]
        timeouts = timeouts or Timeouts(deadline=10_000.0, queue=10_000.0, heartbeat=10_000.0)
        completion = Completion(self.pool, requests, choices, timeouts, CompletionTimes())
        completion.submit()
        self.completions.append(completion)
        return completion

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for engine in self.engines:
                engine.step()

    def run(self) -> int:
        """Steps until no engine has work; returns the number of steps."""
        for steps in range(100_000):
            if not any(engine.is_busy for engine in self.engines):
                return steps
            self.step()
        raise AssertionError("the engines still have work")

    def texts(self, completions: list[Completion] | None = None) -> list[list[int] | str]:
        """Runs all completions to their end; returns the tokens of each, or the name of its error."""
        self.run()
        return [self.text(completion) for completion in completions or self.completions]

    def text(self, completion: Completion) -> list[int] | str:
        events = self.read(completion)
        return type(completion.failure).__name__ if completion.failure else tokens_of(events)

    def read(self, completion: Completion) -> list[CompletionEvent]:
        """All events until the completion ends."""
        events: list[CompletionEvent] = []
        self.run()
        while completion.is_open or completion.events:
            events += take(completion)
            self.run()
        return events


def take(completion: Completion) -> list[CompletionEvent]:
    """The events that wait, as a reader takes them that then stops reading."""
    events: list[CompletionEvent] = []

    def consume(_writes: Writes) -> bool:
        events.extend(completion.events)
        completion.events.clear()
        return True

    completion.read(consume)
    completion.read(None)
    return events


def tokens_of(events: Iterable[CompletionEvent], choice: int = 0) -> list[int]:
    """The tokens of a choice; checks that each arrived once and in order."""
    deltas = [event for event in events if isinstance(event, Delta) and event.index == choice]
    assert [delta.start for delta in deltas] == list(range(len(deltas)))
    return [int(delta.text) for delta in deltas]


def expected_tokens(completion: Completion) -> list[int]:
    """The tokens that a completion must get, with or without crashes and suspensions."""
    state, tokens = _hash(completion.requests[0].prompt), list[int]()
    for _ in range(completion.requests[0].max_tokens):
        tokens.append(state % 1000)
        state = _hash(tokens[-1:], state)
    return tokens
