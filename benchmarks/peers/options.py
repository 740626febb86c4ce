"""The flags of `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.plan import PARTS, PEERS, PRECISIONS, Sizes
from benchmarks.peers.shapes import MODELS
from model.command_line import OneLineParser

_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be compared."""

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
        """Those of PERFORMANCE.md, in so many rounds."""
        return Sizes(rounds=self.rounds, batches=self.streams)


def parse_options(argv: Sequence[str] | None) -> Options:
    """Ends the process with a usage line and status 2 where the flags are wrong."""
    parser = OneLineParser(prog="python -m benchmarks.peers", description="Ours beside other engines.")
    add = parser.add_argument
    add("--models", type=_some_of(MODELS), default=("default", "C"), metavar="NAMES", help="of default, A, B, C")
    add("--what", type=_some_of(PARTS), default=PARTS, metavar="PARTS", help=f"of {', '.join(PARTS)}; default all")
    add("--peers", type=_some_of(PEERS), default=PEERS, metavar="NAMES", help=f"of {', '.join(PEERS)}; default all")
    add("--precisions", type=_some_of(PRECISIONS), default=PRECISIONS, metavar="NAMES", help="of bf16, f32, int8")
    add("--server-precisions", type=_some_of(PRECISIONS), default=("bf16",), metavar="NAMES", help="default bf16")
    add("--rounds", type=_positive, default=5, help="alternations, each side once in each (%(default)s)")
    add("--streams", type=_numbers, default=(1, 8, 32), metavar="N,N", help="batches and streams, at most 32 (1,8,32)")
    add("--threads", type=_positive, default=_cores(), help="of every side; default all cores there are")
    add("--weights", type=Path, default=_ROOT / "weights", help="weights directory of the model `default`")
    add("--folder", type=Path, default=_ROOT / ".peers", help="where environments and models are kept (.peers)")
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
        raise argparse.ArgumentTypeError(f"{max(numbers)} is more than 32, which every side is set up for")
    return numbers


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
