"""What /v1/completions writes: log-probabilities in the legacy shape, and how a stream cuts them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from app.api.serializers import piece
from app.generation.events import Delta, TokenDetail
from app.generation.token_table import TokenTable
from app.http.json_stream import Elements
from model.tokenizer.tokenizer import Tokenizer


def logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`; and `top_tokens`, where no two tokens share a name."""
    details = list(details)
    return {name: [value(tokenizer, detail) for detail in details] for name, value in _COLUMNS.items()}


def logprob_elements(tokenizer: Tokenizer, details: TokenTable) -> dict[str, Elements]:
    """logprobs(), made while it is written."""

    def column(value: _Column) -> Elements:
        return Elements(lambda: ([value(tokenizer, detail)] for detail in details))

    return {name: column(value) for name, value in _COLUMNS.items()}


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, where its bytes are some; else the bytes, or how the vocabulary writes it."""
    data = tokenizer.token_bytes(token)
    try:
        if data:
            return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return tokenizer.piece(token) or f"token:{token}"


def one_by_one(delta: Delta) -> Iterator[Delta]:
    """The delta in pieces of one token each; a token that completes no character goes with the next that does."""
    if len(delta.tokens) < 2:
        yield delta
        return
    waiting: list[TokenDetail] = []
    start, base = 0, delta.tokens[0].offset
    for token, following in zip(delta.tokens, [*delta.tokens[1:], None], strict=True):
        waiting.append(token)
        end = len(delta.text) if following is None else min(len(delta.text), following.offset - base)
        if following is None or start < end < len(delta.text):
            yield Delta(delta.index, delta.text[start:end], tuple(waiting))
            start, waiting = end, []


def _top_by_name(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, float | None]:
    """The most likely tokens, the chosen one always among them; a name that two tokens share goes to the likelier."""
    named = {name_of(tokenizer, detail.id): detail.logprob}
    others: dict[str, float | None] = {}
    for token, logprob in detail.top:
        name = name_of(tokenizer, token)
        taken = name in others or (name in named and token != detail.id)
        others[f"token:{token}" if taken else name] = logprob
    return others | named


_Column = Callable[[Tokenizer, TokenDetail], Any]
_COLUMNS: Mapping[str, _Column] = {
    "tokens": lambda tokenizer, detail: name_of(tokenizer, detail.id),
    "token_logprobs": lambda _, detail: detail.logprob,
    "top_logprobs": lambda tokenizer, detail: None if detail.logprob is None else _top_by_name(tokenizer, detail),
    "text_offset": lambda _, detail: detail.offset,
    "top_tokens": lambda tokenizer, detail: [piece(tokenizer, token, logprob) for token, logprob in detail.top],
}
