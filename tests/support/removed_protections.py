"""Removes protections of the service for positive controls, which show that a promise's test can fail.

The product has no code for this: each process of a service started with Faults.removing() calls install() first. A
protection stays in place until the control arms its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.common import fault_injection
from app.common.types import StepReport

_ENGINES = {"app.engine", "tests.support.fake_engine"}


@dataclass(frozen=True, slots=True)
class _Removal:
    """A function of the product and its replacement, which gets the function as first argument."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]


_REMOVALS: list[_Removal] = []


def is_armed(name: str, detail: object = "") -> bool:
    """Whether a test has armed this name in this process."""
    registry = fault_injection._REGISTRY
    return bool(registry and registry.match(name, detail))


def install(*names: str) -> None:
    """Makes these protections removable in this process, if it is the API process or an engine."""
    is_engine, is_api = not _ENGINES.isdisjoint(sys.orig_argv), "serve" in sys.orig_argv
    for removal in _REMOVALS:
        if removal.name in names and (is_engine if removal.module.startswith("app.engine.") else is_api):
            _install(removal)


def _install(removal: _Removal) -> None:
    owner: Any = importlib.import_module(removal.module)
    *classes, name = removal.function.split(".")
    for each in classes:
        owner = getattr(owner, each)
    found = inspect.getattr_static(owner, name)
    real: Any = found.fget if isinstance(found, property) else getattr(owner, name)

    @functools.wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        if is_armed(removal.name):
            return removal.instead(real, *arguments, **named)
        return real(*arguments, **named)

    kinds: dict[type, Callable[[Any], Any]] = {property: property, classmethod: staticmethod}
    setattr(owner, name, kinds.get(type(found), lambda same: same)(call))


def _removal(name: str, module: str, function: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(instead: Callable[..., Any]) -> Callable[..., Any]:
        _REMOVALS.append(_Removal(name, module, function, instead))
        return instead

    return register


@_removal("worker_turns.fifo", "app.access.worker_turns", "WorkerTurns._check")
def _one_limit_for_all_tenants(real: Any, queue: Any, tenant: Any, size: int) -> None:
    real(queue, type(tenant)(jobs=1, size=1), size)


@_removal("worker_turns.fifo", "app.access.worker_turns", "WorkerTurns.acquire")
def _one_worker_in_order_of_arrival(real: Any, queue: Any, account: Any, cost: int) -> Any:
    return real(queue, dataclasses.replace(account, tenant=""), cost)


@_removal("loop_share.unlimited", "app.access.worker_turns", "LoopShare.parsing")
def _parse_at_once(*_arguments: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


@_removal("loop_share.unlimited", "app.access.worker_turns", "LoopShare.pause")
async def _pause_for_nothing(*_arguments: Any) -> None:
    await asyncio.sleep(0)


@_removal("owner_shares.none", "app.access.owner_shares", "OwnerShares.largest")
def _oldest_of_all_owners(_real: Any, shares: Any) -> Any:
    return next(iter(shares._names.values())).keys()


@_removal("metrics.unlimited", "app.api.metrics", "SharedRendering.text")
async def _render_each_time(_real: Any, rendering: Any) -> bytes:
    return b"".join(rendering._parts())


@_removal("replay.copied", "app.api.native.resumable_stream", "ResumableStream._replayed")
def _replay_in_one_piece(_real: Any, stream: Any, number: int, _connection: Any) -> Any:
    yield b"".join(stream._replay_buffer.since(number, 1 << 30))


@_removal("documents.on_loop", "app.common.threaded_result", "ThreadedResult.get")
async def _compute_on_the_loop(_real: Any, result: Any) -> Any:
    return result._compute()


@_removal("best_effort.unlimited", "app.http.http_protocol", "HttpProtocol._wait_for_turn")
def _parse_without_a_turn(_real: Any, protocol: Any, data: bytes) -> None:
    protocol._parse_seconds = 0.0
    protocol._parse_pieces(data)


@_removal("best_effort.unlimited", "app.http.http_protocol", "HttpProtocol._discard")
def _discard_without_end(*_arguments: Any) -> None:
    pass


@_removal("incoming_bodies.unlimited", "app.http.incoming_bodies", "IncomingBodies._fits")
def _every_body_fits(*_arguments: Any) -> bool:
    return True


@_removal("long_texts.on_loop", "app.tokenization.tokenizer_pool", "_is_short")
def _every_text_is_short(*_arguments: Any) -> bool:
    return True


@_removal("stream.unbounded", "app.generation.completion", "Completion._suspend")
@_removal("engine.unproven", "app.engine.startup", "check_finite_logits")
def _do_nothing(*_arguments: Any, **_named: Any) -> None:
    pass


@_removal("tokenizer.trusted", "app.serving.model_instance", "ModelInstance.text_encoder")
def _encode_in_this_process(real: Any, instance: Any) -> Any:
    encoder = real(instance)
    encoder._sandbox = None
    return encoder


@_removal("json_stream.at_once", "app.http.json_stream", "_chunk")
def _whole_body(_real: Any, parts: Any) -> tuple[bytes, bool]:
    return b"".join(parts), True


@_removal("job.other_engine", "app.api.request_handle", "RequestHandle.attach")
def _attach_to_the_newest_engine(real: Any, handle: Any) -> None:
    handle.completion._pool = handle.service.engine
    real(handle)


@_removal("reload.keep_old", "app.serving.hot_reload", "HotReload._retire")
async def _keep_the_old_engine(*_arguments: Any) -> None:
    pass


@_removal("weights.no_snapshot", "app.serving.weights_snapshot", "WeightsSnapshot.open")
def _no_open_files(real: Any, directory: Any, *_arguments: Any) -> Any:
    return real.__self__(directory, {}, {})


_HOARD: list[object] = []


@_removal("service.leak", "app.serving.service", "Service.begin")
async def _leak(real: Any, *arguments: Any, **named: Any) -> Any:
    admitted = await real(*arguments, **named)
    _HOARD.append([bytearray(b"x" * 65536), os.dup(0), asyncio.create_task(asyncio.sleep(1e6))])
    return admitted


@_removal("allocator.release", "app.engine.scheduling.block_allocator", "BlockAllocator.release")
def _leak_blocks(real: Any, allocator: Any, sequence: Any) -> None:
    sequence.blocks = ()
    real(allocator, sequence)


@_removal("engine.idle", "app.engine.execution.engine", "Engine.step")
def _empty_step(_real: Any, engine: Any, *_arguments: Any) -> StepReport:
    return StepReport(counters=engine.scheduler.counters)


@_removal("engine.masks_in_step", "app.engine.guided.grammar_tracker", "GrammarTracker._share_steps")
def _wait_for_every_mask(real: Any, tracker: Any, tenants: set[str]) -> Any:
    is_shared = real(tracker, tenants)
    tracker._background.clear()
    for job in [state.job for state in tracker._states.values() if state.job]:
        tracker._workers.submit(job)
        tracker._workers.wait([job], 60)
    return is_shared
