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
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from app.common.errors import EngineError, EngineFailed, InvalidRequest, NotReady
from app.common.ipc import Cancel, Ready, Submit, WorkerConfig
from app.common.model_version import Version
from app.common.types import Counters, PromptScores, Request, RequestStarted, StepReport
from app.engine_client.crash_recovery import CANARY_ID, CanaryRequest, CrashRecovery
from app.engine_client.fair_queue import FairQueue, prompt_tokens
from app.engine_client.supervisor import WORKER, EngineStopped, Supervisor, WeightsFiles, read_directory
from app.engine_client.token_stream import TokenStream, notify

_log = logging.getLogger("inkstream")

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


def block_hashes(requests: Iterable[Request], block_size: int, version: Version) -> list[int]:
    """Chained hashes of the full blocks of all prompts, in order.

    A hash covers all tokens up to the end of its block, the adapters, and the cache namespace, which isolates tenants.
    All engines have the same weights. A hash collision costs a prompt that is computed twice, and nothing else.
    """
    chains = (_chain(request, block_size, version) for request in requests if request.leader is None)
    return list(dict.fromkeys(islice((block for chain in chains for block in chain), _MAX_HASHES)))


def _chain(request: Request, block_size: int, version: Version) -> Iterator[int]:
    parent = hash((request.cache_namespace, request.source, *version.adapters))
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


_REFUSED = "the engine crashed twice while it worked on this request, so it is not retried: change the request"

_PREFETCHED_SHARE, _MAX_PREFETCHED = 4, 8
"""Requests that an engine has beyond those that it can run: a quarter as many, at most eight."""
_STEP_PROMPT_TOKENS = 256
"""Prompt tokens that an engine on a CPU starts in one step."""


def deliver(report: StepReport, streams: Mapping[str, TokenStream], reached: set[TokenStream]) -> list[str]:
    """Adds a report to the streams of its requests, which it adds to `reached`; returns the ids of ended requests.

    This may suspend a stream, which removes its requests from `streams`.
    """
    ended = []
    for request_id, seconds in report.work:
        if stream := streams.get(request_id):
            stream.work_seconds += seconds
    items: list[RequestStarted | PromptScores] = [*report.started, *report.scores]
    for item in items:
        if stream := streams.get(item.request_id):
            stream.push(item.request_id, report.at, item)
            reached.add(stream)
    for event in report.events:
        if stream := streams.get(event.request_id):
            stream.push(event.request_id, report.at, event)
            reached.add(stream)
            if event.finish:
                ended.append(event.request_id)
    for failure in report.failed:
        if stream := streams.get(failure.request_id):
            error = InvalidRequest(failure.message) if failure.is_user_error else EngineFailed(failure.message)
            stream.push(failure.request_id, report.at, error)
            reached.add(stream)
            ended.append(failure.request_id)
    return ended


class EngineClient:
    """Owns an engine, and the requests that it has been sent or will be sent again after a crash."""

    def __init__(self, config: WorkerConfig, *, silence_seconds: float = 30.0, command: Sequence[str] = WORKER) -> None:
        self.pool: EnginePool  # set by the pool
        self.counters = Counters()
        self._past_counters = Counters()  # of earlier processes of this engine
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self.max_running = config.max_running
        """Most requests that it runs at once."""
        self._index = config.replica
        self._step_prompt_tokens = config.tokens_per_step or _STEP_PROMPT_TOKENS
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, TokenStream] = {}  # by request id, in the order of sending
        self._reached: set[TokenStream] = set()  # whose readers do not know yet what has arrived
        self._unstarted: dict[str, Request] = {}  # those that the engine has and has not started
        self._recovery = CrashRecovery()
        self._canary = CanaryRequest()

    @property
    def ready(self) -> Ready | None:
        """Facts about the loaded model; None while the engine does not accept requests."""
        return self.supervisor.ready

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    @property
    def requests(self) -> dict[str, TokenStream]:
        """Its unfinished requests by id, in the order of sending."""
        return dict(self._streams)

    @property
    def cumulative_counters(self) -> Counters:
        """Monotonic counters over all its processes: a sum over engines that drops would look like a counter reset."""
        one, two = self._past_counters, self.counters
        preemptions, violations = one.preemptions + two.preemptions, one.block_violations + two.block_violations
        return Counters(preemptions=preemptions, block_violations=violations)

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and are retried one by one."""
        return self._recovery.n_suspects

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work besides grammars, and so must make progress; for the supervisor."""
        return self._recovery.n_in_flight > len(self._compiling)

    @property
    def is_running_canary(self) -> bool:
        """Whether the engine runs only the canary request; for the supervisor."""
        return self._canary.is_open

    @property
    def can_start(self) -> bool:
        """Whether one more request would probably start at once."""
        return self.load < self.max_running and not self.counters.waiting

    def has(self, stream: TokenStream) -> bool:
        """Whether this engine computes some of the stream's sequences, or will after a crash."""
        return any(request_id in self._streams for request_id in stream.open_ids)

    def has_capacity(self, request: Request) -> bool:
        """Whether the request may be sent now.

        With API keys, the last eighth of the slots and the prefetch are only for tenants that have nothing here,
        and a tenant gets no further ahead than what the engine can start in one step: the requests that the engine
        has not started are in order of arrival, and others' turns must not wait for them. Requests whose grammars are
        being compiled take no capacity from others, since they take no part in the steps.
        """
        if self.ready is None or self.n_suspects:
            return False
        compiling = self._compiling
        n_taken = len(compiling) if request.grammar else len(self._streams) - len(compiling)
        if n_taken >= self.max_running + max(1, min(_MAX_PREFETCHED, self.max_running // _PREFETCHED_SHARE)):
            return False
        namespace = request.cache_namespace
        if not namespace:
            return True
        taken = compiling if request.grammar else self._streams.keys() - compiling
        own = [name for name in taken if self._streams[name].requests[0].cache_namespace == namespace]
        if not own:
            return True
        tokens = sum(prompt_tokens(self._unstarted[name]) for name in own if name in self._unstarted)
        return n_taken < self.max_running - self.max_running // 8 and tokens < self._step_prompt_tokens

    def send(self, stream: TokenStream, request_id: str) -> None:
        """Sends a request for which there is capacity; a suspect is sent once no other one is on trial."""
        self._streams[request_id] = stream
        if stream.crash_count:
            self._recovery.add_suspect(request_id, stream.crash_count)
            self._send_suspects()
        else:
            self._recovery.add(request_id, self._progress(request_id))
            self._submit(request_id)

    def release(self, request_ids: Sequence[str]) -> None:
        """Cancels those of these requests that it has; their streams keep their crash counts."""
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.crash_count = max(stream.crash_count, self._recovery.crash_count(request_id))
                self.supervisor.send(Cancel(request_id))
        self._remove(request_ids)

    def on_report(self, report: StepReport) -> None:
        """Handles the report of a step; for the supervisor."""
        self.counters = report.counters
        for started in report.started:
            self._unstarted.pop(started.request_id, None)
        is_scheduled = bool(self._reached)
        ended = deliver(report, self._streams, self._reached)
        if self._reached and not is_scheduled:  # once for all sequences, and all reports in the pipe
            asyncio.get_running_loop().call_soon(self._notify_readers)
        self._remove(ended)
        self._send_suspects()
        self.pool.on_report(report, ended)

    def _notify_readers(self) -> None:
        reached, self._reached = self._reached, set()
        notify(reached)

    def on_ready(self) -> None:
        """The engine accepts requests: sends those that were in flight first; for the supervisor."""
        n_open = len(self._streams)
        self.pool.on_ready(self._index)
        if self.ready and n_open:
            _log.warning("%d open requests continue on this engine", n_open)
            self.replayed += n_open
        if self.ready and (canary := self._canary.start(self.ready, self.pool.new_stream)):
            self._streams[CANARY_ID] = canary
            self._recovery.add_first(CANARY_ID)
        self._send_suspects()
        self.pool.on_capacity()

    def on_crash(self) -> bool:
        """Returns whether a request is refused; all others wait for the next process. For the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._unstarted.clear()
        self._remove(self._canary.on_crash())
        for stream in dict.fromkeys(self._streams.values()):
            stream.incidents.append((time.monotonic(), "engine crashed"))
        refused = self._recovery.on_crash(self._progress)
        # A stream fails as a whole: all its sequences have the same parameters.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            stream.fail(EngineFailed(_REFUSED), time.monotonic())
            self._canary.schedule()
        self.pool.on_crash(self._index)
        return bool(refused)

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted; for the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._remove(self._canary.on_crash())
        self.pool.on_stopped(self._index, reason)

    @property
    def _compiling(self) -> set[str]:
        """Requests whose grammars the engine compiles or has just compiled."""
        return {request_id for request_id, request in self._unstarted.items() if request.grammar}

    def _send_suspects(self) -> None:
        """Sends the next suspect, if it can start at once: while it waits it could not clear itself."""
        self._recovery.update_trial(self._progress)
        can_start = self._recovery.n_in_flight < self.max_running and not self.counters.waiting
        if self.ready and can_start and (request_id := self._recovery.pop_next(self._progress)):
            self._submit(request_id)

    def _submit(self, request_id: str) -> None:
        self._unstarted[request_id] = request = self._streams[request_id].request(request_id)
        self.supervisor.send(Submit(request))

    def _progress(self, request_id: str) -> int:
        return self._streams[request_id].progress(request_id)

    def _remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._recovery.remove(request_id)
            self._streams.pop(request_id, None)
            self._unstarted.pop(request_id, None)


_COMMON_FIELDS = ("model_version", "numerics", "context", "vocab_size", "block_size")
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
        stream = self.new_stream(requests)
        self._enqueue(stream, requests)
        return stream

    def new_stream(self, requests: Sequence[Request]) -> TokenStream:
        """A stream for requests that no queue has yet."""
        return TokenStream(
            requests,
            cancel=self.cancel,
            position=self.queue.position,
            suspend=self.suspend,
            resume=self.resume_suspended,
        )

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
        if len(self.engines) == 1:
            return 0 if self.engines[0].has_capacity(request) else None
        available = {index: engine for index, engine in enumerate(self.engines) if engine.has_capacity(request)}
        if (bound := self._bound_engine(stream)) is not None:
            return bound if bound in available else None
        if not available:
            return None
        candidates = {index: engine for index, engine in available.items() if engine.can_start} or available
        loads, requests = {index: engine.load for index, engine in candidates.items()}, stream.open_requests
        assert self._common_ready
        hashes = block_hashes(requests, self._common_ready.block_size, self._common_ready.model_version)
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
