"""Validates tokenizer.json before the tokenizers library reads it.

The library trusts its file: an id of two billion makes it reserve a table of that size, and the process is killed.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from model.files import one_line, read_bytes

LARGEST_ID = 2**22
"""Ids beyond are no vocabulary's."""
_MOST_BYTES = 64 << 20
_MOST_GROWTH = 256


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct):
    id: int


class _Step(msgspec.Struct):
    """A normaliser or a step of the decoder, or a sequence of them."""

    normalizers: list[_Step] | None = None
    decoders: list[_Step] | None = None
    pattern: dict[str, str] | None = None
    content: str = ""
    prepend: str = ""


class _File(msgspec.Struct):
    """What is read here; all else is skipped without taking memory."""

    model: _Model
    added_tokens: list[_Added] | None = None
    normalizer: _Step | None = None
    decoder: _Step | None = None


def read_tokenizer_json(path: Path) -> str:
    """The content of a regular file of bounded size with sane ids. Raises ValueError naming the file."""
    content = read_bytes(path, _MOST_BYTES)
    try:
        file = msgspec.json.decode(content, type=_File)
        text = content.decode()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a tokenizer ({one_line(str(error))})") from None
    vocab = file.model.vocab
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token.id for token in file.added_tokens or ())]
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < LARGEST_ID:
            raise ValueError(f"{path}: a token has id {token}, and ids must be from 0 to {LARGEST_ID - 1}")
    for name, step in (("normalizer", file.normalizer), ("decoder", file.decoder)):
        if step and (growth := _growth(step)) > _MOST_GROWTH:
            raise ValueError(f"{path}: the {name} may make a text {growth} times as long; {_MOST_GROWTH} is allowed")
    return text


def _growth(step: _Step) -> int:
    """By how much a text may grow; a few replacements one after another can fill any memory."""
    inner = step.normalizers if step.normalizers is not None else step.decoders
    if inner is not None:
        return math.prod(map(_growth, inner))
    if step.pattern is None:
        return 1 + len(step.prepend) // _MOST_GROWTH
    # A regular expression, or an empty text, may match before every character.
    replaced = len(step.pattern.get("String", ""))
    return max(1, -(-len(step.content) // replaced)) if replaced else 1 + len(step.content)
