"""What to compare, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from benchmarks.common import Range, range_of

OURS = "inkstream"
PEERS = ("openvino", "llama.cpp", "transformers")
PRECISIONS = ("bf16", "f32", "int8")
PARTS = ("engine", "prefill", "server")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of an engine or a server."""

    what: Literal["decode", "prefill", "load"]
    rows: int
    """Rows of the batch, or streams of the load."""
    prompt: int = 64
    """Tokens, or words for a load."""
    tokens: int = 128

    @property
    def title(self) -> str:
        """Name in the table."""
        return {"prefill": f"prefill {self.prompt}", "load": f"{self.rows} streams"}.get(
            self.what, f"decode x{self.rows}"
        )

    @property
    def requests(self) -> int:
        """Requests of one round of a load."""
        return max(4, 2 * self.rows)


def engine_figures(parts: Sequence[str], batches: Sequence[int], context: int) -> list[Figure]:
    """Figures of bare engines; no sequence is longer than the model's context."""
    decode = [Figure(what="decode", rows=rows) for rows in batches] if "engine" in parts else []
    prefill = [Figure(what="prefill", rows=1, prompt=min(512, context - 1), tokens=1)] if "prefill" in parts else []
    return decode + prefill


def schedule(engines: Sequence[str], figures: Sequence[T], rounds: int) -> Iterator[tuple[int, T, str]]:
    """(round, figure, engine): each round measures every figure of every engine, starting with another engine."""
    for number in range(rounds):
        first = number % len(engines) if engines else 0
        for figure in figures:
            for engine in (*engines[first:], *engines[:first]):
                yield number, figure, engine


def common_prefix_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of equal tokens from the start."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Range | None:
    """`ours` divided by `theirs`, round by round, so that a slow moment affects both; None without a common round."""
    pairs = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return range_of(pairs) if pairs else None
