"""HTTP client of the command line: requests, event streams that resume after a lost connection, error messages."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from app.common.settings import CLIENT_KEY, CLIENT_URL
from app.http.sse import EventParser

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECTION_LOST = "connection lost"
"""Name under which events() reports that it tries to resume a broken stream."""
_STREAM_SECONDS, _WHOLE_SECONDS, _CANCEL_SECONDS = 60.0, 900.0, 2.0
"""Read timeouts: a stream has a heartbeat every ten seconds, a whole response arrives when the text is complete."""
_MAY_COME_BACK = (502, 503, 504)
"""Statuses of a service that is starting, or of a proxy in front of one."""
_RESUME_SECONDS, _RETRY_SECONDS = 60.0, 0.25
_IDS = "return_token_ids"
"""Field with which a stream carries what another service needs to go on without computing the text again."""
_INCOMPLETE = "the stream ended before the text was complete"


class ServiceError(Exception):
    """The service returned an error or an incomplete response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Status code of the response; 0 without one."""


class ServiceUnreachable(Exception):
    """The service is unreachable, or the server is not inkstream."""


class _Arrived:
    """What has arrived of a stream, with which another service goes on."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.start: dict[str, Any] = {}
        prompt = body.get("prompt")
        n_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        self._choices: list[dict[str, Any]] = [
            {"text": "", "token_ids": [], **({"logprobs": 0} if body.get("logprobs") is not None else {})}
            for _ in range(n_prompts * int(body.get("n") or 1))
        ]

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """Adds an event."""
        if name == "start":
            self.start = dict(data)
        elif name == "token" and data.get("index", 0) < len(self._choices):
            choice = self._choices[data.get("index", 0)]
            choice["text"] += data["text"]
            choice["token_ids"] += data.get("token_ids", [])
            if "logprobs" in choice:
                choice["logprobs"] += len(data.get("tokens", []))

    def resuming_body(self, after: int) -> dict[str, Any]:
        """The request that goes on after this event."""
        return {**self.body, "resume": {"after": after, "receipt": self.start, "choices": self._choices}}


class Client:
    """HTTP client of a running service."""

    def __init__(self, url: str, api_key: str, *, resume_seconds: float = _RESUME_SECONDS) -> None:
        """`resume_seconds` limits the attempts to resume a broken stream. Raises ValueError: invalid address or key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(
                f"--url (or the variable {CLIENT_URL}) must look like {DEFAULT_URL}, where `inkstream serve` listens"
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"--url is the address of the service alone: leave /v1 out ({url.rstrip('/')[:-3]})")
        if not api_key.isascii() or not api_key.isprintable():
            raise ValueError("the API key contains invalid characters: keys are printable ASCII")
        self.url = url
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._resume_seconds = resume_seconds

    def events(self, body: Mapping[str, Any]) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """(name, data) of each event, to the last. Raises ServiceError, ServiceUnreachable.

        If the connection is lost, reports CONNECTION_LOST and resumes the stream. Closing this iterator early cancels
        the completion.
        """
        name = last_id = request_id = ""
        deadline = 0.0  # of the attempts to resume; 0 while the connection holds
        arrived = _Arrived({**body, _IDS: True})
        opening = self._request("POST", "/complete", _STREAM_SECONDS, arrived.body)
        try:
            while True:
                try:
                    with opening as response:
                        if not last_id and response.headers.get_content_type() != "text/event-stream":
                            raise ServiceUnreachable(f"{self.url} is not an inkstream service: check --url")
                        for name, last_id, data in _events_of(response):
                            request_id, deadline = last_id.rpartition(":")[0], 0.0
                            arrived.take(name, data)
                            yield name, data
                    error: Exception | None = None
                except (ServiceError, ServiceUnreachable) as failure:
                    error = failure
                    if not request_id and _IDS in arrived.body and _IDS in str(failure):  # an older service
                        arrived = _Arrived(body)
                        opening = self._request("POST", "/complete", _STREAM_SECONDS, arrived.body)
                        continue
                    if not request_id:
                        raise
                if name in ("done", "error"):
                    return
                is_refused = isinstance(error, ServiceError) and error.status not in _MAY_COME_BACK
                if not request_id or is_refused or 0 < deadline < time.monotonic():
                    raise ServiceError(f"{_INCOMPLETE}: {error}" if error else _INCOMPLETE)
                if not deadline:
                    deadline = time.monotonic() + self._resume_seconds
                    yield CONNECTION_LOST, {}
                time.sleep(_RETRY_SECONDS)
                opening = self._resumed(last_id, arrived)
        finally:
            if request_id and name not in ("done", "error"):
                gone = contextlib.suppress(ServiceError, ServiceUnreachable)
                with gone, self._request("DELETE", f"/complete/{request_id}", _CANCEL_SECONDS):
                    pass

    @contextlib.contextmanager
    def _resumed(self, last_id: str, arrived: _Arrived) -> Iterator[http.client.HTTPResponse]:
        """The stream's rest from the service that began it, or from one that does not know it."""
        stream, _, number = last_id.rpartition(":")
        headers = {"Last-Event-ID": last_id}
        with contextlib.ExitStack() as stack:
            try:
                opening = self._request("GET", f"/complete/{stream}/events", _STREAM_SECONDS, headers=headers)
                response = stack.enter_context(opening)
            except ServiceError as error:
                if not arrived.start or error.status not in (404, *_MAY_COME_BACK):
                    raise
                body = arrived.resuming_body(int(number))
                response = stack.enter_context(self._request("POST", "/complete", _STREAM_SECONDS, body))
            yield response

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response as one object. Raises ServiceError, ServiceUnreachable."""
        with self._request("POST", "/complete", _WHOLE_SECONDS, {**body, "stream": False}) as response:
            try:
                content = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                raise ServiceError("the connection was lost before the response was complete") from None
            except ValueError:
                content = None
        if not isinstance(content, dict):
            raise ServiceUnreachable(f"{self.url} is not an inkstream service: check --url")
        return content

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        seconds: float,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(self._connection_class(self._host, self._port, timeout=seconds)) as connection:
            try:
                content = None if body is None else json.dumps(body)
                connection.request(method, f"{self._path}{path}", content, {**self._headers, **(headers or {})})
                response = connection.getresponse()
                failure = b"" if response.status < 300 else response.read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceUnreachable(
                    f"no service answers at {self.url} ({getattr(error, 'strerror', None) or error}): start one with "
                    "`inkstream serve` (`make serve` in a checkout), or name another with --url"
                ) from None
            if response.status >= 300:
                raise ServiceError(_message(response, failure), response.status)
            yield response


def _events_of(response: http.client.HTTPResponse) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, id, data) of the events that arrive until the stream ends or breaks."""
    parser = EventParser()
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # the last event may be incomplete
        for line in response:
            yield from ((event.name, event.id, json.loads(event.data)) for event in parser.feed(line) if event.name)


def _message(response: http.client.HTTPResponse, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status} {response.reason}"
    if response.status == 401:
        return f"{message}; for this command, set the variable {CLIENT_KEY} or --api-key"
    retry_after = response.headers.get("Retry-After")
    return f"{message} (retry in {retry_after} s)" if retry_after else message
