"""Grammars are validated in a process that is killed on time-out and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.access.worker_turns import WorkAccount
from app.common.errors import EngineFailed, InvalidRequest
from app.guided.grammar import grammar_from
from app.guided.validator import GrammarValidator
from app.guided.validator_worker import explain
from tests.support.async_test import async_test
from tests.support.processes import has_exited

SLOW = {"anyOf": [{"type": "integer", "multipleOf": prime} for prime in (999983, 999979, 999961)]}
"""Tells multiples of large primes by their digits: as many states as the product has."""


@contextlib.asynccontextmanager
async def _validator(weights: Path, seconds: float = 60) -> AsyncIterator[GrammarValidator]:
    checker = GrammarValidator(weights, seconds=seconds)
    try:
        yield checker
    finally:
        await checker.close()


async def _check(checker: GrammarValidator, tenant: str = "", **fields: Any) -> None:
    grammar = grammar_from(*next(iter(fields.items())))
    assert grammar
    await checker.check(grammar, WorkAccount(tenant))


async def _problem(checker: GrammarValidator, tenant: str = "", **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await _check(checker, tenant, **fields)
    assert [caught.value.param] == list(fields)
    return str(caught.value)


@async_test
async def test_valid_grammars_pass_and_invalid_ones_give_a_reason(weights: Path) -> None:
    async with _validator(weights) as checker:
        assert not checker.pids, "the process must start only when needed"
        await _check(checker, regex="[ab]+/")
        await _check(checker, json_schema={"type": "object", "properties": {"a": {"$ref": "#"}}})
        await _check(checker, grammar='start: "(" start ")" | "x"')
        await _check(checker, response_format={"type": "json_object"})
        assert await _problem(checker, regex="a(b") == "regex: unclosed group"
        assert "look-around" in await _problem(checker, regex="a(?=b)")
        assert await _problem(checker, regex="") == "regex: it allows no text at all"
        assert await _problem(checker, json_schema={"type": "foo"}) == "json_schema: at #: Invalid type: foo"
        assert "not" in await _problem(checker, json_schema={"not": {}})
        assert "no text" in await _problem(checker, json_schema={"$ref": "#"})
        wide = {"type": "object", "properties": {f"p{i}": {} for i in range(400)}}
        assert "too complex" in await _problem(checker, json_schema=wide)
        assert await _problem(checker, grammar="start: a") == 'grammar: line 1, column 8: unknown name: "a"'


@async_test
async def test_grammar_bomb_is_refused_in_time_and_a_new_process_checks_the_next_grammar(
    weights: Path,
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async with _validator(weights, seconds=2) as checker:
        await _check(checker, regex="a")
        before = set(checker.pids)
        ticking = asyncio.create_task(tick())
        assert "compiling it takes" in await _problem(checker, json_schema=SLOW)  # too long, or too much memory
        ticking.cancel()
        assert ticks > 5
        (killed,) = before - set(checker.pids)
        assert has_exited(killed)
        await _check(checker, regex="b")


@async_test
async def test_timed_out_grammar_is_refused_for_every_tenant_until_the_entry_expires(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarValidator(weights, seconds=0.05)
    assert "takes more than" in await _problem(checker, tenant="a", json_schema=SLOW)
    await checker.close()  # no further question is possible
    assert "takes more than" in await _problem(checker, tenant="b", json_schema=SLOW)
    later = time.monotonic() + 301
    monkeypatch.setattr("app.guided.validator.time.monotonic", lambda: later)
    with pytest.raises(EngineFailed, match="closed"):  # checked again, because the machine may have been busy
        await _check(checker, json_schema=SLOW)


@async_test
async def test_accepted_grammars_are_cached_per_tenant(weights: Path) -> None:
    checker = GrammarValidator(weights, seconds=60)
    await _check(checker, tenant="a", regex="abc")
    await checker.close()
    await _check(checker, tenant="a", regex="abc")
    with pytest.raises(EngineFailed, match="closed"):
        await _check(checker, tenant="b", regex="abc")


@async_test
async def test_requests_of_one_tenant_for_one_grammar_share_a_check(weights: Path) -> None:
    async with _validator(weights) as checker:
        checked_tenants, call = [], checker._pool.call

        async def counted(question: bytes, account: WorkAccount) -> bytes:
            checked_tenants.append(account.tenant)
            return await call(question, account)

        checker._pool.call = counted  # type: ignore[assignment]
        checks = [asyncio.create_task(_check(checker, tenant=t, regex="x+y")) for t in ("a", "a", "a", "b")]
        await asyncio.sleep(0)
        checks[0].cancel()  # the check continues for the other requests
        found = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(one) for one in found] == [asyncio.CancelledError, type(None), type(None), type(None)]
        assert checked_tenants == ["a", "b"]


@async_test
async def test_grammar_beyond_the_memory_limit_ends_only_the_process(weights: Path) -> None:
    async with _validator(weights) as checker:
        assert "memory" in await _problem(checker, json_schema=SLOW)
        await _check(checker, regex="a")


@async_test
async def test_process_that_does_not_start_is_a_server_error(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="does not start"):
        await _check(GrammarValidator(tmp_path, seconds=60), regex="a")


@async_test
async def test_missing_package_is_reported_with_its_own_name(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.guided.validator.find_spec", lambda _: None)
    checker = GrammarValidator(weights, seconds=1)
    assert "install llguidance" in await _problem(checker, regex="a")


@pytest.mark.parametrize(
    ("message", "explained"),
    [
        ("panic: index out of range\n<backtrace>\n   0: <unknown>", "it cannot be compiled"),
        ("lexer error: too many states: 200 >= 200\n<non-verbose/>", "it is too complex: make it simpler"),
        ('at 2(3): unknown name: "b"\n   1 | start: a\n   2 | a: b\n', 'line 2, column 3: unknown name: "b"'),
        ("x" * 1000, "x" * 200 + "..."),
        ("a\x1b[1mb\n\nc", "a [1mb c"),
    ],
)
def test_messages_are_one_short_line_of_plain_text(message: str, explained: str) -> None:
    assert explain(message) == explained
