"""Whether a guide can be followed, asked of a process of its own before the request is let in. asyncio, no llguidance.

nothing --first check--> process --guide after guide--> process --too much time or memory--> nothing
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from app.engine.errors import EngineFailed, InvalidRequest, QueueFull
from app.engine.frames import Check, Checked, Fatal, Phase
from app.engine.process import EngineProcess

CHECKER = (sys.executable, "-P", "-m", "app.engine.guide_process")
MISSING = 'this server was installed without constrained decoding: pip install "inkstream[guided]"'

_MOST_WAITING = 32
_REMEMBERED_BYTES = 4 << 20
_START_SECONDS = 60.0


class GuideChecker:
    """Owns the process. One guide at a time; what it said of a guide is remembered."""

    def __init__(
        self, weights: Path, *, seconds: float, command: Sequence[str] = CHECKER, installed: bool | None = None
    ) -> None:
        self._command = (*command, str(seconds), str(weights))
        self._seconds = seconds
        self._installed = find_spec("llguidance") is not None if installed is None else installed
        self._process: EngineProcess | None = None
        self._busy = asyncio.Lock()
        self._waiting = 0
        self._problems: OrderedDict[str, str] = OrderedDict()
        self._remembered = 0

    async def check(self, guide: str, field: str) -> None:
        """Raises InvalidRequest for `field` where the guide cannot be followed, QueueFull, EngineFailed."""
        if not self._installed:
            raise InvalidRequest(MISSING, field)
        if (problem := self._known(guide)) is None:
            if self._waiting >= _MOST_WAITING:
                raise QueueFull("too many new guides wait to be checked: try again in a moment", 1)
            self._waiting += 1
            try:
                async with self._busy:
                    problem = self._known(guide)
                    problem = await self._ask(guide) if problem is None else problem
            finally:
                self._waiting -= 1
        if field != "grammar":  # it was written by us: its lines mean nothing to the user
            problem = re.sub(r"^line \d+, column \d+: ", "", problem)
        if problem:
            raise InvalidRequest(f"{field}: {problem}", field)

    async def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process:
            process.kill()
            await process.end()

    def _known(self, guide: str) -> str | None:
        if guide in self._problems:
            self._problems.move_to_end(guide)
        return self._problems.get(guide)

    def _remember(self, guide: str, problem: str) -> str:
        self._problems[guide] = problem
        self._remembered += len(guide)
        while self._remembered > _REMEMBERED_BYTES:
            self._remembered -= len(self._problems.popitem(last=False)[0])
        return problem

    async def _ask(self, guide: str) -> str:
        """A process that is found dead says nothing of the guide; one that dies of it twice does."""
        for _ in range(2):
            process = self._process = self._process or await self._start()
            process.send(Check(guide))
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await process.receive()
            except TimeoutError:
                await self.stop()
                return f"it takes more than {self._seconds:g} s to prepare: make it simpler"
            except BaseException:  # nobody waits any more, and the next one must not get this answer
                await self.stop()
                raise
            if isinstance(answer, Checked):
                return self._remember(guide, answer.problem)
            await self.stop()
        return "it takes too much memory to prepare: make it simpler"

    async def _start(self) -> EngineProcess:
        process = await EngineProcess.spawn(self._command)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await process.receive()
            if isinstance(answer, Phase):
                return process
        except BaseException:
            process.kill()
            await process.end()
            raise
        process.kill()
        await process.end()
        why = f": {answer.message}" if isinstance(answer, Fatal) else ""
        raise EngineFailed(f"the process that checks guides does not start{why}")
