"""Encodes a request's texts off the event loop: in this process, or in a sandboxed one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from app.common.errors import EngineFailed, InvalidRequest
from app.tokenization.tokenizer_sandbox import TokenizerSandbox, TooSlow
from model.files import one_line
from model.tokenizer.token_spans import CompactSpans
from model.tokenizer.tokenizer import Tokenizer

_SECONDS, _SECONDS_PER_CHARACTER, _LEAST_SECONDS = 2.0, 1e-5, 0.1
"""Time limits for all texts of a request, and a minimum for each: about twenty times what known tokenizers take."""
_OFF_THE_LOOP = 1 << 14
_T = TypeVar("_T")
_log = logging.getLogger("inkstream")


class TextEncoder:
    """Encodes the texts of one request, and limits the time that they take together.

    A proven tokenizer runs in this process. An unproven one runs in the sandbox, so that calls block: make them from a
    worker thread, which `turn_length` ensures.
    """

    def __init__(self, tokenizer: Tokenizer, sandbox: TokenizerSandbox | None = None) -> None:
        self.tokenizer = tokenizer
        self._sandbox = sandbox
        self._seconds_left = _SECONDS

    def turn_length(self, length: int) -> int:
        """The length for TokenizerPool.run(): with a sandbox, no text is short enough for the event loop."""
        return max(length, _OFF_THE_LOOP) if self._sandbox else length

    def encode(self, text: str) -> list[int]:
        """Tokenizer.encode(). Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported():
                return self.tokenizer.encode(text)
        return self._timed(text, lambda box, seconds: box.encode(text, seconds=seconds))

    def encode_plain(self, text: str) -> list[int]:
        """Without added special tokens. Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported():
                return self.tokenizer.encode_many([text])[0]
        return self._timed(text, lambda box, seconds: box.encode(text, is_plain=True, seconds=seconds))

    def span_slices(self, text: str, *, add_special_tokens: bool) -> Generator[None, None, CompactSpans]:
        """Tokenizer.span_slices(), in one slice with a sandbox. Raises InvalidRequest, EngineFailed."""
        special = add_special_tokens
        if self._sandbox is None:
            with _panics_reported():
                return (yield from self.tokenizer.span_slices(text, add_special_tokens=special))
        return self._timed(text, lambda box, seconds: box.encode_spans(text, is_plain=not special, seconds=seconds))

    def _timed(self, text: str, ask: Callable[[TokenizerSandbox, float], _T]) -> _T:
        assert self._sandbox
        self._seconds_left += len(text) * _SECONDS_PER_CHARACTER
        began = time.monotonic()
        try:
            return ask(self._sandbox, max(self._seconds_left, _LEAST_SECONDS))
        except TooSlow as error:
            raise InvalidRequest(
                f"the model's tokenizer {error} for this text: shorten it, or break up long runs of one kind of "
                "character"
            ) from None
        finally:
            self._seconds_left -= time.monotonic() - began


@contextmanager
def _panics_reported() -> Iterator[None]:
    """Turns panics of the tokenizers library, which are not Exceptions and would end the thread, into EngineFailed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        _log.error("the tokenizer failed on a text: %s", one_line(str(error)[:200]))
        raise EngineFailed("the model's tokenizer failed on this text") from None
