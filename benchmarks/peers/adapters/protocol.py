"""Protocol of all adapters: one line of JSON in, one line of JSON out, until standard input ends.

The real standard output is reserved for responses; whatever a library prints goes to standard error instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
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


class Adapter(ABC):
    """One engine with one model."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Versions and settings for the report."""

    @abstractmethod
    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy continuations of `tokens` tokens in one batch, and their seconds after the first token of each row."""

    @abstractmethod
    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token."""


class SteppedAdapter(Adapter):
    """An engine with continuous batching, stepped by hand. Requests have a number."""

    @abstractmethod
    def add(self, prompt: list[int] | str, tokens: int, temperature: float = 0.0, seed: int = 0) -> int:
        """Adds a request that generates exactly `tokens` tokens."""

    @abstractmethod
    def step(self) -> None:
        """Computes one step."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a request has not finished."""

    @abstractmethod
    def take(self, request: int) -> list[int]:
        """New tokens of a request."""

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        rows: dict[int, list[int]] = {self.add(prompt, tokens): [] for prompt in prompts}

        def take_all() -> None:
            for request, row in rows.items():
                row += self.take(request)

        while not all(rows.values()):
            self.step()
            take_all()
        assert all(len(row) == 1 for row in rows.values()), "the prompts were not read in one step"
        seconds = self._finish()
        take_all()
        return seconds, list(rows.values())

    def prefill(self, prompt: list[int]) -> float:
        request = self.add(prompt, 1)
        seconds = self._finish()
        assert len(self.take(request)) == 1
        return seconds

    def _finish(self) -> float:
        started = time.perf_counter()
        while self.is_busy():
            self.step()
        return time.perf_counter() - started

    def load(self, *, streams: int, prompts: list[str], tokens: int, temperature: float) -> dict[str, Any]:
        """Takes a server's load in this process: streams that start a new request when the last one ends.

        Text in, token ids out: does not count detokenizing and sending them.
        """
        waiting, running = list(enumerate(prompts)), dict[int, list[float]]()
        finished: list[list[float]] = []
        began = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < streams:
                seed, prompt = waiting.pop(0)
                sent = time.perf_counter()
                running[self.add(prompt, tokens, temperature, seed)] = [sent]
            self.step()
            now = time.perf_counter()
            for request, times in list(running.items()):
                times += [now] * len(self.take(request))
                if len(times) > tokens:
                    finished.append(running.pop(request))
        return {
            "seconds": time.perf_counter() - began,
            "tokens": sum(len(times) - 1 for times in finished),
            "first": [times[1] - times[0] for times in finished],
            "gaps": [after - before for times in finished for before, after in pairwise(times[1:])],
        }


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
            send({"error": reason(error)})
            raise SystemExit(0 if isinstance(error, UnsupportedError) else 1) from error
        for line in sys.stdin:
            try:
                send(_dispatch(adapter, json.loads(line)))
            except Exception as error:
                send({"error": reason(error)})
                if not isinstance(error, UnsupportedError):
                    raise


def reason(error: BaseException) -> str:
    """First line of an error, for the table."""
    if isinstance(error, UnsupportedError):
        return str(error)
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
    if what == "load":
        assert isinstance(adapter, SteppedAdapter)
        return adapter.load(**request)
    if what == "prefill":
        return {"seconds": adapter.prefill(prompts_of(**request)[0])}
    tokens = request.pop("tokens")
    seconds, rows = adapter.decode(prompts_of(**request), tokens)
    return {"seconds": seconds, "lengths": [len(row) for row in rows], "ids": rows[0]}
