"""A sandboxed tokenizer, for one that is not proven to run in linear time.

A call into the tokenizers library cannot be interrupted, and it may hold the GIL. A child process can be killed
(app/tokenization/tokenizer_worker.py). Calls block the calling thread and no other: make them from worker threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Literal

import msgspec

from app.sandbox.sandbox import Sandbox, SandboxError
from model.tokenizer.token_spans import CompactSpans, Spans
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import Directory, encode_directory

_MAX_RESPONSE_BYTES = 64 << 20

Part = Literal["prompt", "plain", "first", "later"]
"""prompt: a whole text, with added special tokens; plain: without. first, later: see Tokenizer.part_slices()."""


class Encode(msgspec.Struct):
    """Request: a text to encode."""

    text: str
    part: Part
    has_spans: bool = False


def slices_of(tokenizer: Tokenizer, text: str, part: Part) -> Generator[None, None, CompactSpans]:
    """The tokens of a text with their spans; yields between the pieces of a long text."""
    if part in ("first", "later"):
        return tokenizer.part_slices(text, is_first=part == "first")
    return tokenizer.span_slices(text, add_special_tokens=part == "prompt")


class TokenizerReply(msgspec.Struct):
    """Response: arrays of unsigned 32-bit numbers, as bytes."""

    ids: bytes = b""
    starts: bytes = b""
    ends: bytes = b""
    problem: str = ""

    def spans(self) -> Spans:
        """The arrays."""
        return Spans(*(array("I", content) for content in (self.ids, self.starts, self.ends)))


class TokenizerSandbox(Sandbox):
    """A tokenizer in child processes."""

    def __init__(self, weights: Directory) -> None:
        super().__init__("app.tokenization.tokenizer_worker", encode_directory(weights))

    def ask(self, request: Encode, *, seconds: float) -> TokenizerReply:
        """The reply to a request. Raises SandboxError, EngineFailed."""
        content = msgspec.msgpack.encode(request)
        response = self.call(content, seconds=seconds, max_bytes=_MAX_RESPONSE_BYTES)
        reply = msgspec.msgpack.decode(response, type=TokenizerReply)
        if reply.problem:
            raise SandboxError(reply.problem)
        return reply
