"""What /v1/completions writes: log-probabilities in the legacy shape, and how a stream cuts them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from app.api.breather import Breather
from app.api.shapes import piece
from app.news import Delta, TokenDetail
from model.tokenizer import Tokenizer


def logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`; and `top_tokens`, where no two tokens share a name."""
    shape: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [], "top_tokens": [],
    }  # fmt: skip
    for detail in details:
        shape["tokens"].append(name_of(tokenizer, detail.id))
        shape["token_logprobs"].append(detail.logprob)
        shape["top_logprobs"].append(None if detail.logprob is None else _top_by_name(tokenizer, detail))
        shape["text_offset"].append(detail.offset)
        shape["top_tokens"].append([piece(tokenizer, token, logprob) for token, logprob in detail.top])
    return shape


async def encoded_logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """The same, made a little at a time, with what is large in it as JSON text already."""
    breather, shape = Breather(), logprobs(tokenizer, ())
    for detail in details:
        for key, (value,) in logprobs(tokenizer, [detail]).items():
            is_large = key in ("top_logprobs", "top_tokens")
            shape[key].append(msgspec.Raw(msgspec.json.encode(value)) if is_large else value)
        await breather.breathe()
    return shape


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
