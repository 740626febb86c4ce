"""python -m app keys add | list | revoke: manages API keys, also while the service runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from app.access.api_keys import KeyFileError, StoredKey, add_key, new_key, read_keys, revoke_key, stored
from model.command_line import OneLineParser

_VARIABLE = "INKSTREAM_KEYS_FILE"


class _NotShown(Exception):
    """The new key could not be printed, so it was revoked."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 a new key could not be shown, 2 bad arguments or keys file."""
    parser = _parser()
    options = parser.parse_args(argv)
    file = options.keys_file or os.environ.get(_VARIABLE)
    if not file:
        parser.error(f"say which file: --keys-file FILE, or the variable {_VARIABLE}")
    if sys.stdout is None:
        parser.error("standard output is closed")
    try:
        match options.verb:
            case "add":
                _add(Path(file), options)
            case "revoke":
                revoke_key(Path(file), options.name)
                print(f"revoked {options.name}: a running service knows within a second", file=sys.stderr)
            case "list":
                _list(read_keys(Path(file)))
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _NotShown as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="inkstream keys", description="Keys of a service.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="add|list|revoke")
    add = verbs.add_parser("add", help="make a key and print it, this once", allow_abbrev=False)
    listing = verbs.add_parser("list", help="names, dates and quotas", allow_abbrev=False)
    revoke = verbs.add_parser("revoke", help="end a key", allow_abbrev=False)
    for verb in (add, revoke):
        verb.add_argument("name", metavar="NAME", help="of who has it: 1 to 64 letters, digits, _ and -")
    for flag, what in [
        ("--requests-per-minute", "requests in a minute"),
        ("--tokens-per-minute", "tokens in a minute, of prompts and texts together"),
        ("--concurrency", "requests at a time"),
    ]:
        add.add_argument(flag, type=_count, default=0, metavar="N", help=f"most {what} (0: any number)")
    add.add_argument("--days", type=_days, metavar="N", help="how long it lasts (default: until it is revoked)")
    for verb in (add, listing, revoke):
        verb.add_argument(
            "--keys-file", metavar="FILE", help=f"where they are kept (default: the variable {_VARIABLE})"
        )
    return parser


def _add(file: Path, options: argparse.Namespace) -> None:
    key = new_key()
    limits = {name: getattr(options, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrency")}
    add_key(file, stored(key, options.name, **limits, days=options.days))
    if sys.stdout.isatty():
        print("this key is shown once and stored nowhere:", file=sys.stderr)
    try:
        print(key, flush=True)
    except OSError as error:
        # Unflushed output must not fail a second time when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        revoke_key(file, options.name)
        raise _NotShown(f"the key could not be shown ({error.strerror}) and was taken back: there is none") from None


def _list(keys: Sequence[StoredKey]) -> None:
    rows: list[tuple[str, ...]] = [("NAME", "CREATED", "EXPIRES", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE")]
    for key in keys:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        rows.append((key.name, f"{key.created:%Y-%m-%d}", _end(key), *(str(limit or "-") for limit in limits)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _end(key: StoredKey) -> str:
    if key.expires is None:
        return "-"
    return f"{key.expires:%Y-%m-%d}{' (expired)' if key.expires <= datetime.now(UTC) else ''}"


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 12:
        raise argparse.ArgumentTypeError("must be a whole number from 0 to 999999999999")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError("must be a number of days above 0, at most 36500")
    return days
