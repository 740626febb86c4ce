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
from model.tokenizer.tokenizer import Tokenizer

_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""Names of fill-in-the-middle tokens: Qwen, StarCoder, SantaCoder, Code Llama."""


def infill_tokens(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """Ids of the tokens before prefix, suffix and middle; None if the vocabulary lacks fill-in-the-middle tokens."""
    for names in _FIM_TOKENS:
        prefix, suffix, middle = (tokenizer.id_of(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return None


_MARGIN = 64


def tail_length(limit: int) -> int:
    """Characters at the end of a prompt that usually contain its last `limit` tokens."""
    return 8 * (limit + _MARGIN) + 512


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    ids: tuple[int, ...]
    text: str
    """The text for echo."""
    truncated: bool = False


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, ready: Ready, encoder: TextEncoder, tokenizer_pool: TokenizerPool, account: WorkAccount) -> None:
        self.ready = ready
        self.tokenizer = encoder.tokenizer
        self._encoder = encoder
        self._tokenizer_pool = tokenizer_pool
        self._account = account

    async def encode_prompts(self, request: GenerationRequest) -> list[EncodedPrompt]:
        """Encodes all prompts of a request. Raises InvalidRequest, ContextLengthExceeded, naming which of several."""
        length = sum(map(len, request.prompts)) + len(request.suffix or "")
        if request.suffix is not None or any(isinstance(prompt, str) for prompt in request.prompts):
            length = self._encoder.pool_length(length)
        return await self._tokenizer_pool.run_slices(length, self._encode_all(request), self._account)

    async def encode_source(self, source: Prompt | None) -> tuple[int, ...]:
        """Encodes the encoder's input. Raises InvalidRequest, ContextLengthExceeded."""
        if not self.ready.has_encoder and source is not None:
            raise InvalidRequest("this model has no encoder: leave out source and put the text into prompt", "source")
        if not self.ready.has_encoder:
            return ()
        ids: list[int] = []
        if source:
            length = self._encoder.pool_length(len(source)) if isinstance(source, str) else len(source)
            ids = await self._tokenizer_pool.run(length, lambda: self._ids(source, "source"), self._account)
        if not ids:
            raise InvalidRequest("this model needs a source: send the text for its encoder", "source")
        check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="source")
        return tuple(ids)

    def _encode_all(self, request: GenerationRequest) -> Generator[None, None, list[EncodedPrompt]]:
        """Encodes the prompts; yields between prompts after each slice of characters."""
        encoded, length = [], 0
        for index, prompt in enumerate(request.prompts):
            if length >= SLICE:
                length = 0
                yield
            encoded.append(self._encode_one(index, request))
            length += len(prompt)
        return encoded

    def _encode_one(self, index: int, request: GenerationRequest) -> EncodedPrompt:
        fault("text.encode", request)
        try:
            return self._prompt(request.prompts[index], request)
        except InvalidRequest as error:
            if request.is_batch:
                error.args = (f"prompt {index}: {error}",)
            raise

    def _prompt(self, prompt: Prompt, request: GenerationRequest) -> EncodedPrompt:
        limit = request.truncate_prompt_tokens
        if request.suffix is not None:
            ids = self._infill(prompt, request.suffix, request)
        else:
            ids = self._ids(prompt, "prompt") if limit is None else self._last_ids(prompt, limit)
        truncated = limit is not None and len(ids) > limit
        ids = ids[-limit:] if truncated and limit else ids
        start_id = self.tokenizer.start_id(self.ready.start_id)
        if not ids and start_id is None:
            raise InvalidRequest("the prompt is empty, and this model has no token that starts a text", "prompt")
        check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="prompt")
        text = prompt if isinstance(prompt, str) and not truncated else self._text(ids)
        return EncodedPrompt(tuple(ids) or (start_id or 0,), text, truncated)

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

    def _infill(self, prompt: Prompt, suffix: str, request: GenerationRequest) -> list[int]:
        """Prefix and suffix with the model's fill-in-the-middle tokens, prefix first."""
        special = infill_tokens(self.tokenizer)
        if special is None:
            raise InvalidRequest("this model's vocabulary has no fill-in-the-middle tokens: leave out suffix", "suffix")
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest("suffix cannot be combined with truncate_prompt_tokens: leave one out", "suffix")
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text, not of token ids", "suffix")
        start, middle, end = special
        # Sequentially in this thread: the library's batch threads use all cores and ignore this thread's nice value.
        prefix_ids, suffix_ids = (self._encoder.encode_plain(text) for text in (prompt, suffix))
        bos = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        return [*bos, start, *prefix_ids, middle, *suffix_ids, end]

    def _ids(self, text: Prompt, field: str, *, may_be_cut: bool = False) -> list[int]:
        """Token ids of a text; for a prompt, with the special tokens that the tokenizer adds, such as BOS."""
        if not isinstance(text, str):
            return text
        # A prompt that is truncated later may be longer than the context.
        if not may_be_cut and (min_tokens := self.tokenizer.least_tokens(text)) > self.ready.context:
            raise ContextLengthExceeded(min_tokens, self.ready.context, field, is_least=True)
        return self._encoder.encode(text) if field == "prompt" else self._encoder.encode_plain(text)
