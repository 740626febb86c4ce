"""The protocol of all sides: one line of JSON in, one line of JSON out, until standard input ends.

The real standard output is kept for the answers; whatever a library prints there goes to standard error instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol


class CannotError(Exception):
    """This side cannot do what was asked for; the message is the reason in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a side is started with."""

    model: Path
    precision: str
    threads: int
    batch: int
    """The most rows of any measurement."""
    length: int
    """The longest sequence of any measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Greedy continuations, timed from the moment that every row has its first token."""

    seconds: float
    rows: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams kept busy: a new request the moment that one ends."""

    streams: int
    prompts: list[str]
    tokens: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came of it, in seconds of one clock."""

    seconds: float
    tokens: int
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Side(Protocol):
    """One engine with one model."""

    def facts(self) -> dict[str, str]:
        """Versions, and whatever else was chosen for it."""

    def decode(self, prompts: list[list[int]], tokens: int) -> Generated:
        """Exactly `tokens` greedy tokens for each prompt, all at once."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token."""

    def serve(self, load: Load) -> Loaded:
        """As a server would, in this process. Raises CannotError where there is no such thing."""


def run(make: Callable[[Task], Side]) -> None:
    """Loads, says so, and answers until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            side = make(_task())
            say({"ready": side.facts()})
        except Exception as error:
            say({"cannot": str(error) if isinstance(error, CannotError) else reason(error)})
            raise SystemExit(0 if isinstance(error, CannotError) else 1) from error
        for line in sys.stdin:
            try:
                say(_answer(side, json.loads(line)))
            except CannotError as error:
                say({"cannot": str(error)})
            except Exception as error:
                say({"cannot": reason(error)})
                raise


def reason(error: BaseException) -> str:
    """The first line of an error, for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def prompts_of(*, vocab_size: int, rows: int, length: int, seed: int) -> list[list[int]]:
    """The same for every side; no two begin alike, and none holds id 0, the end of a text."""
    random = Random(f"{seed}/{length}")
    return [[random.randrange(1, vocab_size) for _ in range(length)] for _ in range(rows)]


def _task() -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    for name in ("threads", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Task(**vars(parser.parse_args()))


def _answer(side: Side, ask: dict[str, Any]) -> dict[str, Any]:
    what = ask.pop("do")
    if what == "serve":
        return asdict(side.serve(Load(**ask)))
    tokens = ask.pop("tokens")
    prompts = prompts_of(**ask)
    if what == "prefill":
        return {"seconds": side.prefill(prompts[0]), "tokens": len(prompts[0])}
    done = side.decode(prompts, tokens)
    return {"seconds": done.seconds, "lengths": [len(row) for row in done.rows], "ids": done.rows[0]}
