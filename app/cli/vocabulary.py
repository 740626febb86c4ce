"""A tokenizer held against its model: are its ids the model's, does it encode and decode. Knows no weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

import msgspec

from model.files import one_line, read_bytes, read_json
from model.tokenizer import Tokenizer, TokenizerError

_MOST_BYTES = 64 << 20
_SAMPLE = "Once upon a time, 12 caf\u00e9s \u2014\n\tand \U0001f98a!"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What was found."""

    kind: str
    size: int
    pieces: Mapping[int, str]
    """Id -> as it stands in the file."""
    sample: list[int]
    """A short text of letters, marks and signs, with the special tokens that the tokenizer adds."""
    is_exact: bool
    """Whether the sample came back as it was."""

    def names(self, ids: tuple[int, ...]) -> str:
        """Ids with their texts."""
        return ", ".join(f"{token} {json.dumps(self.pieces.get(token, ''))}" for token in ids) or "none"


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct):
    id: int
    content: str


class _Padding(msgspec.Struct):
    strategy: str | dict[str, int]


class _File(msgspec.Struct):
    """What is read of tokenizer.json here; all else is skipped without taking memory."""

    model: _Model
    added_tokens: list[_Added] | None = None
    padding: _Padding | None = None


def read_vocabulary(directory: Path, vocab_size: int) -> Vocabulary:
    """Loads and tries the tokenizer of a model with `vocab_size` rows. Raises TokenizerError or CheckpointError."""
    path = directory / "tokenizer.json"
    try:
        file = msgspec.json.decode(read_bytes(path, _MOST_BYTES), type=_File)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a tokenizer ({one_line(str(error))})") from None
    read_json(directory / "tokenizer_config.json", optional=True)
    pieces = _pieces(path, file, vocab_size)
    if file.padding and file.padding.strategy != "BatchLongest":
        raise TokenizerError(f"{path}: pads every text to a fixed length; set padding to null")
    with _errors_of_rust(path):
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {vocab_size}")
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise TokenizerError(f"{path}: encodes a sample to {short(ids)}, the model's ids end at {vocab_size - 1}")
    kind = file.model.type or "kind not named"
    return Vocabulary(kind=kind, size=tokenizer.vocab_size, pieces=pieces, sample=ids, is_exact=text == _SAMPLE)


def _pieces(path: Path, file: _File, vocab_size: int) -> dict[int, str]:
    """Raises TokenizerError for an id outside the model: tables that reach up to it would be as large as it says."""
    vocab = file.model.vocab
    pairs = list(vocab.items()) if isinstance(vocab, dict) else [(text, i) for i, (text, _) in enumerate(vocab)]
    pairs += [(token.content, token.id) for token in file.added_tokens or []]
    for piece, token in pairs:
        if not 0 <= token < vocab_size:
            raise TokenizerError(
                f"{path}: the token {short(piece)} has the id {token}, the model's are 0 to {vocab_size - 1}"
            )
    return {token: piece for piece, token in pairs}


@contextlib.contextmanager
def _errors_of_rust(path: Path) -> Iterator[None]:
    """The tokenizers library panics, which is no Exception and writes to descriptor 2, or raises bare Exceptions."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except (TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(
            f"{path}: fails on a short text ({one_line(str(error)) or type(error).__name__})"
        ) from None
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, nowhere):
            os.close(descriptor)
