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

from app.access.worker_turns import WorkAccount
from app.common.errors import InvalidRequest
from app.guided.grammar import Grammar
from app.sandbox.sandbox import SandboxError, SandboxPool
from model.weights_version import Directory, encode_directory

MISSING = (
    "this server was installed without the package llguidance, which constrained decoding needs: "
    "leave the field out, or ask its operator to install llguidance 1.9"
)
MAX_JOBS = 64
"""Grammars that are queued or being checked; one tenant may have at most half of them."""

_MAX_VERDICTS = 8192
_MAX_REWRITTEN_BYTES = 8 << 20
"""Limit of all rewritten grammars together; a request that needs a dropped one repeats its check."""
_KILLED_SECONDS = 300.0
"""How long a grammar whose check was killed is refused from the cache: on a busy machine a good one may be killed."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    problem: str
    """Empty if the grammar is valid."""
    expires: float = float("inf")
    rewritten: str | None = None
    """The grammar to use instead, if the check rewrote its schemas."""

    @property
    def rewritten_bytes(self) -> int:
        """Memory of the rewritten grammar; JSON is written in ASCII."""
        return len(self.rewritten or "")


@dataclass(slots=True)
class _Check:
    """A check in progress and the requests that wait for it."""

    task: asyncio.Task[_Verdict]
    waiting: int = 0


class GrammarValidator:
    """Owns the processes, which start with the first grammar, and the verdicts for one set of weights.

    A verdict is kept by the SHA-256 of the grammar. Refusals apply to all tenants, to protect the workers.
    Acceptances are kept per tenant, so that no tenant can find out by timing whether another uses the same grammar.
    """

    def __init__(self, weights: Directory, *, seconds: float) -> None:
        worker = ("app.guided.validator_worker", encode_directory(weights))
        self._pool = SandboxPool(*worker, seconds=seconds, max_jobs=MAX_JOBS)
        self._verdicts: OrderedDict[tuple[str | None, bytes], _Verdict] = OrderedDict()
        """By tenant, None for refusals, and hash; the least recently used first."""
        self._rewritten_bytes = 0
        self._in_progress: dict[tuple[str, bytes], _Check] = {}
        self._tasks: set[asyncio.Task[_Verdict]] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return self._pool.pids

    async def check(self, grammar: Grammar, account: WorkAccount) -> str:
        """The text to compile, which may differ from the grammar's. Raises InvalidRequest, Busy, EngineFailed."""
        if find_spec("llguidance") is None:
            raise InvalidRequest(MISSING, grammar.field)
        verdict = self._known_verdict(grammar.lark, account.tenant) or await self._join_check(grammar.lark, account)
        problem = verdict.problem
        if grammar.field != "grammar":  # a generated grammar: its line numbers mean nothing to the user
            problem = re.sub(r"^line \d+, column \d+: ", "", problem)
        if problem:
            raise InvalidRequest(f"{grammar.field}: {problem}", grammar.field)
        return verdict.rewritten or grammar.lark

    async def close(self) -> None:
        """Stops the processes; checks in progress fail."""
        self._pool.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _known_verdict(self, lark: str, tenant: str) -> _Verdict | None:
        digest = _digest(lark)
        for key in ((None, digest), (tenant, digest)):
            if (verdict := self._verdicts.get(key)) and verdict.expires > time.monotonic():
                self._verdicts.move_to_end(key)
                return verdict
        return None

    async def _join_check(self, lark: str, account: WorkAccount) -> _Verdict:
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

    async def _validate(self, lark: str, account: WorkAccount) -> _Verdict:
        try:
            problem, rewritten = json.loads(await self._pool.call(lark.encode(), account))
            verdict = _Verdict(problem, rewritten=rewritten)
        except SandboxError as error:
            verdict = _Verdict(f"compiling it {error}: make it simpler", time.monotonic() + _KILLED_SECONDS)
        self._keep((None if verdict.problem else account.tenant, _digest(lark)), verdict)
        return verdict

    def _keep(self, key: tuple[str | None, bytes], verdict: _Verdict) -> None:
        if previous := self._verdicts.pop(key, None):
            self._rewritten_bytes -= previous.rewritten_bytes
        self._verdicts[key] = verdict
        self._rewritten_bytes += verdict.rewritten_bytes
        while len(self._verdicts) > _MAX_VERDICTS or self._rewritten_bytes > _MAX_REWRITTEN_BYTES:
            self._rewritten_bytes -= self._verdicts.popitem(last=False)[1].rewritten_bytes


def _digest(lark: str) -> bytes:
    return hashlib.sha256(lark.encode()).digest()
