"""An engine pool with fake engines, which sample by a hash of all previous tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from app.common.ipc import Cancel, Down, Ready, Submit, WorkerConfig
from app.common.model_version import Version
from app.common.types import Counters, FinishReason, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.engine_pool import EngineClient, EnginePool
from app.engine_client.fair_queue import FairQueue
from app.engine_client.supervisor import EngineStopped, WeightsFiles, read_directory
from app.engine_client.token_stream import Arrival, TokenStream


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

    def __init__(self, client: EngineClient, slots: int) -> None:
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

    def start(self, _files: WeightsFiles = read_directory) -> None:
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
            self.client.on_report(StepReport(started=tuple(started), counters=self.counters))
            self.crash()
            return
        events = [self._sample(request) for request in list(self.running.values())]
        self.client.on_report(StepReport(events=tuple(events), started=tuple(started), counters=self.counters, at=1.0))

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


class PoolHarness:
    """An engine pool, its fake engines, and its streams."""

    def __init__(self, n: int = 2, *, slots: int = 4, capacity: int = 1000, load: bool = True) -> None:
        queue = FairQueue(max_requests=capacity, max_prompt_tokens=100_000)
        configs = [WorkerConfig(weights="", replica=index, replicas=n, max_running=slots) for index in range(n)]
        self.pool = EnginePool([EngineClient(config) for config in configs], queue)
        self.engines = [FakeSupervisor(client, slots) for client in self.pool.engines]
        for client, engine in zip(self.pool.engines, self.engines, strict=True):
            client.supervisor = engine  # type: ignore[assignment]
        self.streams: list[TokenStream] = []
        if load:
            self.pool.start()

    def submit(self, prompt: tuple[int, ...], n: int = 1, max_tokens: int = 12, **fields: Any) -> TokenStream:
        names = [f"r{len(self.streams)}/{i}" for i in range(n)]
        requests = [
            Request(id=name, prompt=prompt, max_tokens=max_tokens, leader=names[0] if i else None, **fields)
            for i, name in enumerate(names)
        ]
        self.streams.append(self.pool.submit(requests))
        return self.streams[-1]

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

    async def texts(self, streams: list[TokenStream] | None = None) -> list[list[int] | str]:
        """Runs all streams to their end; returns the tokens of each, or the name of its error."""
        self.run()
        return [await self.text(stream) for stream in streams or self.streams]

    async def text(self, stream: TokenStream) -> list[int] | str:
        arrivals = await self.read(stream)
        errors = [type(a.item).__name__ for a in arrivals if isinstance(a.item, Exception)]
        return errors[0] if errors else tokens_of(arrivals)

    async def read(self, stream: TokenStream) -> list[Arrival]:
        """Everything that arrives until the stream ends."""
        arrivals: list[Arrival] = []
        self.run()
        while stream.is_open or stream._arrivals:
            arrivals += await asyncio.wait_for(stream.receive(), 60)
            self.run()
        return arrivals


def tokens_of(arrivals: Iterable[Arrival], choice: int = 0) -> list[int]:
    """The tokens of a choice; checks that each arrived once and in order."""
    events = [a.item for a in arrivals if isinstance(a.item, SampledEvent) and a.choice == choice]
    assert [event.index for event in events] == list(range(len(events)))
    return [event.token for event in events if event.token is not None]


def expected_tokens(stream: TokenStream) -> list[int]:
    """The tokens that a stream must receive, with or without crashes and pauses."""
    state, tokens = _hash(stream.requests[0].prompt), list[int]()
    for _ in range(stream.requests[0].max_tokens):
        tokens.append(state % 1000)
        state = _hash(tokens[-1:], state)
    return tokens
