"""The service, independent of HTTP: settings, the current model instance, and admission of requests.

AdmissionControl checks the tenant's rate limits and the queue's capacity.

FailureMonitor detects that the service fails every request, and reports it through /health/ready:

healthy --the last FAILURES requests all failed with server errors--> suspected --the canary fails--> failing
   ^                                                                     |                              |
   +-------------------- any request succeeds, or the canary does -------+------------------------------+

Failures alone prove nothing: one client may send the same poisoned request again and again. So a canary request, whose
content no client controls, confirms them. It runs at most once in RECHECK_SECONDS, and only while failures are
unexplained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from app.access.rate_limiter import RateLimiter, Reservation, Tenant
from app.access.worker_turns import LoopShare, WorkAccount
from app.common.errors import (
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    InvalidRequest,
    NotReady,
    Starting,
    Unavailable,
)
from app.common.ipc import Ready
from app.common.model_version import Version
from app.common.settings import Settings
from app.common.types import Request, SamplingParams
from app.engine_client.engine_pool import EnginePool
from app.engine_client.request_queue import RequestQueue
from app.engine_client.supervisor import EngineStopped
from app.generation.collector import collect
from app.generation.completion import Completion, CompletionTimes, Timeouts
from app.generation.engine_requests import BuiltRequests
from app.generation.prompt_encoder import PromptEncoder, tail_length
from app.generation.request import GenerationRequest, Prompt
from app.guided.grammar import MAX_BYTES, grammar_from
from app.guided.validator import GrammarValidator
from app.serving.model_instance import ModelInstance
from app.tokenization.text_encoder import TokenizerPool
from model.tokenizer.tokenizer import Tokenizer, TokenizerError

_log = logging.getLogger("inkstream")
FAILURES = 8
RECHECK_SECONDS = 2.0
_PROBLEM = (
    "the last requests failed on the server's side, and so does a canary request: the log names the reason; load "
    "working weights (kill -HUP) or restart the service"
)


class FailureMonitor:
    """Health state from recent outcomes; owned by the service, which runs run() as one task."""

    def __init__(self, canary: Callable[[], Awaitable[bool | None]]) -> None:
        """`canary` runs a request through the service; returns whether it succeeded, or None if that is unknown."""
        self.problem = ""
        """Why the service is not ready; empty while it is healthy."""
        self._canary = canary
        self._failures = 0
        self._is_suspected = asyncio.Event()

    def record_success(self) -> None:
        """A request succeeded."""
        self._failures = 0
        self._is_suspected.clear()
        if self.problem:
            self.problem = ""
            _log.info("answers succeed again: the service is ready")

    def record_failure(self) -> None:
        """A request failed through the server's fault."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._is_suspected.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._is_suspected.wait()
            succeeded = await self._canary()
            # A request may have succeeded while the canary ran.
            if succeeded:
                self.record_success()
            elif succeeded is False and self._is_suspected.is_set() and not self.problem:
                self.problem = _PROBLEM
                _log.error("not ready: the last %d answers failed, and so does a canary request", self._failures)
            await asyncio.sleep(RECHECK_SECONDS)


# Admission before tokenization uses cheap estimates, because tokenizing a megabyte of text takes half a second; the
# exact numbers are checked afterwards.

_DECAY = 0.9
_PRIOR_CHARACTERS_PER_TOKEN = 3.0


class AdmissionControl:
    """Admits requests; owned by the event loop."""

    def __init__(self) -> None:
        self._rate_limiter = RateLimiter()
        self._characters, self._tokens = _PRIOR_CHARACTERS_PER_TOKEN * 1000, 1000.0
        """Characters and tokens of recent texts."""

    @contextmanager
    def reserve_tokens(
        self, request: GenerationRequest, tenant: Tenant, tokenizer: Tokenizer, context: int
    ) -> Iterator[Reservation]:
        """Reserves the request's estimated tokens of its tenant's limits; refunded if it is not admitted.

        Raises InvalidRequest if it can never fit, RateLimitExceeded if it does not fit now.
        """
        max_sampled = request.n_sampled * request.max_tokens
        min_tokens = sum(min(context, _min_tokens(prompt, tokenizer) + max_sampled) for prompt in request.prompts)
        try:
            reservation = self._rate_limiter.reserve(tenant, min_tokens, time.monotonic())
        except InvalidRequest:  # its body was read, and a chat was rendered
            self.count_refused(tenant)
            raise
        try:
            yield reservation
        except Unavailable:
            reservation.cancel()
            raise
        except BaseException:
            reservation.end(0)
            raise

    def check_requests(self, tenant: Tenant) -> None:
        """Raises RateLimitExceeded if the tenant has no requests left, before any work is done for one."""
        self._rate_limiter.check_requests(tenant, time.monotonic())

    def count_refused(self, tenant: Tenant) -> None:
        """Counts a request that was refused for what it sent: reading it took the event loop's time."""
        self._rate_limiter.count_request(tenant, time.monotonic())

    def reserve_delivery(self, tenant: Tenant) -> Reservation:
        """Counts a request for events that were generated before; it is concurrent until the reservation ends.

        Raises RateLimitExceeded.
        """
        return self._rate_limiter.reserve(tenant, 0, time.monotonic())

    @contextmanager
    def count_request(self, tenant: Tenant) -> Iterator[WorkAccount]:
        """Counts a request that generates nothing against the request limits. Raises RateLimitExceeded."""
        reservation = self._rate_limiter.reserve(tenant, 0, time.monotonic())
        try:
            yield WorkAccount(tenant.cache_namespace, reservation)
        finally:
            reservation.end(0)

    @contextmanager
    def prepare(self, tenant: Tenant) -> Iterator[WorkAccount]:
        """Host work before reserve_tokens(), which counts the request; if the work fails, the request is counted here.

        Raises RateLimitExceeded.
        """
        with self.count_request(tenant) as account:
            yield account
            account.reservation.cancel()

    @contextmanager
    def reserve_queue(
        self, request: GenerationRequest, tenant: Tenant, timeouts: Timeouts, queue: RequestQueue
    ) -> Iterator[None]:
        """Reserves capacity in `queue` during tokenization; refuses a request whose deadline would pass in the queue.

        Raises QueueFull, and InvalidRequest if it can never fit into the queue.
        """
        max_wait = min(timeouts.queue, timeouts.deadline / 2)
        others = [text for text in (request.source, request.suffix) if text]
        texts = [*request.prompts, *others]
        max_characters = None if request.truncate_prompt_tokens is None else tail_length(request.truncate_prompt_tokens)
        tokens = sum(self._estimate_tokens(text, max_characters) for text in texts)
        requests = len(request.prompts) * request.n_sampled
        with queue.reserved(tenant.cache_namespace, requests, tokens, time.monotonic(), max_wait):
            yield

    def charge(self, reservation: Reservation, request: GenerationRequest, engine_requests: Sequence[Request]) -> None:
        """Replaces the estimate by the exact number of tokens. Raises InvalidRequest, RateLimitExceeded."""
        leaders = [leader for leader in engine_requests if leader.leader is None]
        prompt_tokens = sum(len(leader.prompt) + len(leader.source) for leader in leaders)
        max_sampled = sum(each.max_tokens for each in engine_requests)
        reservation.charge(prompt_tokens + max_sampled, time.monotonic())
        if all(isinstance(prompt, str) for prompt in request.prompts) and request.truncate_prompt_tokens is None:
            self._characters = self._characters * _DECAY + sum(map(len, request.prompts))
            self._tokens = self._tokens * _DECAY + sum(len(leader.prompt) for leader in leaders)

    def _estimate_tokens(self, prompt: Prompt, max_characters: int | None) -> int:
        """Estimated tokens of a prompt, from the characters per token of recent texts."""
        if not isinstance(prompt, str):
            return len(prompt)
        length = len(prompt) if max_characters is None else min(len(prompt), max_characters)
        return round(length * self._tokens / self._characters)


def _min_tokens(prompt: Prompt, tokenizer: Tokenizer) -> int:
    return tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)


_CANARY = "the canary"
"""Name and cache namespace of canary requests; a client's names cannot contain a space."""
_CANARY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that was submitted to the engine; its owner must also release `instance`."""

    instance: ModelInstance
    completion: Completion
    request: GenerationRequest
    params: SamplingParams
    tokenizer: Tokenizer
    model_version: Version
    numerics: str
    truncated: bool
    reservation: Reservation
    """The reservation on its tenant's rate limits."""


class Service:
    """State shared by all routes; created in app/main.py."""

    def __init__(self, settings: Settings, instance: ModelInstance, tokenizer_pool: TokenizerPool) -> None:
        self.settings = settings
        self.instance = instance
        """The model instance for new requests. A request keeps its own across awaits."""
        self.tokenizer_pool = tokenizer_pool
        self.admission = AdmissionControl()
        self.loop_share = LoopShare()
        self.draining = False
        self.failures = FailureMonitor(self._run_canary)
        """Detects that every recent request failed."""
        self._model_names = set(instance.accepted_names)
        self._retiring: list[ModelInstance] = []
        self._loaded, self._switched = asyncio.Event(), asyncio.Event()
        self._failed: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()

    @property
    def engine(self) -> EnginePool:
        """The current engine pool."""
        return self.instance.engine

    @property
    def engines(self) -> list[EnginePool]:
        """The current engine pool, and pools of old weights that still serve requests."""
        return [instance.engine for instance in (self.instance, *self._retiring)]

    @property
    def reserved_bytes(self) -> int:
        """Memory that running engines have reserved for their KV caches, and that still seems free."""
        return sum(engine.supervisor.unwritten_cache_bytes for pool in self.engines for engine in pool.engines)

    @property
    def model_name(self) -> str:
        """The current model's name for clients."""
        return self.instance.model_name

    @property
    def phase(self) -> str:
        """Human-readable state: ready, draining, or a startup phase."""
        if self.draining:
            return "draining"
        return self.engine.phase if self.instance.tokenizer or self.engine.phase != "ready" else "loading tokenizer"

    def is_model_name(self, name: str) -> bool:
        """Whether `name` names the model or its directory, or one that was served before."""
        return name in self._model_names

    def require_open(self) -> None:
        """Raises NotReady while draining."""
        if self.draining:
            raise NotReady("the service is shutting down: try again in a moment", 5)

    def require_ready(self, instance: ModelInstance | None = None) -> tuple[Ready, Tokenizer]:
        """Facts and tokenizer of the current instance or `instance`. Raises NotReady while loading or draining."""
        self.require_open()
        instance = instance or self.instance
        if instance.engine.ready is None or instance.tokenizer is None:
            error = NotReady if self._loaded.is_set() else Starting
            raise error(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        return instance.engine.ready, instance.tokenizer

    async def load(self) -> None:
        """Loads the first model instance, which has been started; an unusable tokenizer ends the service."""
        try:
            await self.instance.load()
            self._loaded.set()
        except TokenizerError as error:
            self._fail(EngineStopped(str(error), 2))
        except Exception as error:  # nothing awaits this task: an error must end the service, not hang it
            self._fail(EngineStopped(f"the tokenizer cannot be used ({type(error).__name__})", 2))

    async def wait_loaded(self) -> None:
        """Waits until the first model instance is loaded."""
        await self._loaded.wait()

    async def wait_stopped(self) -> EngineStopped:
        """Waits for a permanent failure of the current engine; failures of old weights are ignored."""
        while not self._failed.done():
            instance = self.instance
            self._switched.clear()
            engine_stopped = asyncio.ensure_future(instance.engine.wait_stopped())
            others: list[asyncio.Future[Any]] = [self._failed, asyncio.ensure_future(self._switched.wait())]
            try:
                await asyncio.wait([engine_stopped, *others], return_when=asyncio.FIRST_COMPLETED)
                if engine_stopped.done() and instance is self.instance:
                    self._fail(engine_stopped.result())
            finally:
                engine_stopped.cancel()
                others[1].cancel()
        return self._failed.result()

    def switch(self, instance: ModelInstance) -> ModelInstance:
        """Routes new requests to this loaded instance. Returns the old one, which must be closed with retire()."""
        old, self.instance = self.instance, instance
        self._retiring.append(old)
        self._model_names |= instance.accepted_names
        self._switched.set()
        self.failures.record_success()  # earlier failures concern the old weights
        return old

    async def retire(self, old: ModelInstance, error: EngineError) -> None:
        """Stops the processes of an old instance; requests that still use it end with `error`."""
        await old.close(error)
        self._retiring.remove(old)

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for engine in self.engines:
            engine.fail_all(error)

    async def close(self) -> None:
        """Stops all processes; open streams end with an error."""
        self.loop_share.close()
        await asyncio.gather(*[instance.close() for instance in (self.instance, *self._retiring)])

    async def begin(
        self,
        name: str,
        request: GenerationRequest,
        tenant: Tenant,
        heartbeat: float,
        instance: ModelInstance | None = None,
        times: CompletionTimes | None = None,
    ) -> Admitted:
        """Validates, admits and submits a request to the current instance or `instance`, which it acquires.

        `times` is filled even if the request is refused.

        Raises InvalidRequest, ContextLengthExceeded, QueueFull, RateLimitExceeded, NotReady, DeadlineExceeded.
        """
        instance = instance or self.instance
        instance.acquire()
        try:
            return await self._begin(name, request, tenant, heartbeat, instance, times or CompletionTimes())
        except BaseException:  # including a client disconnect
            instance.release()
            raise

    async def _begin(
        self,
        name: str,
        request: GenerationRequest,
        tenant: Tenant,
        heartbeat: float,
        instance: ModelInstance,
        times: CompletionTimes,
    ) -> Admitted:
        ready, tokenizer = self.require_ready(instance)
        with self.admission.reserve_tokens(request, tenant, tokenizer, ready.context) as reservation:
            timeouts = self._timeouts(request, heartbeat)
            with self.admission.reserve_queue(request, tenant, timeouts, instance.engine.queue):
                account = WorkAccount(tenant.cache_namespace, reservation)
                encoder = PromptEncoder(ready, instance.text_encoder(), self.tokenizer_pool, account)
                times.tokenizing = time.monotonic()
                async with _deadline(timeouts):
                    encoded = await encoder.encode_prompts(request)
                    source = await encoder.encode_source(request.source)
                    times.compiling = time.monotonic() if request.grammar else None
                    grammar = await self._compile_grammar(request, instance.grammar_validator, account)
            built = BuiltRequests(name, request, ready, tokenizer, tenant.cache_namespace)
            engine_requests = built.requests(encoded, source, grammar)
            self.admission.charge(reservation, request, engine_requests)
            choices = built.choices(engine_requests, encoded)  # anything that can fail comes before submission
            times.queued = time.monotonic()
            completion = Completion(instance.engine, engine_requests, choices, timeouts, times)
            completion.submit()
        return Admitted(
            instance=instance,
            completion=completion,
            request=request,
            params=engine_requests[0].params,
            tokenizer=tokenizer,
            model_version=ready.model_version,
            numerics=ready.numerics,
            truncated=any(prompt.truncated for prompt in encoded),
            reservation=reservation,
        )

    async def _run_canary(self) -> bool | None:
        """Whether a canary request succeeds; None if the service is busy or not ready."""
        try:
            await self._continue_canary()
        except EngineError as error:
            return False if isinstance(error, EngineFailed) else None
        except Exception:
            _log.exception("the canary request failed")
            return False
        return True

    async def _continue_canary(self) -> None:
        """Runs a canary request; raises the errors that a client's request would get."""
        deadline = min(_CANARY_SECONDS, self.settings.request_timeout)
        source = "Once" if self.require_ready()[0].has_encoder else None
        request = GenerationRequest(
            prompts=["Once"], source=source, max_tokens=2, ignore_eos=True, deadline_ms=int(deadline * 1e3)
        )
        admitted = await self.begin(_CANARY, request, Tenant(cache_namespace=_CANARY), heartbeat=deadline)
        try:
            await collect(admitted.completion)
        finally:
            admitted.completion.end()
            admitted.reservation.end(0)
            admitted.instance.release()

    async def _compile_grammar(
        self, request: GenerationRequest, validator: GrammarValidator, account: WorkAccount
    ) -> str:
        """The validated grammar of the request; empty for none."""
        if not request.grammar:
            return ""
        field, value = request.grammar
        length = len(value) if isinstance(value, str) else MAX_BYTES  # a schema may be as large as the request body
        grammar = await self.tokenizer_pool.run(length, lambda: grammar_from(field, value), account)
        if grammar is None:
            return ""
        return await validator.check(grammar, account)

    def _fail(self, reason: EngineStopped) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    def _timeouts(self, request: GenerationRequest, heartbeat: float) -> Timeouts:
        deadline = self.settings.request_timeout
        if request.deadline_ms is not None:
            if request.deadline_ms > (limit := self.settings.max_deadline_ms):
                raise InvalidRequest(f"deadline_ms must be at most {limit}, this server's own limit", "deadline_ms")
            deadline = request.deadline_ms / 1e3
        return Timeouts(deadline=deadline, queue=self.settings.queue_timeout, heartbeat=heartbeat)


@asynccontextmanager
async def _deadline(timeouts: Timeouts) -> AsyncIterator[None]:
    """Applies the request's deadline to tokenization and grammar validation, including their queues."""
    try:
        async with asyncio.timeout(timeouts.deadline) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the deadline passed while the prompt was encoded: raise deadline_ms") from None
