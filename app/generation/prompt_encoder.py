"""Prompt encoding: special tokens, fill-in-the-middle, truncation, length checks."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from dataclasses import dataclass

from app.access.worker_turns import WorkAccount
from app.common.errors import ContextLengthExceeded, InvalidRequest
from app.common.fault_injection import fault
from app.common.ipc import Ready
from app.generation.request import GenerationRequest, Prompt
from app.tokenization.text_encoder import TextEncoder
from app.tokenization.tokenizer_pool import SLICE, TokenizerPool
from app.tokenization.tokenizer_sandbox import Part
from model.tokenizer.infill import infill_tokens

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
    starts: array[int] | None = None
    """Where each token begins in `text`; None if `text` is the decoded tokens, or if the request does not ask."""


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
            ids = await self._tokenizer_pool.run(length, lambda: self._ids(source, "plain", "source"), self._account)
        if not ids:
            raise InvalidRequest("this model needs a source: send the text for its encoder", "source")
        _check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="source")
        return tuple(ids)

    def _encode_all(self, request: GenerationRequest) -> Generator[None, None, list[EncodedPrompt]]:
        """Encodes the prompts; yields between prompts after each slice of characters."""
        encoded, length = [], 0
        for index, prompt in enumerate(request.prompts):
            if length >= SLICE:
                length = 0
                yield
            encoded.append((yield from self._encode_one(index, request)))
            length += len(prompt)
        return encoded

    def _encode_one(self, index: int, request: GenerationRequest) -> Generator[None, None, EncodedPrompt]:
        fault("text.encode", request)
        try:
            return (yield from self._prompt(request.prompts[index], request))
        except InvalidRequest as error:
            if request.is_batch:
                error.args = (f"prompt {index}: {error}",)
            raise

    def _prompt(self, prompt: Prompt, request: GenerationRequest) -> Generator[None, None, EncodedPrompt]:
        limit, starts = request.truncate_prompt_tokens, None
        is_placed = isinstance(prompt, str) and request.echo and request.logprobs is not None
        if request.suffix is not None:
            ids, starts = yield from self._infill(prompt, request.suffix, request)
        elif isinstance(prompt, str) and is_placed and limit is None:
            ids, starts = yield from self._placed(prompt, "prompt")
        else:
            # A chat template writes all special tokens itself, as in transformers.
            part: Part = "plain" if request.is_chat else "prompt"
            ids = self._ids(prompt, part) if limit is None else self._last_ids(prompt, part, limit)
        truncated = limit is not None and len(ids) > limit
        if isinstance(prompt, str) and is_placed and limit is not None and not truncated:
            ids, starts = yield from self._placed(prompt, "prompt")
        ids = ids[-limit:] if truncated and limit else ids
        start_id = self.tokenizer.start_id(self.ready.start_id)
        if not ids and start_id is None:
            raise InvalidRequest("the prompt is empty, and this model has no token that starts a text", "prompt")
        _check_ids(ids, context=self.ready.context, vocab_size=self.ready.vocab_size, field="prompt")
        text = prompt if isinstance(prompt, str) and not truncated else self._text(ids)
        return EncodedPrompt(tuple(ids) or (start_id or 0,), text, truncated, starts if ids else None)

    def _placed(self, text: str, part: Part) -> Generator[None, None, tuple[list[int], array[int]]]:
        """The ids of a text, and where each begins in it."""
        self._check_length(text, "prompt")
        spans = (yield from self._encoder.span_slices(text, part)).flat()
        return spans.ids.tolist(), spans.starts

    def _last_ids(self, prompt: Prompt, part: Part, limit: int) -> list[int]:
        """All ids of a prompt, or of a part at its end: tokenizing a megabyte takes half a second and 270 MB.

        Cutting the text may change the tokens at the cut, so that part has more tokens than are kept.
        """
        length = tail_length(limit)
        while isinstance(prompt, str) and length < len(prompt):
            ids = self._ids(prompt[-length:], part, may_be_cut=True)
            if len(ids) >= limit + _MARGIN:
                return ids
            length *= 2
        return self._ids(prompt, part, may_be_cut=True)

    def _text(self, ids: list[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def _infill(
        self, prompt: Prompt, suffix: str, request: GenerationRequest
    ) -> Generator[None, None, tuple[list[int], array[int]]]:
        """Prefix and suffix with the model's fill-in-the-middle tokens, and where each token begins in the prompt."""
        tokens = infill_tokens(self.tokenizer)
        if tokens is None:
            raise InvalidRequest("this model's vocabulary has no fill-in-the-middle tokens: leave out suffix", "suffix")
        if request.truncate_prompt_tokens is not None:
            raise InvalidRequest("suffix cannot be combined with truncate_prompt_tokens: leave one out", "suffix")
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text, not of token ids", "suffix")
        prefix_ids, starts = yield from self._placed(prompt, "first")
        suffix_ids, _ = yield from self._placed(suffix, "later")
        bos = [self.tokenizer.bos_id] if self.tokenizer.adds_bos and self.tokenizer.bos_id is not None else []
        middle = [] if tokens.middle is None else [tokens.middle]
        behind = [tokens.suffix, *suffix_ids]
        head = [*bos, *(behind if tokens.suffix_first else []), tokens.prefix]
        tail = [*([] if tokens.suffix_first else behind), *middle]
        placed = array("I", [*[0] * len(head), *starts, *[len(prompt)] * len(tail)])
        return [*head, *prefix_ids, *tail], placed

    def _ids(self, text: Prompt, part: Part, field: str = "prompt", *, may_be_cut: bool = False) -> list[int]:
        """Token ids of a text; for the part "prompt", with the special tokens that the tokenizer adds, such as BOS."""
        if not isinstance(text, str):
            return text
        if not may_be_cut:  # a prompt that is truncated later may be longer than the context
            self._check_length(text, field)
        return self._encoder.encode(text) if part == "prompt" else self._encoder.encode_plain(text)

    def _check_length(self, text: str, field: str) -> None:
        if (min_tokens := self.tokenizer.least_tokens(text)) > self.ready.context:
            raise ContextLengthExceeded(min_tokens, self.ready.context, field, is_least=True)


def _check_ids(ids: list[int], *, context: int, vocab_size: int, field: str) -> None:
    """Raises ContextLengthExceeded for more ids than the context holds, InvalidRequest for an unknown one."""
    if len(ids) > context:
        raise ContextLengthExceeded(len(ids), context, field)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocab_size - 1}", field
            )
