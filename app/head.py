"""What a request's headers ask of HTTP itself, beyond what the parser refuses. Knows scopes and bytes, no routes."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import httptools

from app.api.errors import ApiError
from app.api.hosts import TARGET


def check(scope: MutableMapping[str, Any], version: str, url: bytes) -> None:
    """Raises ApiError 400 for what is not spoken here; a name in the URL itself goes into the scope.

    uvicorn passes on the path alone, and a name that nobody looked at would have been answered to. Not 505 and 501: a
    5xx is our fault to whoever watches the service, and these are anybody's to send.
    """
    if version not in ("1.1", "1.0"):
        raise ApiError(400, "this service speaks HTTP/1.0 and HTTP/1.1: send the request as one", code="bad_request")
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        message = "the only Transfer-Encoding here is chunked: send the body without any other, or with Content-Length"
        raise ApiError(400, message, code="bad_request")
    if not url.startswith(b"/") and (host := httptools.parse_url(url).host) is not None:
        scope[TARGET] = b"[%b]" % host if b":" in host else host
