"""HTTP client of the command line: requests, event streams that resume after a lost connection, error messages."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from app.common.settings import CLIENT_KEY, CLIENT_URL
from app.http.sse import EventParser

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECTION_LOST = "connection lost"
"""Name under which events() reports that it tries to resume a broken stream."""
_STREAM_SECONDS, _WHOLE_SECONDS, _CANCEL_SECONDS = 60.0, 900.0, 2.0
"""Read timeouts: a stream has a heartbeat every ten seconds, a whole response arrives when the text is complete."""
_RESUME_SECONDS, _RETRY_SECONDS = 60.0, 0.25


class ServiceError(Exception):
    """The service returned an error or an incomplete response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Status code of the response; 0 without one."""


class ServiceUnreachable(Exception):
    """The service is unreachable, or the server is not inkstream."""


@dataclass(slots=True)
class _Position:
    """The last event of a stream that arrived."""

    event_id: str = ""
    name: str = ""

    @property
    def is_end(self) -> bool:
        return self.name in ("done", "error")

    @property
    def request_id(self) -> str:
        return self.event_id.rpartition(":")[0]


class Client:
    """HTTP client of a running service."""

    def __init__(self, url: str, api_key: str, *, resume_seconds: float = _RESUME_SECONDS) -> None:
        """`resume_seconds` limits the attempts to resume a broken stream. Raises ValueError: invalid address or key."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"--url (or the variable {CLIENT_URL}) must look like {DEFAULT_URL}, where `inkstream serve` listens"
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"--url is the address of the service alone: leave /v1 out ({url.rstrip('/')[:-3]})")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("--url must not contain a user name, a query or a fragment: pass a key with --api-key")
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
        position, lost_id, deadline = _Position(), "", 0.0
        try:
            with contextlib.ExitStack() as connections:
                first = self._request("POST", "/complete", _STREAM_SECONDS, body)
                yield from self._read(connections.enter_context(first), position)
                while not position.is_end:
                    is_new = position.event_id != lost_id
                    if is_new:
                        lost_id, deadline = position.event_id, time.monotonic() + self._resume_seconds
                    rest = self._try_to_resume(position, deadline, connections)
                    if is_new:
                        yield CONNECTION_LOST, {}
                    if rest:
                        yield from self._read(rest, position)
        finally:
            if position.request_id and not position.is_end:
                self._cancel(position.request_id)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response as one object. Raises ServiceError, ServiceUnreachable."""
        return self._object("POST", "/complete", {**body, "stream": False})

    def get(self, path: str) -> dict[str, Any]:
        """The object at `path`. Raises ServiceError, ServiceUnreachable."""
        return self._object("GET", path)

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._request(method, path, _WHOLE_SECONDS, body) as response:
            try:
                content = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                raise ServiceError("the connection was lost before the response was complete") from None
            except ValueError:
                content = None
        if not isinstance(content, dict):
            raise ServiceUnreachable(f"{self.url} is not an inkstream service: check --url")
        return content

    def _read(self, response: http.client.HTTPResponse, position: _Position) -> Iterator[tuple[str, dict[str, Any]]]:
        if response.headers.get_content_type() != "text/event-stream":
            if position.event_id:  # the connection was lost in the headers
                return
            raise ServiceUnreachable(f"{self.url} is not an inkstream service: check --url")
        parser = EventParser()
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # the last event may be incomplete
            for event in (event for line in response for event in parser.feed(line) if event.name):
                data = json.loads(event.data)
                position.name, position.event_id = event.name, event.id
                yield event.name, data

    def _try_to_resume(
        self, position: _Position, deadline: float, connections: contextlib.ExitStack
    ) -> http.client.HTTPResponse | None:
        """The rest of a broken stream; None if another attempt may succeed. Raises ServiceError if none can."""
        if not position.request_id:
            raise ServiceError("the stream ended before the text was complete")
        time.sleep(_RETRY_SECONDS)
        path, headers = f"/complete/{position.request_id}/events", {"Last-Event-ID": position.event_id}
        try:
            return connections.enter_context(self._request("GET", path, _STREAM_SECONDS, headers=headers))
        except (ServiceError, ServiceUnreachable) as error:
            is_refused = isinstance(error, ServiceError) and error.status != 503
            if is_refused or time.monotonic() > deadline:
                raise ServiceError(f"the stream ended before the text was complete: {error}") from None
        return None

    def _cancel(self, request_id: str) -> None:
        with (
            contextlib.suppress(ServiceError, ServiceUnreachable),
            self._request("DELETE", f"/complete/{request_id}", _CANCEL_SECONDS),
        ):
            pass

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        seconds: float,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection_class(self._host, self._port, timeout=seconds)
        try:
            try:
                content = None if body is None else json.dumps(body)
                connection.request(method, f"{self._path}{path}", content, {**self._headers, **(headers or {})})
                response = connection.getresponse()
                failure = b"" if response.status < 300 else response.read()
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceUnreachable(_unreachable(self.url, error)) from None
            if response.status >= 300:
                raise ServiceError(_message(response, failure), response.status)
            yield response
        finally:
            connection.close()


def error_message(body: Any) -> str | None:
    """The message of an error object, if `body` is one."""
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        return None


def _unreachable(url: str, error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return f"{url} speaks HTTP without TLS: write http:// in place of https://"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return (
        f"no service answers at {url} ({reason}): start one with `inkstream serve` (`make serve` in a checkout), "
        "or name another with --url"
    )


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
