"""What every route shares: settings, engine, tokenizer, metrics; and how a request becomes a completion. No HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from app.completion import Completion
from app.engine.admission import check_ids
from app.engine.client import EngineClient, EngineGone
from app.engine.errors import ContextLengthExceeded, InvalidRequest, NotReady
from app.engine.frames import Ready
from app.engine.guide_checker import GuideChecker
from app.engine.params import SamplingParams
from app.engine.types import Request
from app.settings import Settings
from model.tokenizer import Tokenizer, TokenizerError

_LONG_PROMPT_CHARACTERS = 20_000
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A completion as it was asked for; None means the default."""

    prompt: str | list[int]
    source: str | list[int] | None
    max_tokens: int
    sampling: dict[str, float | None]
    seed: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An admitted request."""

    completion: Completion
    params: SamplingParams
    weights_version: str


class Service:
    """Wired once, in app/main.py."""

    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.guides = GuideChecker(settings.weights, seconds=settings.guide_seconds)
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self.created = int(time.time())
        self._failed: asyncio.Future[EngineGone] = asyncio.get_running_loop().create_future()

    @property
    def model_name(self) -> str:
        """What clients call the model: the name of its directory."""
        return self.settings.weights.resolve().name

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

    async def begin(self, request_id: str, wish: Wish) -> Begun:
        """Validates, admits, submits. Raises InvalidRequest, ContextLengthExceeded, QueueFull, NotReady."""
        ready, tokenizer = self.require_ready()
        self.engine.check_queue()
        prompt = await self._prompt_ids(wish.prompt, ready, tokenizer)
        source = await self._source_ids(wish.source, ready, tokenizer)
        check_ids(prompt, context=ready.context, vocab_size=ready.vocab_size, field="prompt")
        params = _sampling_params(wish, ready)
        request = Request(
            id=request_id,
            prompt=tuple(prompt),
            max_tokens=min(wish.max_tokens, ready.context - len(prompt)),
            params=params,
            source=tuple(source),
            stop_ids=() if wish.ignore_eos else tokenizer.end_ids(ready.eos_ids),
        )
        completion = Completion(self.engine.submit(request), tokenizer, wish.stops)
        return Begun(completion=completion, params=params, weights_version=ready.weights_version)

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        model_size = self.engine.ready.vocab_size if self.engine.ready else tokenizer.vocab_size
        if tokenizer.vocab_size > model_size:
            raise TokenizerError(
                f"{self.settings.weights}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {model_size}"
            )

    async def _prompt_ids(self, prompt: str | list[int], ready: Ready, tokenizer: Tokenizer) -> list[int]:
        ids = await _ids(prompt, ready, tokenizer, "prompt")
        start_id = tokenizer.start_id(ready.start_id)
        if not ids and start_id is None:
            raise InvalidRequest("the prompt is empty, and this model has no token that starts a text", "prompt")
        return ids or [start_id or 0]

    async def _source_ids(self, source: str | list[int] | None, ready: Ready, tokenizer: Tokenizer) -> list[int]:
        if not ready.has_encoder and source is not None:
            raise InvalidRequest("this model has no encoder: leave out source and put the text into prompt", "source")
        if not ready.has_encoder:
            return []
        ids = await _ids(source, ready, tokenizer, "source") if source else []
        if not ids:
            raise InvalidRequest("this model answers a source: give the text its encoder reads", "source")
        check_ids(ids, context=ready.context, vocab_size=ready.vocab_size, field="source")
        return ids


async def _ids(text: str | list[int], ready: Ready, tokenizer: Tokenizer, field: str) -> list[int]:
    """Token ids of a text; those of a prompt with the special tokens that the tokenizer adds (BOS, say)."""
    if not isinstance(text, str):
        return text
    if (least := tokenizer.least_tokens(text)) > ready.context:
        raise ContextLengthExceeded(least, ready.context, field)

    def encode() -> list[int]:
        return tokenizer.encode(text) if field == "prompt" else tokenizer.encode_many([text])[0]

    # Long ones off the event loop, which has other streams to serve.
    return await asyncio.to_thread(encode) if len(text) > _LONG_PROMPT_CHARACTERS else encode()


def _sampling_params(wish: Wish, ready: Ready) -> SamplingParams:
    """What was asked for, else the model's defaults, else no filter; a random seed where none was given."""
    asked = {name: value for name, value in wish.sampling.items() if value is not None}
    chosen = {**_NEUTRAL, **ready.sampling_defaults, **asked}
    return SamplingParams(
        temperature=chosen["temperature"],
        top_k=max(0, int(chosen["top_k"])),
        top_p=chosen["top_p"],
        min_p=chosen["min_p"],
        seed=secrets.randbits(53) if wish.seed is None else wish.seed,  # 53 bits survive every JSON parser
        logprobs=wish.logprobs,
    )
