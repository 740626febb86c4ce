"""What to compare, and in which order: command-line flags, figures, rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from benchmarks.common import available_cores
from benchmarks.peers.shapes import MODELS
from model.command_line import OneLineParser

OURS = "inkstream"
IN_PROCESS_NAMES = {OURS: "our bare engine", "openvino": "openvino in process"}
"""Table names of engines that take a server's load without a server."""
PEERS = ("openvino", "llama.cpp", "ctranslate2", "transformers")
PRECISIONS = ("bf16", "f32", "int8")
PARTS = ("engine", "prefill", "server")
What = Literal["decode", "prefill"]
T = TypeVar("T")
_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a bare engine."""

    what: What
    rows: int
    prompt: int
    tokens: int

    @property
    def title(self) -> str:
        """Column header."""
        return f"decode x{self.rows}" if self.what == "decode" else f"prefill {self.prompt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    tokens: int = 128
    prefill: int = 512
    rounds: int = 5
    requests: int = 2
    """Requests per stream in a round of the server comparison; at least `least_requests` in total."""
    least_requests: int = 4

    def requests_for(self, streams: int) -> int:
        """Requests of one round."""
        return max(self.least_requests, self.requests * streams)


def figures(parts: Sequence[str], sizes: Sizes, context: int) -> list[Figure]:
    """Figures of the requested parts; no sequence is longer than the model's context."""
    result = []
    if "engine" in parts:
        result += [Figure(what="decode", rows=n, prompt=sizes.prompt, tokens=sizes.tokens) for n in sizes.batches]
    if "prefill" in parts:
        result += [Figure(what="prefill", rows=1, prompt=min(sizes.prefill, context - 1), tokens=1)]
    return result


def schedule(engines: Sequence[str], figures: Sequence[T], rounds: int) -> Iterator[tuple[int, T, str]]:
    """(round, figure, engine): each round measures every figure of every engine, starting with another engine."""
    for number in range(rounds):
        first = number % len(engines) if engines else 0
        for figure in figures:
            for engine in (*engines[first:], *engines[:first]):
                yield number, figure, engine


def length_error(rows: int, tokens: int, lengths: Sequence[int]) -> str | None:
    """Error message if an engine generated other numbers of tokens than requested, else None."""
    if list(lengths) == [tokens] * rows:
        return None
    return f"asked for {rows} x {tokens} tokens, it generated {sum(lengths)} in {len(lengths)} rows"


def common_prefix_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of equal tokens from the start."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command-line flags."""

    models: tuple[str, ...]
    what: tuple[str, ...]
    peers: tuple[str, ...]
    precisions: tuple[str, ...]
    server_precisions: tuple[str, ...]
    rounds: int
    streams: tuple[int, ...]
    threads: int
    weights: Path
    folder: Path

    @property
    def sizes(self) -> Sizes:
        """The sizes of PERFORMANCE.md with these rounds and batches."""
        return Sizes(rounds=self.rounds, batches=self.streams)


def parse_options(argv: Sequence[str] | None) -> Options:
    """Exits with a usage line and status 2 if the flags are invalid."""
    parser = OneLineParser(prog="python -m benchmarks.peers", description="Compares inkstream with other engines.")
    add = parser.add_argument
    add(
        "--models",
        type=_some_of(MODELS),
        default=("default", "C"),
        metavar="NAMES",
        help="models out of default, A, B, C",
    )
    add(
        "--what",
        type=_some_of(PARTS),
        default=PARTS,
        metavar="PARTS",
        help=f"parts out of {', '.join(PARTS)}; default all",
    )
    add(
        "--peers",
        type=_some_of(PEERS),
        default=PEERS,
        metavar="NAMES",
        help=f"peers out of {', '.join(PEERS)}; default all",
    )
    add(
        "--precisions",
        type=_some_of(PRECISIONS),
        default=PRECISIONS,
        metavar="NAMES",
        help="precisions out of bf16, f32, int8; default all",
    )
    add("--server-precisions", type=_some_of(PRECISIONS), default=("bf16",), metavar="NAMES", help="default bf16")
    add("--rounds", type=_positive, default=5, help="rounds; each measures every engine once (%(default)s)")
    add(
        "--streams",
        type=_numbers,
        default=(1, 8, 32),
        metavar="N,N",
        help="batch sizes and numbers of streams, at most 32 (1,8,32)",
    )
    add("--threads", type=_positive, default=available_cores(), help="threads of each engine; default all cores")
    add("--weights", type=Path, default=_ROOT / "weights", help="weights directory of the model `default`")
    add("--folder", type=Path, default=_ROOT / ".peers", help="folder of environments and models (.peers)")
    return Options(**vars(parser.parse_args(argv)))


def _some_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(_positive(part) for part in text.split(","))
    if max(numbers) > 32:
        raise argparse.ArgumentTypeError(f"{max(numbers)} is more than 32, the limit of the engines' configuration")
    return numbers
