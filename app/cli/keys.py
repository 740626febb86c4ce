"""python -m app keys add | list | revoke: manages API keys, even while the service is running."""

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


class _KeyNotPrinted(Exception):
    """The new key could not be printed, so it was revoked."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 a new key could not be printed, 2 bad arguments or keys file."""
    parser = build_parser()
    options = parser.parse_args(argv)
    file = options.keys_file or os.environ.get(_VARIABLE)
    if not file:
        parser.error(f"the keys file is missing: use --keys-file FILE or the variable {_VARIABLE}")
    if sys.stdout is None:
        parser.error("standard output is closed")
    try:
        match options.verb:
            case "add":
                _add(Path(file), options)
            case "revoke":
                revoke_key(Path(file), options.name)
                print(f"revoked {options.name}: a running service rejects it within a second", file=sys.stderr)
            case "list":
                _list(read_keys(Path(file)))
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _KeyNotPrinted as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(prog="inkstream keys", description="Manage the API keys of a service.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="add|list|revoke")
    add = verbs.add_parser("add", help="create a key and print it once", allow_abbrev=False)
    listing = verbs.add_parser("list", help="list names, dates and limits", allow_abbrev=False)
    revoke = verbs.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    for verb in (add, revoke):
        verb.add_argument("name", metavar="NAME", help="name of the key: 1 to 64 letters, digits, _ and -")
    for flag, description in [
        ("--requests-per-minute", "requests per minute"),
        ("--tokens-per-minute", "tokens per minute, of prompts and completions together"),
        ("--concurrency", "concurrent requests"),
    ]:
        add.add_argument(
            flag, type=_count, default=0, metavar="N", help=f"maximum number of {description} (0: unlimited)"
        )
    add.add_argument("--days", type=_days, metavar="N", help="days until the key expires (default: it does not expire)")
    add.add_argument(
        "--reads-usage", action="store_true", help="show this key the usage of every key in /metrics (default: its own)"
    )
    for verb in (add, listing, revoke):
        verb.add_argument("--keys-file", metavar="FILE", help=f"file of the keys (default: the variable {_VARIABLE})")
    return parser


def _add(file: Path, options: argparse.Namespace) -> None:
    key = new_key()
    limits = {name: getattr(options, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrency")}
    add_key(file, stored(key, options.name, **limits, days=options.days, reads_usage=options.reads_usage))
    if sys.stdout.isatty():
        print("this key is shown only once; the file stores only its hash:", file=sys.stderr)
    try:
        print(key, flush=True)
    except OSError as error:
        # The interpreter flushes standard output at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        revoke_key(file, options.name)
        raise _KeyNotPrinted(f"the key could not be printed ({error.strerror}) and was revoked") from None


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
