"""Downloads the files of a model of the Hugging Face Hub that the service reads, into the Hub's cache.

Only safetensors, tokenizer and configuration files. huggingface_hub knows the endpoint, the token, the cache and the
errors of the Hub. The transfer itself is here, because the library deletes a partial file when it is interrupted
(https://github.com/huggingface/huggingface_hub/pull/4228), does not compare what arrived with its hash, and reports
progress in steps of 10 MB.

<cache>/models--org--name/blobs/HASH                  a file; HASH.inkstream.incomplete while it arrives
<cache>/models--org--name/snapshots/COMMIT/config.json -> ../../blobs/HASH, after all files have arrived
<cache>/models--org--name/refs/main                   the commit
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

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
from huggingface_hub.hf_api import HfApi, ModelInfo
from huggingface_hub.utils import WeakFileLock, build_hf_headers, close_session, get_session, hf_raise_for_status
from tqdm import tqdm

from model.checkpoint.hub import HubModel
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE, adapter_problem, missing_file, remedy, shard_names
from model.config import ConfigError, check_model_type
from model.files import CheckpointError, read_json, write_file

_SMALL_FILES = re.compile(
    r"config\.json|generation_config\.json|golden\.json|manifest\.json|tokenizer[\w.-]*\.(json|model)"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
    r"|(LICEN[CS]E|NOTICE)(\.(txt|md))?"
)
_THREADS = 4
_ATTEMPTS = 5
"""Failures in a row, without a byte in between."""
_MAX_WAIT_SECONDS = 60.0
_REPORT_SECONDS = 10.0
_JOIN_SECONDS = 2.0
_SPARE_BYTES = 16 << 20
"""Room to leave on the disk."""
_Say = Callable[[str], None]


class _Stopped(Exception):
    """Another thread has failed, or the user has interrupted the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file of a commit."""

    name: str
    size: int
    etag: str
    """SHA-256 of a large file (LFS), else git's hash of the blob: the name in the cache."""

    def hasher(self) -> Any:
        """The hash object whose result is the etag."""
        if len(self.etag) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def fetch(named: HubModel, say: _Say) -> Path:
    """The directory of the model's files in the cache, complete. Raises CheckpointError."""
    for library in ("httpx2", "httpcore2"):  # they log the URLs of requests, some of which are signed
        logging.getLogger(library).setLevel(logging.WARNING)
    repository = _Repository(named)
    if named.is_commit and repository.is_complete(named.revision):
        return repository.snapshot(named.revision)
    try:
        return _fetch(repository, say)
    finally:
        close_session()


def _fetch(repository: _Repository, say: _Say) -> Path:
    """fetch() with connections to the Hub."""
    named = repository.model
    try:
        info = _retry(lambda: _info(named))
    except HFValidationError as error:
        raise CheckpointError(f"{named}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, httpx2.InvalidURL):
        raise CheckpointError(
            f"{named}: {constants.ENDPOINT} does not answer like the Hub: check HF_ENDPOINT"
        ) from None
    except (httpx2.HTTPError, OSError) as error:
        if _is_unreachable(error) and (commit := repository.cached_commit()):
            say(f"{named}: {_reason(error)}; using commit {commit[:12]} from the cache {repository.cache}")
            return repository.snapshot(commit)
        raise _explained(error, repository) from None
    with _interruptible(named, say):
        try:
            return _download(repository, info, say)
        except (httpx2.HTTPError, OSError) as error:
            raise _explained(error, repository) from None


class _Repository:
    """A model's folder in the cache."""

    def __init__(self, named: HubModel) -> None:
        self.model = named
        self.cache = Path(constants.HF_HUB_CACHE)
        folder = f"models--{named.repository.replace('/', '--')}"
        self.folder = self.cache / folder
        self.lock = self.cache / ".locks" / folder / "inkstream.lock"

    def snapshot(self, commit: str) -> Path:
        """Directory of a commit."""
        return self.folder / "snapshots" / commit

    def blob(self, file: _File) -> Path:
        """Where a file lies."""
        return self.folder / "blobs" / file.etag

    def partial(self, file: _File) -> Path:
        """Where a file lies while it arrives."""
        return self.folder / "blobs" / f"{file.etag}.inkstream.incomplete"

    def present_bytes(self, file: _File) -> int:
        """Bytes of a file that have arrived."""
        for path, most in ((self.blob(file), file.size), (self.partial(file), file.size)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size, most)
        return 0

    def is_complete(self, commit: str) -> bool:
        """Whether this commit's snapshot has all files that the service needs; another program may have made it."""
        directory = self.snapshot(commit)
        try:
            names = {path.name for path in directory.iterdir() if path.exists()}
            needed = set() if WEIGHTS_FILE in names else shard_names(directory / INDEX_FILE)
        except (OSError, CheckpointError):
            return False
        return not missing_file(names) and needed <= names

    def cached_commit(self) -> str:
        """The complete commit in the cache that the revision stood for when it was last looked up; or ""."""
        commit = self.model.revision
        if not self.model.is_commit:
            try:
                commit = (self.folder / "refs" / self.model.revision).read_text().strip()
            except OSError:
                return ""
        return commit if self.is_complete(commit) else ""

    def cached(self) -> str:
        """What of it is in the cache, in words."""
        with contextlib.suppress(OSError):
            commits = [path.name for path in (self.folder / "snapshots").iterdir() if self.is_complete(path.name)]
            if commits:
                return (
                    f"the cache {self.cache} has {', '.join(f'{self.model.repository}@{commit}' for commit in commits)}"
                )
        with contextlib.suppress(OSError):
            names = sorted(path.name[8:].replace("--", "/", 1) for path in self.cache.glob("models--*"))
            if names:
                more = ", ..." if len(names) > 5 else ""
                return f"the cache {self.cache} has {', '.join(names[:5])}{more}, and not all of this one"
        return f"the cache {self.cache} is empty"

    def link(self, file: _File, commit: str) -> None:
        """Makes the file appear in the snapshot. Raises OSError."""
        path = self.snapshot(commit) / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        temporary = path.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            temporary.symlink_to(Path("../../blobs") / file.etag)
        except OSError:  # a file system without links
            shutil.copyfile(self.blob(file), temporary)
        temporary.replace(path)

    def write_ref(self, commit: str) -> None:
        """Notes which commit the revision is, for a start without network. Raises OSError."""
        if not self.model.is_commit:
            with contextlib.suppress(CheckpointError):
                write_file(self.folder / "refs" / self.model.revision, commit.encode())


def _info(named: HubModel) -> ModelInfo:
    api = HfApi(library_name="inkstream")
    return api.model_info(
        named.repository, revision=named.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )


def _download(repository: _Repository, info: ModelInfo, say: _Say) -> Path:
    files, commit = _needed_files(repository.model, info), str(info.sha)
    snapshot = repository.snapshot(commit)
    small = [file for file in files if not file.name.endswith(".safetensors")]
    repository.lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(repository.lock, timeout=0.1))
        except TimeoutError:
            say(f"{repository.model}: another process downloads it; waiting for that")
            stack.enter_context(WeakFileLock(repository.lock))
        transfer = _Transfer(repository, commit, say)
        transfer.run(small)
        _check_config(repository, small)
        weights = [file for file in files if file.name in _weight_files(repository, files)]
        transfer.run(weights, is_shown=True)
        for file in (*small, *weights):
            repository.link(file, commit)
        repository.write_ref(commit)
    return snapshot


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
        if _SMALL_FILES.fullmatch(name) or name.endswith(".safetensors") or name == INDEX_FILE
    ]


def _weight_files(repository: _Repository, files: Sequence[_File]) -> set[str]:
    """Names of the files with tensors: the whole one, or the shards that the index names."""
    names = {file.name for file in files}
    if WEIGHTS_FILE in names:
        return {WEIGHTS_FILE}
    index = next(file for file in files if file.name == INDEX_FILE)
    shards = shard_names(repository.blob(index))
    if missing := sorted(shards - names):
        raise CheckpointError(
            f"{repository.model}: {INDEX_FILE} names {missing[0]}, which the repository does not have"
        )
    return shards


def _check_config(repository: _Repository, files: Sequence[_File]) -> None:
    """Raises CheckpointError for a model that cannot be served, before gigabytes of it arrive."""
    config = next(file for file in files if file.name == "config.json")
    try:
        check_model_type(read_json(repository.blob(config)))
    except ConfigError as error:
        raise CheckpointError(f"{repository.model}: config.json: {error}") from None


class _Transfer:
    """Fetches files into the cache, some at once; the calling thread shows how far they are."""

    def __init__(self, repository: _Repository, commit: str, say: _Say) -> None:
        self._repository = repository
        self._commit = commit
        self._say = say
        self._headers = {**build_hf_headers(library_name="inkstream"), "Accept-Encoding": "identity"}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._received = 0
        """Bytes of the files of this run that have arrived, before or now."""

    def run(self, files: Sequence[_File], *, is_shown: bool = False) -> None:
        """Returns once all files are in the cache. Raises CheckpointError, OSError and httpx2.HTTPError."""
        total = sum(file.size for file in files)
        self._received = sum(map(self._repository.present_bytes, files))
        missing = [file for file in files if not self._repository.blob(file).exists()]
        if not missing:
            return
        self._check_room(total - self._received)
        waiting, results = SimpleQueue[_File](), SimpleQueue[BaseException | None]()
        for file in sorted(missing, key=lambda file: -file.size):
            waiting.put(file)
        threads = [
            threading.Thread(target=self._work, args=(waiting, results), daemon=True)
            for _ in range(min(_THREADS, len(missing)))
        ]
        for thread in threads:
            thread.start()
        with self._progress(total, self._received, len(files)) if is_shown else contextlib.nullcontext() as progress:
            try:
                for _ in missing:
                    if (error := _result(results, progress)) is not None:
                        raise error
            except BaseException as error:
                self._stop.set()
                for thread in threads if isinstance(error, Exception) else ():  # Ctrl+C waits for nothing
                    thread.join(_JOIN_SECONDS)
                raise

    def _check_room(self, needed: int) -> None:
        folder = next(path for path in (self._repository.folder, *self._repository.folder.parents) if path.exists())
        if needed + _SPARE_BYTES > (free := shutil.disk_usage(folder).free):
            raise CheckpointError(
                f"{self._repository.model}: no room on the disk: {_size(needed)} are still to come, "
                f"{_size(_SPARE_BYTES)} should stay free, and "
                f"{self._repository.cache} has {_size(free)} free; free some (hf cache ls lists the models there), or "
                "set HF_HOME to a folder on another disk"
            )

    def _work(self, waiting: SimpleQueue[_File], results: SimpleQueue[BaseException | None]) -> None:
        """One thread: fetches files until none waits."""
        while not self._stop.is_set():
            try:
                file = waiting.get_nowait()
            except Empty:
                return
            try:
                self._fetch(file)
                results.put(None)
            except BaseException as error:  # raised again by run()
                results.put(error)
                return

    def _fetch(self, file: _File) -> None:
        """Fetches one file, and once more if what arrives has another hash."""
        partial = self._repository.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            if self._receive(file, partial) == file.etag:
                partial.replace(self._repository.blob(file))
                return
            self._count(-partial.stat().st_size)
            partial.unlink()
        raise CheckpointError(
            f"{self._repository.model}: {file.name} arrived damaged twice: it has another hash than "
            f"{constants.ENDPOINT} names; try again later, and look at the proxy or mirror if there is one"
        )

    def _receive(self, file: _File, partial: Path) -> str:
        """Adds what is missing to the partial file; returns the hash of the whole."""
        hasher, failures = file.hasher(), 0
        with partial.open("ab+", buffering=0) as output:  # unbuffered: a killed process loses nothing
            if output.tell() > file.size:
                output.truncate(0)
            output.seek(0)
            while chunk := output.read(1 << 20):
                hasher.update(chunk)
            while (start := output.tell()) < file.size:
                try:
                    if self._stop.is_set():
                        raise _Stopped
                    for chunk in self._stream(file, start):
                        if chunk is None:  # the server starts over
                            self._count(-start)
                            output.truncate(0)
                            hasher = file.hasher()
                            continue
                        output.write(chunk)
                        hasher.update(chunk)
                        self._count(len(chunk))
                        failures = 0
                    if output.tell() <= start:
                        raise httpx2.RemoteProtocolError("the response ended early")
                except (httpx2.TransportError, HfHubHTTPError) as error:
                    failures += 1
                    seconds = _retry_seconds(error, failures)
                    if seconds is None or failures > _ATTEMPTS:
                        raise
                    if seconds > 5:
                        self._say(f"{self._repository.model}: {_reason(error)}; trying again in {seconds:.0f} s")
                    if self._stop.wait(seconds):
                        raise _Stopped from None
        return str(hasher.hexdigest())

    def _stream(self, file: _File, start: int) -> Iterator[bytes | None]:
        """The content from byte `start`; first None if the server sends all of it instead."""
        url = hf_hub_url(self._repository.model.repository, file.name, revision=self._commit)
        headers = {**self._headers, "Range": f"bytes={start}-"} if start else self._headers
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if start and response.status_code != 206:
                yield None
                start = 0
            for chunk in response.iter_bytes():
                if self._stop.is_set():
                    raise _Stopped
                start += len(chunk)
                yield chunk
                if start > file.size:
                    return

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self._received += n_bytes

    @contextlib.contextmanager
    def _progress(self, total: int, present: int, n_files: int) -> Iterator[Callable[[], None]]:
        """A function that shows how far the transfer is: a bar on a terminal, a line every ten seconds elsewhere."""
        named, started = self._repository.model, time.monotonic()
        kept = f", {_size(present)} of them here already" if present else ""
        count = "1 file" if n_files == 1 else f"{n_files} files"
        self._say(f"downloading {named}: {count}, {_size(total)}{kept}, to {self._repository.cache}")
        hidden = bool(constants.HF_HUB_DISABLE_PROGRESS_BARS) or not sys.stderr.isatty()
        columns, lines = shutil.get_terminal_size()  # tqdm prints nothing on a terminal that does not know its size
        bar = tqdm(
            desc=str(named),
            total=total,
            initial=present,
            unit="B",
            unit_scale=True,
            disable=hidden,
            ncols=columns,
            nrows=lines,
        )
        reported_at, reported = started, present

        def show() -> None:
            nonlocal reported_at, reported
            received, now = self._received, time.monotonic()
            bar.update(received - bar.n)
            if hidden and now - reported_at >= _REPORT_SECONDS:
                speed = (received - reported) / (now - reported_at)
                left = f"{(total - received) / speed:.0f} s left" if speed > 0 else "nothing arrives"
                self._say(
                    f"downloading {named}: {100 * received // max(1, total)} %, {_size(received)} of {_size(total)}, "
                    f"{_size(speed)}/s, {left}"
                )
                reported_at, reported = now, received

        with bar:
            yield show
            show()
        self._say(f"downloaded {named}, commit {self._commit[:12]}, in {time.monotonic() - started:.0f} s")


def _result(results: SimpleQueue[BaseException | None], progress: Callable[[], None] | None) -> BaseException | None:
    """The next result of a thread; shows the progress while it waits."""
    while True:
        with contextlib.suppress(Empty):
            return results.get(timeout=0.2)
        if progress:
            progress()


@contextlib.contextmanager
def _interruptible(named: HubModel, say: _Say) -> Iterator[None]:
    """Ctrl+C and SIGTERM end a download, quietly, also where they would be ignored (process 1 of a container)."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, _exit)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        say(f"{named}: stopped; what has arrived is kept, and the same command continues")
        raise
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _retry(call: Callable[[], ModelInfo]) -> ModelInfo:
    """Calls until the Hub is not busy any more, a few times. A Hub that cannot be reached is not asked again."""
    for failures in range(1, _ATTEMPTS):
        try:
            return call()
        except HfHubHTTPError as error:
            if (seconds := _retry_seconds(error, failures)) is None:
                raise
            time.sleep(seconds)
    return call()


def _retry_seconds(error: Exception, failures: int) -> float | None:
    """Seconds to wait after an error that may be transient; None for others."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in (408, 429) and error.response.status_code < 500:
            return None
        with contextlib.suppress(ValueError):
            return min(max(0.0, float(error.response.headers.get("Retry-After", ""))), _MAX_WAIT_SECONDS)
    return min(2.0**failures / 4, _MAX_WAIT_SECONDS)


def _is_unreachable(error: Exception) -> bool:
    is_busy = isinstance(error, HfHubHTTPError) and _retry_seconds(error, 1) is not None
    return is_busy or isinstance(error, httpx2.TransportError | OfflineModeIsEnabled)


def _reason(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {error.response.status_code}"
    return f"cannot reach {constants.ENDPOINT} ({str(error) or type(error).__name__})"


def _explained(error: Exception, repository: _Repository) -> CheckpointError:
    """What to do about an error of the Hub, the network or the disk."""
    named, where = repository.model, f"{constants.ENDPOINT}/{repository.model.repository}"
    login = "set HF_TOKEN to an access token of your account, or run hf auth login"
    match error:
        case GatedRepoError():
            problem = f"the model is gated: accept its license at {where}, and {login}"
        case RevisionNotFoundError():
            problem = f"the repository has no branch, tag or commit {named.revision!r}; {where} lists them"
        case RepositoryNotFoundError():
            problem = (
                f"no directory of this name here, and no such model at {constants.ENDPOINT}; if it is private, {login}"
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            problem = f"{_reason(error)}: the token is wrong or must not read this model; {login}"
        case _ if _is_unreachable(error):
            remedy = "unset it" if isinstance(error, OfflineModeIsEnabled) else "check the network, or HF_ENDPOINT"
            revision = "" if named.revision == "main" else f" --revision {named.revision}"
            elsewhere = (
                "without a network, run this on another machine, copy DIR here and name it in place of the model: "
                f"hf download {named.repository}{revision} --local-dir DIR"
            )
            problem = f"no directory of this name here, and {_reason(error)}: {remedy}; {repository.cached()}"
            return CheckpointError(f"{named}: {problem}; {elsewhere}")
        case HfHubHTTPError():
            url = error.response.url
            problem = f"{_reason(error)} for {url.copy_with(query=None)}"
            if (
                error.response.status_code == 404
                and "X-Error-Code" not in error.response.headers
                and str(url).startswith(constants.ENDPOINT)
            ):
                problem = f"{constants.ENDPOINT} does not answer like the Hub: check HF_ENDPOINT"
        case OSError():
            problem = (
                f"{error.filename or repository.cache}: cannot be written ({error.strerror or error}); make room or "
                "give permission there, or set HF_HOME to another folder"
            )
        case _:
            problem = str(error)
    if commit := repository.cached_commit():
        problem += f"; HF_HUB_OFFLINE=1 uses commit {commit[:12]} of the cache"
    return CheckpointError(f"{named}: {problem}")


def _size(n_bytes: float) -> str:
    """Bytes in the unit that people read."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
