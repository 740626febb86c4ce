"""Encodes the parts of a prompt whose special tokens are given as ids, such as fill-in-the-middle.

Text in such a part stays text: a special token's name in it does not become the token. Only the first part gets the
space that SentencePiece puts before a text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from model.tokenizer.token_spans import EMPTY_TOKENIZER


def part_tokenizer(rust: RustTokenizer, specials: Collection[str], *, is_first: bool) -> RustTokenizer:
    """A tokenizer with the same ids that adds no special tokens and reads none in a text. Shares the vocabulary.

    specials: tokens that count as special, whatever `rust` says. is_first: whether it may put a space before a text.
    """
    added = rust.get_added_tokens_decoder()
    tokens = [_as_special(token) if token.content in specials else token for _, token in sorted(added.items())]
    part = RustTokenizer(rust.model)
    part.add_tokens(tokens)
    if part.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps: only the file can say so
        part = RustTokenizer.from_str(rust.to_str())
        part.add_tokens(tokens)
    part.normalizer, part.pre_tokenizer = rust.normalizer, rust.pre_tokenizer
    if not is_first:
        _remove_space_in_front(part)
    part.post_processor = None
    part.encode_special_tokens = True
    return part


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _remove_space_in_front(part: RustTokenizer) -> None:
    sections = {
        name: _continuing(json.loads(section.__getstate__()))
        for name in ("normalizer", "pre_tokenizer")
        if (section := getattr(part, name)) is not None
    }
    patched = RustTokenizer.from_str(json.dumps({**EMPTY_TOKENIZER, **sections}))
    part.normalizer, part.pre_tokenizer = patched.normalizer, patched.pre_tokenizer


def _continuing(step: dict[str, Any]) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts nothing before a text; None if nothing else is left of it."""
    match step["type"]:
        case "Prepend":
            return None
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
        case "Sequence":
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            return {**step, name: [kept for inner in step[name] if (kept := _continuing(inner))]}
    return step
