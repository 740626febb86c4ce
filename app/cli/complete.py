"""python -m app complete "text": continue a text through a running service, streamed to the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from app.api.native.request_schemas import CompleteRequest
from app.cli.client import CLIENT_KEY, Client, NoAnswer, Refused, error_message
from app.cli.request_flags import add_flags, given_fields
from model.argument_parser import OneLineParser

# What a model writes must not steer a terminal.
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 refused or broken off, 2 bad arguments or nobody answers, 130 Ctrl+C."""
    parser, names = _parser()
    options = parser.parse_args(argv)
    body = {"prompt": _prompt(options, parser), **given_fields(options, names)}
    try:
        client = Client(options.url, options.api_key or os.environ.get(CLIENT_KEY, ""))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        parser.error("the arguments are not UTF-8")
    except ValueError as error:
        parser.error(str(error))
    if sys.stdout is None:
        parser.error("standard output is closed")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        if options.json:
            print(json.dumps(client.whole(body)))
        else:
            _print_text(client, body)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except NoAnswer as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = OneLineParser(prog="inkstream complete", description="Continue a text.", allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="the text; - or nothing reads it from standard input")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"if it asks for one; better in the variable {CLIENT_KEY}")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")
    fields = parser.add_argument_group("fields of the request")
    return parser, add_flags(fields, CompleteRequest.model_json_schema(), without={"prompt", "stream"})


def _prompt(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if options.prompt is None and options.source is not None:
        return ""
    if sys.stdin is None:
        parser.error("standard input is closed: give the text as an argument")
    if options.prompt is None and sys.stdin.isatty():
        parser.error("say what to continue")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        parser.error("standard input is not UTF-8")
    if options.prompt is None and not text:
        parser.error("say what to continue: standard input is empty")
    return text


def _print_text(client: Client, body: dict[str, Any]) -> None:
    """The first text as it comes, others behind it when it is at its end. Raises Refused and NoAnswer."""
    later: dict[int, list[str]] = {}
    count = body.get("n", 1)
    begun, reasons = False, set[str]()
    try:
        for name, data in client.events(body):
            if name == "start" and data.get("truncated"):
                print("note: of the prompt only the end is read", file=sys.stderr)
            if name == "start" and count > 1:
                _write(f"[1 of {count}]\n")
            elif name == "token" and data["index"] == 0:
                begun = True
                _write(data["text"])
            elif name == "token":
                later.setdefault(data["index"], []).append(data["text"])
            elif name == "error":
                raise Refused(error_message(data) or "the service failed")
            elif name == "done":
                reasons |= {choice["finish_reason"] for choice in data["choices"]}
    finally:
        if begun:
            _write("\n")
    if not begun:
        _write("\n")
    for index in range(1, count):
        _write(f"\n[{index + 1} of {count}]\n{''.join(later.get(index, []))}\n")
    for reason in sorted(reasons - {"stop", "length"}):
        print(f"note: the text ends early: {reason}", file=sys.stderr)


def _write(text: str) -> None:
    print(text.translate(_HARMLESS) if sys.stdout.isatty() else text, end="", flush=True)
