"""inkstream complete TEXT: completes a text with a running service; flags are generated from the JSON schema."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.api.native.routes import CompleteRequest
from app.cli.client import CLIENT_KEY, Client, NoAnswer, Refused, error_message
from model.argument_parser import OneLineParser

_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def add_flags(parser: argparse._ActionsContainer, schema: Mapping[str, Any], without: set[str]) -> list[str]:
    """Adds one flag for every property of `schema` except those in `without`. Returns the names of the fields."""
    names = [name for name in schema["properties"] if name not in without]
    for name in names:
        described = schema["properties"][name]
        how = _how(name, [part for part in described.get("anyOf", [described]) if part.get("type") != "null"])
        help_text = " ".join(filter(None, [described.get("description", ""), _HINTS.get(name, "")]))
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text.replace("%", "%%"), **how)
    return names


def given_fields(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The fields that were given on the command line, as the service expects them."""
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {name: dict(value) if name in _PAIRS else value for name, value in given.items()}


def _how(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """add_argument()'s keywords for a field of these types."""
    types = {part.get("type", "string") for part in parts}
    if name in _OWN:
        return _OWN[name]
    if types == {"boolean"}:
        return {"action": "store_const", "const": True}
    if "array" in types:
        items = next(part["items"] for part in parts if part.get("type") == "array")
        return {"action": "append", **_SIMPLE[items.get("type", "string")]}
    assert len(types) == 1, f"{name} needs a way to be written on a command line"
    return _SIMPLE[types.pop()]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text[:60]!r}") from None


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, and a finite one, not {text[:60]!r}")
    return number


def _stop(text: str) -> str:
    return re.sub(r"\\[nrt\\]", lambda found: _ESCAPES[found.group()], text)


def _pair(text: str) -> tuple[str, float]:
    token, _, bias = text.rpartition("=")
    if not token:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS, such as 123=-5, not {text[:60]!r}")
    return str(_whole(token)), _finite(bias)


def _content(text: str) -> str:
    """The text itself, or the content of the file after @."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{text[1:]}: is not UTF-8") from None


def _json(text: str) -> Any:
    try:
        return json.loads(_content(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None


_SIMPLE: dict[str, dict[str, Any]] = {
    "integer": {"type": _whole, "metavar": "N"},
    "number": {"type": _finite, "metavar": "X"},
    "string": {"metavar": "TEXT"},
}
_OWN: dict[str, dict[str, Any]] = {
    "source": _SIMPLE["string"],
    "stop": {"action": "append", "type": _stop, "metavar": "TEXT"},
    "logit_bias": {"action": "append", "type": _pair, "metavar": "ID=BIAS"},
    "json_schema": {"type": _json, "metavar": "JSON"},
    "grammar": {"type": _content, "metavar": "TEXT"},
}
_PAIRS = {"logit_bias"}
_HINTS = {
    "stop": r"May be repeated; \n, \t and \\ are read.",
    "stop_token_ids": "May be repeated.",
    "logit_bias": "May be repeated: 123=-5. Of one id, the last counts.",
    "json_schema": "Or @FILE.",
    "grammar": "Or @FILE.",
}


# Model output must not send control sequences to the terminal.
_HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 refused or interrupted, 2 bad arguments or no service, 130 Ctrl+C."""
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
    """Prints the first choice as it streams, then the others. Raises Refused and NoAnswer."""
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
