"""Unchanging content, compressed and hashed once: gzip where the client accepts it, 304 where the client has it."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

_ACCEPTS_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
_YEAR = "public, max-age=31536000, immutable"


class StaticContent:
    """One response body. `version` is a prefix of its SHA-256; an address with ?v=<version> may be kept for good.

    No proxy may rewrite it: a page's policy allows its script by its hash.
    """

    def __init__(self, body: bytes, media_type: str) -> None:
        self.body = body
        self.media_type = media_type
        self.version = hashlib.sha256(body).hexdigest()[:16]
        compressed = gzip.compress(body, mtime=0)
        self._compressed = compressed if len(compressed) < len(body) else None

    def respond(self, request: Request, headers: Mapping[str, str]) -> Response:
        """The response to a GET or HEAD request."""
        is_compressed = self._compressed is not None and bool(
            _ACCEPTS_GZIP.search(request.headers.get("accept-encoding", ""))
        )
        etag = f'"{self.version}{"-gzip" if is_compressed else ""}"'
        is_versioned = request.query_params.get("v") == self.version
        own = {"ETag": etag, "Cache-Control": _YEAR if is_versioned else "no-cache, no-transform"}
        if self._compressed is not None:
            own["Vary"] = "Accept-Encoding"
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if known & {etag, "*"}:
            return Response(status_code=304, headers={**headers, **own})
        if is_compressed:
            own["Content-Encoding"] = "gzip"
        body = self._compressed if is_compressed else self.body
        return Response(body, headers={**headers, **own}, media_type=self.media_type)
