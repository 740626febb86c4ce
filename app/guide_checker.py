"""Whether a guide can be followed, asked of a process of its own before the request is let in. Knows no llguidance."""

from __future__ import annotations

import re
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

from app.engine.errors import InvalidRequest
from app.guide import Guide
from app.killable import KillableHelper, Killed

MISSING = 'this server was installed without constrained decoding: pip install "inkstream[guided]"'
MOST_WAITING = 32

_REMEMBERED_BYTES = 4 << 20


class GuideChecker:
    """Owns the process, which starts with the first guide; what it said of a guide is remembered."""

    def __init__(self, weights: Path, *, seconds: float, installed: bool | None = None) -> None:
        self._helper = KillableHelper("app.guide_process", str(weights), seconds=seconds, most_waiting=MOST_WAITING)
        self._installed = find_spec("llguidance") is not None if installed is None else installed
        self._problems: OrderedDict[str, str] = OrderedDict()
        self._remembered = 0

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._helper.pid

    async def check(self, guide: Guide) -> None:
        """Raises InvalidRequest where the guide cannot be followed, Busy, EngineFailed."""
        if not self._installed:
            raise InvalidRequest(MISSING, guide.field)
        if (problem := self._problems.get(guide.grammar)) is None:
            problem = await self._ask(guide.grammar)
        else:
            self._problems.move_to_end(guide.grammar)
        if guide.field != "grammar":  # it was written by us: its lines mean nothing to the user
            problem = re.sub(r"^line \d+, column \d+: ", "", problem)
        if problem:
            raise InvalidRequest(f"{guide.field}: {problem}", guide.field)

    async def close(self) -> None:
        """Ends the process."""
        await self._helper.close()

    async def _ask(self, grammar: str) -> str:
        try:
            problem = (await self._helper.ask(grammar.encode())).decode()
        except Killed as error:
            return f"to prepare it {error}: make it simpler"
        if grammar not in self._problems:
            self._problems[grammar] = problem
            self._remembered += len(grammar)
        while self._remembered > _REMEMBERED_BYTES:
            self._remembered -= len(self._problems.popitem(last=False)[0])
        return problem
