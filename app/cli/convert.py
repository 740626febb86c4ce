"""inkstream convert SRC OUT: writes any weights that are read as safetensors, dense or quantized."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.cli.torch_file_sandbox import read_characters, read_torch_file
from model.checkpoint.converted_directory import (
    ConversionSource,
    ConvertedDirectory,
    open_directory,
    open_gguf,
    prepare,
)
from model.checkpoint.gguf_directory import find_gguf
from model.checkpoint.hub import resolve_weights
from model.checkpoint.model_summary import Line, describe_bytes
from model.checkpoint.new_directory import check_new
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE
from model.checkpoint.torch_source import has_torch_weights, open_bin_directory, open_nanogpt
from model.command_line import DTYPES, OneLineParser, path
from model.files import CheckpointError, entry_exists, one_line

_BITS = {"int4": 4, "int8": 8}
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done; 2 nothing was written, with one line that says why; 130 Ctrl+C."""
    options = build_parser().parse_args(argv)
    out = Path(options.out)
    try:
        with _ending_on_signals():
            check_new(out, Path(options.source))
            source = _open(options)
            directory = prepare(source, out, dtype=options.dtype, bits=_BITS.get(options.quantize, 0))
            with _progress(directory.conversion.tensor_bytes) as progress:
                directory.write(progress)
    except ValueError as error:  # CheckpointError among others; all messages name the file
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print(one_line(f"{out}: converted from {options.source}"))
    for label, text in _lines(directory):
        print(f"  {label:<13}{one_line(text)}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(
        prog="inkstream convert",
        description="Convert weights to safetensors, dense or quantized.",
        epilog="docs/bring-your-model.md describes what is read and written",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        type=path,
        help="weights directory, also with pytorch_model.bin; GGUF file; a model of the Hugging Face Hub: "
        "org/name[@revision] or org/name:Q4_K_M; or the checkpoint of a nanoGPT (ckpt.pt)",
    )
    parser.add_argument("out", metavar="OUT", type=path, help="new or empty directory")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of matrices that are not quantized (default: as SRC has them, or bfloat16 if SRC is "
        "quantized)",
    )
    parser.add_argument(
        "--quantize",
        choices=tuple(_BITS),
        help="write matrices as integers with a scale for each 32 columns (compressed-tensors, pack-quantized); int4 "
        "is coarser than serve --quantize int4, which has offsets",
    )
    parser.add_argument(
        "--activation",
        choices=("gelu", "gelu_tanh"),
        help="of a nanoGPT: gelu_tanh if its version had a new_gelu() of its own (default: gelu)",
    )
    parser.add_argument(
        "--chars", metavar="FILE", type=path, help="of a character-level nanoGPT: the meta.pkl of its data set"
    )
    return parser


def _fail(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return 2


def _open(options: argparse.Namespace) -> ConversionSource:
    """Raises CheckpointError."""
    resolved = resolve_weights(options.source, lambda line: print(one_line(line), file=sys.stderr, flush=True))
    if resolved.is_file() and resolved.suffix in _TORCH_SUFFIXES:
        characters = read_characters(Path(options.chars)) if options.chars else None
        return open_nanogpt(resolved, read_torch_file, activation=options.activation or "gelu", characters=characters)
    for flag, value in (("--activation", options.activation), ("--chars", options.chars)):
        if value:
            raise CheckpointError(f"{flag} is for the checkpoint of a nanoGPT (ckpt.pt), which {resolved} is not")
    is_safe = any(entry_exists(resolved / name) for name in (WEIGHTS_FILE, INDEX_FILE))
    if resolved.is_dir() and not is_safe and has_torch_weights(resolved):
        return open_bin_directory(resolved, read_torch_file)
    return open_gguf(resolved) if find_gguf(resolved) else open_directory(resolved)


def _lines(directory: ConvertedDirectory) -> list[Line]:
    source, conversion = directory.source, directory.conversion
    after = conversion.n_bytes
    lines = [
        ("weights", f"{describe_bytes(source.n_bytes)} before, {describe_bytes(after)} after"),
        ("bits", f"{8 * after / conversion.n_params:.2f} per weight, of {conversion.n_params:,} weights"),
        ("dense", ", ".join(sorted(conversion.dtypes))),
    ]
    if packed := conversion.describe_packed():
        lines.append(("packed", packed))
    if directory.leaves_out_golden:
        lines.append(("left out", "golden.json: it holds for the numbers before they were rounded"))
    if "tokenizer.json" not in source.files:
        lines.append(
            ("tokenizer", f"none: put tokenizer.json into {directory.out}, or convert with --chars; see "
             "docs/bring-your-model.md")
        )  # fmt: skip
    return lines


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Counts written bytes, on a terminal in a line that it erases at the end."""
    done, shown = 0, -1

    def add(n_bytes: int) -> None:
        nonlocal done, shown
        done += n_bytes
        percent = 100 * done // max(1, total)
        if percent != shown:
            shown, filled = percent, 30 * done // max(1, total)
            bar = f"{'#' * filled}{'.' * (30 - filled)}"
            text = f"{bar} {percent:3d} % of {describe_bytes(total)}"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        yield add
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process as Ctrl+C does: after what was written is removed."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
