"""python -m app keys add | list | revoke: manages API keys, even while the service is running."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from app.access.api_keys import KeyFileError, StoredKey, add_key, new_key, read_keys, revoke_key, stored
from model.command_line import OneLineParser, non_negative_int, positive_number

_VARIABLE = "INKSTREAM_KEYS_FILE"


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 2 bad arguments or keys file."""
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
    except OverflowError:
        parser.error("--days is too large")
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
            flag, type=non_negative_int, default=0, metavar="N", help=f"maximum number of {description} (0: unlimited)"
        )
    add.add_argument(
        "--days", type=positive_number, metavar="N", help="days until the key expires (default: it does not expire)"
    )
    for verb in (add, listing, revoke):
        verb.add_argument("--keys-file", metavar="FILE", help=f"file of the keys (default: the variable {_VARIABLE})")
    return parser


def _add(file: Path, options: argparse.Namespace) -> None:
    key = new_key()
    limits = {name: getattr(options, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrency")}
    add_key(file, stored(key, options.name, **limits, days=options.days))
    if sys.stdout.isatty():
        print("this key is shown only once; the file stores only its hash:", file=sys.stderr)
    print(key, flush=True)


def _list(keys: Sequence[StoredKey]) -> None:
    print(f"{'NAME':<20} {'CREATED':<10} {'EXPIRES':<20} {'REQUESTS/MIN':>12} {'TOKENS/MIN':>12} {'AT ONCE':>8}")
    for key in keys:
        expires = f"{key.expires:%Y-%m-%d}" if key.expires else "-"
        if key.expires and key.expires <= datetime.now(UTC):
            expires += " (expired)"
        limits = f"{key.requests_per_minute or '-':>12} {key.tokens_per_minute or '-':>12} {key.concurrency or '-':>8}"
        print(f"{key.name:<20} {key.created:%Y-%m-%d} {expires:<20} {limits}")
