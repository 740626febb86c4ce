"""Encodes the texts of one request, in this process or in a sandboxed one, within a limit on time."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator

from app.common.errors import EngineFailed, InvalidRequest
from app.sandbox.sandbox import SandboxError
from app.tokenization.tokenizer_sandbox import Encode, Part, TokenizerSandbox, slices_of
from model.files import one_line
from model.tokenizer.token_spans import CompactSpans, Spans
from model.tokenizer.tokenizer import Tokenizer

_SECONDS, _SECONDS_PER_CHARACTER, _MIN_SECONDS = 2.0, 1e-5, 0.1
"""Time limits for all texts of a request, and a minimum for each: about twenty times the time of known tokenizers."""
_POOL_LENGTH = 1 << 14
_log = logging.getLogger("inkstream")


class TextEncoder:
    """Encodes the texts of one request, and limits the time that they take together.

    A proven tokenizer runs in this process. An unproven one runs in the sandbox, so that calls block: make them from a
    worker thread, which `pool_length` ensures.
    """

    def __init__(self, tokenizer: Tokenizer, sandbox: TokenizerSandbox | None = None) -> None:
        self.tokenizer = tokenizer
        self._sandbox = sandbox
        self._seconds_left = _SECONDS

    def pool_length(self, length: int) -> int:
        """The length for TokenizerPool.run(): with a sandbox, no text is short enough for the event loop."""
        return max(length, _POOL_LENGTH) if self._sandbox else length

    def encode(self, text: str) -> list[int]:
        """Tokenizer.encode(). Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported:
                return self.tokenizer.encode(text)
        return list(self._ask(Encode(text=text, part="prompt")).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Encodes without adding special tokens. Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported:
                return self.tokenizer.encode_many([text])[0]
        return list(self._ask(Encode(text=text, part="plain")).ids)

    def span_slices(self, text: str, part: Part) -> Generator[None, None, CompactSpans]:
        """The tokens of a text with their spans, in one slice with a sandbox. Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported:
                return (yield from slices_of(self.tokenizer, text, part))
        spans = CompactSpans()
        spans.append(self._ask(Encode(text=text, part=part, has_spans=True)))
        return spans

    def _ask(self, request: Encode) -> Spans:
        assert self._sandbox
        self._seconds_left += len(request.text) * _SECONDS_PER_CHARACTER
        started = time.monotonic()
        try:
            return self._sandbox.ask(request, seconds=max(self._seconds_left, _MIN_SECONDS)).spans()
        except SandboxError as error:
            raise InvalidRequest(
                f"the model's tokenizer {error} for this text: shorten it, or break up long runs of one kind of "
                "character"
            ) from None
        finally:
            self._seconds_left -= time.monotonic() - started


class _PanicsReported:
    """Turns panics of the tokenizers library, which are not Exceptions and would end the thread, into EngineFailed.

    Used for each prompt of a batch: as a generator it cost as much as encoding a short text.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
            return
        _log.error("the tokenizer failed on a text: %s", one_line(str(error)[:200]))
        raise EngineFailed("the model's tokenizer failed on this text") from None


_panics_reported = _PanicsReported()
