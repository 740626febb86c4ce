"""Hot reload: loads and validates new weights while serving, then switches new requests to them.

requested or detected -> loading -> validated -> switched -> requests on the old weights finish -> old weights closed
                             +-- any error: new weights closed, one log line; the old weights keep serving

At most two sets of engines exist at a time: the next reload waits until the previous weights are closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Literal

from app.common.errors import NotReady
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.serving.weights_snapshot import WeightsFingerprint, take_fingerprint, what_is_missing
from model.files import one_line

_log = logging.getLogger("inkstream")
_POLL_SECONDS = 0.1
_LOAD_SECONDS = 1800.0
"""Timeout for the largest model on the slowest disk."""
_ENDED = "their engine ended while it was loading ({})"

Outcome = Literal["switched", "refused"]


class LoadFailed(ValueError):
    """The new weights cannot be served; the message says why."""


class StillChanging(LoadFailed):
    """Files were replaced while they were read; the watcher tries again."""


class HotReload:
    """Runs as one task. Requests during a load are coalesced into one more load after it."""

    def __init__(
        self, service: Service, make: Callable[[], Awaitable[ModelInstance]], record_outcome: Callable[[Outcome], None]
    ) -> None:
        """`make` creates an instance from the directory's current state. `record_outcome` counts outcomes."""
        settings = service.settings
        self._service = service
        self._weights = settings.weights
        self._make = make
        self._record_outcome = record_outcome
        self._watch_seconds = settings.watch
        self._drain_seconds = settings.request_timeout + settings.resume_seconds
        """Time for requests on old weights to finish, including resumed streams."""
        self._requested = asyncio.Event()
        self._retiring: asyncio.Task[None] | None = None

    def request_reload(self) -> None:
        """Requests a reload, even if the directory has not changed."""
        self._requested.set()

    async def run(self) -> None:
        """Runs until cancelled; then only the processes of the current model instance remain."""
        await self._service.wait_loaded()
        attempted = self._service.instance.fingerprint
        current = await asyncio.to_thread(take_fingerprint, self._weights)
        if current != attempted and not self._watch_seconds:
            _log.warning("the weights changed while they were loaded: kill -HUP %d loads them again", os.getpid())
        unfinished: WeightsFingerprint | None = None  # not hashed or logged again
        try:
            while True:
                if await self._wait_requested():
                    attempted = current = await self._load()
                    continue
                previous, current = current, await asyncio.to_thread(take_fingerprint, self._weights)
                # Changed since the last attempt, and stable since the last check.
                if current == previous and current not in (attempted, unfinished):
                    if await self._is_complete():
                        attempted = current = await self._load()
                    else:
                        unfinished = current
        finally:
            if self._retiring:
                self._retiring.cancel()
                await asyncio.gather(self._retiring, return_exceptions=True)

    async def _wait_requested(self) -> bool:
        """Waits for a reload request, or for the next check of the directory; returns whether one was requested."""
        try:
            async with asyncio.timeout(self._watch_seconds or None):
                await self._requested.wait()
        except TimeoutError:
            return False
        self._requested.clear()
        return True

    async def _is_complete(self) -> bool:
        if problem := await asyncio.to_thread(what_is_missing, self._weights):
            _log.info("new weights are not complete yet: %s", problem)
        return not problem

    async def _load(self) -> WeightsFingerprint:
        """Loads the directory and switches to it, or logs why not. Returns the directory's fingerprint."""
        if self._retiring:
            if not self._retiring.done():
                _log.info("new weights wait until requests on older weights have finished")
            await asyncio.gather(self._retiring, return_exceptions=True)
        fingerprint = await asyncio.to_thread(take_fingerprint, self._weights)
        _log.info("loading new weights from %s", fingerprint.path)
        if source := self._service.instance.source:
            _log.info("this is commit %s of %s again: restart for a newer one", source.commit[:12], source.repository)
        try:
            instance = await self._load_instance()
        except Exception as error:  # whatever it is, it must not end the reload task
            if self._watch_seconds and isinstance(error, StillChanging):
                _log.info("new weights are still being written")
                return fingerprint
            reason = str(error)
            if not isinstance(error, ValueError | OSError):
                _log.exception("new weights could not be loaded")
                reason = f"{type(error).__name__} in the service"
            self._record_outcome("refused")
            _log.error("new weights are refused, the old ones stay: %s", one_line(reason))
            return fingerprint
        old = self._service.switch(instance)
        self._record_outcome("switched")
        version = instance.engine.ready.model_version.short_key if instance.engine.ready else ""
        _log.info("new weights are served: %s, version %s", instance.model_name, version)
        self._retiring = asyncio.create_task(self._retire(old))
        return instance.fingerprint

    async def _load_instance(self) -> ModelInstance:
        """The loaded model instance. Raises LoadFailed and others after cleaning up."""
        if problem := await asyncio.to_thread(what_is_missing, self._weights):  # before an engine allocates memory
            raise LoadFailed(problem)
        instance = await self._make()
        try:
            instance.start()
            await self._wait_loaded(instance)
            if await asyncio.to_thread(take_fingerprint, self._weights) != instance.fingerprint:
                raise StillChanging("they changed while they were loaded")
        except BaseException:
            await instance.close()
            raise
        return instance

    async def _wait_loaded(self, instance: ModelInstance) -> None:
        """Raises LoadFailed, TokenizerError."""
        stopped = asyncio.ensure_future(instance.engine.wait_stopped())
        loading = asyncio.ensure_future(instance.load())
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                while not loading.done():
                    await asyncio.wait({loading, stopped}, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        raise LoadFailed(str(stopped.result()))
                    # The engine client would restart it; if memory is short, that could kill the old engine.
                    if instance.engine.restarts:
                        raise LoadFailed(_ENDED.format(instance.engine.phase))
                    if self._service.draining:
                        raise LoadFailed("the service is shutting down")
            await loading
            if instance.engine.restarts or not instance.engine.ready:  # it failed while the tokenizer was loading
                raise LoadFailed(_ENDED.format(instance.engine.phase))
        except TimeoutError:
            raise LoadFailed(f"they are not loaded after {_LOAD_SECONDS:g} s") from None
        finally:
            stopped.cancel()
            loading.cancel()
            await asyncio.gather(stopped, loading, return_exceptions=True)

    async def _retire(self, old: ModelInstance) -> None:
        """Closes old weights once no request uses them, or after the timeout."""
        error = NotReady("the weights that this response started with are no longer served: send the request again", 1)
        try:
            async with asyncio.timeout(self._drain_seconds):
                await old.wait_unreferenced()
        except TimeoutError:
            _log.warning("old weights are closed after %g s: some requests end with an error", self._drain_seconds)
        await self._service.retire(old, error)
        _log.info("old weights are closed")
