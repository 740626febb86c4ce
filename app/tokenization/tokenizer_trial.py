"""Tries a tokenizer before it is served: does it load, encode and decode, and are its ids those of the model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.tokenization.regex_check import check_regexes
from model.tokenizer.tokenizer import Tokenizer, TokenizerError

_SAMPLE = "Once upon a time, 12 caf\u00e9s \u2014\n\tand \U0001f98a!"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTokenizer:
    """What was found."""

    tokenizer: Tokenizer
    is_exact: bool
    """Whether a short text came back as it was."""

    def names(self, ids: tuple[int, ...]) -> str:
        """Ids with their texts."""
        return ", ".join(f"{token} {json.dumps(self.tokenizer.piece(token))}" for token in ids) or "none"


def try_tokenizer(directory: Path) -> TriedTokenizer:
    """Loads the tokenizer and lets it read a short text. Raises TokenizerError or CheckpointError."""
    path = directory / "tokenizer.json"
    checked = check_regexes(directory)  # before this process runs any of them
    with _errors_of_rust(path):
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
    if not set(tokenizer.unproven.patterns) <= set(checked.patterns):
        raise TokenizerError(f"{path}: changed while it was loaded: load it again")
    if not ids:
        raise TokenizerError(f"{path}: makes no tokens of a short text")
    return TriedTokenizer(
        tokenizer=tokenizer,
        is_exact=text.removeprefix(" " if tokenizer.strips_first_space else "") == _SAMPLE,
    )


def check_vocabulary(directory: Path, tokenizer: Tokenizer, model_size: int) -> None:
    """Raises TokenizerError where the tokenizer makes ids that the model does not have."""
    if tokenizer.vocab_size > model_size:
        path = directory / "tokenizer.json"
        raise TokenizerError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {model_size}")


@contextlib.contextmanager
def _errors_of_rust(path: Path) -> Iterator[None]:
    """Bare Exceptions and panics (no Exceptions) of the tokenizers library become TokenizerErrors."""
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{path}: fails on a short text ({error or type(error).__name__})") from None
