"""Whose key a request has: the keys of a file, noticed when they change. Knows no HTTP."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from app.access.key_store import KeyFileError, StoredKey, read_keys
from app.access.tenant import RateLimits, Tenant

_LOOK_SECONDS = 1.0
_SALT = b"inkstream: salt of the prefix cache"
_log = logging.getLogger("inkstream")


@dataclass(frozen=True, slots=True)
class _Held:
    digest: bytes
    expires: float
    """In seconds since 1970."""
    caller: Tenant


class ApiKeys:
    """Asked for every request; looks at most once a second whether the file has changed.

    A file that was damaged or taken away changes nothing: a mistake must neither let everybody in nor lock all out.
    """

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._seen = self._look()
        self._looked_at = time.monotonic()
        self._held = tuple(map(_held, read_keys(path)))

    @property
    def count(self) -> int:
        """How many there are, also those whose time is over."""
        return len(self._held)

    def caller_of(self, key: bytes) -> Tenant | None:
        """Who has this key; None where it is unknown, revoked or too old."""
        self._refresh()
        digest, found = hashlib.sha256(key).digest(), None
        for held in self._held:  # all of them: how long it takes tells nothing of which one it was, or nearly was
            if hmac.compare_digest(held.digest, digest):
                found = held
        return found.caller if found and time.time() < found.expires else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        if (seen := self._look()) == self._seen:
            return
        self._seen = seen
        try:
            self._held = tuple(map(_held, read_keys(self._path)))
        except KeyFileError as error:
            _log.error("the keys stay what they were: %s", error)
        else:
            _log.info("the keys file has changed: %d keys", len(self._held))

    def _look(self) -> tuple[int, ...] | None:
        """What changes when the file does."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode


def _held(key: StoredKey) -> _Held:
    digest = bytes.fromhex(key.sha256)
    caller = Tenant(
        name=key.name,
        # Made of what only the server knows, and the same after a restart: nobody chooses whose cache is shared.
        salt=hmac.new(digest, _SALT, hashlib.sha256).hexdigest(),
        quota=RateLimits(
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            concurrency=key.concurrency,
        ),
    )
    return _Held(digest, key.expires.timestamp() if key.expires else float("inf"), caller)
