"""inkstream complete TEXT: completes a text with a running service."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from app.api.native.routes import CompleteRequest
from app.cli.client import (
    CONNECTION_LOST,
    DEFAULT_URL,
    Client,
    ServiceError,
    ServiceUnreachable,
    error_message,
)
from app.cli.interactive import interact
from app.cli.request_flags import add_flags, given_fields, printable
from app.common.settings import CLIENT_KEY, CLIENT_URL
from model.command_line import OneLineParser


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 failed or interrupted, 2 bad arguments or no service, 130 Ctrl+C."""
    command = build_parser()
    options, rest = command.parse_known_args(argv)
    if rest:
        is_text = options.prompt is not None and not any(word.startswith("-") for word in rest)
        quoted = f"inkstream complete {' '.join([options.prompt, *rest])!r}" if is_text else ""
        hint = f"; a text with spaces stands in quotes: {quoted}" if is_text else ""
        command.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    fields = given_fields(options, [name for name in CompleteRequest.model_fields if name not in _NOT_FLAGS])
    if options.interactive:
        _check_interactive(options, command)
    prompt = options.prompt or "" if options.interactive else _prompt(options, command)
    body = {"prompt": prompt, **fields}
    try:
        url = options.url if options.url is not None else os.environ.get(CLIENT_URL) or DEFAULT_URL
        client = Client(url, options.api_key or os.environ.get(CLIENT_KEY, ""))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        command.error("the arguments are not UTF-8")
    except ValueError as error:
        command.error(str(error))
    if sys.stdout is None:
        command.error("standard output is closed")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        if options.interactive:
            return interact(client, prompt, fields)
        if options.json:
            print(json.dumps(client.complete(body)))
        else:
            _print_text(client, body)
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ServiceUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


_NOT_FLAGS = {"prompt", "stream"}


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(
        prog="inkstream complete",
        description="Complete a text with a running service.",
        epilog='examples: inkstream complete "Once upon a time"; cat prompt.txt | inkstream complete --max-tokens 200; '
        "inkstream complete -i",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", help="text to complete; - or nothing reads it from standard input")
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="write a text in turns with the model, in this terminal"
    )
    parser.add_argument("--url", help=f"URL of the service (default: the variable {CLIENT_URL}, or {DEFAULT_URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"API key, if the service requires one; prefer the variable {CLIENT_KEY}"
    )
    parser.add_argument("--json", action="store_true", help="print the whole response as one JSON object")
    add_flags(
        parser.add_argument_group("fields of the request"), CompleteRequest.model_json_schema(), without=_NOT_FLAGS
    )
    return parser


def _check_interactive(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    """Exits with an error if -i has no terminal, or has flags that need another output."""
    if not all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        command.error("-i needs a terminal as standard input and output: leave it out to read a pipe")
    for flag, is_given in (("--json", options.json), ("--echo", options.echo), ("--n", (options.n or 1) > 1)):
        if is_given:
            command.error(f"{flag} cannot be combined with -i, which shows one text: leave one of them out")


def _prompt(options: argparse.Namespace, command: argparse.ArgumentParser) -> str:
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if options.prompt is None and options.source is not None:
        return ""
    if sys.stdin is None:
        command.error("standard input is closed: pass the text as an argument")
    if options.prompt is None and sys.stdin.isatty():
        command.error(
            "the text to complete is missing: pass it as an argument (inkstream complete "
            '"Once upon a time") or on standard input, or use -i to write it in turns with the model'
        )
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        command.error("standard input is not UTF-8")
    if options.prompt is None and not text:
        command.error("the text to complete is missing: standard input is empty")
    return text


def _print_text(client: Client, body: dict[str, Any]) -> None:
    """Prints the first choice as it streams, then the others. Raises ServiceError, ServiceUnreachable."""
    other_choices: dict[int, list[str]] = {}
    count = body.get("n", 1)
    has_output, reasons = False, set[str]()
    events = client.events(body)
    try:
        for name, data in events:
            if name == CONNECTION_LOST:
                print("note: the connection was lost; resuming the text", file=sys.stderr)
            elif name == "start" and data.get("truncated"):
                print("note: the prompt was truncated to its end", file=sys.stderr)
            if name == "start" and count > 1:
                _write(f"[1 of {count}]\n")
            elif name == "token" and data["index"] == 0:
                has_output = True
                _write(data["text"])
            elif name == "token":
                other_choices.setdefault(data["index"], []).append(data["text"])
            elif name == "error":
                raise ServiceError(error_message(data) or "the service failed")
            elif name == "done":
                reasons |= {choice["finish_reason"] for choice in data["choices"]}
    finally:
        events.close()
        if has_output:
            _write("\n")
    if not has_output:
        _write("\n")
    for index in range(1, count):
        _write(f"\n[{index + 1} of {count}]\n{''.join(other_choices.get(index, []))}\n")
    if "logprobs" in body:
        print("note: --json prints the log-probabilities", file=sys.stderr)
    for reason in sorted(reasons - {"stop", "length"}):
        print(f"note: the text is incomplete: {reason}", file=sys.stderr)


def _write(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
