"""JSON serializers of the native API: tokens, choices, receipts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from app import VERSION
from app.api.completion_fields import GUIDES, SAMPLING
from app.generation.request import Finished, Prompt, TokenDetail
from app.generation.token_table import TokenTable
from app.http.json_stream import Elements
from app.serving.service import Admitted
from model.tokenizer.tokenizer import Tokenizer


def piece(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    """One token."""
    data = tokenizer.token_bytes(token_id)
    return {"id": token_id, "text": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def token(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    """One token, and the most likely ones in its place."""
    top = [piece(tokenizer, token_id, logprob) for token_id, logprob in detail.top]
    return piece(tokenizer, detail.id, detail.logprob) | {"top": top}


def tokens(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> list[dict[str, Any]]:
    """Tokens in order."""
    return [token(tokenizer, detail) for detail in details]


def token_elements(tokenizer: Tokenizer, details: TokenTable) -> Elements:
    """tokens(), encoded lazily: a response may hold hundreds of thousands of alternatives."""
    return Elements(lambda: ([token(tokenizer, detail)] for detail in details))


def echoed(body: object) -> dict[str, str]:
    """The client's own `user` and `request_id`, if it sent them."""
    return {name: value for name in ("user", "request_id") if (value := getattr(body, name)) is not None}


def choice(ended: Finished) -> dict[str, Any]:
    """How a choice ended."""
    return {"index": ended.index, "finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}


def receipt(admitted: Admitted) -> dict[str, Any]:
    """The receipt, which reproduces the text: `settings` and `seed`, sent again with the prompt."""
    wish = admitted.wish
    prompts = [prompt_sha256(prompt) for prompt in wish.prompts]
    others = {"source": wish.source, "suffix": wish.suffix}
    return {
        "weights_version": admitted.weights_version,
        "seed": admitted.params.seed,
        "settings": settings(admitted),
        "prompt_sha256": prompts if wish.is_batch else prompts[0],
        **{f"{name}_sha256": prompt_sha256(text) for name, text in others.items() if text is not None},
        "numerics": admitted.numerics,
        "version": VERSION,
    }


def settings(admitted: Admitted) -> dict[str, Any]:
    """The effective settings, under the names of the request's fields."""
    wish, params = admitted.wish, admitted.params
    guide = dict([wish.guide]) if wish.guide else {}
    return {
        **{name: getattr(params, name) for name in SAMPLING},
        "logit_bias": {str(token_id): bias for token_id, bias in wish.logit_bias},
        "max_tokens": wish.max_tokens,
        "min_tokens": wish.min_tokens,
        "n": wish.n,
        "stop": list(wish.stops),
        "stop_token_ids": list(wish.stop_token_ids),
        "include_stop": wish.include_stop,
        "ignore_eos": wish.ignore_eos,
        "logprobs": wish.logprobs,
        "echo": wish.echo,
        "truncate_prompt_tokens": wish.truncate_prompt_tokens,
        **{name: guide.get(name) for name in GUIDES},
    }


def prompt_sha256(prompt: Prompt) -> str:
    """SHA-256 of the text in UTF-8, or of the ids in decimal with commas."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
