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
from app.common.fault_injection import is_armed
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.serving.weights_snapshot import WeightsFingerprint, look, what_is_missing
from model.files import one_line

_log = logging.getLogger("inkstream")
_GLANCE_SECONDS = 0.1
_LOAD_SECONDS = 1800.0
"""Timeout for the largest model on the slowest disk."""
_ENDED = "their engine ended while it was loading ({})"

Outcome = Literal["switched", "refused"]


class LoadFailed(Exception):
    """The new weights cannot be served; the message says why."""


class StillChanging(LoadFailed):
    """Files were replaced while they were read; the watcher tries again."""


class HotReload:
    """Runs as one task. Requests during a load are coalesced into one more load after it."""

    def __init__(
        self, service: Service, make: Callable[[], Awaitable[ModelInstance]], note: Callable[[Outcome], None]
    ) -> None:
        """`make` creates the next model instance from the directory's current state. `note` counts outcomes."""
        settings = service.settings
        self._service = service
        self._weights = settings.weights
        self._make = make
        self._note = note
        self._watch_seconds = settings.watch
        self._drain_seconds = settings.request_timeout + settings.resume_seconds
        """Time for requests on old weights to finish, including resumed streams."""
        self._asked = asyncio.Event()
        self._retiring: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Requests a reload, even if the directory has not changed."""
        self._asked.set()

    async def run(self) -> None:
        """Runs until cancelled; leaves only the processes of the served model instance behind."""
        await self._service.wait_loaded()
        tried, seen = self._service.served.seen, await asyncio.to_thread(look, self._weights)
        if seen != tried and not self._watch_seconds:
            _log.warning("the weights changed while they were loaded: kill -HUP %d loads them again", os.getpid())
        unfinished: WeightsFingerprint | None = None  # not hashed or logged again
        try:
            while True:
                if await self._is_asked():
                    tried = seen = await self._load()
                    continue
                before, seen = seen, await asyncio.to_thread(look, self._weights)
                # Changed since the last attempt, and stable since the last look.
                if seen == before and seen not in (tried, unfinished):
                    if await self._is_whole():
                        tried = seen = await self._load()
                    else:
                        unfinished = seen
        finally:
            if self._retiring:
                self._retiring.cancel()
                await asyncio.gather(self._retiring, return_exceptions=True)

    async def _is_asked(self) -> bool:
        """Waits for a reload request, or for the next look at the directory."""
        try:
            async with asyncio.timeout(self._watch_seconds or None):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    async def _is_whole(self) -> bool:
        if problem := await asyncio.to_thread(what_is_missing, self._weights):
            _log.info("new weights are not complete yet: %s", problem)
        return not problem

    async def _load(self) -> WeightsFingerprint:
        """Loads the directory and switches to it, or logs why not. Returns the directory's fingerprint."""
        if self._retiring:
            if not self._retiring.done():
                _log.info("new weights wait until the answers of the weights before the last have ended")
            await asyncio.gather(self._retiring, return_exceptions=True)
        seen = await asyncio.to_thread(look, self._weights)
        _log.info("loading new weights from %s", seen.place)
        try:
            served = await self._loaded()
        except LoadFailed as error:
            if self._watch_seconds and isinstance(error, StillChanging):
                _log.info("new weights are still being written")
                return seen
            self._note("refused")
            _log.error("new weights are refused, the old ones stay: %s", one_line(str(error)))
            return seen
        old = self._service.switch(served)
        self._note("switched")
        version = served.engine.ready.weights_version[:16] if served.engine.ready else ""
        _log.info("new weights are served: %s, version %s", served.model_name, version)
        self._retiring = asyncio.create_task(self._retire(old))
        return served.seen

    async def _loaded(self) -> ModelInstance:
        """The loaded model instance. Raises LoadFailed after cleaning up."""
        try:
            return await self._tried()
        except LoadFailed:
            raise
        except (ValueError, OSError) as error:
            raise LoadFailed(str(error)) from None
        except Exception as error:  # an unexpected error must not end the reload task
            _log.exception("new weights could not be loaded")
            raise LoadFailed(f"{type(error).__name__} on our side") from None

    async def _tried(self) -> ModelInstance:
        """Like _loaded(), without handling unexpected errors."""
        if problem := await asyncio.to_thread(what_is_missing, self._weights):  # before an engine allocates memory
            raise LoadFailed(problem)
        served = await self._make()
        try:
            served.start()
            await self._wait_loaded(served)
            if await asyncio.to_thread(look, self._weights) != served.seen:
                raise StillChanging("they changed while they were loaded")
        except BaseException:
            await served.close()
            raise
        return served

    async def _wait_loaded(self, served: ModelInstance) -> None:
        """Raises LoadFailed."""
        gone = asyncio.ensure_future(served.engine.wait_gone())
        loading = asyncio.ensure_future(served.load())
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                while not loading.done():
                    await asyncio.wait({loading, gone}, timeout=_GLANCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        raise LoadFailed(str(gone.result()))
                    # The engine client would restart it; if memory is short, that could kill the old engine.
                    if served.engine.restarts:
                        raise LoadFailed(_ENDED.format(served.engine.phase))
                    if self._service.draining:
                        raise LoadFailed("the service is shutting down")
            await loading
            if served.engine.restarts or not served.engine.ready:  # the engine failed while the tokenizer was loading
                raise LoadFailed(_ENDED.format(served.engine.phase))
        except TimeoutError:
            raise LoadFailed(f"they are not loaded after {_LOAD_SECONDS:g} s") from None
        except ValueError as error:
            raise LoadFailed(str(error)) from None
        finally:
            gone.cancel()
            loading.cancel()
            await asyncio.gather(gone, loading, return_exceptions=True)

    async def _retire(self, old: ModelInstance) -> None:
        """Closes old weights once no request uses them, or after the timeout."""
        if is_armed("reload.keep_old"):
            return
        error = NotReady("the weights that this answer began with are no longer served: send it again", 1)
        try:
            async with asyncio.timeout(self._drain_seconds):
                await old.wait_free()
        except TimeoutError:
            _log.warning("old weights are closed after %g s: some answers end with an error", self._drain_seconds)
        await self._service.retire(old, error)
        _log.info("old weights are closed")
