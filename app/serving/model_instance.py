"""One set of weights as it is served: engine, tokenizer, guides, chat template, name.

made --start()--> loading --load()--> loaded --close()--> closed

Whoever answers a request with it holds it until the answer is over, so that it is known when nobody needs it any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.chat.template import ChatTemplate
from app.common.errors import EngineError
from app.common.fault_injection import is_armed
from app.engine_client.engine_pool import EnginePool
from app.guided.validator import GrammarValidator
from app.serving.weights_snapshot import WeightsFingerprint, WeightsSnapshot
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_sandbox import TokenizerSandbox
from app.tokenization.tokenizer_trial import check_vocabulary, try_tokenizer
from model.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("inkstream")


class ModelInstance:
    """Owned by the service; nothing of it is ever exchanged, so what a request takes from it belongs together."""

    def __init__(
        self,
        weights: Path,
        seen: WeightsFingerprint,
        engine: EnginePool,
        chat_template: ChatTemplate | None,
        *,
        guide_seconds: float,
        snapshot: WeightsSnapshot | None = None,
        copies: Sequence[Path] = (),
    ) -> None:
        """`seen` is how the directory looked before anything of it was read.

        snapshot: of the weights, owned from now on; without one processes that restart read the directory again.
        copies: folders for what takes space of it.
        """
        self.weights = weights
        self._snapshot = snapshot or WeightsSnapshot(weights, {}, {})
        self._copies = copies
        self._copying: asyncio.Task[None] | None = None
        self.seen = seen
        self.model_name = weights.resolve().name
        """What clients call the model: the name of its directory."""
        self.created = int(time.time())
        self.engine = engine
        self.guides = GrammarValidator(weights, seconds=guide_seconds, files=self._snapshot.files)
        self.chat_template = chat_template
        self.tokenizer: Tokenizer | None = None
        """There once it is loaded."""
        self._sandbox: TokenizerSandbox | None = None
        self.is_closed = False
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()

    def start(self) -> None:
        """The engine begins to load, once the weights are copied; until then it imports what it needs."""
        self._copying = asyncio.create_task(asyncio.to_thread(self._snapshot.copy, self._copies))
        self.engine.start(self._copied_files)

    async def load(self) -> None:
        """The tokenizer, beside the engine. Raises TokenizerError; waits for ever where the engine does not come."""
        await self._copied_files()
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        ready = await self.engine.wait_ready()
        check_vocabulary(self.weights, tokenizer, ready.vocab_size)
        if tokenizer.unproven and not is_armed("tokenizer.trusted"):
            _log.info("the tokenizer has unusual regular expressions: texts are read in sandboxed processes")
            with self._snapshot.reading():
                self._sandbox = TokenizerSandbox(self.weights)
        self.tokenizer = tokenizer

    def text_encoder(self) -> TextEncoder:
        """For the texts of one request, once the tokenizer is loaded."""
        assert self.tokenizer
        return TextEncoder(self.tokenizer, self._sandbox)

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
    def held(self) -> Iterator[ModelInstance]:
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
        if self._sandbox:
            self._sandbox.close()
        await asyncio.gather(self.engine.stop(), self.guides.close())
        if self._copying:
            await asyncio.gather(self._copying, return_exceptions=True)
        self._snapshot.close()

    async def _copied_files(self) -> Mapping[str, str]:
        """Where processes read the weights, once no write to the directory can reach it."""
        if self._copying:
            await asyncio.shield(self._copying)
        return self._snapshot.files

    def _load_tokenizer(self) -> Tokenizer:
        with self._snapshot.reading():
            tokenizer = try_tokenizer(self.weights).tokenizer
        _ = tokenizer.bytes_of  # made when it is first asked for, which must not be on the event loop
        return tokenizer
