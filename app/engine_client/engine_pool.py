"""Engine pool: one or several engines behind one interface, with a router that prefers engines with a cached prefix.

loading --all have loaded the same--> serving --the last is gone--> gone
       +------------ one is gone ------------------------------------------^

Requests that wait for one engine while another has free slots move there. The pool serves as long as one engine does.
After a crash, requests that only waited move to the other engines at once; suspects wait for the next process of their
engine, so they cannot crash another one. Only an engine that keeps crashing is given up, and then all of its requests
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
from app.engine_client.supervisor import EngineGone, FilesOfWeights, as_in_directory
from app.engine_client.token_stream import TokenStream

# An engine that has the prompt's first blocks in its prefix cache need not compute them. The router does not query the
# engines but remembers what it sent: the chained hashes of the blocks, as many as the cache has blocks, with
# least-recently-used eviction like the cache itself.
#
# The bound on what an engine may have to do is that of "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and
# Zadimoghaddam, SODA 2018): _BOUND times the mean, rounded up. A prefix that all requests share fills one engine up to
# that bound, then a second one caches it, too.

_BOUND = 1.25
_MOST_HASHES = 4096
"""Of the prompts of one request: 65,536 tokens in blocks of 16, which take some two milliseconds."""


def block_hashes(requests: Iterable[Request], block_size: int) -> list[int]:
    """Names of the full blocks of all prompts, each beginning before what follows it.

    A hash covers all tokens up to the end of its block, and the cache namespace, which isolates tenants. A hash
    collision costs a prompt that is computed twice, and nothing else.
    """
    chains = (_chain(request, block_size) for request in requests if request.leader is None)
    return list(dict.fromkeys(islice((name for chain in chains for name in chain), _MOST_HASHES)))


def _chain(request: Request, block_size: int) -> Iterator[int]:
    name = hash((request.salt, request.source))
    for start in range(0, len(request.prompt) - block_size + 1, block_size):
        name = hash((name, request.prompt[start : start + block_size]))
        yield name


class PrefixRouter:
    """Remembers which blocks were sent to which engine. Owned by the event loop."""

    def __init__(self, engines: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._turns = [0] * engines
        self._turn = 0

    def choose(self, hashes: Sequence[int], loads: Mapping[int, int], adding: int) -> int:
        """Chooses an engine for `adding` sequences. loads: number of sequences of each candidate.

        Among engines within the bound: the one with most of the blocks, then the least loaded, then the least
        recently used.
        """
        bound = math.ceil(_BOUND * (sum(loads.values()) + adding) / len(loads))
        least = min(loads.values())
        fit = [engine for engine, load in loads.items() if load == least or load + adding <= bound]
        return max(fit, key=lambda engine: (self.known(engine, hashes), -loads[engine], -self._turns[engine]))

    def known(self, engine: int, hashes: Iterable[int]) -> int:
        """How many of these blocks the engine has, or had last."""
        known = self._known[engine]
        return sum(name in known for name in hashes)

    def note(self, engine: int, hashes: Sequence[int], most: int) -> None:
        """Records that these blocks were sent to an engine whose cache has `most` blocks."""
        self._turn += 1
        self._turns[engine] = self._turn
        known = self._known[engine]
        # In reverse order: a block is always evicted before its predecessor.
        for name in reversed(hashes):
            known[name] = None
            known.move_to_end(name)
        while len(known) > most:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Forgets the blocks of an engine that has lost its cache."""
        self._known[engine].clear()


_log = logging.getLogger("inkstream")
_SAME = ("weights_version", "numerics", "context", "vocab_size", "block_size")
"""Fields in which all engines must agree, since an answer may continue on any of them."""

_MOST_MOVES = 8
"""Streams moved at once from engines with a queue to one without: bounds the time on the event loop."""


class EnginePool:
    """Owns the engines."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        """All engines share one queue, and each has its index in this order as its `replica`."""
        self.engines = tuple(engines)
        self.queue = engines[0].queue
        self._router = PrefixRouter(len(engines))
        self._facts: Ready | None = None
        """Of all engines, once all have loaded."""
        self._loaded, self._gone_event = asyncio.Event(), asyncio.Event()
        self._gone: EngineGone | None = None
        for engine in engines:
            engine.peers = self

    @property
    def ready(self) -> Ready | None:
        """What was loaded; None until all have loaded it, and while no engine takes requests."""
        return self._facts if any(engine.ready for engine in self.engines) else None

    @property
    def phase(self) -> str:
        """What the pool is doing, for people."""
        if self.ready:
            return "ready"
        waited_for = [engine.supervisor for engine in self.engines if not engine.ready]
        # Report why an engine was given up only once all engines are.
        return min(waited_for, key=lambda one: one.is_gone).phase if waited_for else "loading"

    @property
    def restarts(self) -> int:
        """Engine processes that ended."""
        return sum(engine.supervisor.restarts for engine in self.engines)

    def start(self, files: FilesOfWeights = as_in_directory) -> None:
        """Spawns the engine processes, each of which reads the weights from `files`."""
        for engine in self.engines:
            engine.supervisor.start(files)

    async def stop(self) -> None:
        """Ends them; open streams end with NotReady."""
        await asyncio.gather(*[engine.supervisor.stop() for engine in self.engines])

    async def wait_ready(self) -> Ready:
        """Waits until all have loaded; what, also where one has crashed since."""
        await self._loaded.wait()
        assert self._facts is not None
        return self._facts

    async def wait_gone(self) -> EngineGone:
        """Waits until no engine can go on, if ever; or, until all have loaded, until one cannot."""
        await self._gone_event.wait()
        assert self._gone is not None
        return self._gone

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queues the sequences of one answer in one engine, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if len(self.engines) == 1:
            return self.engines[0].submit(requests)
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        hashes = block_hashes(requests, self.ready.block_size)
        place = self._router.choose(hashes, self._loads(), len(requests))
        stream = self.engines[place].submit(requests)
        self._router.note(place, hashes, self._blocks(place))
        return stream

    def resume(self, stream: TokenStream) -> None:
        """Queues again what a paused stream has left, also while engines restart. Raises NotReady, QueueFull."""
        home = next((engine for engine in self.engines if engine is stream.source), self.engines[0])
        if home.ready is None and (home.supervisor.is_gone or not stream.strikes):
            home = self._other_than(home) or home
        stream.source = home
        home.resume(stream)

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for engine in self.engines:
            engine.fail_all(error)

    def on_ready(self, place: int) -> None:
        """An engine has loaded; for its client."""
        here = [engine.ready for engine in self.engines if engine.ready]
        if len(self.engines) == 1:
            self._facts = here[0]
            self._loaded.set()
            return
        other = _difference([*([self._facts] if self._facts else []), *here])
        if self._facts and other:
            reason = f"it came back with another {other} than the others have"
            self.engines[place].supervisor.dismiss(EngineGone(reason, 1))
        elif not self._facts and len(here) == len(self.engines):
            if other:
                self._end(EngineGone(f"the engines do not agree in their {other}: start again", 1))
                return
            devices = ", ".join(dict.fromkeys(one.device for one in here))
            self._facts = replace(here[0], device=f"{len(here)} x {devices}")
            self._loaded.set()
        else:  # there may have been none when theirs crashed
            for engine in self.engines:
                if not engine.ready:
                    self._send_away(engine, engine.innocent)

    def on_room(self, place: int) -> None:
        """An engine has free slots: moves requests there that wait for other engines; for its client."""
        taker = self.engines[place]
        givers = [engine for engine in self.engines if engine is not taker and engine.ready and engine.counters.waiting]
        if not (givers and taker.has_room(1, "")):
            return
        for stream in _in_turn(givers):
            if taker.has_room(len(stream.open_ids), stream.requests[0].salt):
                self._move(stream, taker)

    def on_crash(self, place: int) -> None:
        """The process of an engine has ended; for its client."""
        self._router.forget(place)
        self._send_away(self.engines[place], self.engines[place].innocent)

    def on_gone(self, place: int, reason: EngineGone) -> None:
        """An engine will not be restarted; for its client."""
        engine = self.engines[place]
        if not self._loaded.is_set() or all(one.supervisor.is_gone for one in self.engines):
            self._end(reason)
        elif reason.exit_code:
            _log.error("engine %d is given up, the others go on: %s", place, reason)
            self._send_away(engine, engine.streams)

    def _loads(self) -> dict[int, int]:
        """Of those that take requests; where some have no suspects to try, only of these."""
        ready = {place: engine for place, engine in enumerate(self.engines) if engine.ready}
        calm = {place: engine for place, engine in ready.items() if not engine.n_suspects}
        return {place: engine.load for place, engine in (calm or ready).items()}

    def _blocks(self, place: int) -> int:
        ready = self.engines[place].ready
        return ready.blocks_total if ready else 0

    def _other_than(self, engine: EngineClient) -> EngineClient | None:
        """An engine to take over requests: one that is ready, or, if this one is given up, one that will be."""
        others = [one for one in self.engines if one is not engine and not one.supervisor.is_gone]
        ready = [one for one in others if one.ready]
        may = ready or (others if engine.supervisor.is_gone else [])
        return min(may, key=lambda one: (one.n_suspects > 0, one.load), default=None)

    def _move(self, stream: TokenStream, taker: EngineClient) -> None:
        """Moves a stream under new request ids, so that late events of the old engine are not attributed to it."""
        names = stream.open_ids
        giver = next(engine for engine in self.engines if engine is stream.source)
        giver.part_with(names)
        requests = stream.renew()
        for name, request in zip(names, requests, strict=True):
            self.queue.rename(name, request.id)
        taker.adopt(stream)
        place, facts = self.engines.index(taker), taker.ready
        assert facts
        self._router.note(place, block_hashes(requests, facts.block_size), facts.blocks_total)

    def _send_away(self, engine: EngineClient, streams: Iterable[TokenStream]) -> None:
        count = 0
        for stream in streams:
            if home := self._other_than(engine):
                engine.part_with(stream.open_ids)
                home.adopt(stream)
                if home.ready and not stream.is_held:  # else it is counted once there is an engine, or not at all
                    home.replayed += len(stream.open_ids)
                count += 1
        if self._other_than(engine):
            self.queue.stand_down(self.engines.index(engine))
        if count:
            _log.warning("%d open answers go on with other engines", count)

    def _end(self, reason: EngineGone) -> None:
        if self._gone is None:
            self._gone = reason
            self._gone_event.set()


def _in_turn(engines: Iterable[EngineClient]) -> list[TokenStream]:
    """Streams that wait for their first token, the first of each tenant and engine, by queue position."""
    firsts: defaultdict[tuple[EngineClient, str], list[tuple[int, TokenStream]]] = defaultdict(list)
    for engine in engines:
        for stream in engine.waiting:
            of_caller = firsts[engine, stream.requests[0].salt]
            if len(of_caller) < _MOST_MOVES and (position := stream.queue_position) is not None:
                of_caller.append((position, stream))
    found = sorted((one for some in firsts.values() for one in some), key=lambda one: one[0])
    return [stream for _, stream in found[:_MOST_MOVES]]


def _difference(facts: Sequence[Ready]) -> str:
    """The first field that differs; empty if all agree."""
    return next((name for name in _SAME if len({getattr(one, name) for one in facts}) > 1), "")
