"""inkstream complete TEXT: completes a text with a running service; its flags are generated from the JSON schema.

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
from app.http.sse import EventParser
from model.command_line import OneLineParser

CLIENT_KEY = "INKSTREAM_API_KEY"
"""Environment variable of the client's API key; not a setting of the service."""
_STREAM_SECONDS, _WHOLE_SECONDS = 60.0, 900.0
"""Read timeouts: a stream has a heartbeat every ten seconds, a whole response arrives when the text is complete."""


class ServiceError(Exception):
    """The service returned an error or an incomplete response."""


class ServiceUnreachable(Exception):
    """The service is unreachable, or the server is not inkstream."""


class Client:
    """HTTP client of a running service."""

    def __init__(self, url: str, api_key: str) -> None:
        """Raises ValueError for an invalid address or key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("--url must look like http://127.0.0.1:8000, where `inkstream serve` listens")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("--url must not contain a user name, a query or a fragment: pass a key with --api-key")
        if not api_key.isascii() or not api_key.isprintable():
            raise ValueError("the API key contains invalid characters: keys are printable ASCII")
        self._url = url
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def events(self, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, data) of each event, to the last. Raises ServiceError, ServiceUnreachable."""
        with self._post(body, _STREAM_SECONDS) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise ServiceUnreachable(f"{self._url} is not an inkstream service: check --url")
            name, parser = "", EventParser()
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # the last may be incomplete
                for event in (event for line in response for event in parser.feed(line) if event.name):
                    name = event.name
                    yield name, json.loads(event.data)
            if name not in ("done", "error"):
                raise ServiceError("the stream ended before the text was complete")

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response as one object. Raises ServiceError, ServiceUnreachable."""
        with self._post({**body, "stream": False}, _WHOLE_SECONDS) as response:
            try:
                content = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                raise ServiceError("the connection was lost before the response was complete") from None
            except ValueError:
                content = None
        if not isinstance(content, dict):
            raise ServiceUnreachable(f"{self._url} is not an inkstream service: check --url")
        return content

    @contextlib.contextmanager
    def _post(self, body: Mapping[str, Any], seconds: float) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_class(self._host, self._port, timeout=seconds)
        try:
            try:
                connection.request("POST", f"{self._path}/complete", json.dumps(body), self._headers)
                response = connection.getresponse()
                failure = b"" if response.status == 200 else response.read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
                raise ServiceUnreachable(
                    f"no response from {self._url} ({reason}): is `inkstream serve` running?"
                ) from None
            if response.status != 200:
                raise ServiceError(_message(response, failure))
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
    message = message or f"status {response.status} {response.reason}"
    if response.status == 401:
        return f"{message}; for this command, set the variable {CLIENT_KEY} or --api-key"
    retry_after = response.headers.get("Retry-After")
    return f"{message} (retry in {retry_after} s)" if retry_after else message


_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def add_flags(parser: argparse._ActionsContainer, schema: Mapping[str, Any], without: set[str]) -> list[str]:
    """Adds one flag for every property of `schema` except those in `without`. Returns the names of the fields."""
    field_names = [name for name in schema["properties"] if name not in without]
    for name in field_names:
        field = schema["properties"][name]
        options = _argument_options(name, [part for part in field.get("anyOf", [field]) if part.get("type") != "null"])
        help_text = " ".join(filter(None, [field.get("description", ""), _HELP_SUFFIXES.get(name, "")]))
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text.replace("%", "%%"), **options)
    return field_names


def given_fields(options: argparse.Namespace, field_names: list[str]) -> dict[str, Any]:
    """The fields that were given on the command line, as the service expects them."""
    given = {name: value for name in field_names if (value := getattr(options, name)) is not None}
    return {name: dict(value) if name in _PAIR_FIELDS else value for name, value in given.items()}


def _argument_options(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """add_argument()'s keywords for a field of these types."""
    types = {part.get("type", "string") for part in parts}
    if name in _ARGUMENTS_BY_FIELD:
        return _ARGUMENTS_BY_FIELD[name]
    if types == {"boolean"}:
        return {"action": "store_const", "const": True}
    if "array" in types:
        items = next(part["items"] for part in parts if part.get("type") == "array")
        return {"action": "append", **_ARGUMENTS_BY_TYPE[items.get("type", "string")]}
    assert len(types) == 1, f"{name} has no command line syntax"
    return _ARGUMENTS_BY_TYPE[types.pop()]


def _integer(text: str) -> int:
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
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text[:60]!r}")
    return number


def _stop(text: str) -> str:
    return re.sub(r"\\[nrt\\]", lambda found: _ESCAPES[found.group()], text)


def _pair(text: str) -> tuple[str, float]:
    token, _, bias = text.rpartition("=")
    if not token:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS, such as 123=-5, not {text[:60]!r}")
    return str(_integer(token)), _finite(bias)


def _read_content(text: str) -> str:
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
        return json.loads(_read_content(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None


_ARGUMENTS_BY_TYPE: dict[str, dict[str, Any]] = {
    "integer": {"type": _integer, "metavar": "N"},
    "number": {"type": _finite, "metavar": "X"},
    "string": {"metavar": "TEXT"},
}
_ARGUMENTS_BY_FIELD: dict[str, dict[str, Any]] = {
    "source": _ARGUMENTS_BY_TYPE["string"],
    "stop": {"action": "append", "type": _stop, "metavar": "TEXT"},
    "logit_bias": {"action": "append", "type": _pair, "metavar": "ID=BIAS"},
    "json_schema": {"type": _json, "metavar": "JSON"},
    "grammar": {"type": _read_content, "metavar": "TEXT"},
}
_PAIR_FIELDS = {"logit_bias"}
_HELP_SUFFIXES = {
    "stop": r"May be repeated; \n, \t and \\ are escapes.",
    "stop_token_ids": "May be repeated.",
    "logit_bias": "May be repeated: 123=-5. The last one for an id applies.",
    "json_schema": "Or @FILE to read it from a file.",
    "grammar": "Or @FILE to read it from a file.",
}


# Model output must not send control sequences to the terminal.
_CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 failed or interrupted, 2 bad arguments or no service, 130 Ctrl+C."""
    parser, field_names = _parser()
    options = parser.parse_args(argv)
    body = {"prompt": _prompt(options, parser), **given_fields(options, field_names)}
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


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    parser = OneLineParser(prog="inkstream complete", description="Complete a text.", allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="text to complete; - or nothing reads it from standard input")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the service (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"API key, if the service requires one; prefer the variable {CLIENT_KEY}"
    )
    parser.add_argument("--json", action="store_true", help="print the whole response as one JSON object")
    fields = parser.add_argument_group("fields of the request")
    return parser, add_flags(fields, CompleteRequest.model_json_schema(), without={"prompt", "stream"})


def _prompt(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    if options.prompt not in (None, "-"):
        return str(options.prompt)
    if options.prompt is None and options.source is not None:
        return ""
    if sys.stdin is None:
        parser.error("standard input is closed: pass the text as an argument")
    if options.prompt is None and sys.stdin.isatty():
        parser.error("the text to complete is missing: pass it as an argument or on standard input")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        parser.error("standard input is not UTF-8")
    if options.prompt is None and not text:
        parser.error("the text to complete is missing: standard input is empty")
    return text


def _print_text(client: Client, body: dict[str, Any]) -> None:
    """Prints the first choice as it streams, then the others. Raises ServiceError, ServiceUnreachable."""
    other_choices: dict[int, list[str]] = {}
    count = body.get("n", 1)
    has_output, reasons = False, set[str]()
    try:
        for name, data in client.events(body):
            if name == "start" and data.get("truncated"):
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
        if has_output:
            _write("\n")
    if not has_output:
        _write("\n")
    for index in range(1, count):
        _write(f"\n[{index + 1} of {count}]\n{''.join(other_choices.get(index, []))}\n")
    for reason in sorted(reasons - {"stop", "length"}):
        print(f"note: the text is incomplete: {reason}", file=sys.stderr)


def _write(text: str) -> None:
    print(text.translate(_CONTROL_CHARACTERS) if sys.stdout.isatty() else text, end="", flush=True)
