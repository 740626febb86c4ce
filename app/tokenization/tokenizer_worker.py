"""python -m app.tokenization.tokenizer_worker WEIGHTS encode|attack FILES: sandboxed tokenizer process.

tokenizer_sandbox.py starts it and sends requests. FILES is the argument of reading_from() of model/files.py, as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from array import array
from functools import cached_property
from pathlib import Path

import msgspec
from tokenizers import Regex, pre_tokenizers

from app.sandbox.sandbox_child import confine, serve
from app.tokenization.tokenizer_sandbox import MOST_ATTACK_SECONDS, AttackTrial, Encode, TokenizerReply
from model.files import Files, reading_from
from model.tokenizer.regexes import attacks, slowest
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

    def answer(self, content: bytes) -> bytes:
        """Handles one encoded request; returns the encoded response."""
        question = msgspec.msgpack.decode(content, type=Encode | AttackTrial)
        try:
            found = self._encode(question) if isinstance(question, Encode) else self._attack(question.pattern)
        except MemoryError:
            found = TokenizerReply(problem="takes too much memory")
        except BaseException as error:  # a Rust panic is not an Exception
            gives_up = "retry-limit" in str(error) or "stack" in str(error)
            found = TokenizerReply(
                problem="gives up" if gives_up else f"fails ({str(error)[:200] or type(error).__name__})"
            )
        return msgspec.msgpack.encode(found)

    def _encode(self, question: Encode) -> TokenizerReply:
        tokenizer, text = self.tokenizer, question.text
        if question.has_spans:
            spans = tokenizer.encode_spans(text, add_special_tokens=not question.is_plain).flat()
            return TokenizerReply(ids=spans.ids.tobytes(), starts=spans.starts.tobytes(), ends=spans.ends.tobytes())
        ids = tokenizer.encode_many([text])[0] if question.is_plain else tokenizer.encode(text)
        return TokenizerReply(ids=array("I", ids).tobytes())

    def _attack(self, pattern: str | None) -> TokenizerReply:
        if pattern is None:
            encode = self.tokenizer.encode_many
            found = list(slowest(lambda text: encode([text]), attacks(""), MOST_ATTACK_SECONDS))
        else:
            split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str
            found = list(slowest(split, attacks(pattern), MOST_ATTACK_SECONDS))
        length, seconds = found[-1]
        if seconds <= MOST_ATTACK_SECONDS:
            return TokenizerReply()
        return TokenizerReply(problem=f"takes {seconds:.1f} s for {length} characters")


def main(weights: Path, purpose: str, files: Files) -> None:
    """Runs until the pipe closes."""
    confine(_LOADING_BYTES)
    worker = _Worker(weights, files)
    if purpose == "encode":
        _ = worker.tokenizer  # load now, so that the first text does not wait for it
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most_bytes = taken + _MEMORY_BYTES if purpose == "encode" else _LOADING_BYTES
    serve(worker.answer, seconds=_SECONDS, most_bytes=most_bytes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
