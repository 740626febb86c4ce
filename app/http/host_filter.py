"""Host header validation, against DNS rebinding.

In a DNS rebinding attack a web page's own domain resolves to this machine: its requests come from a browser behind the
firewall and are same-origin, so that CORS does not stop them. The Host header reveals them: it must be a name that an
attacker cannot register.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.best_effort import BestEffortTurns
from app.http.errors import ApiError
from app.http.request_log import respond

TARGET_HOST_KEY = "inkstream_target"
"""Scope key of the host in an absolute-form URL (RFC 9112, 3.2.2), if there is one."""

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::[0-9]{0,5})?")


class HostFilter:
    """ASGI middleware: accepts IP addresses, localhost, names without a dot, and `allowed` names."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = (), best_effort: BestEffortTurns | None = None) -> None:
        self.app = app
        self._best_effort = best_effort or BestEffortTurns()
        self._allowed = frozenset(name.lower().removesuffix(".") for name in allowed)
        self._last_accepted: bytes | None = None
        """Nearly all requests name the same host, and parsing an address takes longer than the rest of the check."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._check(scope)):
            await self._best_effort.turn_for(scope)
            await respond(Request(scope), error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        """Checks both the header and the URL: a proxy may have looked at either."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) != 1 and (values or scope.get("http_version") != "1.0"):
            return _bad_host()
        if TARGET_HOST_KEY in scope:
            values.append(scope[TARGET_HOST_KEY])
        return next(filter(None, map(self._check_host, values)), None)

    def _check_host(self, host: bytes) -> ApiError | None:
        if host == self._last_accepted:
            return None
        name = _parse_host(host)
        if name is None:
            return _bad_host()
        if self._is_allowed(name):
            self._last_accepted = host
            return None
        message = f"unknown host {name[:100]}: start the service with --allowed-hosts {name[:100]}"
        return ApiError(421, message, code="unknown_host")

    def _is_allowed(self, name: str) -> bool:
        # Anyone can register a name with a dot; a name without one cannot be registered.
        return "." not in name or name.endswith(".localhost") or name in self._allowed or _is_address(name)


def _bad_host() -> ApiError:
    message = "a request must have exactly one valid Host header: send the name of this service in it"
    # A proxy may have read another host: close the connection, because later requests on it cannot be trusted.
    return ApiError(400, message, code="bad_host", headers={"Connection": "close"})


def _parse_host(header: bytes) -> str | None:
    """The host name in lower case, without its port; None if it is invalid."""
    match = _HOST.fullmatch(header.decode("latin-1").lower())
    if not match:
        return None
    name = match[1]
    if name.startswith("["):
        return name if _is_address(name[1:-1]) else None
    return name.removesuffix(".") or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
