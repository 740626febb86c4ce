"""Checks in sandboxed processes whether a grammar can be followed, before its request is admitted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from app.access.tenant_queue import WorkAccount
from app.common.errors import InvalidRequest
from app.guided.grammar import Grammar
from app.sandbox.sandbox import SandboxError, SandboxPool
from model.files import Files

MISSING = 'this server was installed without constrained decoding: pip install "inkstream[guided]"'
MAX_JOBS = 64
"""Grammars that are queued or being checked; one tenant may have at most half of them."""

_MAX_VERDICTS = 8192
_KILLED_SECONDS = 300.0
"""How long a grammar whose check was killed is refused from the cache: on a busy machine a good one may be killed."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    problem: str
    """Empty if the grammar is valid."""
    expires: float = float("inf")


@dataclass(slots=True)
class _Check:
    """A check in progress and the requests that wait for it."""

    task: asyncio.Task[str]
    waiting: int = 0


class GrammarValidator:
    """Owns the processes, which start with the first grammar, and the verdicts for one set of weights.

    A verdict is kept by the SHA-256 of the grammar. Refusals apply to all tenants, to protect the workers.
    Acceptances are kept per tenant, so that no tenant can find out by timing whether another uses the same grammar.
    """

    def __init__(self, weights: Path, *, seconds: float, files: Files | None = None) -> None:
        """`files`: where the processes read the tokenizer of `weights` (model/files.py)."""
        arguments = (str(weights), json.dumps(dict(files or {})))
        self._pool = SandboxPool("app.guided.validator_worker", *arguments, seconds=seconds, max_jobs=MAX_JOBS)
        self._verdicts: OrderedDict[tuple[str | None, bytes], _Verdict] = OrderedDict()
        """By tenant, None for refusals, and hash; the least recently used first."""
        self._in_progress: dict[tuple[str, bytes], _Check] = {}
        self._tasks: set[asyncio.Task[str]] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return self._pool.pids

    async def check(self, grammar: Grammar, account: WorkAccount) -> None:
        """Raises InvalidRequest for an invalid grammar, Busy, EngineFailed."""
        if find_spec("llguidance") is None:
            raise InvalidRequest(MISSING, grammar.field)
        problem = self._known_problem(grammar.lark, account.tenant)
        if problem is None:
            problem = await self._join_check(grammar.lark, account)
        if grammar.field != "grammar":  # a generated grammar: its line numbers mean nothing to the user
            problem = re.sub(r"^line \d+, column \d+: ", "", problem)
        if problem:
            raise InvalidRequest(f"{grammar.field}: {problem}", grammar.field)

    async def close(self) -> None:
        """Stops the processes; checks in progress fail."""
        self._pool.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _known_problem(self, lark: str, tenant: str) -> str | None:
        digest = _digest(lark)
        for key in ((None, digest), (tenant, digest)):
            if (verdict := self._verdicts.get(key)) and verdict.expires > time.monotonic():
                self._verdicts.move_to_end(key)
                return verdict.problem
        return None

    async def _join_check(self, lark: str, account: WorkAccount) -> str:
        """Checks a grammar once for all concurrent requests of a tenant that use it."""
        key = account.tenant, _digest(lark)
        if (check := self._in_progress.get(key)) is None:
            check = self._in_progress[key] = _Check(asyncio.create_task(self._validate(lark, account)))
            self._tasks.add(check.task)
            check.task.add_done_callback(self._tasks.discard)
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if check.task.done() or not check.waiting:
                check.task.cancel()
                if self._in_progress.get(key) is check:
                    del self._in_progress[key]

    async def _validate(self, lark: str, account: WorkAccount) -> str:
        try:
            verdict = _Verdict((await self._pool.call(lark.encode(), account)).decode())
        except SandboxError as error:
            verdict = _Verdict(f"compiling it {error}: make it simpler", time.monotonic() + _KILLED_SECONDS)
        self._verdicts[None if verdict.problem else account.tenant, _digest(lark)] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict.problem


def _digest(lark: str) -> bytes:
    return hashlib.sha256(lark.encode()).digest()
