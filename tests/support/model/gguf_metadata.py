"""Tokenizer metadata of a GGUF file, made of a tokenizer.json as llama.cpp's converter makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE_TYPE = range(1, 7)


def gguf_metadata(raw: Mapping[str, Any], *, pre: str = "", rows: int = 0, **fields: Any) -> dict[str, Any]:
    """raw: content of a tokenizer.json; rows: of the embedding; fields: others of tokenizer.ggml.

    Byte-level tokenizers need the name `pre`. SentencePiece's scores, which a tokenizer.json lacks, follow the merges.
    """
    model, added = raw["model"], {token["id"]: token for token in raw["added_tokens"]}
    is_bytewise = bool(pre)
    texts = {token: text for text, token in model["vocab"].items()}
    texts |= {token: item["content"] for token, item in added.items()}
    scores = {} if is_bytewise else _scores(model)
    tokens, types, values = [], [], []
    for token in range(max(rows, max(texts) + 1)):
        text = texts.get(token)
        kind = _type(text, added.get(token), model.get("unk_token"))
        values.append(scores.get(text or "", 0.0) if kind in (_NORMAL, _BYTE_TYPE) else -1000.0)
        tokens.append(_written(text, token, kind))
        types.append(kind)
    names = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    content = {"tokenizer.ggml.model": "gpt2" if is_bytewise else "llama", "tokenizer.ggml.pre": pre or "default"}
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if is_bytewise:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        return {**content, **lists, "tokenizer.ggml.merges": merges, **names}
    return {**content, **lists, "tokenizer.ggml.scores": values, **names}


def _type(text: str | None, added: Mapping[str, Any] | None, unknown: str | None) -> int:
    if text is None:
        return _UNUSED
    if text == unknown:
        return _UNKNOWN
    if added is None:
        return _BYTE_TYPE if _BYTE.fullmatch(text) else _NORMAL
    return _CONTROL if added["special"] or _looks_special(text) else _USER_DEFINED


def _looks_special(text: str) -> bool:
    marks = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>") or any(text.startswith(begin) and text.endswith(end) for begin, end in marks)


def _written(text: str | None, token: int, kind: int) -> str:
    if text is None:
        return f"[PAD{token}]"
    return text.replace("\u2581", " ") if kind == _USER_DEFINED else text


def _scores(model: Mapping[str, Any]) -> dict[str, float]:
    """A token is the better, the earlier a merge makes it; characters, which no merge makes, are the worst."""
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in model["merges"]]
    made = dict.fromkeys(left + right for left, right in pairs)
    order = [*made, *(text for text in model["vocab"] if text not in made)]
    return {text: -float(rank) for rank, text in enumerate(order)}
