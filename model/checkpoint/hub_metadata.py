"""What a hub says about a model: its commit, and name, size and hash of each file. Validated before any use.

A hub is untrusted: it may be a mirror. The commit and the hashes become names in the cache, the sizes bound what is
written there, and a file's name becomes a part of a URL and of a path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

MAX_INFO_BYTES = 8 << 20
"""A file takes about 200 bytes there."""
_MAX_FILES = 20_000
MAX_SMALL_BYTES = 64 << 20
"""Of a file other than weights; the largest tokenizers take 40 MB."""
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
"""Of a name between two slashes: what file systems allow."""
SMALL_FILES = re.compile(
    r"config\.json|generation_config\.json|golden\.json|manifest\.json|tokenizer[\w.-]*\.(json|model)"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
    r"|model\.safetensors\.index\.json|(LICEN[CS]E|NOTICE)(\.(txt|md))?",
    re.A,
)
_WEIGHTS = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors|([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][\w.-]*\.gguf", re.A
)
"""GGUF files may lie in a folder of the top one, as large series do."""

_Size = Annotated[int, Meta(ge=0, le=1 << 50)]
_Sha1 = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class MetadataError(ValueError):
    """Not what a hub answers; the message says which field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a commit."""

    name: str
    size: int
    etag: str
    """SHA-256 of a large file (LFS), else git's hash of the blob: the name in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A commit of a repository."""

    commit: str
    names: frozenset[str]
    """Every file of the top folder."""
    files: tuple[RemoteFile, ...]
    """The files of the top folder that the service may read, and GGUF files of the folders in it."""
    base_model: str
    """Which base model its card names; empty if none."""


class _Lfs(Struct):
    sha256: _Sha256
    size: _Size


class _Sibling(Struct):
    rfilename: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME_BYTES)]
    size: _Size | None = None
    blob_id: str | None = msgspec.field(name="blobId", default=None)
    lfs: _Lfs | None = None


class _Info(Struct):
    sha: _Sha1
    siblings: Annotated[list[_Sibling], Meta(max_length=_MAX_FILES)]
    card: Raw = msgspec.field(name="cardData", default_factory=lambda: Raw(b"null"))


class _Card(Struct):
    base_model: str | list[str] | None = None


def parse_model_info(content: bytes) -> RemoteModel:
    """The answer to GET /api/models/org/name/revision/REVISION?blobs=True. Raises MetadataError."""
    try:
        info = msgspec.json.decode(content, type=_Info)
    except msgspec.ValidationError as error:
        raise MetadataError(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise MetadataError("its model info is not JSON") from None
    for sibling in info.siblings:
        if problem := _name_problem(sibling.rfilename):
            raise MetadataError(f"the file name {sibling.rfilename[:100]!r} {problem}")
    counts = Counter(sibling.rfilename for sibling in info.siblings)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise MetadataError(f"the file {twice!r} is listed twice")
    return RemoteModel(
        commit=info.sha,
        names=frozenset(name for name in counts if "/" not in name),
        files=tuple(_needed(info.siblings)),
        base_model=_base_model(info.card),
    )


def _name_problem(name: str) -> str:
    """Why this cannot be a path inside a repository; empty if it can."""
    if re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\\]", name):
        return "has a control character or a backslash"
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts:
        return "is not a path inside the repository"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"has a part of more than {_MAX_PART_BYTES} bytes"
    return ""


def _needed(siblings: list[_Sibling]) -> Iterator[RemoteFile]:
    for sibling in siblings:
        is_weights = bool(_WEIGHTS.fullmatch(sibling.rfilename))
        if not is_weights and not SMALL_FILES.fullmatch(sibling.rfilename):
            continue
        size, etag = sibling.size, sibling.blob_id
        if sibling.lfs:
            if size not in (None, sibling.lfs.size):
                raise MetadataError(f"{sibling.rfilename} has two sizes, {size} and {sibling.lfs.size}")
            size, etag = sibling.lfs.size, sibling.lfs.sha256
        elif etag is None or not re.fullmatch(r"[0-9a-f]{40}", etag):
            raise MetadataError(f"the blobId of {sibling.rfilename} is not 40 hexadecimal digits")
        if size is None:
            raise MetadataError(f"{sibling.rfilename} has no size")
        if not is_weights and size > MAX_SMALL_BYTES:
            raise MetadataError(f"{sibling.rfilename} has {size} bytes, more than {MAX_SMALL_BYTES}")
        yield RemoteFile(name=sibling.rfilename, size=size, etag=etag)


def _base_model(card: Raw) -> str:
    """A user writes the card, so this leaves out what is odd there."""
    try:
        base = msgspec.json.decode(card, type=_Card).base_model
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return ""
    return (base[0] if base else "") if isinstance(base, list) else base or ""
