"""Bounded requests to a hub: redirects, headers, bytes and time have limits, and a token stays with its host.

huggingface_hub's own functions follow any redirect, read any length, and wait as long as bytes keep arriving.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session, hf_raise_for_status, tqdm

from model.checkpoint.hub_metadata import RemoteFile
from model.files import one_line

_MAX_REDIRECTS = 5
"""A renamed repository needs one, a large file another."""
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try."""
_MAX_PAUSE = 300.0
"""Seconds to wait at most because a hub asks for it: its window of requests."""
_LEAST_BYTES = 1 << 15
"""Fewer in a window are no progress."""
_WINDOW = 60.0
"""Seconds in which the head, the model info, and every _LEAST_BYTES of a file must arrive."""
_log = logging.getLogger("inkstream")


class TransferError(OSError):
    """An answer that is refused whatever its content: too long, too slow, or inconsistent. It has no errno."""


class TooSlow(TransferError):
    """A hub that sends hardly anything, as if it could not be reached."""


class _EndedEarly(TransferError):
    """A body that is shorter than its file; another try appends the rest."""


class _Pace:
    """Shuts connections down when too little arrives, because the library's timeouts begin anew with every byte."""

    def __init__(self) -> None:
        self.is_over = False
        self._connections: list[socket.socket] = []
        self._received, self._ends = 0, time.monotonic() + _WINDOW
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hub-pace", daemon=True)

    def __enter__(self) -> _Pace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()

    def add(self, count: int) -> None:
        """Counts bytes of a body; enough of them begin a new window."""
        self._received += count
        if self._received >= _LEAST_BYTES:
            self._received, self._ends = 0, time.monotonic() + _WINDOW

    def trace(self, event: str, details: dict[str, Any]) -> None:
        """The library's trace extension: keeps a duplicate of each socket, which TLS then takes over."""
        if event == "connection.connect_tcp.complete":
            opened = details["return_value"].get_extra_info("socket")
            self._connections.append(socket.socket(fileno=os.dup(opened.fileno())))

    def _watch(self) -> None:
        while not self._finished.wait(max(0.0, self._ends - time.monotonic())):
            if time.monotonic() < self._ends:
                continue
            self.is_over = True
            for connection in tuple(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._finished.wait(0.1)  # again, for a connection that is opened meanwhile


@contextmanager
def _respond(url: str, headers: dict[str, str]) -> Iterator[tuple[httpx2.Response, _Pace]]:
    """The response of status 2xx, whose body is not read yet. Raises TransferError, OSError and httpx2.HTTPError."""
    # A new connection for every request: only its own is known to the pace.
    headers = {**headers, "Accept-Encoding": "identity", "Connection": "close"}
    with _Pace() as pace:
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with get_session().stream(
                    "GET", url, headers=headers, follow_redirects=False, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                    extensions={"trace": pace.trace},
                ) as response:  # fmt: skip
                    if response.status_code not in _REDIRECTS:
                        _raise_for_status(response)
                        yield response, pace
                        return
                    target = redirect_target(url, response.headers.get("Location", ""))
                    if not keeps_token(url, target):
                        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
                    url = target
        except (httpx2.TransportError, OSError):
            if pace.is_over:
                problem = f"sends less than {_LEAST_BYTES} bytes in {_WINDOW:g} s"
                raise TooSlow(f"{_host(url)} {problem}; what has arrived is kept") from None
            raise
        raise TransferError(f"{_host(url)} redirects more than {_MAX_REDIRECTS} times")


def redirect_target(url: str, location: str) -> str:
    """Where a redirect leads. Raises TransferError if it must not be followed."""
    try:
        given, target = httpx2.URL(location), httpx2.URL(url).join(location)
    except (httpx2.InvalidURL, ValueError, TypeError):
        raise TransferError(f"{_host(url)} redirects to something that is no URL") from None
    if not location or target.scheme not in _PORTS or not target.host or (given.scheme and not given.host):
        raise TransferError(f"{_host(url)} redirects to something that is not http or https")
    if httpx2.URL(url).scheme == "https" and target.scheme == "http":
        raise TransferError(f"{_host(url)} redirects from https to http, which anyone on the way can change")
    return str(target.copy_with(userinfo=b"", fragment=None))


def keeps_token(url: str, target: str) -> bool:
    """Whether the token of `url` may go to `target`: the same scheme, host and port, or the step from http to https."""
    before, after = (httpx2.URL(each) for each in (url, target))
    ports = [each.port or _PORTS[each.scheme] for each in (before, after)]
    is_same = before.scheme == after.scheme and ports[0] == ports[1]
    is_upgrade = (before.scheme, after.scheme) == ("http", "https") and ports == [80, 443]
    return before.host == after.host and (is_same or is_upgrade)


def fetch_info(url: str, headers: dict[str, str], max_bytes: int) -> bytes:
    """The body, of at most `max_bytes`. Raises as _respond does."""
    pauses = iter(_PAUSES)
    while True:
        try:
            return _read(url, headers, max_bytes)
        except HfHubHTTPError as error:
            _pause(error, next(pauses, None))


def _read(url: str, headers: dict[str, str], max_bytes: int) -> bytes:
    content = bytearray()
    with _respond(url, headers) as (response, _):
        for chunk in response.iter_bytes():  # decoded in pieces of at most 1 MiB
            content += chunk
            if len(content) > max_bytes:
                raise TransferError(f"{_host(url)} answers with more than {max_bytes} bytes of model info")
    return bytes(content)


def fetch_file(url: str, headers: dict[str, str], output: BinaryIO, file: RemoteFile) -> None:
    """Appends the bytes that `output` lacks, in several tries, whose count begins anew with enough of them.

    Raises as _respond does.
    """
    pauses, mark = iter(_PAUSES), output.tell()
    while True:
        try:
            return _append_rest(url, headers, output, file)
        except (HfHubHTTPError, httpx2.TransportError, _EndedEarly) as error:
            if output.tell() >= mark + _LEAST_BYTES:
                pauses, mark = iter(_PAUSES), output.tell()
            _pause(error, next(pauses, None))


def _pause(error: Exception, pause: float | None) -> None:
    """Waits before another try, as long as the hub asks for within reason, or raises the error."""
    if isinstance(error, HfHubHTTPError):
        status, asked = error.response.status_code, error.response.headers.get("Retry-After", "").strip()
        if pause is None or (status not in (408, 429) and status < 500):
            raise error
        if asked.isascii() and asked.isdigit():
            pause = min(max(pause, float(asked)), _MAX_PAUSE)
        _log.warning("%s answers %d; trying again in %g s", _host(str(error.response.url)), status, pause)
    elif pause is None:
        raise error
    time.sleep(pause)


def _append_rest(url: str, headers: dict[str, str], output: BinaryIO, file: RemoteFile) -> None:
    """Appends the bytes that `output` lacks, and never one more than the file has. Raises as _respond does."""
    if (start := output.tell()) == file.size:
        return
    ranges = {"Range": f"bytes={start}-"} if start else {}
    with _respond(url, {**headers, **ranges}) as (response, pace):
        if start and response.status_code == 200:  # it ignores ranges
            output.seek(0)
            output.truncate()
            start = 0
        _check_lengths(response, start, file)
        left = file.size - start
        bar = tqdm(total=file.size, initial=start, desc=file.name, unit="B", unit_scale=True, disable=None)  # type: ignore[no-untyped-call]
        with bar as progress:
            for chunk in response.iter_bytes():
                if len(chunk) > left:
                    raise TransferError(f"{file.name}: more than {file.size} bytes arrive")
                output.write(chunk)
                left -= len(chunk)
                progress.update(len(chunk))
                pace.add(len(chunk))
    if left:
        raise _EndedEarly(f"{file.name}: ends {left} bytes before its size of {file.size}")


def _check_lengths(response: httpx2.Response, start: int, file: RemoteFile) -> None:
    """Compares what the headers say with the size that the hub named. Raises TransferError."""
    part = f"bytes {start}-{file.size - 1}/"
    if response.status_code == 206:
        if not start or response.headers.get("Content-Range", "") not in (f"{part}{file.size}", f"{part}*"):
            raise TransferError(f"{file.name}: another range arrives than was asked for")
    elif response.status_code != 200:
        raise TransferError(f"{file.name}: {_host(str(response.url))} answers {response.status_code}")
    length, encoding = response.headers.get("Content-Length"), response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        if start:
            raise TransferError(f"{file.name}: a range arrives compressed")
    elif length is not None and length.strip() != str(file.size - start):
        raise TransferError(f"{file.name}: {length[:20]} bytes are announced, not {file.size - start}")


def _raise_for_status(response: httpx2.Response) -> None:
    """huggingface_hub's error of the status, without the body, which may have any length and content."""
    if response.status_code >= 400:
        names = ("X-Error-Code", "X-Error-Message", "Retry-After", "ratelimit")
        values = {name: one_line(response.headers.get(name, "")) for name in names}
        headers = {name: value for name, value in values.items() if value and value.isascii()}
        bare = httpx2.Response(response.status_code, headers=headers, content=b"", request=response.request)
        hf_raise_for_status(bare)


def _host(url: str) -> str:
    parsed = httpx2.URL(url)
    return one_line(f"{parsed.scheme}://{parsed.netloc.decode('ascii', 'replace').rpartition('@')[2]}")
