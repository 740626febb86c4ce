"""Prompt encoding: special tokens, fill-in-the-middle, truncation, length checks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from app.access.tenant_queue import WorkAccount
from app.common.errors import ContextLengthExceeded, InvalidRequest
from app.common.fault_injection import fault
from app.common.ipc import Ready
from app.engine_client.fair_queue import check_ids
from app.generation.request import GenerationRequest, Prompt
from app.tokenization.text_encoder import SLICE, TextEncoder, TokenizerPool

_INFILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""Names of fill-in-the-middle tokens: Qwen, StarCoder, SantaCoder, Code Llama."""


_MARGIN = 64


def tail_length(limit: int) -> int:
    """Characters at the end of a prompt that usually contain its last `limit` tokens."""
    return 8 * (limit + _MARGIN) + 512


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine sees it."""

    ids: tuple[int, ...]
    text: str
    """The text for echo."""
    truncated: bool = False


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, ready: Ready, encoder: TextEncoder, long_texts: TokenizerPool, account: WorkAccount) -> None:
        self.ready = ready
        self.tokenizer = encoder.tokenizer
        self._encoder = encoder
        self._long_texts = long_texts
        self._account = account

    async def prompts(self, wish: GenerationRequest) -> list[EncodedPrompt]:
        """Encodes all prompts of a request. Raises InvalidRequest, ContextLengthExceeded, naming which of several."""
        length = sum(map(len, wish.prompts)) + len(wish.suffix or "")
        if wish.suffix is not None or any(isinstance(prompt, str) for prompt in wish.prompts):
            length = self._encoder.turn_length(length)
        return await self._long_texts.run_slices(length, self._read_all(wish), self._account)

    async def source(self, source: Prompt | None) -> tuple[int, ...]:
        """Encodes the encoder's input. Raises InvalidRequest, ContextLengthExceeded."""
        if not self.ready.has_encoder and source is not None:
            raise InvalidRequest("this model has no encoder: leave out source and put the text into prompt", "source")
        if not self.ready.has_encoder:
            return ()
        ids: list[int] = []
        if source:
            length = self._encoder.turn_length(len(source)) if isinstance(source, str) else len(source)
            ids = await self._long_texts.run(length, lambda: self._ids(source, "source"), self._account)
        if not ids:
            raise InvalidRequest("this model answers a source: give the text its encoder reads", "source")
        check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="source")
        return tuple(ids)

    def _read_all(self, wish: GenerationRequest) -> Generator[None, None, list[EncodedPrompt]]:
        """Yields after a number of characters, between prompts only."""
        reads, length = [], 0
        for place, prompt in enumerate(wish.prompts):
            if length >= SLICE:
                length = 0
                yield
            reads.append(self._read(place, wish))
            length += len(prompt)
        return reads

    def _read(self, place: int, wish: GenerationRequest) -> EncodedPrompt:
        fault("text.encode", wish)
        try:
            return self._prompt(wish.prompts[place], wish)
        except InvalidRequest as error:
            if wish.is_batch:
                error.args = (f"prompt {place}: {error}",)
            raise

    def _prompt(self, prompt: Prompt, wish: GenerationRequest) -> EncodedPrompt:
        limit = wish.truncate_prompt_tokens
        if wish.suffix is not None:
            ids = self._infill(prompt, wish.suffix, wish)
        else:
            ids = self._ids(prompt, "prompt") if limit is None else self._last_ids(prompt, limit)
        truncated = limit is not None and len(ids) > limit
        ids = ids[-limit:] if truncated and limit else ids
        start_id = self.tokenizer.start_id(self.ready.start_id)
        if not ids and start_id is None:
            raise InvalidRequest("the prompt is empty, and this model has no token that starts a text", "prompt")
        check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="prompt")
        shown = prompt if isinstance(prompt, str) and not truncated else self._text(ids)
        return EncodedPrompt(tuple(ids) or (start_id or 0,), shown, truncated)

    def _last_ids(self, prompt: Prompt, limit: int) -> list[int]:
        """All ids of a prompt, or of a part at its end: tokenizing a megabyte takes half a second and 270 MB.

        Cutting the text may change the tokens at the cut, so that part has more tokens than are kept.
        """
        length = tail_length(limit)
        while isinstance(prompt, str) and length < len(prompt):
            ids = self._ids(prompt[-length:], "prompt", may_be_cut=True)
            if len(ids) >= limit + _MARGIN:
                return ids
            length *= 2
        return self._ids(prompt, "prompt", may_be_cut=True)

    def _text(self, ids: list[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def _infill(self, prompt: Prompt, suffix: str, wish: GenerationRequest) -> list[int]:
        """Prefix and suffix with the model's fill-in-the-middle tokens, prefix first."""
        marks = next((m for m in map(self._mark_ids, _INFILLING) if None not in m), None)
        if marks is None:
            raise InvalidRequest("this model's vocabulary has no fill-in-the-middle tokens: leave out suffix", "suffix")
        if wish.truncate_prompt_tokens is not None:
            raise InvalidRequest("suffix cannot be combined with truncate_prompt_tokens: leave one out", "suffix")
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text, not of token ids", "suffix")
        start, middle, end = (mark for mark in marks if mark is not None)
        # One after the other, in this thread: the library's batch threads use all cores and ignore our nice value.
        before, behind = (self._encoder.encode_plain(text) for text in (prompt, suffix))
        begin = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        return [*begin, start, *before, middle, *behind, end]

    def _mark_ids(self, names: tuple[str, str, str]) -> list[int | None]:
        return [self.tokenizer.id_of(name) for name in names]

    def _ids(self, text: Prompt, field: str, *, may_be_cut: bool = False) -> list[int]:
        """Token ids of a text; for a prompt, with the special tokens that the tokenizer adds, such as BOS."""
        if not isinstance(text, str):
            return text
        # A prompt that is truncated later may be longer than the context.
        if not may_be_cut and (least := self.tokenizer.least_tokens(text)) > self.ready.context:
            raise ContextLengthExceeded(least, self.ready.context, field, is_least=True)
        return self._encoder.encode(text) if field == "prompt" else self._encoder.encode_plain(text)
