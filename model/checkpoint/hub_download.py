"""Downloads the files of a model of the Hugging Face Hub that the service reads, into the Hub's cache.

Only safetensors, tokenizer and configuration files. huggingface_hub knows the endpoint, the token, the transfer and the
errors. The partial file is kept here, because the library deletes its own when it is interrupted
(https://github.com/huggingface/huggingface_hub/pull/4228), and so is the comparison of each file with its hash.

<cache>/models--org--name/blobs/HASH                  a file; HASH.inkstream.incomplete while it arrives
<cache>/models--org--name/snapshots/COMMIT/config.json -> ../../blobs/HASH, after all files have arrived
<cache>/models--org--name/refs/main                   the commit
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import HfApi, ModelInfo
from huggingface_hub.utils import WeakFileLock, build_hf_headers, close_session

from model.checkpoint.hub import HubModel
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE, adapter_problem, missing_file, remedy, shard_names
from model.config import ConfigError, check_model_type
from model.files import CheckpointError, read_json, write_file

_SMALL_FILES = re.compile(
    r"config\.json|generation_config\.json|golden\.json|manifest\.json|tokenizer[\w.-]*\.(json|model)"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
    r"|model\.safetensors\.index\.json|(LICEN[CS]E|NOTICE)(\.(txt|md))?"
)
_LOGIN = "set HF_TOKEN to an access token of your account, or run hf auth login"
_PAUSES = (0.5, 1.0, 2.0)
"""Seconds before each further try."""
_Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file of a commit."""

    name: str
    size: int
    etag: str
    """SHA-256 of a large file (LFS), else git's hash of the blob: the name in the cache."""

    def is_intact(self, path: Path) -> bool:
        """Whether the file there has the hash."""
        with path.open("rb") as content:
            if len(self.etag) == 64:
                return hashlib.file_digest(content, "sha256").hexdigest() == self.etag
            digest = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
            digest.update(content.read())
            return digest.hexdigest() == self.etag


def fetch(named: HubModel, say: _Say) -> Path:
    """The directory of the model's files in the cache, complete. Raises CheckpointError."""
    for library in ("httpx2", "httpcore2"):  # they log the URLs of requests, some of which are signed
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").handlers.clear()  # it writes to stderr itself what our handler writes, too
    folder = Path(constants.HF_HUB_CACHE) / f"models--{named.repository.replace('/', '--')}"
    cached = _cached_snapshot(folder, named)
    if cached and named.is_commit:
        return cached
    try:
        return _download(named, folder, _info(named), say)
    except (httpx2.HTTPError, OSError) as error:
        problem, is_unreachable = _explain(error, named)
        if cached and is_unreachable:
            say(f"{named}: {problem}; using commit {cached.name[:12]} from the cache {constants.HF_HUB_CACHE}")
            return cached
        raise CheckpointError(f"{named}: {problem}") from None
    except KeyboardInterrupt:
        say(f"{named}: stopped; what has arrived is kept, and the same command continues")
        raise
    finally:
        close_session()


def _cached_snapshot(folder: Path, named: HubModel) -> Path | None:
    """The complete snapshot of the commit that the revision stood for when it was last looked up."""
    try:
        commit = named.revision if named.is_commit else (folder / "refs" / named.revision).read_text().strip()
        snapshot = folder / "snapshots" / commit
        names = {path.name for path in snapshot.iterdir() if path.exists()}  # another program may have fetched a part
        needed = set() if WEIGHTS_FILE in names else shard_names(snapshot / INDEX_FILE)
    except (OSError, CheckpointError):
        return None
    return snapshot if not missing_file(names) and needed <= names else None


def _info(named: HubModel) -> ModelInfo:
    api, pauses = HfApi(library_name="inkstream"), iter(_PAUSES)
    try:
        while True:
            try:
                return api.model_info(
                    named.repository,
                    revision=named.revision,
                    files_metadata=True,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT,
                )
            except HfHubHTTPError as error:
                status, pause = error.response.status_code, next(pauses, None)
                if pause is None or (status != 429 and status < 500):
                    raise
                time.sleep(pause)
    except HFValidationError as error:
        raise CheckpointError(f"{named}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, httpx2.InvalidURL):
        raise CheckpointError(
            f"{named}: {constants.ENDPOINT} does not answer like the Hub: check HF_ENDPOINT"
        ) from None


def _download(named: HubModel, folder: Path, info: ModelInfo, say: _Say) -> Path:
    """Fetches what the cache lacks; weights last, once the configuration is known to be supported."""
    files, commit = _needed_files(named, info), str(info.sha)
    lock = folder.parent / ".locks" / folder.name / "inkstream.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        small = [file for file in files if not file.name.endswith(".safetensors")]
        _fetch_files(named, folder, commit, small)
        blobs = {file.name: folder / "blobs" / file.etag for file in files}
        try:
            check_model_type(read_json(blobs["config.json"]))
        except ConfigError as error:
            raise CheckpointError(f"{named}: config.json: {error}") from None
        shards = {WEIGHTS_FILE} if WEIGHTS_FILE in blobs else shard_names(blobs[INDEX_FILE])
        if missing := sorted(shards - blobs.keys()):
            raise CheckpointError(f"{named}: {INDEX_FILE} names {missing[0]}, which the repository does not have")
        weights = [file for file in files if file.name in shards]
        if not all(blobs[file.name].exists() for file in weights):
            size = sum(file.size for file in weights) / 1e6
            say(f"downloading {named}: weights of {size:,.1f} MB, to {constants.HF_HUB_CACHE}")
            _fetch_files(named, folder, commit, weights)
            say(f"downloaded {named}, commit {commit[:12]}")
        _link(folder / "snapshots" / commit, small + weights)
        if not named.is_commit:  # for a start without network
            with contextlib.suppress(CheckpointError):
                write_file(folder / "refs" / named.revision, commit.encode())
    return folder / "snapshots" / commit


def _needed_files(named: HubModel, info: ModelInfo) -> list[_File]:
    """The files of the top folder that the service may read. Raises CheckpointError if it cannot serve the rest."""
    siblings = {file.rfilename: file for file in info.siblings or () if "/" not in file.rfilename}
    if needed := missing_file(set(siblings)):
        base = getattr(info.card_data, "base_model", None)
        base = base[0] if isinstance(base, list) and base else base
        other = f" (its card names {base} as its base model)" if isinstance(base, str) else ""
        raise CheckpointError(f"{named}: the repository has no {needed}{remedy(needed, set(siblings))}{other}")
    if problem := adapter_problem(set(siblings)):
        raise CheckpointError(f"{named}: the repository has adapter_config.json: {problem}")
    return [
        _File(
            name=name,
            size=(file.lfs.size if file.lfs else file.size) or 0,
            etag=str(file.lfs.sha256 if file.lfs else file.blob_id),
        )
        for name, file in siblings.items()
        if _SMALL_FILES.fullmatch(name) or name.endswith(".safetensors")
    ]


def _fetch_files(named: HubModel, folder: Path, commit: str, files: Iterable[_File]) -> None:
    """Completes the blobs, one after the other; bytes that an earlier run left are not fetched again.

    Raises CheckpointError, OSError and httpx2.HTTPError.
    """
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    headers = {**build_hf_headers(library_name="inkstream"), "Accept-Encoding": "identity"}
    partials = {file: blobs / f"{file.etag}.inkstream.incomplete" for file in files if not (blobs / file.etag).exists()}
    to_come = sum(file.size - (path.stat().st_size if path.exists() else 0) for file, path in partials.items())
    if to_come > (free := shutil.disk_usage(blobs).free):
        raise CheckpointError(
            f"{named}: no room on the disk: {to_come / 1e6:,.1f} MB are still to come, and {constants.HF_HUB_CACHE} "
            f"has {free / 1e6:,.1f} MB free; free some (hf cache ls lists the models there), or set HF_HOME to another "
            "disk"
        )
    for file, partial in partials.items():
        url = hf_hub_url(named.repository, file.name, revision=commit)
        with partial.open("ab+", buffering=0) as output:  # unbuffered: a killed process loses nothing
            if output.tell() > file.size:
                output.truncate(0)
            _fetch_rest(url, output, headers, file)
        if not file.is_intact(partial):
            partial.unlink()
            raise CheckpointError(
                f"{named}: {file.name} arrived damaged: it has another hash than {constants.ENDPOINT} names; "
                "try again, and look at the proxy or mirror if there is one"
            )
        partial.replace(blobs / file.etag)


def _fetch_rest(url: str, output: BinaryIO, headers: dict[str, str], file: _File) -> None:
    """Appends what is missing, in several tries, whose count restarts whenever the file has grown.

    The library makes such tries after some errors of the network, but not after others, nor after a status of 5xx.
    """
    pauses, most = iter(_PAUSES), output.tell()
    while True:
        try:
            http_get(
                url, output, resume_size=output.tell(), headers=headers, expected_size=file.size,
                displayed_filename=file.name,
            )  # fmt: skip
            return
        except (HfHubHTTPError, httpx2.TransportError, OSError) as error:
            if isinstance(error, HfHubHTTPError):
                if error.response.status_code < 500:
                    raise
            elif isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; without a number it is the library's, of a file of another size
            if output.tell() > file.size:
                output.seek(0)
                output.truncate()
            if output.tell() > most:
                pauses, most = iter(_PAUSES), output.tell()
            elif isinstance(error, (httpx2.ConnectError, httpx2.TimeoutException, httpx2.RemoteProtocolError)):
                raise  # the library has tried it several times
            if (pause := next(pauses, None)) is None:
                raise
            time.sleep(pause)


def _link(snapshot: Path, files: Iterable[_File]) -> None:
    """Makes the files appear in the snapshot. Raises OSError."""
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        # Not the process id: in a container it is the one of an earlier process, which was killed here.
        path, temporary = snapshot / file.name, snapshot / f".{file.name}.{secrets.token_hex(8)}.tmp"
        if path.exists():
            continue
        try:
            temporary.symlink_to(Path("../../blobs") / file.etag)
        except OSError:  # a file system without links
            shutil.copyfile(snapshot.parents[1] / "blobs" / file.etag, temporary)
        temporary.replace(path)


def _explain(error: Exception, named: HubModel) -> tuple[str, bool]:
    """What to do about an error of the Hub, the network or the disk; whether the Hub cannot be reached for now."""
    where, status = f"{constants.ENDPOINT}/{named.repository}", 0
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
    match error:
        case GatedRepoError():
            problem = f"the model is gated: accept its license at {where}, and {_LOGIN}"
        case RevisionNotFoundError():
            problem = f"the repository has no branch, tag or commit {named.revision!r}; {where} lists them"
        case RepositoryNotFoundError():
            problem = (
                f"no directory of this name here, and no such model at {constants.ENDPOINT}; if it is private, {_LOGIN}"
            )
        case HfHubHTTPError() if status in (401, 403):
            problem = f"{constants.ENDPOINT} answers {status}: the token is wrong or must not read this model; {_LOGIN}"
        case HfHubHTTPError():
            path = error.response.url.copy_with(query=None)
            return f"{constants.ENDPOINT} answers {status} for {path}", status in (408, 429) or status >= 500
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, which keeps it from the network", True
        case httpx2.TransportError():
            return f"cannot reach {constants.ENDPOINT} ({str(error) or type(error).__name__})", True
        case OSError(errno=None):
            problem = f"what arrives has another size than {constants.ENDPOINT} names; look at the proxy or mirror"
        case OSError():
            problem = (
                f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror or error}; make room or give permission "
                "there, or set HF_HOME to another folder"
            )
        case _:
            problem = str(error)
    return problem, False
