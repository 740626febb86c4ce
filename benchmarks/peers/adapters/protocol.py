"""Protocol of all adapters: one line of JSON in, one line of JSON out, until standard input ends.

The real standard output is reserved for responses; whatever a library prints goes to standard error instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any


class UnsupportedError(Exception):
    """The engine does not support the request; the message is the reason in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Arguments of an adapter process."""

    model: Path
    precision: str
    threads: int
    batch: int
    """The most rows of any measurement."""
    length: int
    """The longest sequence of any measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """Greedy continuations, timed from when every row has its first token."""

    seconds: float
    rows: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """A server's load: streams that start a new request when the last one ends."""

    streams: int
    prompts: list[str]
    tokens: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    """Result of a load, in seconds of one clock."""

    seconds: float
    tokens: int
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Adapter(ABC):
    """One engine with one model."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions and settings for the report."""

    @abstractmethod
    def decode(self, prompts: list[list[int]], tokens: int) -> DecodeResult:
        """Generates exactly `tokens` greedy tokens for all prompts in one batch."""

    @abstractmethod
    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token."""

    def serve(self, load: ServeLoad) -> ServeResult:
        """Takes a server's load in this process. Raises UnsupportedError if the engine cannot."""
        raise UnsupportedError(f"it takes no load of {load.streams} streams in its process")


def run(create: Callable[[AdapterOptions], Adapter]) -> None:
    """Loads the model, reports readiness, and answers until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def send(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            adapter = create(_parse_options())
            send({"ready": adapter.facts()})
        except Exception as error:
            send({"error": str(error) if isinstance(error, UnsupportedError) else reason(error)})
            raise SystemExit(0 if isinstance(error, UnsupportedError) else 1) from error
        for line in sys.stdin:
            try:
                send(_dispatch(adapter, json.loads(line)))
            except UnsupportedError as error:
                send({"error": str(error)})
            except Exception as error:
                send({"error": reason(error)})
                raise


def reason(error: BaseException) -> str:
    """First line of an error, for the table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def prompts_of(*, vocab_size: int, rows: int, length: int, seed: int) -> list[list[int]]:
    """The same prompts for every engine; no two start alike, and none holds id 0, the end of text."""
    random = Random(f"{seed}/{length}")
    return [[random.randrange(1, vocab_size) for _ in range(length)] for _ in range(rows)]


def _parse_options() -> AdapterOptions:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    for name in ("threads", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return AdapterOptions(**vars(parser.parse_args()))


def _dispatch(adapter: Adapter, request: dict[str, Any]) -> dict[str, Any]:
    what = request.pop("do")
    if what == "serve":
        return asdict(adapter.serve(ServeLoad(**request)))
    tokens = request.pop("tokens")
    prompts = prompts_of(**request)
    if what == "prefill":
        return {"seconds": adapter.prefill(prompts[0]), "tokens": len(prompts[0])}
    done = adapter.decode(prompts, tokens)
    return {"seconds": done.seconds, "lengths": [len(row) for row in done.rows], "ids": done.rows[0]}
