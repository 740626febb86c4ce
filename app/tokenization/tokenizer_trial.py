"""Tries a tokenizer before it is served: in a sandboxed process first, unless it is proven to run in linear time."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import msgspec

from app.common.errors import EngineFailed
from app.sandbox.sandbox import SandboxError
from app.tokenization.tokenizer_sandbox import Encode, TokenizerSandbox
from model.files import read_bytes
from model.tokenizer.regexes import Unproven, find_unproven
from model.tokenizer.tokenizer import MAX_BYTES, Tokenizer, TokenizerError, read_tokenizer_json
from model.tokenizer.tokenizer_settings import read_settings
from model.weights_version import Directory, File

_SAMPLE = "Once upon a time, 12 caf\u00e9s \u2014\n\tand \U0001f98a!"
_SECONDS, _SECONDS_PER_BYTE = 5.0, 0.5e-6
"""Time limit for an unproven tokenizer to load and to encode the sample; common ones take 0.1 s for each MB."""


def try_in_sandbox(directory: Directory) -> Unproven:
    """Tries an unproven tokenizer in a sandboxed process; returns its unproven parts. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    try:
        text = read_tokenizer_json(path)
        unproven = find_unproven(msgspec.json.decode(text))
    except msgspec.DecodeError as error:  # a number that only an untyped decoder reads
        raise TokenizerError(f"{path}: not a tokenizer ({error})") from None
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    if not unproven:
        return unproven
    seconds, sandbox = _SECONDS + len(text) * _SECONDS_PER_BYTE, TokenizerSandbox(directory)
    deadline = time.monotonic() + seconds
    try:
        ids = sandbox.ask(Encode(text=_SAMPLE, part="prompt"), seconds=seconds).spans().ids
        if time.monotonic() > deadline:
            raise SandboxError(f"takes more than {seconds:.1f} seconds")
    except SandboxError as error:
        raise TokenizerError(f"{path}: the tokenizer {error} on a short text") from None
    except EngineFailed:
        raise TokenizerError(f"{path}: the tokenizer does not load in a sandboxed process") from None
    finally:
        sandbox.close()
    _check_sample(path, ids)
    return unproven


def _check_sample(path: File, ids: Sequence[int]) -> None:
    if not ids:
        raise TokenizerError(f"{path}: encodes a short text to no tokens")


_in_use: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()
"""By the hash of their files. The library and Python hold the GIL while they build one: tens of ms for each MB."""


def try_tokenizer(directory: Directory) -> Tokenizer:
    """Loads the tokenizer and encodes a short text. Raises TokenizerError or CheckpointError.

    If this process uses a tokenizer from the same files, as after new weights for the same model, returns that one.
    """
    key = _hash_of_files(directory)
    if (tokenizer := _in_use.get(key)) is None:
        tokenizer = _try_tokenizer(directory)
        if key and key == _hash_of_files(directory):
            _in_use[key] = tokenizer
    return tokenizer


def _hash_of_files(directory: Directory) -> bytes:
    """SHA-256 of what load() reads; empty if it cannot be read."""
    try:
        content = read_bytes(directory / "tokenizer.json", MAX_BYTES)
        settings = msgspec.json.encode(read_settings(directory))
    except ValueError:
        return b""
    return hashlib.sha256(settings + b"\0" + content).digest()


def _try_tokenizer(directory: Directory) -> Tokenizer:
    path = directory / "tokenizer.json"
    unproven = try_in_sandbox(directory)  # before this process loads it
    with _library_errors(path):
        tokenizer = Tokenizer.load(directory)
        if not unproven:
            ids = tokenizer.encode(_SAMPLE)
            tokenizer.decode(ids)
            _check_sample(path, ids)
    if not set(tokenizer.unproven.patterns) <= set(unproven.patterns):
        raise TokenizerError(f"{path}: changed while it was loaded: load it again")
    return tokenizer


def check_vocabulary(directory: Directory, tokenizer: Tokenizer, model_size: int) -> None:
    """Raises TokenizerError if the tokenizer has ids that the model does not."""
    if tokenizer.vocab_size > model_size:
        path = directory / "tokenizer.json"
        raise TokenizerError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {model_size}")


@contextlib.contextmanager
def _library_errors(path: File) -> Iterator[None]:
    """Turns bare Exceptions and panics (which are not Exceptions) of the tokenizers library into TokenizerErrors."""
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{path}: fails on a short text ({error or type(error).__name__})") from None
