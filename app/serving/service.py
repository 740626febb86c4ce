"""The service, independent of HTTP: settings, the served model instance, and admission of requests.

FailureMonitor detects that the service fails every request, and reports it through /health/ready:

healthy --every one of the last FAILURES answers failed on the server's side--> suspected --the canary fails--> failing
   ^                                                                                |                              |
   +------------------------- any answer succeeds, or the canary does --------------+------------------------------+

Failures alone prove nothing: one client may send the same poisoned request again and again. So a canary request, whose
content no client controls, confirms them. It runs at most once in RECHECK_SECONDS, and only while failures are
unexplained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.access.rate_limiter import Reservation, Tenant
from app.access.tenant_queue import LoopShare, WorkAccount
from app.chat.template import ChatTemplate
from app.common.errors import DeadlineExceeded, EngineError, EngineFailed, InvalidRequest, NotReady
from app.common.ipc import Ready
from app.common.settings import Settings
from app.common.types import SamplingParams
from app.engine_client.engine_pool import EnginePool
from app.engine_client.supervisor import EngineGone
from app.generation.prompt_encoder import PromptEncoder
from app.generation.request import GenerationRequest
from app.generation.session import BuiltRequests, GenerationSession, SessionTimes, Timeouts
from app.guided.grammar import MOST_BYTES, guide_of
from app.guided.validator import GrammarValidator
from app.serving.admission import AdmissionControl
from app.serving.model_instance import ModelInstance
from app.tokenization.text_encoder import TokenizerPool
from model.tokenizer.tokenizer import Tokenizer, TokenizerError

_log = logging.getLogger("inkstream")
FAILURES = 8
RECHECK_SECONDS = 2.0
_PROBLEM = (
    "the last answers failed on the server's side, and a request of its own does, too: the log names the reason; load "
    "good weights (kill -HUP) or start the service again"
)


class FailureMonitor:
    """Health state from recent outcomes; owned by the service, which runs run() as one task."""

    def __init__(
        self,
        canary: Callable[[], Awaitable[bool | None]],
        *,
        failures: int = FAILURES,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        """`canary` runs a request through the service; returns whether it succeeded, or None if that is unknown."""
        self.problem = ""
        """Why the service is not ready; empty while it is healthy."""
        self._canary = canary
        self._most_failures = failures
        self._recheck_seconds = recheck_seconds
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
        if self._failures >= self._most_failures:
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
            await asyncio.sleep(self._recheck_seconds)


_CANARY = "the canary"
"""Name and cache namespace of canary requests; a client's names cannot contain a space."""
_CANARY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A completion that was submitted to the engine; its owner must also release `served`."""

    served: ModelInstance
    completion: GenerationSession
    wish: GenerationRequest
    params: SamplingParams
    tokenizer: Tokenizer
    weights_version: str
    numerics: str
    truncated: bool
    lease: Reservation
    """The reservation on its tenant's rate limits."""


class Service:
    """State shared by all routes; created in app/main.py."""

    def __init__(self, settings: Settings, served: ModelInstance, long_texts: TokenizerPool) -> None:
        self.settings = settings
        self.served = served
        """The model instance for new requests. A request keeps its own across awaits."""
        self._long_texts = long_texts
        self.gate = AdmissionControl()
        self.loop_share = LoopShare()
        self.draining = False
        self.failures = FailureMonitor(self._run_canary)
        """Detects that every recent request failed."""
        self._names = {served.model_name}
        self._retiring: list[ModelInstance] = []
        self._loaded, self._switched = asyncio.Event(), asyncio.Event()
        self._failed: asyncio.Future[EngineGone] = asyncio.get_running_loop().create_future()

    @property
    def engine(self) -> EnginePool:
        """The current engine pool."""
        return self.served.engine

    @property
    def engines(self) -> list[EnginePool]:
        """The current engine pool, and those of old weights that still serve requests."""
        return [served.engine for served in (self.served, *self._retiring)]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The current tokenizer; None until it is loaded."""
        return self.served.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The current chat template, if the weights have one."""
        return self.served.chat_template

    @property
    def model_name(self) -> str:
        """The current model's name for clients."""
        return self.served.model_name

    @property
    def created(self) -> int:
        """Unix time at which the current model was loaded."""
        return self.served.created

    @property
    def phase(self) -> str:
        """Human-readable state: ready, draining, or a startup phase."""
        if self.draining:
            return "draining"
        return self.engine.phase if self.tokenizer or self.engine.phase != "ready" else "loading tokenizer"

    def is_called(self, name: str) -> bool:
        """Whether `name` is the model's name, or the name of weights that were served before."""
        return name in self._names

    def require_open(self) -> None:
        """Raises NotReady while draining."""
        if self.draining:
            raise NotReady("the service is shutting down: try again in a moment", 5)

    def require_ready(self, served: ModelInstance | None = None) -> tuple[Ready, Tokenizer]:
        """Facts and tokenizer of the current instance or `served`. Raises NotReady while loading or draining."""
        self.require_open()
        served = served or self.served
        if served.engine.ready is None or served.tokenizer is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        return served.engine.ready, served.tokenizer

    async def load(self) -> None:
        """Loads the first model instance, which has been started; an unusable tokenizer ends the service."""
        try:
            await self.served.load()
            self._loaded.set()
        except TokenizerError as error:
            self._fail(EngineGone(str(error), 2))
        except Exception as error:  # nothing awaits this task: an error must end the service, not hang it
            self._fail(EngineGone(f"the tokenizer cannot be used ({type(error).__name__})", 2))

    async def wait_loaded(self) -> None:
        """Waits until the first model instance is loaded."""
        await self._loaded.wait()

    async def wait_gone(self) -> EngineGone:
        """Waits for a permanent failure of the current engine; failures of old weights are ignored."""
        while not self._failed.done():
            served = self.served
            self._switched.clear()
            engine_gone = asyncio.ensure_future(served.engine.wait_gone())
            others: list[asyncio.Future[Any]] = [self._failed, asyncio.ensure_future(self._switched.wait())]
            try:
                await asyncio.wait([engine_gone, *others], return_when=asyncio.FIRST_COMPLETED)
                if engine_gone.done() and served is self.served:
                    self._fail(engine_gone.result())
            finally:
                engine_gone.cancel()
                others[1].cancel()
        return self._failed.result()

    def switch(self, served: ModelInstance) -> ModelInstance:
        """Routes new requests to this loaded instance. Returns the old one, for which the caller must call retire()."""
        old, self.served = self.served, served
        self._retiring.append(old)
        self._names.add(served.model_name)
        self._switched.set()
        self.failures.record_success()  # earlier failures were of the old weights
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
        await asyncio.gather(*[served.close() for served in (self.served, *self._retiring)])

    async def begin(
        self, name: str, wish: GenerationRequest, caller: Tenant, heartbeat: float, served: ModelInstance | None = None
    ) -> Admitted:
        """Validates, admits and submits a request to the current instance or `served`, which is held until released.

        Raises InvalidRequest, ContextLengthExceeded, QueueFull, QuotaUsedUp, NotReady, DeadlineExceeded.
        """
        served = served or self.served
        served.hold()
        try:
            return await self._begin(name, wish, caller, heartbeat, served)
        except BaseException:  # including a client disconnect
            served.release()
            raise

    async def _begin(
        self, name: str, wish: GenerationRequest, caller: Tenant, heartbeat: float, served: ModelInstance
    ) -> Admitted:
        clock = SessionTimes()
        ready, tokenizer = self.require_ready(served)
        patience = self._patience(wish, heartbeat)
        with self.gate.lease(wish, caller, tokenizer, ready.context) as lease:
            with self.gate.room(wish, caller, patience, served.engine.queue):
                account = WorkAccount(caller.salt, lease)
                reader = PromptEncoder(ready, served.text_encoder(), self._long_texts, account)
                async with _deadline(patience):
                    reads, source = await reader.prompts(wish), await reader.source(wish.source)
                    guide = await self._guide(wish, served.guides, account)
            batch = BuiltRequests(name, wish, ready, tokenizer, caller.salt)
            requests = batch.requests(reads, source, guide)
            self.gate.charge(lease, wish, requests)
            choices = batch.choices(requests, reads)  # anything that can fail comes before submission
            stream = served.engine.submit(requests)
        completion = GenerationSession(stream, choices, patience, clock)
        return Admitted(
            served=served,
            completion=completion,
            wish=wish,
            params=requests[0].params,
            tokenizer=tokenizer,
            weights_version=ready.weights_version,
            numerics=ready.numerics,
            truncated=any(read.truncated for read in reads),
            lease=lease,
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
        longest = min(_CANARY_SECONDS, self.settings.request_timeout)
        source = "Once" if self.require_ready()[0].has_encoder else None
        wish = GenerationRequest(
            prompts=["Once"], source=source, max_tokens=2, ignore_eos=True, deadline_ms=int(longest * 1e3)
        )
        admitted = await self.begin(_CANARY, wish, Tenant(salt=_CANARY), heartbeat=longest)
        try:
            while not admitted.completion.is_over:
                if await admitted.completion.ready():
                    admitted.completion.take()
        finally:
            admitted.completion.close()
            admitted.lease.end(0)
            admitted.served.release()

    async def _guide(self, wish: GenerationRequest, guides: GrammarValidator, account: WorkAccount) -> str:
        """The validated grammar of the request; empty for none."""
        if not wish.guide:
            return ""
        field, value = wish.guide
        length = len(value) if isinstance(value, str) else MOST_BYTES  # a schema may be as large as the request body
        guide = await self._long_texts.run(length, lambda: guide_of(field, value), account)
        if guide is None:
            return ""
        await guides.check(guide, account)
        return guide.grammar

    def _fail(self, gone: EngineGone) -> None:
        if not self._failed.done():
            self._failed.set_result(gone)

    def _patience(self, wish: GenerationRequest, heartbeat: float) -> Timeouts:
        longest = self.settings.longest_deadline_ms
        if wish.deadline_ms is not None and wish.deadline_ms > longest:
            raise InvalidRequest(f"deadline_ms must be at most {longest}, this server's own limit", "deadline_ms")
        deadline = self.settings.request_timeout if wish.deadline_ms is None else wish.deadline_ms / 1e3
        return Timeouts(deadline=deadline, queue=self.settings.queue_timeout, heartbeat=heartbeat)


@asynccontextmanager
async def _deadline(patience: Timeouts) -> AsyncIterator[None]:
    """Applies the request's deadline to tokenization and grammar validation, including their queues."""
    try:
        async with asyncio.timeout(patience.deadline) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the text was read: raise deadline_ms") from None
