"""Model instance: the engine pool, tokenizer, grammar validator and chat template of one set of weights.

created --start()--> loading --load()--> loaded --close()--> closed

Reference counted: each request holds a reference until its response is complete, so that a reload knows when to close
the instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.chat.template_client import ChatTemplate
from app.common.errors import EngineError
from app.common.weights_store import WeightsStore
from app.engine_client.engine_pool import EnginePool
from app.guided.validator import GrammarValidator
from app.serving.weights_snapshot import WeightsFingerprint, WeightsSnapshot
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_sandbox import TokenizerSandbox
from app.tokenization.tokenizer_trial import check_vocabulary, try_tokenizer
from model.checkpoint.gguf_directory import is_model_file, series_stem
from model.checkpoint.hub import source_of
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import WeightsVersion

_log = logging.getLogger("inkstream")


class ModelInstance:
    """Owned by the service. Its parts never change, so that a request always uses matching ones."""

    def __init__(
        self,
        weights: Path,
        fingerprint: WeightsFingerprint,
        engine: EnginePool,
        chat_template: ChatTemplate | None,
        *,
        grammar_seconds: float,
        name: str | None = None,
        snapshot: WeightsSnapshot | None = None,
        store: WeightsStore | None = None,
    ) -> None:
        """`fingerprint` is the directory's fingerprint from before anything was read.

        name: the model's name for clients, by default the directory's.
        snapshot: of the weights, owned by this object; without one, restarted processes read the directory again.
        store: for copies of large weights.
        """
        self.weights = weights
        self._snapshot = snapshot or WeightsSnapshot(weights, {}, {})
        self._store = store
        self._copying: asyncio.Task[None] | None = None
        self.fingerprint = fingerprint
        self.source = source_of(weights)
        """The commit that the weights were downloaded as; None for a directory of the user's own."""
        own_name = series_stem(weights.name) if is_model_file(weights.name) else weights.resolve().name
        self.model_name = self.source.repository if self.source else name or own_name
        """The model's name for clients: org/name of the Hub, else that in its manifest, or its directory's."""
        self.accepted_names = frozenset({self.model_name, own_name})
        """The names by which a request may ask for it."""
        self.created = int(time.time())
        self.engine = engine
        self.grammar_validator = GrammarValidator(self._snapshot.directory, seconds=grammar_seconds)
        self.chat_template = chat_template
        self.tokenizer: Tokenizer | None = None
        """None until it is loaded."""
        self.tokenizer_info: bytes | memoryview = b""
        """The response of GET /tokenizer_info, encoded once: 6,000 special tokens take 10 ms."""
        self._sandbox: TokenizerSandbox | None = None
        self.is_closed = False
        self._references = 0
        self._unreferenced = asyncio.Event()
        self._unreferenced.set()

    @property
    def revision(self) -> str | None:
        """The commit of the Hugging Face Hub, for clients."""
        return self.source.commit if self.source else None

    def start(self) -> None:
        """Starts the engine, which imports its modules while the weights are copied, and then loads."""
        if not self.source:  # files of the Hub's cache are never written again
            self._copying = asyncio.create_task(asyncio.to_thread(self._snapshot.keep, self._store))
        self.engine.start(self._kept_version)

    async def load(self) -> None:
        """Loads the tokenizer while the engine loads. Raises TokenizerError; waits forever for an engine that fails."""
        await self._kept_version()
        tokenizer, _ = await asyncio.gather(asyncio.to_thread(self._load_tokenizer), self._check_chat_template())
        ready = await self.engine.wait_ready()
        check_vocabulary(self.weights, tokenizer, ready.vocab_size)
        if tokenizer.unproven:
            _log.info("the tokenizer is not proven to be fast: texts are tokenized in sandboxed processes")
            self._sandbox = TokenizerSandbox(self._snapshot.directory)
        self.tokenizer = tokenizer

    def text_encoder(self) -> TextEncoder:
        """A text encoder for one request; the tokenizer must be loaded."""
        assert self.tokenizer
        return TextEncoder(self.tokenizer, self._sandbox)

    def acquire(self) -> None:
        """Acquires a reference until release()."""
        self._references += 1
        self._unreferenced.clear()

    def release(self) -> None:
        """Releases a reference of acquire()."""
        self._references -= 1
        if not self._references:
            self._unreferenced.set()

    @contextmanager
    def acquired(self) -> Iterator[ModelInstance]:
        """Holds a reference inside the block."""
        self.acquire()
        try:
            yield self
        finally:
            self.release()

    async def wait_unreferenced(self) -> None:
        """Waits until no reference is held."""
        await self._unreferenced.wait()

    async def close(self, error: EngineError | None = None) -> None:
        """Stops its processes; idempotent. Open streams end with `error`."""
        self.is_closed = True
        if error:
            self.engine.fail_all(error)
        if self.chat_template:
            await self.chat_template.close()
        if self._sandbox:
            self._sandbox.close()
        await asyncio.gather(self.engine.stop(), self.grammar_validator.close())
        if self._copying:
            await asyncio.gather(self._copying, return_exceptions=True)
        self._snapshot.close()

    async def _kept_version(self) -> WeightsVersion | None:
        """Waits for the copies; returns what processes read, unaffected by later writes to the directory."""
        if self._copying:
            await asyncio.shield(self._copying)
        return self._snapshot.version if self._snapshot.version.files else None

    async def _check_chat_template(self) -> None:
        """Warns of a template that cannot be compiled: completions work without it."""
        if self.chat_template and (problem := await self.chat_template.problem()):
            _log.warning("%s; chats get status 400, completions work", problem)

    def _load_tokenizer(self) -> Tokenizer:
        tokenizer = try_tokenizer(self._snapshot.directory)
        _ = tokenizer.bytes_of  # computed on first use, which must not happen on the event loop
        return tokenizer
