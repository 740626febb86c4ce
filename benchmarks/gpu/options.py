"""The flags of `python -m benchmarks.gpu`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.stages import NAMES, Stage, choose
from model.command_line import OneLineParser

_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be done."""

    stages: tuple[Stage, ...]
    minutes: float
    device: str
    tiny: bool
    out: Path
    weights: Path
    wheels: Path | None


def parse_options(argv: Sequence[str] | None) -> Options:
    """Ends the process with one line and status 2 if the flags make no sense."""
    parser = _parser()
    flags = parser.parse_args(argv)
    only = [name for name in flags.only.split(",") if name]
    try:
        stages = choose(only, tiny=flags.tiny)
    except ValueError as error:
        parser.error(str(error))
    if not 0 < flags.minutes <= 600:
        parser.error("--minutes must be above 0 and at most 600")
    if flags.device == "cpu" and not flags.tiny:
        parser.error("--device cpu is there to try this script in tiny sizes: give --tiny, too")
    if flags.wheels and not flags.wheels.is_dir():
        parser.error(f"--wheels {flags.wheels}: there is no such folder")
    return Options(
        stages=stages,
        minutes=flags.minutes,
        device=flags.device,
        tiny=flags.tiny,
        out=flags.out,
        weights=flags.weights,
        wheels=flags.wheels,
    )


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m benchmarks.gpu", description="Everything that a GPU is needed for.")
    add = parser.add_argument
    wheels, out = os.environ.get("WHEELS"), os.environ.get("OUT")
    add("--only", default="", metavar="NAME,NAME", help=f"these stages of {', '.join(NAMES)}")
    add("--minutes", type=float, default=8.0, metavar="M", help="for all of it (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny (%(default)s)")
    add("--tiny", action="store_true", help="tiny sizes: to see that the script works, never for a figure")
    add(
        "--out",
        type=Path,
        default=Path(out) if out else _ROOT / "benchmarks/results",
        metavar="DIR",
        help="where the report goes (the variable OUT, else benchmarks/results)",
    )
    add("--weights", type=Path, default=_ROOT / "weights", metavar="DIR", help="of the default model")
    add(
        "--wheels",
        type=Path,
        default=Path(wheels) if wheels else None,
        metavar="DIR",
        help="a folder of wheels for packages that are missing here (the variable WHEELS)",
    )
    return parser
