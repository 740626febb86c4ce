"""python -m app.tokenization.tokenizer_worker WEIGHTS encode|attack FILES: sandboxed tokenizer process.

tokenizer_sandbox.py starts it and sends requests. FILES is the argument of reading_from() of model/files.py, as JSON.
"""

from __future__ import annotations

import json
import sys
from array import array
from functools import cached_property
from pathlib import Path

import msgspec
from tokenizers import Regex, pre_tokenizers

from app.sandbox.sandbox_child import confine, serve
from app.tokenization.tokenizer_sandbox import MAX_ATTACK_SECONDS, AttackTrial, Encode, TokenizerReply, slices_of
from model.files import Files, reading_from
from model.tokenizer.regexes import attacks, slowest
from model.tokenizer.token_spans import run_to_completion
from model.tokenizer.tokenizer import Tokenizer

_LOADING_BYTES = 8 << 30
"""Address space limit while the tokenizer loads, which may have 64 MiB of JSON."""
_MEMORY_BYTES = 1 << 30
"""Additional limit for a text: the library takes 170 bytes per character."""
_SECONDS = 60.0
"""Time limit of a response if the parent, which has its own limits, was killed."""


class _Worker:
    """Handles requests for one tokenizer, which is loaded on first use, after its patterns were tested."""

    def __init__(self, weights: Path, files: Files) -> None:
        self._weights, self._files = weights, files

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError."""
        with reading_from(self._weights, self._files):
            return Tokenizer.load(self._weights)

    def handle(self, content: bytes) -> bytes:
        """Handles one encoded request; returns the encoded response."""
        request = msgspec.msgpack.decode(content, type=Encode | AttackTrial)
        try:
            reply = self._encode(request) if isinstance(request, Encode) else self._attack(request.pattern)
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

    def _attack(self, pattern: str | None) -> TokenizerReply:
        if pattern is None:
            encode = self.tokenizer.encode_many
            timings = list(slowest(lambda text: encode([text]), attacks(""), MAX_ATTACK_SECONDS))
        else:
            split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str
            timings = list(slowest(split, attacks(pattern), MAX_ATTACK_SECONDS))
        length, seconds = timings[-1]
        if seconds <= MAX_ATTACK_SECONDS:
            return TokenizerReply()
        return TokenizerReply(problem=f"takes {seconds:.1f} s for {length} characters")


def main(weights: Path, purpose: str, files: Files) -> None:
    """Runs until the pipe closes."""
    confine(_LOADING_BYTES)
    worker = _Worker(weights, files)
    if purpose == "encode":
        _ = worker.tokenizer  # load now, so that the first text does not wait for it
    serve(worker.handle, seconds=_SECONDS, more_bytes=_MEMORY_BYTES if purpose == "encode" else _LOADING_BYTES)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
