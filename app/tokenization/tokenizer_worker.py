"""python -m app.tokenization.tokenizer_worker WEIGHTS: sandboxed tokenizer process.

tokenizer_sandbox.py starts it and sends requests. WEIGHTS is what encode_directory() made.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from functools import cached_property

import msgspec

from app.sandbox.sandbox_child import confine, serve
from app.tokenization.tokenizer_sandbox import Encode, TokenizerReply, slices_of
from model.tokenizer.token_spans import run_to_completion
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import Directory, decode_directory

_LOADING_BYTES = 8 << 30
"""Address space limit while the tokenizer loads, which may have 64 MiB of JSON."""
_MEMORY_BYTES = 1 << 30
"""Additional limit for a text: the library takes 170 bytes per character."""
_SECONDS = 60.0
"""Time limit of a response if the parent, which has its own limits, was killed."""


class _Worker:
    """Handles requests for one tokenizer."""

    def __init__(self, weights: Directory) -> None:
        self._weights = weights

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError."""
        return Tokenizer.load(self._weights)

    def handle(self, content: bytes) -> bytes:
        """Handles one encoded request; returns the encoded response."""
        try:
            reply = self._encode(msgspec.msgpack.decode(content, type=Encode))
        except MemoryError:
            reply = TokenizerReply(problem="takes too much memory")
        except BaseException as error:  # a Rust panic is not an Exception
            gives_up = "retry-limit" in str(error) or "stack" in str(error)
            reply = TokenizerReply(
                problem="gives up" if gives_up else f"fails ({str(error)[:200] or type(error).__name__})"
            )
        return msgspec.msgpack.encode(reply)

    def _encode(self, request: Encode) -> TokenizerReply:
        tokenizer, text = self.tokenizer, request.text
        if request.has_spans:
            spans = run_to_completion(slices_of(tokenizer, text, request.part)).flat()
            return TokenizerReply(ids=spans.ids.tobytes(), starts=spans.starts.tobytes(), ends=spans.ends.tobytes())
        ids = tokenizer.encode_many([text])[0] if request.part == "plain" else tokenizer.encode(text)
        return TokenizerReply(ids=array("I", ids).tobytes())


def main(weights: Directory) -> None:
    """Runs until the pipe closes."""
    confine(_LOADING_BYTES)
    worker = _Worker(weights)
    with contextlib.suppress(BaseException):  # a Rust panic is none of Exception; the first reply reports the error
        _ = worker.tokenizer  # load now, so that the first text does not wait for it
    serve(worker.handle, seconds=_SECONDS, more_bytes=_MEMORY_BYTES)


if __name__ == "__main__":
    main(decode_directory(sys.argv[1]))
