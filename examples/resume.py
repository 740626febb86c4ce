"""Streams a completion, and resumes it where the connection broke, at another service if need be. Needs only Python.

    python3 examples/resume.py "Once upon a time"

A service that asks for keys takes one from the variable INKSTREAM_API_KEY.
"""

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

PATIENCE = 30.0
"""Seconds to look for a lost service. A stream is never silent for so long: heartbeats come every ten seconds."""


def events(requests: list[urllib.request.Request]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Id, name and data of the events of one connection, until it ends or breaks; of the first request that works."""
    *others, last = requests
    for request in others:
        try:
            yield from events([request])
            return
        except urllib.error.HTTPError as error:
            if error.code not in (404, 502, 503, 504):
                raise
    with urllib.request.urlopen(last, timeout=PATIENCE) as response:
        fields: dict[str, str] = {}
        for line in response:
            name, colon, value = line.decode().rstrip("\n").partition(": ")
            if colon and name:  # a line without a name is a heartbeat
                fields[name] = value
            elif not line.strip() and "data" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])
                fields = {}


def completion(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of the text, each once. Raises RuntimeError if the service ends the stream with an error."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("INKSTREAM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    body = {**body, "return_token_ids": True}
    requests = [urllib.request.Request(f"{url}/complete", json.dumps(body).encode(), headers)]
    last_id, give_up_at = "", 0.0
    receipt: dict[str, Any] = {}
    choice: dict[str, Any] = {"text": "", "token_ids": []}
    while True:
        try:
            for event_id, name, data in events(requests):
                last_id, give_up_at = event_id, 0.0
                if name == "start":
                    receipt = data
                elif name == "token":
                    choice["text"] += data["text"]
                    choice["token_ids"] += data.get("token_ids", [])
                    yield data["text"]
                elif name == "error":
                    raise RuntimeError(data["error"]["message"])
                elif name == "done":
                    return
        except urllib.error.HTTPError as error:
            if not last_id or error.code not in (502, 503, 504):  # the service is starting or restarting
                raise RuntimeError(json.load(error)["error"]["message"]) from None
        except urllib.error.URLError as error:
            if not last_id:
                raise RuntimeError(f"no service at {url}: {error.reason}; start one with make serve") from None
        except (OSError, http.client.HTTPException):
            pass  # the connection broke
        give_up_at = give_up_at or time.monotonic() + PATIENCE
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"the connection broke, and {url} did not come back within {PATIENCE:.0f} s")
        time.sleep(0.2)
        if last_id:  # else nothing has come, and the same request is sent again
            # An event's id is the id of its stream, a colon and a number. The service sends what came after that event.
            stream, _, number = last_id.rpartition(":")
            since = {**headers, "last-event-id": last_id}
            requests = [urllib.request.Request(f"{url}/complete/{stream}/events", headers=since)]
            # A service that does not know the stream goes on from what has come of it.
            resume = {"after": int(number), "receipt": receipt, "choices": [choice]}
            again = {**body, "resume": resume} if receipt else body
            requests.append(urllib.request.Request(f"{url}/complete", json.dumps(again).encode(), headers))


def main() -> int:
    """Exit codes: 0 done, 1 no service or an error."""
    parser = argparse.ArgumentParser(description="Stream a completion and resume it if the connection breaks.")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=100, help="length of the continuation (%(default)s)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text; random by default")
    options = parser.parse_args()
    body: dict[str, Any] = {"prompt": options.prompt, "max_tokens": options.max_tokens}
    if options.seed is not None:
        body["seed"] = options.seed
    try:
        for piece in completion(options.url.rstrip("/"), body):
            print(piece, end="", flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
