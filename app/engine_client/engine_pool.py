"""Engine pool: the open requests, the queue in which they wait, and the engines that compute them.

loading --all have loaded the same--> serving --the last engine stops--> stopped
       +------------ one engine stops ---------------------------------------^

A request leaves the queue when an engine has capacity for it, and only then a router chooses the engine: it prefers one
with a cached prefix. The pool serves as long as one engine does. After a crash, the requests that were in flight wait
for the next process of their engine, so they cannot crash another one. Only an engine that keeps crashing is stopped,
and then its requests return to the head of the queue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from app.common.errors import EngineError, EngineFailed, NotReady
from app.common.ipc import Ready
from app.common.types import Request, StepReport
from app.engine_client.client import EngineClient
from app.engine_client.fair_queue import FairQueue
from app.engine_client.supervisor import EngineStopped, WeightsFiles, read_directory
from app.engine_client.token_stream import TokenStream

# An engine that has the prompt's first blocks in its prefix cache need not compute them. The router does not query the
# engines but remembers which blocks it sent: the chained hashes of the blocks, as many as the cache has blocks, with
# least-recently-used eviction like the cache itself.
#
# The bound on an engine's load is that of "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and
# Zadimoghaddam, SODA 2018): _BOUND times the mean, rounded up. A prefix that all requests share fills one engine up to
# that bound, then a second one caches it, too.

_BOUND = 1.25
_MAX_HASHES = 4096
"""Limit per request: 65,536 prompt tokens in blocks of 16, which take about two milliseconds."""


def block_hashes(requests: Iterable[Request], block_size: int) -> list[int]:
    """Chained hashes of the full blocks of all prompts, in order.

    A hash covers all tokens up to the end of its block, and the cache namespace, which isolates tenants. A hash
    collision costs a prompt that is computed twice, and nothing else.
    """
    chains = (_chain(request, block_size) for request in requests if request.leader is None)
    return list(dict.fromkeys(islice((block for chain in chains for block in chain), _MAX_HASHES)))


def _chain(request: Request, block_size: int) -> Iterator[int]:
    parent = hash((request.cache_namespace, request.source))
    for start in range(0, len(request.prompt) - block_size + 1, block_size):
        parent = hash((parent, request.prompt[start : start + block_size]))
        yield parent


class PrefixRouter:
    """Remembers which blocks were sent to which engine. Owned by the event loop."""

    def __init__(self, engines: int) -> None:
        self._blocks_of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._last_used = [0] * engines
        self._clock = 0

    def choose(self, hashes: Sequence[int], loads: Mapping[int, int], adding: int) -> int:
        """Chooses an engine for `adding` sequences. loads: number of sequences of each candidate.

        Among engines within the bound: the one with most of the blocks, then the least loaded, then the least
        recently used.
        """
        bound = math.ceil(_BOUND * (sum(loads.values()) + adding) / len(loads))
        least = min(loads.values())
        within_bound = [engine for engine, load in loads.items() if load == least or load + adding <= bound]
        return max(
            within_bound, key=lambda engine: (self.n_cached(engine, hashes), -loads[engine], -self._last_used[engine])
        )

    def n_cached(self, engine: int, hashes: Iterable[int]) -> int:
        """Number of these blocks that are probably in the engine's cache."""
        blocks = self._blocks_of[engine]
        return sum(block in blocks for block in hashes)

    def record(self, engine: int, hashes: Sequence[int], max_blocks: int) -> None:
        """Records that these blocks were sent to an engine whose cache has `max_blocks` blocks."""
        self._clock += 1
        self._last_used[engine] = self._clock
        blocks = self._blocks_of[engine]
        # In reverse order: a block is always evicted before its predecessor.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > max_blocks:
            blocks.popitem(last=False)

    def clear(self, engine: int) -> None:
        """Forgets the blocks of an engine that has lost its cache."""
        self._blocks_of[engine].clear()


_log = logging.getLogger("inkstream")
_COMMON_FIELDS = ("weights_version", "numerics", "context", "vocab_size", "block_size")
"""Fields in which all engines must agree, since a response may continue on any of them."""

_ENGINE_STOPPED = "the engine stopped and will not be restarted: send the request again after the service is restarted"
_SHUTTING_DOWN = "the service is shutting down: send it again in a moment"


class EnginePool:
    """Owns the queue and the engines, and distributes requests among them."""

    def __init__(self, engines: Sequence[EngineClient], queue: FairQueue) -> None:
        """Each engine has its index in this order as its `replica`."""
        self.engines = tuple(engines)
        self.queue = queue
        self.n_suspensions = 0
        """Times that a stream was suspended because its reader did not keep up."""
        self._waiting: dict[str, TokenStream] = {}  # by request id: those in the queue that no engine has
        self._suspended: dict[str, TokenStream] = {}  # by request id: submitted again once their readers catch up
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

    def start(self, files: WeightsFiles = read_directory) -> None:
        """Spawns the engine processes, each of which reads the weights from `files`."""
        for engine in self.engines:
            engine.supervisor.start(files)

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

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queues the sequences of one response, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        self.queue.check(requests, time.monotonic())
        stream = TokenStream(requests, self)
        self._enqueue(stream, requests)
        return stream

    def resume(self, stream: TokenStream) -> None:
        """Queues a paused stream's open sequences again, even while engines restart. Raises NotReady, QueueFull."""
        if self._are_all_stopped:
            raise NotReady(_SHUTTING_DOWN, 5)
        self.queue.check(stream.open_requests, time.monotonic())
        self._enqueue(stream, stream.renew())

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancels requests that their stream no longer needs; for the stream."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._suspended.pop(request_id, None)
            self.queue.remove(request_id)
        for engine in self.engines:
            engine.release(request_ids)

    def position(self, request_id: str) -> int | None:
        """Number of requests that wait ahead of this one; for its stream."""
        return self.queue.position(request_id)

    def suspend(self, stream: TokenStream) -> None:
        """Cancels the requests of a stream whose reader does not keep up, until resume_suspended(); for the stream."""
        self.n_suspensions += 1
        self.cancel(stream.open_ids)
        self._suspended.update(dict.fromkeys(stream.open_ids, stream))

    def resume_suspended(self, stream: TokenStream) -> None:
        """Queues the open sequences of a suspended stream again, without a second admission check; for the stream."""
        for request_id in stream.open_ids:
            self._suspended.pop(request_id, None)
        self._enqueue(stream, stream.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        _fail((*self._waiting.values(), *self._suspended.values()), error)
        for engine in self.engines:
            _fail(engine.requests.values(), error)

    def on_ready(self, index: int) -> None:
        """An engine has loaded; for its client."""
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
            self._common_ready = replace(loaded[0], device=f"{len(loaded)} x {devices}")
            self._loaded.set()

    def on_capacity(self) -> None:
        """Sends the waiting requests for which engines have capacity, in the order of the queue; for the clients."""
        while self._waiting and (taken := self.queue.take(self._choose_engine)):
            request_id, index = taken
            stream = self._waiting.pop(request_id)
            stream.engine = index
            self.engines[index].send(stream, request_id)

    def on_report(self, report: StepReport, ended: Sequence[str]) -> None:
        """An engine has completed a step; for its client."""
        has_backlog = any(engine.counters.waiting for engine in self.engines)
        self.queue.on_report(report.started, report.at, has_backlog=has_backlog)
        for request_id in ended:
            self.queue.remove(request_id)
        self.on_capacity()

    def on_crash(self, index: int) -> None:
        """The process of an engine has ended; for its client."""
        self._router.clear(index)
        self.on_capacity()

    def on_stopped(self, index: int, reason: EngineStopped) -> None:
        """An engine will not be restarted; for its client."""
        error = EngineFailed(_ENGINE_STOPPED) if reason.exit_code else NotReady(_SHUTTING_DOWN, 5)
        if not self._loaded.is_set() or self._are_all_stopped:
            self._stop(reason)
            self.fail_all(error)
        elif reason.exit_code:
            _log.error("engine %d is stopped, the others continue: %s", index, reason)
            self._return_all(self.engines[index])
        else:
            _fail(self.engines[index].requests.values(), error)

    @property
    def _are_all_stopped(self) -> bool:
        return all(engine.supervisor.is_stopped for engine in self.engines)

    def _enqueue(self, stream: TokenStream, requests: Iterable[Request]) -> None:
        for request in requests:
            self._waiting[request.id] = stream
            self.queue.add(request)
        self.on_capacity()

    def _choose_engine(self, request_id: str) -> int | None:
        """Engine to which a request is sent now; None if it must wait."""
        stream = self._waiting[request_id]
        request = stream.requests[0]
        available = {index: engine for index, engine in enumerate(self.engines) if engine.has_capacity(request)}
        if (bound := self._bound_engine(stream)) is not None:
            return bound if bound in available else None
        if not available or len(self.engines) == 1:
            return next(iter(available), None)
        candidates = {index: engine for index, engine in available.items() if engine.can_start} or available
        loads, requests = {index: engine.load for index, engine in candidates.items()}, stream.open_requests
        assert self._common_ready
        hashes = block_hashes(requests, self._common_ready.block_size)
        chosen = self._router.choose(hashes, loads, len(requests))
        facts = available[chosen].ready
        assert facts
        self._router.record(chosen, hashes, facts.blocks_total)
        return chosen

    def _bound_engine(self, stream: TokenStream) -> int | None:
        """The engine that computes other sequences of the stream, or that it may have crashed."""
        index = stream.engine
        if index is None or not (stream.crash_count or self.engines[index].has(stream)):
            return None
        return None if self.engines[index].supervisor.is_stopped else index

    def _return_all(self, engine: EngineClient) -> None:
        """Returns the requests of a stopped engine to the head of the queue, in their order."""
        returned = engine.requests
        engine.replayed += len(returned)
        engine.release(list(returned))
        for request_id, stream in reversed(returned.items()):
            self.queue.remove(request_id)
            self.queue.add(stream.request(request_id), first=True)
            self._waiting[request_id] = stream
        self.on_capacity()

    def _stop(self, reason: EngineStopped) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._stopped_event.set()


def _fail(streams: Iterable[TokenStream], error: EngineError) -> None:
    for stream in dict.fromkeys(streams):
        stream.fail(error, time.monotonic())


def _difference(facts: Sequence[Ready]) -> str:
    """The first field that differs; empty if all agree."""
    return next((name for name in _COMMON_FIELDS if len({getattr(one, name) for one in facts}) > 1), "")
