"""One set of weights as it is served: engine, tokenizer, guides, chat template, name. Knows no request and no HTTP.

made --start()--> loading --load()--> loaded --close()--> closed

Whoever answers a request with it holds it until the answer is over, so that it is known when nobody needs it any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.chat_template import ChatTemplate
from app.engine.errors import EngineError
from app.engine.fleet import Fleet
from app.guide_checker import GuideChecker
from app.weights_watch import Look
from model.tokenizer import Tokenizer, TokenizerError


class Served:
    """Owned by the service; nothing of it is ever exchanged, so what a request takes from it belongs together."""

    def __init__(
        self,
        weights: Path,
        seen: Look,
        engine: Fleet,
        chat_template: ChatTemplate | None,
        *,
        guide_seconds: float,
    ) -> None:
        """`seen` is how the directory looked before anything of it was read."""
        self.weights = weights
        self.seen = seen
        self.model_name = weights.resolve().name
        """What clients call the model: the name of its directory."""
        self.created = int(time.time())
        self.engine = engine
        self.guides = GuideChecker(weights, seconds=guide_seconds)
        self.chat_template = chat_template
        self.tokenizer: Tokenizer | None = None
        """There once it is loaded."""
        self.is_closed = False
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()

    def start(self) -> None:
        """The engine begins to load."""
        self.engine.start()

    async def load(self) -> None:
        """The tokenizer, beside the engine. Raises TokenizerError; waits for ever where the engine does not come."""
        tokenizer = await asyncio.to_thread(_load_tokenizer, self.weights)
        ready = await self.engine.wait_ready()
        self._check_vocabulary(tokenizer, ready.vocab_size)
        self.tokenizer = tokenizer

    def hold(self) -> None:
        """Somebody needs it until release()."""
        self._holders += 1
        self._free.clear()

    def release(self) -> None:
        """As often as hold()."""
        self._holders -= 1
        if not self._holders:
            self._free.set()

    @contextmanager
    def held(self) -> Iterator[Served]:
        """hold() and release()."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    async def wait_free(self) -> None:
        """Waits until nobody holds it."""
        await self._free.wait()

    async def close(self, error: EngineError | None = None) -> None:
        """Ends its processes, any number of times; streams that are still open end with `error`."""
        self.is_closed = True
        if error:
            self.engine.fail_all(error)
        if self.chat_template:
            await self.chat_template.close()
        await asyncio.gather(self.engine.stop(), self.guides.close())

    def _check_vocabulary(self, tokenizer: Tokenizer, model_size: int) -> None:
        if tokenizer.vocab_size > model_size:
            raise TokenizerError(
                f"{self.weights}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {model_size}"
            )


def _load_tokenizer(weights: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(weights)
    _ = tokenizer.bytes_of  # made when it is first asked for, which must not be on the event loop
    return tokenizer
