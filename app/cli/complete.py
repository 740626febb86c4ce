"""python -m app complete "text": continue a text through a running service, streamed to the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit


class _Refused(Exception):
    """The service's error message."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 refused or broken off, 2 bad arguments or nobody answers, 130 Ctrl+C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.prompt is None and options.source is None:
        parser.error("say what to continue")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    names = ("source", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    given = {name: v for name in names if (v := getattr(options, name)) is not None}
    body = {"prompt": prompt or "", **given}
    try:
        for text in _stream(options.url, body):
            print(text, end="", flush=True)
        print()
    except _Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"error: no answer from {options.url} ({error}): is `inkstream serve` running?", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inkstream complete", description="Continue a text.", allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="the text, or - for standard input; may be left out with --source")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)")
    parser.add_argument("--source", metavar="TEXT", help="what the encoder reads, for models that have one")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    return parser


def _stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The texts of the token events. Raises _Refused for an error of the service."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the address must look like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=60)
    path = f"{parts.path.rstrip('/')}/complete"
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise _Refused(_message(response.read()))
    name = ""
    for line in response:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: ") and name == "token":
            yield json.loads(line[6:])["text"]
        elif line.startswith(b"data: ") and name == "error":
            raise _Refused(_message(line[6:]))
    if name != "done":
        raise _Refused("the stream broke off")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
