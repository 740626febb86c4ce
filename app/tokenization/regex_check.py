"""Times the regular expressions of a tokenizer.json on adversarial texts before a model with it is served."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from app.common.errors import EngineFailed
from app.common.fault_injection import is_armed
from app.tokenization.tokenizer_sandbox import TokenizerSandbox, TooSlow
from model.tokenizer.regexes import Unproven, find_unproven
from model.tokenizer.tokenizer import TokenizerError
from model.tokenizer.tokenizer_file import read_tokenizer_json

_MOST_PATTERNS = 16
_CHECK_SECONDS = 15.0
"""For all patterns of a tokenizer; usual ones take 0.1 s each."""


def check_regexes(directory: Path) -> Unproven:
    """What of a tokenizer.json is unproven, after it was timed on adversarial texts. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    try:
        unproven = find_unproven(msgspec.json.decode(read_tokenizer_json(path)))
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    if not unproven or is_armed("tokenizer.unchecked"):
        return unproven
    if len(unproven.patterns) > _MOST_PATTERNS:
        raise TokenizerError(
            f"{path}: has {len(unproven.patterns)} unusual regular expressions; {_MOST_PATTERNS} are allowed"
        )
    sandbox, end = TokenizerSandbox(directory, "attack"), time.monotonic() + _CHECK_SECONDS
    try:
        for pattern in (*dict.fromkeys(unproven.patterns), None):
            _attack(sandbox, path, pattern, max(0.1, end - time.monotonic()))
    finally:
        sandbox.close()
    return unproven


def _attack(sandbox: TokenizerSandbox, path: Path, pattern: str | None, seconds: float) -> None:
    what = f"the regular expression {json.dumps(pattern[:200])}" if pattern is not None else "the tokenizer"
    try:
        sandbox.attack(pattern, seconds=seconds)
    except TooSlow as error:
        change = "write it without nested or adjacent repetitions of the same characters" if pattern else "simplify it"
        raise TokenizerError(f"{path}: {what} {error} on adversarial texts, and 0.25 s is allowed: {change}") from None
    except EngineFailed:
        raise TokenizerError(f"{path}: {what} could not be tried in a process of its own") from None
