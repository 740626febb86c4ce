"""What a tokenizer of the tokenizers library tells of itself when it is asked or tried. Knows no files and no bytes."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_PROBE = "a \ue000 \U0010ffff"
"""A letter and characters that no vocabulary has: what encodes this encodes everything."""


def check_ids(rust: RustTokenizer) -> None:
    """Raises ValueError where a vocabulary has no tokens, or two with one id."""
    ids = rust.get_vocab(with_added_tokens=False).values()
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id, and each needs its own")
    if not rust.get_vocab(with_added_tokens=True):
        raise ValueError("the vocabulary is empty")


def unknown_token(model: dict[str, Any]) -> str | None:
    """The token for text that no other token writes."""
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def put_first(rust: RustTokenizer) -> int | None:
    """The id that the tokenizer itself puts before every text. Fails where it cannot encode every text."""
    whole, processor = rust.encode(_PROBE), rust.post_processor
    rust.post_processor = None
    plain = rust.encode(_PROBE)
    rust.post_processor = processor
    marked = list(zip(whole.ids, whole.special_tokens_mask, strict=True))
    if [token for token, is_added in marked if not is_added] != plain.ids:
        raise ValueError("the post_processor does not keep the text as it is")
    if unknown := [token for token, is_added in marked if is_added and rust.id_to_token(token) is None]:
        raise ValueError(f"the post_processor adds a token with id {unknown[0]}, which the vocabulary does not have")
    return marked[0][0] if marked and marked[0][1] else None
