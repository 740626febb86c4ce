"""An engine pool whose engines a test plays: they sample by a hash of all tokens before, as a model does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.common.ipc import Cancel, Down, Ready, Submit, WorkerConfig
from app.common.types import Counters, FinishReason, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.engine_client.supervisor import EngineStopped, WeightsFiles, read_directory
from app.engine_client.token_stream import TokenStream


def ready_message(**changes: Any) -> Ready:
    facts: dict[str, Any] = {"context": 10_000, "vocab_size": 1000, "n_params": 1, "dtype": "none", "device": "a CPU"}
    facts |= {"weights_version": "v", "eos_ids": (), "start_id": 0, "sampling_defaults": {}, "blocks_total": 1000}
    facts |= {"block_size": 4, "has_encoder": False, "numerics": "n", "numerics_reason": "", "waits_for_build": False}
    return Ready(**{**facts, **changes})


def _next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


class FakeSupervisor:
    """Replaces a supervisor: an engine process that handles its frames when the test calls step()."""

    def __init__(self, client: EngineClient, slots: int) -> None:
        self.client = client
        self.slots = slots
        self.ready: Ready | None = None
        self.phase, self.restarts, self.is_stopped = "loading weights", 0, False
        self.report_age = self.progress_age = 0.0
        self.start_seconds: dict[str, float] = {}
        self.frames: list[Down] = []
        self.waiting: dict[str, list[int]] = {}
        self.running: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.seen: list[str] = []
        """Requests that came, in order; those that came back after a crash are there again."""
        self.deadly = ""
        """A request that kills it in its first step."""

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
        for requests in (self.waiting, self.running, self.requests):
            requests.clear()
        self.client.on_crash()

    def give_up(self, reason: EngineStopped) -> None:
        self.ready, self.is_stopped = None, True
        self.client.on_stopped(reason)

    abandon = give_up

    def step(self) -> None:
        """Reads its pipe, and gives a token to each request that has a slot."""
        if self.ready is None:
            return
        started, events = [], []
        for frame in self.frames:
            if isinstance(frame, Submit):
                name = frame.request.id
                self.requests[name] = frame.request
                self.waiting[name] = [*frame.request.prompt, *frame.request.generated]
                self.seen.append(name)
            elif isinstance(frame, Cancel):
                self.waiting.pop(frame.request_id, None)
                self.running.pop(frame.request_id, None)
        self.frames.clear()
        while self.waiting and len(self.running) < self.slots:
            name = next(iter(self.waiting))
            self.running[name] = self.waiting.pop(name)
            started.append(RequestStarted(name, 0))
        if self.deadly in self.running:
            self.client.on_report(StepReport(started=tuple(started), counters=self.counters))
            self.crash()
            return
        for name, tokens in list(self.running.items()):
            request = self.requests[name]
            tokens.append(_next_token(tokens))
            written = len(tokens) - len(request.prompt)
            finish = FinishReason.LENGTH if written == request.max_tokens else None
            events.append(SampledEvent(name, written - 1, tokens[-1], finish=finish))
            if finish:
                del self.running[name]
        self.client.on_report(StepReport(events=tuple(events), started=tuple(started), counters=self.counters, at=1.0))

    @property
    def counters(self) -> Counters:
        return Counters(running=len(self.running), waiting=len(self.waiting), blocks_total=100)


class PoolHarness:
    """An engine pool, its engines, and all events of its streams."""

    def __init__(self, n: int = 2, *, slots: int = 4, capacity: int = 1000, load: bool = True) -> None:
        queue = FairQueue(QueueLimits(max_requests=capacity, max_prompt_tokens=100_000))
        configs = [WorkerConfig(weights="", replica=index, replicas=n, max_running=slots) for index in range(n)]
        self.pool = EnginePool([EngineClient(config) for config in configs], queue)
        self.engines = [FakeSupervisor(client, slots) for client in self.pool.engines]
        for client, engine in zip(self.pool.engines, self.engines, strict=True):
            client.supervisor = engine  # type: ignore[assignment]
        self.streams: list[TokenStream] = []
        if load:
            self.pool.start()

    def submit(
        self, prompt: tuple[int, ...], n: int = 1, max_tokens: int = 12, cache_namespace: str = ""
    ) -> TokenStream:
        number = len(self.streams)
        names = [f"r{number}/{i}" for i in range(n)]
        requests = [
            Request(
                id=name,
                prompt=prompt,
                max_tokens=max_tokens,
                leader=names[0] if i else None,
                cache_namespace=cache_namespace,
            )
            for i, name in enumerate(names)
        ]
        self.streams.append(self.pool.submit(requests))
        return self.streams[-1]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for engine in self.engines:
                engine.step()

    async def texts(self, streams: list[TokenStream] | None = None) -> list[list[int] | str]:
        """Run all streams to their end; return the tokens, or the name of the error, of each."""
        for _ in range(2000):
            if not any(stream.is_open for stream in self.streams):
                break
            self.step()
        else:
            raise AssertionError("it does not come to an end")
        return [await read_text(stream) for stream in streams or self.streams]


async def read_text(stream: TokenStream) -> list[int] | str:
    arrivals = await asyncio.wait_for(stream.receive(), 60)
    errors = [type(a.item).__name__ for a in arrivals if isinstance(a.item, Exception)]
    tokens = [a.item for a in arrivals if isinstance(a.item, SampledEvent) and a.choice == 0]
    assert [token.index for token in tokens] == list(range(len(tokens))), "each token once, in order"
    return errors[0] if errors else [token.token for token in tokens if token.token is not None]


def alone(stream: TokenStream) -> list[int]:
    """The tokens of a stream that no crash or pause interrupts."""
    tokens = list(stream.requests[0].prompt)
    for _ in range(stream.requests[0].max_tokens):
        tokens.append(_next_token(tokens))
    return tokens[len(stream.requests[0].prompt) :]


def in_loop(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())
