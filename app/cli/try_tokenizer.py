"""A tokenizer held against its model: are its ids the model's, does it encode and decode. Knows no weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.tokenizer import Tokenizer, TokenizerError

_SAMPLE = "Once upon a time, 12 caf\u00e9s \u2014\n\tand \U0001f98a!"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTokenizer:
    """What was found."""

    tokenizer: Tokenizer
    sample: list[int]
    """A short text of letters, marks and signs, with the special tokens that the tokenizer adds."""
    is_exact: bool
    """Whether the sample came back as it was."""

    def names(self, ids: tuple[int, ...]) -> str:
        """Ids with their texts."""
        return ", ".join(f"{token} {json.dumps(self.tokenizer.piece(token))}" for token in ids) or "none"


def try_tokenizer(directory: Path, vocab_size: int) -> TriedTokenizer:
    """Loads and tries the tokenizer of a model with `vocab_size` rows. Raises TokenizerError or CheckpointError."""
    path = directory / "tokenizer.json"
    with _errors_of_rust(path):
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {vocab_size}")
    if not ids:
        raise TokenizerError(f"{path}: makes no tokens of a short text")
    return TriedTokenizer(
        tokenizer=tokenizer,
        sample=ids,
        is_exact=text.removeprefix(" " if tokenizer.strips_first_space else "") == _SAMPLE,
    )


@contextlib.contextmanager
def _errors_of_rust(path: Path) -> Iterator[None]:
    """The tokenizers library panics, which is no Exception and writes to descriptor 2, or raises bare Exceptions."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{path}: fails on a short text ({error or type(error).__name__})") from None
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, nowhere):
            os.close(descriptor)
