"""Downloads the files of a model of the Hugging Face Hub that the service reads, into the Hub's cache.

Only safetensors, tokenizer and configuration files, or the GGUF files of one model. huggingface_hub knows the endpoint,
the token and the errors. The partial file is kept here, because the library deletes its own when it is interrupted
(https://github.com/huggingface/huggingface_hub/pull/4228), and so is the comparison of each file with its hash.
Nothing that the Hub says is used before hub_metadata.py has checked it, and hub_transfer.py bounds what it sends.

<cache>/models--org--name/blobs/HASH                  a file; HASH.inkstream.incomplete while it arrives
<cache>/models--org--name/snapshots/COMMIT/config.json -> ../../blobs/HASH, after all files have arrived
<cache>/models--org--name/refs/main                   the commit
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import httpx2
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import WeakFileLock, close_session, validate_repo_id

from model.checkpoint.gguf_directory import choose_files, find_gguf
from model.checkpoint.hub import COMMIT, HubModel
from model.checkpoint.hub_metadata import MAX_INFO_BYTES, MetadataError, RemoteFile, RemoteModel, parse_model_info
from model.checkpoint.hub_transfer import TooSlow, TransferError, fetch_file, fetch_info
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE, adapter_problem, missing_file, remedy, shard_names
from model.config import ConfigError
from model.families.registry import read_config
from model.files import CheckpointError, read_json, write_file

_LOGIN = "set HF_TOKEN to an access token of your account, or run hf auth login"
_Say = Callable[[str], None]


def fetch(named: HubModel, say: _Say) -> Path:
    """The directory of the model's files in the cache, complete, or its GGUF file there. Raises CheckpointError."""
    for library in ("httpx2", "httpcore2"):  # they log the URLs of requests, also signed ones
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").handlers.clear()  # it writes to stderr itself what our handler writes, too
    folder = Path(constants.HF_HUB_CACHE) / f"models--{named.repository.replace('/', '--')}"
    cached = _cached_snapshot(folder, named)
    # Only the repository's list of files tells that a GGUF file is all that it has.
    if cached and named.is_commit and (named.quantization or cached.is_dir()):
        return cached
    try:
        return _download(named, folder, _info(named), say)
    except (httpx2.HTTPError, OSError) as error:
        problem, is_unreachable = _explain(error, named)
        if cached and is_unreachable:
            commit, *file = cached.relative_to(folder / "snapshots").parts
            what = f"{'/'.join(file)} of commit" if file else "commit"
            say(f"{named}: {problem}; using {what} {commit[:12]} from the cache {constants.HF_HUB_CACHE}")
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
        if not COMMIT.fullmatch(commit):
            return None
        snapshot = folder / "snapshots" / commit
        names = {path.name for path in snapshot.iterdir() if path.exists()}  # another program may have fetched a part
        if named.quantization or (missing_file(names) and any(snapshot.rglob("*.gguf"))):
            return _cached_gguf(snapshot, named)
        needed = set() if WEIGHTS_FILE in names else shard_names(snapshot / INDEX_FILE)
    except (OSError, UnicodeError, CheckpointError):
        return None
    return snapshot if not missing_file(names) and needed <= names else None


def _headers() -> dict[str, str]:
    """The library's own would first ask the endpoint, without any bound, which program runs here."""
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {"user-agent": "inkstream", **({"authorization": f"Bearer {token}"} if token else {})}


def _info(named: HubModel) -> RemoteModel:
    try:
        validate_repo_id(named.repository)
    except HFValidationError as error:
        raise CheckpointError(f"{named}: {error}") from None
    where = f"{constants.ENDPOINT}/api/models/{named.repository}/revision/{quote(named.revision, safe='')}?blobs=True"
    try:
        info = parse_model_info(fetch_info(where, _headers(), MAX_INFO_BYTES))
        if named.is_commit and info.commit != named.revision:
            raise MetadataError(f"it names another commit, {info.commit}")
    except (MetadataError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise CheckpointError(
            f"{named}: {constants.ENDPOINT} does not answer like the Hub ({error}): check HF_ENDPOINT"
        ) from None
    return info


def _download(named: HubModel, folder: Path, info: RemoteModel, say: _Say) -> Path:
    """Fetches what the cache lacks; weights last, once the configuration is known to be supported."""
    if chosen := _chosen_gguf(named, info):
        return _download_gguf(named, folder, info, chosen, say)
    _check_names(named, info)
    lock = folder.parent / ".locks" / folder.name / "inkstream.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        small = [file for file in info.files if not file.name.endswith((".safetensors", ".gguf"))]
        _fetch_files(named, folder, info.commit, small)
        blobs = {file.name: folder / "blobs" / file.etag for file in info.files}
        try:
            read_config(read_json(blobs["config.json"]))
        except ConfigError as error:
            raise CheckpointError(f"{named}: config.json: {error}") from None
        shards = {WEIGHTS_FILE} if WEIGHTS_FILE in blobs else shard_names(blobs[INDEX_FILE])
        if missing := sorted(shards - blobs.keys()):
            raise CheckpointError(f"{named}: {INDEX_FILE} names {missing[0]}, which the repository does not have")
        weights = [file for file in info.files if file.name in shards]
        if not all(blobs[file.name].exists() for file in weights):
            size = sum(file.size for file in weights) / 1e6
            say(f"downloading {named}: weights of {size:,.1f} MB, to {constants.HF_HUB_CACHE}")
            _fetch_files(named, folder, info.commit, weights)
            say(f"downloaded {named}, commit {info.commit[:12]}")
        _link(folder / "snapshots" / info.commit, small + weights)
        _keep_reference(named, folder, info)
    return folder / "snapshots" / info.commit


def _cached_gguf(snapshot: Path, named: HubModel) -> Path | None:
    """The first file of the one model that fits, if all of its files are there."""
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]
    try:
        return find_gguf(snapshot / choose_files(names, named.quantization)[0])[0]
    except ValueError:
        return None


def _chosen_gguf(named: HubModel, info: RemoteModel) -> list[RemoteFile]:
    """The GGUF files to download; empty if the repository's safetensors are meant. Raises CheckpointError."""
    files = {file.name: file for file in info.files if file.name.endswith(".gguf")}
    has_safetensors = any(file.name.endswith(".safetensors") for file in info.files)
    if not named.quantization and (has_safetensors or not files):
        return []
    try:
        return [files[name] for name in choose_files(files, named.quantization)]
    except ValueError as error:
        raise CheckpointError(f"{named}: {error}") from None


def _download_gguf(named: HubModel, folder: Path, info: RemoteModel, chosen: Sequence[RemoteFile], say: _Say) -> Path:
    """Fetches the files of one model; returns the first one."""
    lock = folder.parent / ".locks" / folder.name / "inkstream.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not all((folder / "blobs" / file.etag).exists() for file in chosen):
            size = sum(file.size for file in chosen) / 1e6
            say(f"downloading {named}: {chosen[0].name}, {size:,.1f} MB, to {constants.HF_HUB_CACHE}")
            _fetch_files(named, folder, info.commit, chosen)
            say(f"downloaded {named}, commit {info.commit[:12]}")
        _link(folder / "snapshots" / info.commit, chosen)
        _keep_reference(named, folder, info)
    return find_gguf(folder / "snapshots" / info.commit / chosen[0].name)[0]


def _keep_reference(named: HubModel, folder: Path, info: RemoteModel) -> None:
    """For a start without network."""
    if not named.is_commit:
        with contextlib.suppress(CheckpointError):
            write_file(folder / "refs" / named.revision, info.commit.encode())


def _check_names(named: HubModel, info: RemoteModel) -> None:
    """Raises CheckpointError if the service cannot serve the repository."""
    names = set(info.names)
    if needed := missing_file(names):
        other = f" (its card names {info.base_model} as its base model)" if info.base_model else ""
        raise CheckpointError(f"{named}: the repository has no {needed}{remedy(needed, names)}{other}")
    if problem := adapter_problem(names):
        raise CheckpointError(f"{named}: the repository has adapter_config.json: {problem}")


def _fetch_files(named: HubModel, folder: Path, commit: str, files: Iterable[RemoteFile]) -> None:
    """Completes the blobs, one after the other; bytes that an earlier run left are not fetched again.

    Raises CheckpointError, OSError and httpx2.HTTPError.
    """
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    headers = _headers()
    # By hash: a repository may have the same content under several names.
    missing = {file.etag: file for file in files if not (blobs / file.etag).exists()}
    partials = {file: blobs / f"{etag}.inkstream.incomplete" for etag, file in missing.items()}
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
                output.seek(0)
            fetch_file(url, headers, output, file)
        if not _is_intact(file, partial):
            partial.unlink()
            raise CheckpointError(
                f"{named}: {file.name} arrived damaged: it has another hash than {constants.ENDPOINT} names; "
                "try again, and look at the proxy or mirror if there is one"
            )
        partial.replace(blobs / file.etag)


def _is_intact(file: RemoteFile, path: Path) -> bool:
    """Whether the file there has the hash."""
    if len(file.etag) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == file.etag


def _link(snapshot: Path, files: Iterable[RemoteFile]) -> None:
    """Makes the files appear in the snapshot. Raises OSError."""
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        # Not the process id: in a container it is the one of an earlier process, which was killed here.
        path = snapshot / file.name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        try:
            temporary.symlink_to(Path("../" * (1 + file.name.count("/"))) / "../blobs" / file.etag)
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
        case TransferError():
            problem = f"{error}; look at HF_ENDPOINT, and at the proxy or mirror if there is one"
            return problem, isinstance(error, TooSlow)
        case OSError():
            problem = (
                f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror or error}; make room or give permission "
                "there, or set HF_HOME to another folder"
            )
        case _:
            problem = str(error)
    return problem, False
