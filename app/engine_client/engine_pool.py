"""Engine pool: the open requests, the queue in which they wait, and the engines that compute them.

loading --all have loaded the same--> serving --the last engine stops--> stopped
       +------------ one engine stops ---------------------------------------^

A request leaves the queue when an engine has capacity for it, and only then a router chooses the engine: it prefers one
with a cached prefix. An engine is sent a few requests more than it runs, so that it need not wait for the event loop
when one ends. The pool serves as long as one engine does. After a crash, the requests that were in flight wait for the
next process of their engine, so they cannot crash another one. Only an engine that keeps crashing is stopped, and then
its requests return to the head of the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from app.common.errors import EngineError, EngineFailed, NotReady
from app.common.ipc import Ready
from app.common.types import Request, StepReport
from app.engine_client.open_sequences import OpenSequences
from app.engine_client.prefix_router import PrefixRouter, block_hashes
from app.engine_client.replica import Replica
from app.engine_client.request_queue import RequestQueue
from app.engine_client.supervisor import EngineStopped, ReadVersion, read_directory

_log = logging.getLogger("inkstream")

_COMMON_FIELDS = ("model_version", "numerics", "vocab_size", "block_size")
"""Fields in which all engines must agree, since a response may continue on any of them; the least context counts."""

_ENGINE_STOPPED = "the engine stopped and will not be restarted: send the request again after the service is restarted"
_SHUTTING_DOWN = "the service is shutting down: send it again in a moment"


class EnginePool:
    """Owns the queue and the engines, and distributes requests among them."""

    def __init__(self, engines: Sequence[Replica], queue: RequestQueue) -> None:
        """Each engine has its index in this order as its `replica`."""
        self.engines = tuple(engines)
        self.queue = queue
        self.n_suspensions = 0
        """Times that a response was suspended because its reader did not keep up."""
        self.waiting: dict[str, OpenSequences] = {}
        """Responses in the queue by the ids of their requests that no engine has."""
        self.had_backlog = False
        """Whether requests waited at the last report."""
        self._suspended: dict[str, OpenSequences] = {}  # by request id: submitted again once their readers catch up
        self._router = PrefixRouter(len(engines))
        self._common_ready: Ready | None = None
        """Facts that all engines share, once all have loaded."""
        self._loaded, self._stopped_event = asyncio.Event(), asyncio.Event()
        self._stopped: EngineStopped | None = None
        for engine in engines:
            engine.pool = self

    @property
    def ready(self) -> Ready | None:
        """Facts about the loaded model; None until all engines have loaded it, and while none accepts requests."""
        return self._common_ready if any(engine.ready for engine in self.engines) else None

    @property
    def phase(self) -> str:
        """Human-readable state of the pool."""
        if self.ready:
            return "ready"
        not_ready = [engine.supervisor for engine in self.engines if not engine.ready]
        # Report why an engine was given up only once all engines are.
        return min(not_ready, key=lambda one: one.is_stopped).phase if not_ready else "loading"

    @property
    def restarts(self) -> int:
        """Number of engine processes that exited."""
        return sum(engine.supervisor.restarts for engine in self.engines)

    def start(self, version: ReadVersion = read_directory) -> None:
        """Spawns the engine processes, which read this version of the weights."""
        for engine in self.engines:
            engine.supervisor.start(version)

    async def stop(self) -> None:
        """Stops the engines; open streams end with NotReady."""
        await asyncio.gather(*[engine.supervisor.stop() for engine in self.engines])

    async def wait_ready(self) -> Ready:
        """Waits until all engines have loaded; returns their common facts, even if one has crashed since."""
        await self._loaded.wait()
        assert self._common_ready is not None
        return self._common_ready

    async def wait_stopped(self) -> EngineStopped:
        """Waits until all engines are stopped; before all have loaded, until one is."""
        await self._stopped_event.wait()
        assert self._stopped is not None
        return self._stopped

    def submit(self, response: OpenSequences) -> None:
        """Queues the sequences of a new response, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        self.queue.check(response.open_requests, time.monotonic())
        self._enqueue(response, response.open_requests)

    def resubmit(self, response: OpenSequences) -> None:
        """Queues a response whose client is back, even while engines restart. Raises NotReady, QueueFull."""
        if self._are_all_stopped:
            raise NotReady(_SHUTTING_DOWN, 5)
        self.queue.check(response.open_requests, time.monotonic())
        self._enqueue(response, response.renew())

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancels requests that their response no longer needs."""
        for request_id in request_ids:
            self.waiting.pop(request_id, None)
            self._suspended.pop(request_id, None)
            self.queue.remove(request_id)
        for engine in self.engines:
            engine.release(request_ids)

    def suspend(self, response: OpenSequences) -> None:
        """Cancels the requests of a response whose reader does not keep up, until resume()."""
        self.n_suspensions += 1
        self.cancel(response.open_ids)
        self._suspended.update(dict.fromkeys(response.open_ids, response))

    def resume(self, response: OpenSequences) -> None:
        """Queues the open sequences of a suspended response again, without a second admission check."""
        for request_id in response.open_ids:
            self._suspended.pop(request_id, None)
        self._enqueue(response, response.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open response with an error."""
        self._fail((*self.waiting.values(), *self._suspended.values()), error)
        for engine in self.engines:
            self._fail(engine.responses.values(), error)

    def on_ready(self, index: int) -> None:
        """An engine has loaded; for the replica."""
        loaded = [engine.ready for engine in self.engines if engine.ready]
        if len(self.engines) == 1:
            self._common_ready = loaded[0]
            self._loaded.set()
            return
        differing = _difference([*([self._common_ready] if self._common_ready else []), *loaded])
        if self._common_ready and differing:
            reason = f"it restarted with another {differing} than the other engines have"
            self.engines[index].supervisor.abandon(EngineStopped(reason, 1))
        elif not self._common_ready and len(loaded) == len(self.engines):
            if differing:
                self._stop(EngineStopped(f"the engines differ in their {differing}: restart the service", 1))
                return
            devices = ", ".join(dict.fromkeys(one.device for one in loaded))
            context = min(one.context for one in loaded)
            self._common_ready = replace(loaded[0], device=f"{len(loaded)} x {devices}", context=context)
            self._loaded.set()

    def on_capacity(self) -> None:
        """Sends the waiting requests for which engines have capacity, in the order of the queue; for the replicas."""
        while self.waiting and (taken := self.queue.take(self._choose_engine)):
            request_id, index = taken
            response = self.waiting.pop(request_id)
            response.engine = index
            self.engines[index].send(response, request_id)

    def on_report(self, report: StepReport, ended: Sequence[str]) -> None:
        """An engine has completed a step that started or ended requests, or while others wait; for the replica."""
        has_backlog = any(engine.counters.waiting for engine in self.engines)
        self.queue.on_report(report.started, report.at, has_backlog=has_backlog)
        self.had_backlog = has_backlog or self.queue.n_unsent > 0
        for request_id in ended:
            self.queue.remove(request_id)
        self.on_capacity()

    def on_crash(self, index: int) -> None:
        """The process of an engine has ended; for the replica."""
        self._router.clear(index)
        self.on_capacity()

    def on_stopped(self, index: int, reason: EngineStopped) -> None:
        """An engine will not be restarted; for the replica."""
        error = EngineFailed(_ENGINE_STOPPED) if reason.exit_code else NotReady(_SHUTTING_DOWN, 5)
        if not self._loaded.is_set() or self._are_all_stopped:
            self._stop(reason)
            self.fail_all(error)
        elif reason.exit_code:
            _log.error("engine %d is stopped, the others continue: %s", index, reason)
            self._return_all(self.engines[index])
        else:
            self._fail(self.engines[index].responses.values(), error)

    @property
    def _are_all_stopped(self) -> bool:
        return all(engine.supervisor.is_stopped for engine in self.engines)

    def _enqueue(self, response: OpenSequences, requests: Iterable[Request]) -> None:
        for request in requests:
            self.waiting[request.id] = response
            self.queue.add(request)
        self.on_capacity()

    def _choose_engine(self, request_id: str) -> int | None:
        """Engine to which a request is sent now; None if it must wait."""
        response = self.waiting[request_id]
        request = response.requests[0]
        if len(self.engines) == 1:
            return 0 if self.engines[0].has_capacity(request) else None
        available = {index: engine for index, engine in enumerate(self.engines) if engine.has_capacity(request)}
        if (bound := self._bound_engine(response)) is not None:
            return bound if bound in available else None
        if not available:
            return None
        candidates = {index: engine for index, engine in available.items() if engine.can_start} or available
        loads, requests = {index: engine.load for index, engine in candidates.items()}, response.open_requests
        assert self._common_ready
        hashes = block_hashes(requests, self._common_ready.block_size, self._common_ready.model_version)
        chosen = self._router.choose(hashes, loads, len(requests))
        facts = available[chosen].ready
        assert facts
        self._router.record(chosen, hashes, facts.blocks_total)
        return chosen

    def _bound_engine(self, response: OpenSequences) -> int | None:
        """The engine that computes other sequences of the response, or that it may have crashed."""
        index = response.engine
        if index is None or not (response.crash_count or self.engines[index].has(response)):
            return None
        return None if self.engines[index].supervisor.is_stopped else index

    def _return_all(self, engine: Replica) -> None:
        """Returns the requests of a stopped engine to the head of the queue, in their order."""
        returned = engine.responses
        engine.replayed += len(returned)
        engine.release(list(returned))
        for request_id, response in reversed(returned.items()):
            self.queue.remove(request_id)
            self.queue.add(response.request(request_id), first=True)
            self.waiting[request_id] = response
        self.on_capacity()

    def _fail(self, responses: Iterable[OpenSequences], error: EngineError) -> None:
        for response in dict.fromkeys(responses):
            request_ids = response.open_ids
            response.fail(error)
            self.cancel(request_ids)

    def _stop(self, reason: EngineStopped) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._stopped_event.set()


def _difference(facts: Sequence[Ready]) -> str:
    """The first field that differs; empty if all agree."""
    return next((name for name in _COMMON_FIELDS if len({getattr(one, name) for one in facts}) > 1), "")
