"""Validates a tokenizer before it is served: it loads, encodes, and its regular expressions run in linear time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from app.common.errors import EngineFailed
from app.sandbox.sandbox import SandboxError
from app.tokenization.tokenizer_sandbox import AttackTrial, TokenizerSandbox
from model.files import read_bytes
from model.tokenizer.regexes import Unproven, find_unproven
from model.tokenizer.tokenizer import MAX_BYTES, Tokenizer, TokenizerError, read_tokenizer_json
from model.tokenizer.tokenizer_settings import read_settings

_MAX_PATTERNS = 16
_CHECK_SECONDS = 15.0
"""Time limit for all patterns of a tokenizer; typical ones take 0.1 s each."""


def check_regexes(directory: Path) -> Unproven:
    """Times the patterns of a tokenizer.json on adversarial texts; returns the unproven ones. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    try:
        unproven = find_unproven(msgspec.json.decode(read_tokenizer_json(path)))
    except msgspec.DecodeError as error:  # a number that only an untyped decoder reads
        raise TokenizerError(f"{path}: not a tokenizer ({error})") from None
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    if not unproven:
        return unproven
    if len(unproven.patterns) > _MAX_PATTERNS:
        raise TokenizerError(
            f"{path}: has {len(unproven.patterns)} unusual regular expressions; {_MAX_PATTERNS} are allowed"
        )
    sandbox, deadline = TokenizerSandbox(directory, "attack"), time.monotonic() + _CHECK_SECONDS
    try:
        for pattern in (*dict.fromkeys(unproven.patterns), None):
            _attack(sandbox, path, pattern, max(0.1, deadline - time.monotonic()))
    finally:
        sandbox.close()
    return unproven


def _attack(sandbox: TokenizerSandbox, path: Path, pattern: str | None, seconds: float) -> None:
    subject = f"the regular expression {json.dumps(pattern[:200])}" if pattern is not None else "the tokenizer"
    try:
        sandbox.ask(AttackTrial(pattern=pattern), seconds=seconds)
    except SandboxError as error:
        change = "write it without nested or adjacent repetitions of the same characters" if pattern else "simplify it"
        raise TokenizerError(
            f"{path}: {subject} {error} on adversarial texts, and 0.25 s is allowed: {change}"
        ) from None
    except EngineFailed:
        raise TokenizerError(f"{path}: {subject} could not be tested in a sandboxed process") from None


_SAMPLE = "Once upon a time, 12 caf\u00e9s \u2014\n\tand \U0001f98a!"


_in_use: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()
"""By the hash of their files. The library and Python hold the GIL while they build one: tens of ms for each MB."""


def try_tokenizer(directory: Path) -> Tokenizer:
    """Loads the tokenizer and encodes a short text. Raises TokenizerError or CheckpointError.

    If this process uses a tokenizer from the same files, as after new weights for the same model, returns that one.
    """
    key = _hash_of_files(directory)
    if (tokenizer := _in_use.get(key)) is None:
        tokenizer = _try_tokenizer(directory)
        if key and key == _hash_of_files(directory):
            _in_use[key] = tokenizer
    return tokenizer


def _hash_of_files(directory: Path) -> bytes:
    """SHA-256 of what load() reads; empty if it cannot be read."""
    try:
        content = read_bytes(directory / "tokenizer.json", MAX_BYTES)
        settings = msgspec.json.encode(read_settings(directory))
    except ValueError:
        return b""
    return hashlib.sha256(settings + b"\0" + content).digest()


def _try_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    unproven = check_regexes(directory)  # before this process runs any of them
    with _library_errors(path):
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode(_SAMPLE)
        tokenizer.decode(ids)
    if not set(tokenizer.unproven.patterns) <= set(unproven.patterns):
        raise TokenizerError(f"{path}: changed while it was loaded: load it again")
    if not ids:
        raise TokenizerError(f"{path}: encodes a short text to no tokens")
    return tokenizer


def check_vocabulary(directory: Path, tokenizer: Tokenizer, model_size: int) -> None:
    """Raises TokenizerError if the tokenizer has ids that the model does not."""
    if tokenizer.vocab_size > model_size:
        path = directory / "tokenizer.json"
        raise TokenizerError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {model_size}")


@contextlib.contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Turns bare Exceptions and panics (which are not Exceptions) of the tokenizers library into TokenizerErrors."""
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{path}: fails on a short text ({error or type(error).__name__})") from None
