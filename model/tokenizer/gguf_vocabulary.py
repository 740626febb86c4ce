"""Validated tokenizer metadata of a GGUF file: tokens, types, scores, merges, special tokens.

The file is untrusted. Strings must be UTF-8: a parser gives those that are not as bytes, and no tokenizer has such
tokens, because byte-level vocabularies and SentencePiece both write lone bytes as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from model.tokenizer.size_limits import LONGEST_PIECE, MAX_ENTRIES

PREFIX = "tokenizer.ggml."
CHARACTER_MAP = f"{PREFIX}precompiled_charsmap"
ARRAYS = (f"{PREFIX}tokens", f"{PREFIX}token_type", f"{PREFIX}scores", f"{PREFIX}merges", CHARACTER_MAP)
"""Keys that have lists; values of other types under the other keys are refused."""
KINDS = ("gpt2", "llama", "t5")
"""Supported values of tokenizer.ggml.model: byte-level BPE, SentencePiece's BPE, Unigram."""
_REFUSED_KINDS = {
    "bert": "WordPiece",
    "rwkv": "RWKV",
    "plamo2": "PLaMo 2",
    "gemma4": "Gemma 4",
    "hybriddna": "DNA",
    "whitespace": "white-space",
    "no_vocab": "no",
    "none": "no",
}
_MAX_CHARACTERS = 32 << 20
"""Of all tokens together; the largest vocabularies have 2 million."""
_PLACEHOLDER = re.compile(r"\[PAD\d+\]|\[EMPTY_\d+\]")
"""Name that converters give an id that only the model has."""
_NO_ID = (1 << 32) - 1
"""-1, which some converters write for a token that does not exist."""


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Token ids are indices of `tokens`, `types` and `scores`."""

    kind: str
    """One of KINDS."""
    pre: str
    """How a byte-level tokenizer cuts text; empty if the file does not say it."""
    architecture: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    """Empty if the file has none; SentencePiece's BPE merges the pair with the highest score first."""
    merges: Sequence[tuple[str, str]] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    """bos, eos, eot, eom, unk, pad -> id."""

    def ids_of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these types, ascending."""
        return [token for token, kind in enumerate(self.types) if kind in types]

    def is_placeholder(self, token: int) -> bool:
        """Whether no text has this id: the model's matrices have more rows than its tokenizer has tokens."""
        return self.types[token] == TokenType.UNUSED and bool(_PLACEHOLDER.fullmatch(self.tokens[token]))


_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}


def read_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Raises ValueError with one line: what is wrong, and what is allowed."""
    kind = text_field(metadata, f"{PREFIX}model")
    if kind not in KINDS:
        _refuse_kind(kind)
    tokens = _tokens(metadata)
    merges = _merges(metadata, tokens) if kind != "t5" else []
    if kind == "gpt2" and f"{PREFIX}merges" not in metadata:
        raise ValueError(f"{PREFIX}merges is missing, and a byte-level tokenizer needs it")
    scores = _scores(metadata, len(tokens))
    if kind != "gpt2" and not merges and not scores:
        raise ValueError(f"{PREFIX}scores is missing, and a tokenizer of the kind {kind} needs it")
    types = _types(metadata, len(tokens))
    return GgufVocabulary(
        kind=kind,
        pre=text_field(metadata, f"{PREFIX}pre"),
        architecture=text_field(metadata, "general.architecture"),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        roles=_default_roles(kind, types) | _roles(metadata, len(tokens)),
    )


def text_field(metadata: Mapping[str, Any], name: str) -> str:
    """A string of the metadata; empty if it is absent. Raises ValueError."""
    return _text(metadata.get(name, ""), name)


def flag_field(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean of the metadata. Raises ValueError."""
    value = metadata.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def _refuse_kind(kind: str) -> None:
    allowed = "use a file with gpt2 (byte-level BPE), llama (SentencePiece's BPE) or t5 (Unigram)"
    if not kind:
        raise ValueError(f"{PREFIX}model is missing, so the file has no tokenizer: {allowed}")
    shown = f"{kind[:40]!r} ({_REFUSED_KINDS[kind]} tokenizer)" if kind in _REFUSED_KINDS else repr(kind[:40])
    raise ValueError(f"{PREFIX}model is {shown}, which is not supported: {allowed}")


def _text(value: Any, name: str) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, str):
            value.encode()  # lone surrogates
            return value
    except UnicodeError:
        raise ValueError(f"{name} is not UTF-8") from None
    raise ValueError(f"{name} must be a string")


def _list(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = metadata[name]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list")
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"{name} has {len(value)} entries; at most {MAX_ENTRIES} are allowed")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    name = f"{PREFIX}tokens"
    if name not in metadata:
        raise ValueError(f"{name} is missing, so the file has no vocabulary")
    tokens, ids, length = [], dict[str, int](), 0
    for token, value in enumerate(_list(metadata, name)):
        text = _text(value, f"{name}[{token}]") or f"[EMPTY_{token}]"
        length += len(text)
        if len(text) > LONGEST_PIECE or length > _MAX_CHARACTERS:
            raise ValueError(
                f"{name} is too long at token {token}: a token may have {LONGEST_PIECE} characters, and all together "
                f"{_MAX_CHARACTERS}"
            )
        if ids.setdefault(text, token) != token:
            raise ValueError(
                f"{name} has {text[:40]!r} twice, as {ids[text]} and {token}; each token needs its own text"
            )
        tokens.append(text)
    if not tokens:
        raise ValueError(f"{name} is empty, so the file has no vocabulary")
    return tokens


def _types(metadata: Mapping[str, Any], n_tokens: int) -> Sequence[int]:
    """All tokens are normal where the file has no types."""
    name = f"{PREFIX}token_type"
    if name not in metadata:
        return [TokenType.NORMAL] * n_tokens
    types = _list(metadata, name)
    _check_length(name, types, n_tokens)
    if not all(type(value) is int and 0 <= value <= TokenType.BYTE for value in types):
        raise ValueError(f"{name} must have numbers from 0 to {int(TokenType.BYTE)}")
    return types


def _scores(metadata: Mapping[str, Any], n_tokens: int) -> Sequence[float]:
    name = f"{PREFIX}scores"
    if name not in metadata:
        return []
    scores = _list(metadata, name)
    _check_length(name, scores, n_tokens)
    if not all(isinstance(value, float) or type(value) is int for value in scores):
        raise ValueError(f"{name} must have numbers")
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"{name} has a number that is not finite")
    return scores


def _check_length(name: str, values: Sequence[Any], n_tokens: int) -> None:
    if len(values) != n_tokens:
        raise ValueError(f"{name} has {len(values)} entries, but there are {n_tokens} tokens")


def _merges(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are merged; of a pair that comes twice the first counts."""
    name = f"{PREFIX}merges"
    if name not in metadata:
        return []
    values = _list(metadata, name)
    if len(tokens) + len(values) > MAX_ENTRIES:
        raise ValueError(f"there are {len(tokens) + len(values)} tokens and merges; at most {MAX_ENTRIES} are allowed")
    known, pairs = set(tokens), dict[tuple[str, str], None]()
    for index, value in enumerate(values):
        merge = _text(value, f"{name}[{index}]")
        space = merge.find(" ", 1)
        pair = (merge[:space], merge[space + 1 :])
        if space < 0 or len(merge) > 2 * LONGEST_PIECE or not {*pair, pair[0] + pair[1]} <= known:
            raise ValueError(f"{name}[{index}] is {merge[:40]!r}; it must be two tokens, and both together a token")
        pairs[pair] = None
    return list(pairs)


def _default_roles(kind: str, types: Sequence[int]) -> dict[str, int]:
    """Special tokens of a file that does not name them: where SentencePiece puts them, if special tokens are there."""
    defaults = {"llama": {"unk": 0, "bos": 1, "eos": 2}, "t5": {"eos": 1, "unk": 2}}.get(kind, {})
    special = (TokenType.UNKNOWN, TokenType.CONTROL)
    return {role: token for role, token in defaults.items() if token < len(types) and types[token] in special}


def _roles(metadata: Mapping[str, Any], n_tokens: int) -> dict[str, int]:
    roles = {}
    for role, name in _ROLES.items():
        token = metadata.get(PREFIX + name, _NO_ID)
        if type(token) is not int:
            raise ValueError(f"{PREFIX}{name} must be a number")
        if token in (_NO_ID, -1):
            continue
        if not 0 <= token < n_tokens:
            if role == "pad":  # real files have ids outside the vocabulary here, and no text has the token
                continue
            raise ValueError(f"{PREFIX}{name} is {token}, and the ids are 0 to {n_tokens - 1}")
        roles[role] = token
    return roles
