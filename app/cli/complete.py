"""inkstream complete TEXT: completes a text with a running service, once or in turns with the user."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.native.routes import CompleteRequest
from app.cli.client import CONNECTION_LOST, DEFAULT_URL, Client, ServiceError, ServiceUnreachable
from app.cli.request_flags import add_flags, given_fields, printable, with_flags
from app.common.settings import CLIENT_KEY, CLIENT_URL
from model.command_line import OneLineParser

_NOT_FLAGS = {"prompt", "stream", "resume"}
_FIELDS = [name for name in CompleteRequest.model_fields if name not in _NOT_FLAGS]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 failed or interrupted, 2 bad arguments or no service, 130 Ctrl+C."""
    command = build_parser()
    options, rest = command.parse_known_args(argv)
    if rest:
        is_text = options.prompt is not None and not any(word.startswith("-") for word in rest)
        quoted = f"inkstream complete {' '.join([options.prompt, *rest])!r}" if is_text else ""
        hint = f"; a text with spaces stands in quotes: {quoted}" if is_text else ""
        command.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if sys.stdout is None:
        command.error("standard output is closed")
    if options.interactive:
        _check_interactive(options, command)
    fields = given_fields(options, _FIELDS)
    body = {**fields, "prompt": options.prompt or "" if options.interactive else _prompt(options, command)}
    try:
        url = options.url if options.url is not None else os.environ.get(CLIENT_URL) or DEFAULT_URL
        client = Client(url, options.api_key or os.environ.get(CLIENT_KEY, ""))
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        command.error("the arguments are not UTF-8")
    except ValueError as error:
        command.error(str(error))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        if options.interactive:
            _interact(client, body)
        elif options.json:
            print(json.dumps(client.complete(body)))
        else:
            _print_choices(client, body)
    except (ServiceError, ServiceUnreachable) as error:
        print(f"error: {with_flags(str(error), _FIELDS, body)}", file=sys.stderr)
        return 1 if isinstance(error, ServiceError) else 2
    return 0


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
    text = ""
    if options.prompt == "-" or not sys.stdin.isatty():
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            command.error("standard input is not UTF-8")
    if options.prompt is None and not text:
        command.error(
            "the text to complete is missing: pass it as an argument (inkstream complete "
            '"Once upon a time") or on standard input, or use -i to write it in turns with the model'
        )
    return text


def _print_choices(client: Client, body: dict[str, Any]) -> None:
    """Prints the first choice as it streams, then the others. Raises ServiceError, ServiceUnreachable."""
    n, texts = body.get("n", 1), defaultdict[int, list[str]](list)
    try:
        _stream(client, body, texts)
        texts[0].append("")  # complete, even if it is empty
    finally:
        _write("\n" if texts[0] else "")
    for index in range(1, n):
        _write(f"\n[{index + 1} of {n}]\n{''.join(texts[index])}\n")
    if "logprobs" in body:
        _note("--json prints the log-probabilities")


def _stream(client: Client, body: dict[str, Any], texts: Mapping[int, list[str]]) -> None:
    """Adds the pieces of each choice's text to `texts`, and prints the first choice's as they arrive."""
    with contextlib.closing(client.events(body)) as events:
        for name, data in events:
            if name == CONNECTION_LOST:
                _note("the connection was lost; resuming the text")
            elif name == "start":
                if data.get("truncated"):
                    _note("the prompt was truncated to its end")
                _write(f"[1 of {body['n']}]\n" if body.get("n", 1) > 1 else "")
            elif name == "token":
                texts[data["index"]].append(data["text"])
                _write(data["text"] if data["index"] == 0 else "")
            elif name == "error":
                raise ServiceError(data["error"]["message"])
            elif name == "done":
                for reason in sorted({choice["finish_reason"] for choice in data["choices"]} - {"stop", "length"}):
                    _note(f"the text is incomplete: {reason}")


_Turn = tuple[str, list[str]]
"""What was typed, and the pieces of its continuation."""


def _interact(client: Client, body: dict[str, Any]) -> None:
    """Reads lines until Ctrl+D; appends each to the text and continues it."""
    print("Type a text and the model continues it; Enter alone continues it further. /undo removes the last turn,")
    print("/regenerate replaces the last continuation, Ctrl+C stops the model, Ctrl+D leaves.")
    with contextlib.suppress(ImportError):  # some builds of Python lack it
        importlib.import_module("readline")  # the line editor of input()
    turns = list[_Turn]()
    if body["prompt"]:
        _take_turn(client, body, turns, body["prompt"])
    while True:
        try:
            entry = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        else:
            _take_turn(client, body, turns, entry)


def _take_turn(client: Client, body: dict[str, Any], turns: list[_Turn], entry: str) -> None:
    """Runs a command, or adds what was typed to the text and continues it; Ctrl+C stops that."""
    if entry == "/undo":
        del turns[-1:]
        return
    if entry == "/regenerate":
        entry = turns.pop()[0] if turns else ""
    pieces = list[str]()
    turns.append((entry, pieces))
    text = "".join(typed + "".join(continuation) for typed, continuation in turns)
    try:
        _stream(client, {**body, "prompt": text}, {0: pieces})
        _write("\n")
    except KeyboardInterrupt:
        print()
    except (ServiceError, ServiceUnreachable) as error:
        print(f"\nerror: {with_flags(str(error), _FIELDS, body)}", file=sys.stderr)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _write(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
