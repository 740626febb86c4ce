"""Engine pool: one or several engines behind one interface, with a router that prefers engines with a cached prefix.

loading --all have loaded the same--> serving --the last engine stops--> stopped
       +------------ one engine stops ---------------------------------------^

Requests that wait for one engine while another has free slots move there. The pool serves as long as one engine does.
After a crash, requests that only waited move to the other engines at once; suspects wait for the next process of their
engine, so they cannot crash another one. Only an engine that keeps crashing is stopped, and then all of its requests
move to the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from app.common.errors import EngineError, NotReady
from app.common.ipc import Ready
from app.common.types import Request
from app.engine_client.client import EngineClient
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

_MAX_MOVES = 8
"""Streams moved at once from engines with a queue to one without: bounds the time on the event loop."""


class EnginePool:
    """Owns the engines and distributes requests among them."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        """All engines share one queue, and each has its index in this order as its `replica`."""
        self.engines = tuple(engines)
        self.queue = engines[0].queue
        self._router = PrefixRouter(len(engines))
        self._common_ready: Ready | None = None
        """Facts that all engines share, once all have loaded."""
        self._loaded, self._stopped_event = asyncio.Event(), asyncio.Event()
        self._stopped: EngineStopped | None = None
        for engine in engines:
            engine.pool_events = self

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
        """Queues the sequences of one response on one engine. Raises NotReady, QueueFull, InvalidRequest."""
        if len(self.engines) == 1:
            return self.engines[0].submit(requests)
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        hashes = block_hashes(requests, self.ready.block_size)
        index = self._router.choose(hashes, self._loads(), len(requests))
        stream = self.engines[index].submit(requests)
        self._router.record(index, hashes, self._blocks(index))
        return stream

    def resume(self, stream: TokenStream) -> None:
        """Queues a paused stream's open sequences again, even while engines restart. Raises NotReady, QueueFull."""
        target = next((engine for engine in self.engines if engine is stream.source), self.engines[0])
        if target.ready is None and (target.supervisor.is_stopped or not stream.crash_count):
            target = self._other_than(target) or target
        stream.source = target
        target.resume(stream)

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for engine in self.engines:
            engine.fail_all(error)

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
        else:  # there may have been no other engine when theirs crashed
            for engine in self.engines:
                if not engine.ready:
                    self._move_away(engine, engine.unaffected)

    def on_capacity(self, index: int) -> None:
        """An engine has free slots: moves waiting requests of other engines there; for its client."""
        receiver = self.engines[index]
        donors = [
            engine for engine in self.engines if engine is not receiver and engine.ready and engine.counters.waiting
        ]
        if not (donors and receiver.has_capacity(1, "")):
            return
        for stream in _first_waiting(donors):
            if receiver.has_capacity(len(stream.open_ids), stream.requests[0].cache_namespace):
                self._move(stream, receiver)

    def on_crash(self, index: int) -> None:
        """The process of an engine has ended; for its client."""
        self._router.clear(index)
        self._move_away(self.engines[index], self.engines[index].unaffected)

    def on_stopped(self, index: int, reason: EngineStopped) -> None:
        """An engine will not be restarted; for its client."""
        engine = self.engines[index]
        if not self._loaded.is_set() or all(one.supervisor.is_stopped for one in self.engines):
            self._stop(reason)
        elif reason.exit_code:
            _log.error("engine %d is stopped, the others continue: %s", index, reason)
            self._move_away(engine, engine.streams)

    def _loads(self) -> dict[int, int]:
        """Loads of the engines that accept requests; of those without suspects, if there are any."""
        ready = {index: engine for index, engine in enumerate(self.engines) if engine.ready}
        without_suspects = {index: engine for index, engine in ready.items() if not engine.n_suspects}
        return {index: engine.load for index, engine in (without_suspects or ready).items()}

    def _blocks(self, index: int) -> int:
        ready = self.engines[index].ready
        return ready.blocks_total if ready else 0

    def _other_than(self, engine: EngineClient) -> EngineClient | None:
        """An engine that can take over requests: a ready one or, if this one is stopped, one that is restarting."""
        others = [one for one in self.engines if one is not engine and not one.supervisor.is_stopped]
        ready = [one for one in others if one.ready]
        candidates = ready or (others if engine.supervisor.is_stopped else [])
        return min(candidates, key=lambda one: (one.n_suspects > 0, one.load), default=None)

    def _move(self, stream: TokenStream, receiver: EngineClient) -> None:
        """Moves a stream under new request ids, so that late events of the old engine are not attributed to it."""
        old_ids = stream.open_ids
        donor = next(engine for engine in self.engines if engine is stream.source)
        donor.release(old_ids)
        requests = stream.renew()
        for old_id, request in zip(old_ids, requests, strict=True):
            self.queue.rename(old_id, request.id)
        receiver.adopt(stream)
        index, facts = self.engines.index(receiver), receiver.ready
        assert facts
        self._router.record(index, block_hashes(requests, facts.block_size), facts.blocks_total)

    def _move_away(self, engine: EngineClient, streams: Iterable[TokenStream]) -> None:
        count = 0
        for stream in streams:
            if target := self._other_than(engine):
                engine.release(stream.open_ids)
                target.adopt(stream)
                # Otherwise it is counted when an engine is ready, or not at all.
                if target.ready and not stream.is_suspended:
                    target.replayed += len(stream.open_ids)
                count += 1
        if self._other_than(engine):
            self.queue.clear_backlog(self.engines.index(engine))
        if count:
            _log.warning("%d open responses continue on other engines", count)

    def _stop(self, reason: EngineStopped) -> None:
        if self._stopped is None:
            self._stopped = reason
            self._stopped_event.set()


def _first_waiting(engines: Iterable[EngineClient]) -> list[TokenStream]:
    """Streams that wait for their first token, the first of each tenant and engine, by queue position."""
    waiting: defaultdict[tuple[EngineClient, str], list[tuple[int, TokenStream]]] = defaultdict(list)
    for engine in engines:
        for stream in engine.waiting:
            of_tenant = waiting[engine, stream.requests[0].cache_namespace]
            if len(of_tenant) < _MAX_MOVES and (position := stream.queue_position) is not None:
                of_tenant.append((position, stream))
    ordered = sorted((entry for entries in waiting.values() for entry in entries), key=lambda entry: entry[0])
    return [stream for _, stream in ordered[:_MAX_MOVES]]


def _difference(facts: Sequence[Ready]) -> str:
    """The first field that differs; empty if all agree."""
    return next((name for name in _COMMON_FIELDS if len({getattr(one, name) for one in facts}) > 1), "")
