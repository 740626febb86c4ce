"""The service, independent of HTTP: settings, the current model instance, and the way of a request to its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.access.rate_limiter import Reservation
from app.access.tenant import Tenant
from app.access.worker_turns import LoopShare, WorkAccount
from app.common.errors import DeadlineExceeded, EngineError, EngineFailed, InvalidRequest, NotReady, Starting
from app.common.ipc import Ready
from app.common.model_version import Version
from app.common.settings import Settings
from app.common.types import Request, SamplingParams
from app.engine_client.canary import Canary
from app.engine_client.engine_pool import EnginePool
from app.engine_client.supervisor import EngineStopped
from app.generation.completion import Completion, CompletionTimes, Timeouts
from app.generation.detokenizer import OutputChoice
from app.generation.engine_requests import BuiltRequests
from app.generation.prompt_encoder import PromptEncoder
from app.generation.request import GenerationRequest
from app.generation.resumed_choice import ResumedChoice
from app.guided.grammar import MAX_BYTES, grammar_from
from app.guided.validator import GrammarValidator
from app.serving.admission import AdmissionControl
from app.serving.failure_monitor import FailureMonitor
from app.serving.model_instance import ModelInstance
from app.tokenization.tokenizer_pool import TokenizerPool
from model.tokenizer.tokenizer import Tokenizer, TokenizerError

_log = logging.getLogger("inkstream")
_CANARY_ID = "service canary"
"""Id of the canary request of the health check; a client's ids cannot contain a space."""
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
            choices = built.choices(engine_requests, encoded)
            if request.resumption:
                await self._feed_received(choices, engine_requests, account)
            # Anything that can fail comes before submission.
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

    async def _feed_received(
        self, choices: Sequence[OutputChoice], engine_requests: Sequence[Request], account: WorkAccount
    ) -> None:
        """Feeds the tokens that the client has. Raises ResumeRefused."""
        resumed = [choice for choice in choices if isinstance(choice, ResumedChoice)]

        def feed() -> None:
            for choice in resumed:
                choice.feed()

        await self.tokenizer_pool.run(sum(len(one.generated) for one in engine_requests), feed, account)

    async def _run_canary(self) -> bool | None:
        """Whether an engine answers a canary request from the queue; None if the service is busy or not ready."""
        engine = self.engine
        if (ready := engine.ready) is None:
            return None
        canary = Canary(ready, _CANARY_ID)
        request_ids = canary.open_ids
        try:
            async with asyncio.timeout(_CANARY_SECONDS):
                engine.submit(canary)
                await canary.wait_answered()
        except (EngineError, TimeoutError) as error:
            return False if isinstance(error, EngineFailed) else None
        except Exception:
            _log.exception("the canary request failed")
            return False
        finally:
            engine.cancel(request_ids)
        return True

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
