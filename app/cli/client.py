"""HTTP client of the command line: completion requests, event streams, error messages."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

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
