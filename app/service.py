"""What every route shares: settings, engine, tokenizer, metrics; and how a request becomes a completion. No HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from app.batch import Batch
from app.caller import Caller
from app.completion import Clock, Completion, Patience
from app.engine.client import EngineClient, EngineGone
from app.engine.errors import DeadlineExceeded, InvalidRequest, NotReady
from app.engine.frames import Ready
from app.engine.params import SamplingParams
from app.gate import Gate
from app.guide import guide_of
from app.guide_checker import GuideChecker
from app.long_texts import LongTexts
from app.prompts import Read, Reader
from app.quotas import Lease
from app.settings import Settings
from app.wish import Wish
from model.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A completion that the engine has taken."""

    completion: Completion
    wish: Wish
    params: SamplingParams
    tokenizer: Tokenizer
    weights_version: str
    numerics: str
    truncated: bool
    lease: Lease
    """Of its caller's quota."""


class Service:
    """Wired once, in app/main.py."""

    def __init__(self, settings: Settings, engine: EngineClient, long_texts: LongTexts) -> None:
        self.settings = settings
        self.model_name = settings.weights.resolve().name
        """What clients call the model: the name of its directory."""
        self._long_texts = long_texts
        self.engine = engine
        self.gate = Gate(engine.queue)
        self.guides = GuideChecker(settings.weights, seconds=settings.guide_seconds)
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self.created = int(time.time())
        self._failed: asyncio.Future[EngineGone] = asyncio.get_running_loop().create_future()

    @property
    def phase(self) -> str:
        """What the service is doing, for people: ready, draining, or a step of the start."""
        if self.draining:
            return "draining"
        return self.engine.phase if self.tokenizer or self.engine.phase != "ready" else "loading tokenizer"

    def require_ready(self) -> tuple[Ready, Tokenizer]:
        """Raises NotReady while loading and draining."""
        if self.draining:
            raise NotReady("the service is shutting down: try again in a moment", 5)
        if self.engine.ready is None or self.tokenizer is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        return self.engine.ready, self.tokenizer

    async def load_tokenizer(self) -> None:
        """Beside the engine's start; a tokenizer that cannot be used ends the service."""
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, self.settings.weights)
            await asyncio.to_thread(lambda: tokenizer.bytes_of)
            await self.engine.wait_ready()
            self._check_vocabulary(tokenizer)
        except TokenizerError as error:
            self._failed.set_result(EngineGone(str(error), 2))
            return
        except Exception as error:  # nobody waits for this task: what it cannot do must end the service, not hang it
            self._failed.set_result(EngineGone(f"the tokenizer cannot be used ({type(error).__name__})", 2))
            return
        self.tokenizer = tokenizer

    async def wait_gone(self) -> EngineGone:
        """Waits until the service cannot go on, if ever."""
        engine_gone = asyncio.ensure_future(self.engine.wait_gone())
        try:
            await asyncio.wait({engine_gone, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            return self._failed.result() if self._failed.done() else engine_gone.result()
        finally:
            engine_gone.cancel()

    async def begin(self, name: str, wish: Wish, caller: Caller, heartbeat: float) -> Admitted:
        """Validates, admits, submits.

        Raises InvalidRequest, ContextLengthExceeded, QueueFull, QuotaUsedUp, NotReady, DeadlineExceeded.
        """
        clock = Clock()
        ready, tokenizer = self.require_ready()
        patience = self._patience(wish, heartbeat)
        with self.gate.lease(wish, caller, tokenizer, ready.context) as lease:
            with self.gate.room(wish, caller, patience):
                reads, source, guide = await self._read(wish, Reader(ready, tokenizer, self._long_texts), patience)
            batch = Batch(name, wish, ready, tokenizer, caller.salt)
            requests = batch.requests(reads, source, guide)
            self.gate.charge(lease, wish, requests)
            stream = self.engine.submit(requests)
        completion = Completion(stream, batch.choices(requests, reads), patience, clock)
        return Admitted(
            completion=completion,
            wish=wish,
            params=requests[0].params,
            tokenizer=tokenizer,
            weights_version=ready.weights_version,
            numerics=ready.numerics,
            truncated=any(read.truncated for read in reads),
            lease=lease,
        )

    async def _read(self, wish: Wish, reader: Reader, patience: Patience) -> tuple[list[Read], tuple[int, ...], str]:
        """Texts to tokens, and the guide; within the deadline, however many others wait for the same."""
        try:
            async with asyncio.timeout(patience.deadline) as limit:
                return await reader.prompts(wish), await reader.source(wish.source), await self._guide(wish)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the deadline passed before the text was read: raise deadline_ms") from None

    async def _guide(self, wish: Wish) -> str:
        """The grammar that the text must follow, which can be followed; empty for none."""
        # In a thread: a schema may be as large as a body.
        guide = await asyncio.to_thread(guide_of, *wish.guide) if wish.guide else None
        if guide is None:
            return ""
        await self.guides.check(guide)
        return guide.grammar

    def _patience(self, wish: Wish, heartbeat: float) -> Patience:
        longest = self.settings.request_timeout
        deadline = longest if wish.deadline_ms is None else wish.deadline_ms / 1e3
        if deadline > longest:
            raise InvalidRequest(f"deadline_ms must be at most {longest * 1e3:.0f}, this server's own", "deadline_ms")
        return Patience(deadline=deadline, queue=self.settings.queue_timeout, heartbeat=heartbeat)

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        model_size = self.engine.ready.vocab_size if self.engine.ready else tokenizer.vocab_size
        if tokenizer.vocab_size > model_size:
            raise TokenizerError(
                f"{self.settings.weights}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {model_size}"
            )
