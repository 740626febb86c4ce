"""API keys: the keys file, adding and revoking keys, and the lookup, which reloads a changed file."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from app.access.tenant import RateLimits, Tenant
from model.files import one_line, replaced_file

# The file is JSON, is private to one user (mode 0600) and contains only the SHA-256 of each key. A plain hash is
# enough: a key is 256 random bits and cannot be guessed from a dictionary, which is what slow, salted hashes protect
# against.
#
# Container secrets look different: another user owns the file, mostly root, and the process's group may read it
# (mode 0440 or 0640). That is accepted too.

PREFIX = "ink-"
"""Prefix of every key, so that secret scanners can find one that was published by mistake."""
MAX_KEYS = 1000
"""Each request's key is compared with all stored keys."""
_MAX_BYTES = 1 << 20

_Count = Annotated[int, Meta(ge=0, le=10**12)]


class KeyFileError(ValueError):
    """The keys file cannot be used; the message is one line that says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnreadableKeyFile(KeyFileError):
    """The system cannot read the keys file now; a later try may succeed although the file does not change."""


class StoredKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the keys file."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created: Annotated[datetime, Meta(tz=True)]
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    requests_per_minute: _Count = 0
    tokens_per_minute: _Count = 0
    concurrency: _Count = 0
    reads_usage: bool = False
    """Whether /metrics shows it the usage of every key, and not only its own."""


class _File(Struct, forbid_unknown_fields=True):
    keys: list[StoredKey]


def new_key() -> str:
    """A key of 256 random bits, in URL-safe characters."""
    return f"{PREFIX}{secrets.token_urlsafe(32)}"


def stored(key: str, name: str, *, days: float | None = None, reads_usage: bool = False, **limits: int) -> StoredKey:
    """The entry for a new key; `limits` as in RateLimits. Raises KeyFileError for an invalid name or number."""
    created = datetime.now(UTC).replace(microsecond=0)
    expires = None if days is None else created + timedelta(days=days)
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = {"name": name, "sha256": digest, "created": created, "expires": expires, **limits}
    entry["reads_usage"] = reads_usage
    try:
        return msgspec.convert(entry, StoredKey)
    except msgspec.ValidationError as error:
        if str(error).endswith("$.name`"):
            raise KeyFileError("a name has 1 to 64 letters, digits, _ and -") from None
        raise KeyFileError(f"invalid key: {error}") from None


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Reads the keys from a file that other users cannot read. Raises KeyFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        remedy = f"create it with: inkstream keys add NAME --keys-file {path}"
        raise KeyFileError(f"the keys file {path} does not exist; {remedy}") from None
    except OSError as error:
        raise UnreadableKeyFile(f"the keys file {path} cannot be read ({error.strerror})") from None
    try:
        _check_mode(path, os.fstat(descriptor))
        content = os.read(descriptor, _MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableKeyFile(f"the keys file {path} cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise KeyFileError(f"the keys file {path} has more than {_MAX_BYTES} bytes")
    try:
        keys = msgspec.json.decode(content, type=_File).keys
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KeyFileError(f"the keys file {path} is damaged: {error}") from None
    if len(keys) > MAX_KEYS:
        raise KeyFileError(f"the keys file {path} has more than {MAX_KEYS} keys")
    if len({key.name for key in keys}) < len(keys):
        raise KeyFileError(f"the keys file {path} has two keys with the same name")
    return tuple(keys)


def add_key(path: Path, key: StoredKey) -> None:
    """Adds a key; creates the file if it does not exist. Raises KeyFileError."""
    with _locked(path):
        keys = read_keys(path) if path.exists() else ()
        if any(other.name == key.name for other in keys):
            raise KeyFileError(
                f"there is a key called {key.name} already: revoke it first "
                f"(inkstream keys revoke {key.name}), or take another name"
            )
        if len(keys) >= MAX_KEYS:
            raise KeyFileError(f"there are {MAX_KEYS} keys already: revoke one first")
        _replace(path, (*keys, key))


def revoke_key(path: Path, name: str) -> None:
    """Removes a key. Raises KeyFileError."""
    with _locked(path):
        keys = read_keys(path)
        rest = tuple(key for key in keys if key.name != name)
        if len(rest) == len(keys):
            raise KeyFileError(f"there is no key called {name[:100]!r}: inkstream keys list shows the names")
        _replace(path, rest)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file's folder, because the file itself is replaced: concurrent changes must not lose one another.

    Raises KeyFileError for an OSError in the block, too.
    """
    try:
        descriptor = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeyFileError(
            f"the keys file {path} cannot be written ({error.strerror}): "
            "name one in a folder that exists and that you may write"
        ) from None


def _replace(path: Path, keys: tuple[StoredKey, ...]) -> None:
    """Replaces the file atomically; keeps its owner and group, so that the service can still read it."""
    path = path.resolve()
    content = msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=1) + b"\n"
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*tmp"):
        leftover.unlink()  # of a killed process: the lock allows one at a time
    with replaced_file(path, mode=0o600) as file:
        file.write(content)
        if path.exists():
            _copy_ownership(file.fileno(), path.stat())


def _copy_ownership(descriptor: int, old: os.stat_result) -> None:
    group_read = old.st_mode & stat.S_IRGRP
    os.fchmod(descriptor, 0o600 | group_read)
    if old.st_uid != os.geteuid() or group_read:
        os.fchown(descriptor, old.st_uid, old.st_gid)


def _check_mode(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"the keys file {path} is not a regular file")
    shared = status.st_mode & 0o077
    if shared and not (shared == stat.S_IRGRP and _is_container_secret(status)):
        raise KeyFileError(f"the keys file {path} can be read by others: chmod 600 {path}")


def _is_container_secret(status: os.stat_result) -> bool:
    """Whether this is a container secret: another user owns it and this process's group may read it.

    A file that this process owns must be private (mode 0600), because its group may have other members. Root may use
    any.
    """
    own_id = os.geteuid()
    return own_id == 0 or (status.st_uid != own_id and status.st_gid in {os.getegid(), *os.getgroups()})


_CHECK_SECONDS = 1.0
_NAMESPACE_LABEL = b"inkstream: salt of the prefix cache"
_log = logging.getLogger("inkstream")


@dataclass(frozen=True, slots=True)
class _LoadedKey:
    digest: bytes
    expires: float
    """In seconds since 1970."""
    tenant: Tenant


class ApiKeys:
    """Looks up the key of every request; checks at most once a second whether the file has changed.

    If the file is damaged or removed, the last valid keys stay in force: a mistake must neither disable authentication
    nor lock out all clients.
    """

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._last_problem = ""
        self._last_fingerprint = self._fingerprint()
        self._checked_at = time.monotonic()
        self._keys, self._names = _load_keys(path)

    @property
    def count(self) -> int:
        """Number of keys, expired ones included."""
        return len(self._keys)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the keys, expired ones included, in the order of the file."""
        return self._names

    def tenant_of(self, key: bytes) -> Tenant | None:
        """The tenant of this key; None if it is invalid, revoked or expired."""
        self._refresh()
        digest, match = hashlib.sha256(key).digest(), None
        for loaded in self._keys:  # always compares with all keys, so that timing does not reveal a match
            if hmac.compare_digest(loaded.digest, digest):
                match = loaded
        return match.tenant if match and time.time() < match.expires else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        if (fingerprint := self._fingerprint()) == self._last_fingerprint:
            return
        self._last_fingerprint = fingerprint
        try:
            self._keys, self._names = _load_keys(self._path)
        except KeyFileError as error:
            is_repeated = isinstance(error, UnreadableKeyFile) and str(error) == self._last_problem
            if isinstance(error, UnreadableKeyFile):
                self._last_fingerprint = ()  # tries again: a revoked key must not stay valid
            self._last_problem = str(error)
            if not is_repeated:
                _log.error("the keys file cannot be used, the previous keys stay in force: %s", error)
        else:
            self._last_problem = ""
            _log.info("the keys file has changed: %d keys", len(self._keys))

    def _fingerprint(self) -> tuple[int, ...] | None:
        """A fingerprint that changes when the file does."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode


def _load_keys(path: Path) -> tuple[tuple[_LoadedKey, ...], tuple[str, ...]]:
    """The keys and their names."""
    keys = tuple(map(_load_key, read_keys(path)))
    return keys, tuple(loaded.tenant.name for loaded in keys)


def _load_key(key: StoredKey) -> _LoadedKey:
    digest = bytes.fromhex(key.sha256)
    tenant = Tenant(
        name=key.name,
        # Derived from the stored hash, stable across restarts: no client can choose another tenant's namespace.
        cache_namespace=hmac.new(digest, _NAMESPACE_LABEL, hashlib.sha256).hexdigest(),
        limits=RateLimits(
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            concurrency=key.concurrency,
        ),
        reads_usage=key.reads_usage,
    )
    return _LoadedKey(digest, key.expires.timestamp() if key.expires else float("inf"), tenant)
