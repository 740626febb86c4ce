"""inkstream complete TEXT: completes a text with a running service; flags are generated from the JSON schema.

Client is the HTTP client of the command line: requests, event streams, error messages.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.api.native.routes import CompleteRequest
from model.command_line import OneLineParser

CLIENT_KEY = "INKSTREAM_API_KEY"
"""Environment variable of the client's API key; not a setting of the service."""
_STREAM_SECONDS, _WHOLE_SECONDS = 60.0, 900.0
"""Read timeouts: a stream sends a heartbeat every ten seconds, a whole response only arrives when it is complete."""


class Refused(Exception):
    """The service returned an error, or the response was incomplete."""


class NoAnswer(Exception):
    """The service is unreachable, or the server is not inkstream."""


class Client:
    """A running service."""

    def __init__(self, url: str, api_key: str) -> None:
        """Raises ValueError for an invalid address or key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("--url must look like http://127.0.0.1:8000, where `inkstream serve` listens")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("--url must not hold a name, a query or a fragment; a key goes into --api-key")
        if not api_key.isascii() or not api_key.isprintable():
            raise ValueError("the API key has characters that no key has")
        self._url = url
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def events(self, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, data) of each event, to the last. Raises Refused and NoAnswer."""
        with self._post(body, _STREAM_SECONDS) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise NoAnswer(f"{self._url} answers, but not as inkstream does")
            name = ""
            with contextlib.suppress(
                OSError, http.client.HTTPException, ValueError
            ):  # the last line may be half of one
                for line in response:
                    if line.startswith(b"event: "):
                        name = line[7:].strip().decode()
                    elif line.startswith(b"data: "):
                        yield name, json.loads(line[6:])
            if name not in ("done", "error"):
                raise Refused("the stream broke off before the text was at its end")

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response as one object. Raises Refused and NoAnswer."""
        with self._post({**body, "stream": False}, _WHOLE_SECONDS) as response:
            try:
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                raise Refused("the connection broke before the answer was complete") from None
            except ValueError:
                answer = None
        if not isinstance(answer, dict):
            raise NoAnswer(f"{self._url} answers, but not as inkstream does")
        return answer

    @contextlib.contextmanager
    def _post(self, body: Mapping[str, Any], seconds: float) -> Iterator[http.client.HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=seconds)
        try:
            try:
                connection.request("POST", f"{self._path}/complete", json.dumps(body), self._headers)
                response = connection.getresponse()
                failure = b"" if response.status == 200 else response.read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
                raise NoAnswer(f"no answer from {self._url} ({reason}): is `inkstream serve` running?") from None
            if response.status != 200:
                raise Refused(_message(response, failure))
            yield response
        finally:
            connection.close()


def error_message(body: Any) -> str | None:
    """The message of an error object, if `body` is one."""
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        return None


def _message(response: http.client.HTTPResponse, body: bytes) -> str:
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = None
    told = message or f"status {response.status} {response.reason}"
    if response.status == 401:
        return f"{told}; here it goes into the variable {CLIENT_KEY}, or --api-key"
    again = response.headers.get("Retry-After")
    return f"{told} (it may work again in {again} s)" if again else told


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
