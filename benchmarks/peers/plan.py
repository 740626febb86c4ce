"""The comparisons to run, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

OURS = "inkstream"
BARE = {OURS: "our bare engine", "openvino": "openvino in process"}
"""What those are called that are put under a server's load without a server."""
PEERS = ("openvino", "llama.cpp", "ctranslate2", "transformers")
PRECISIONS = ("bf16", "f32", "int8")
PARTS = ("engine", "prefill", "server")
What = Literal["decode", "prefill"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing to measure of a bare engine."""

    what: What
    rows: int
    prompt: int
    tokens: int

    @property
    def title(self) -> str:
        """Head of its column."""
        return f"decode x{self.rows}" if self.what == "decode" else f"prefill {self.prompt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    tokens: int = 128
    prefill: int = 512
    rounds: int = 5
    requests: int = 2
    """Of each stream in a round of the server comparison; at least `least_requests` in all."""
    least_requests: int = 4

    def requests_for(self, streams: int) -> int:
        """Requests of one round at so many streams."""
        return max(self.least_requests, self.requests * streams)


def figures(parts: Sequence[str], sizes: Sizes, context: int) -> list[Figure]:
    """The figures of the parts that were asked for, no sequence longer than the model's context."""
    found = []
    if "engine" in parts:
        found += [Figure(what="decode", rows=n, prompt=sizes.prompt, tokens=sizes.tokens) for n in sizes.batches]
    if "prefill" in parts:
        found += [Figure(what="prefill", rows=1, prompt=min(sizes.prefill, context - 1), tokens=1)]
    return found


def schedule(sides: Sequence[str], figures: Sequence[T], rounds: int) -> Iterator[tuple[int, T, str]]:
    """(round, figure, side): in each round every figure of every side, side after side; each round begins elsewhere."""
    for number in range(rounds):
        first = number % len(sides) if sides else 0
        for figure in figures:
            for side in (*sides[first:], *sides[:first]):
                yield number, figure, side


def complaint(rows: int, tokens: int, lengths: Sequence[int]) -> str | None:
    """What is wrong with the number of tokens that a side generated; None if it is what was asked for."""
    if list(lengths) == [tokens] * rows:
        return None
    return f"asked for {rows} x {tokens} tokens, it generated {sum(lengths)} in {len(lengths)} rows"


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens from the start are the same."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
