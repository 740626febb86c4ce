"""Checks of a GPU engine: captured and run-ahead steps, bits that repeat, synchronizing calls, missing memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.gpu.runner import DeviceRunner
from app.engine.scheduling.batch_plan import BatchPlan
from app.engine.worker_loop import EngineStartError
from benchmarks.engine_driver import Outputs, cancel_all, random_prompt, request, run_all, run_until_decoding
from benchmarks.gpu.engines import StartupPhases, build_device_engine, build_engine, shape_of
from benchmarks.gpu.parity import LAYOUTS
from benchmarks.gpu.results import Finding, StageContext, Unsupported
from benchmarks.shapes import smaller
from model.config import ModelConfig

_SYNCHRONIZING = "called a synchronizing"
"""Excludes the mode's own warning, once per process, that it "does not yet detect all synchronizing operations"."""
_SPARE_BYTES = 64 << 20
"""Enough for short sequences; one matrix of the prompt's activations takes more."""
_MOST_TOKENS = 64
"""Tokens of a step above which the CPU emulation simulates running out of memory."""


def graphs(context: StageContext) -> Iterator[Finding]:
    """Captured steps against eager ones, and run-ahead against none: the same tokens, and if possible the same bits.

    Uses one engine and disables run-ahead, then graphs; batch sizes lie on and next to the captured sizes, and shrink
    while they run.
    """
    shape = _llama(context)
    engine = build_device_engine(
        context, shape, max_running=40, tokens_per_step=512, cache_tokens=2048 if context.tiny else 16_384
    )
    tokens = 4 if context.tiny else 24
    requests = []
    for count in (3,) if context.tiny else (1, 7, 8, 9, 33):
        sizes = [(5 + 13 * i % 90, tokens + 5 * (i % 9)) for i in range(count)]
        requests.append(_mixed_requests(shape, f"{count}.", sizes))

    def outputs(engine: Engine, space: str) -> list[Outputs]:
        """Each mode has its own cache namespace, so that it finds no blocks that another mode has computed."""
        return [run_all(engine, [msgspec.structs.replace(r, cache_namespace=space) for r in rs]) for rs in requests]

    def both(graphs: str) -> Iterator[tuple[str, list[Outputs]]]:
        if hasattr(engine.runner, "launch"):
            yield f"{graphs}, a step ahead", outputs(engine, f"{graphs} ahead")
        yield graphs, outputs(Engine(engine.scheduler, engine.runner), graphs)  # completes each step, then plans

    modes: list[tuple[str, list[Outputs]]] = []
    if isinstance(engine.runner, DeviceRunner) and engine.runner.graphs.replays:
        modes += both("captured")
        engine.runner.graphs.replays.clear()
    modes += both("eager")
    if len(modes) == 1:
        raise Unsupported("this engine neither captures steps nor runs ahead")
    plainest, baseline = modes.pop()
    for name, found in modes:
        same, bits, failed = Counter[bool](), Counter[bool](), dict[str, str]()
        for one, other, batch in zip(found, baseline, requests, strict=True):
            same += Counter(one.tokens(r.id) == other.tokens(r.id) for r in batch)
            bits += Counter(one.events.get(r.id) == other.events.get(r.id) for r in batch)
            failed |= one.failed
        yield Finding(
            what=f"{name} against {plainest}",
            value=same[True],
            unit=f"of {same.total()} texts the same",
            ok=not same[False] and not failed,
            note=str(failed or f"{bits[True]} to the last bit of their log-probabilities"),
        )


def deterministic(context: StageContext) -> Iterator[Finding]:
    """Bitwise reproducibility: alone, in a batch, and again. On a GPU only --deterministic guarantees it."""
    for name, options in (("by default", {}), ("deterministic", {"deterministic": True})):
        shape, phases = _llama(context), StartupPhases()
        sizes: dict[str, Any] = {"max_running": 40, "tokens_per_step": 256, "cache_tokens": 32_768, **options}
        try:
            engines = [build_engine(context, shape, phases=phases, **sizes) for _ in range(2)]
        except EngineStartError as error:
            yield Finding(what=f"{name}: starts", value="refused", ok=False, note=str(error))
            continue
        yield Finding(what=f"{name}: starts", value="yes", note=phases.proof)
        lengths = range(3, 60, 19) if context.tiny else range(3, 600, 18)
        requests = _mixed_requests(shape, "", [(length, 5 if context.tiny else 40) for length in lengths])
        batched = run_all(engines[0], requests)
        alone = [run_all(engines[1], [one]) for one in requests[::4]]
        reruns = {
            "again, in a fresh engine": run_all(engines[1], requests),
            "again, from the cache": run_all(engines[0], requests),
            "alone": Outputs({name: events for one in alone for name, events in one.events.items()}),
        }
        for what, outputs in reruns.items():
            same = [batched.events.get(name) == events for name, events in outputs.events.items()]
            tokens = [batched.tokens(name) == outputs.tokens(name) for name in outputs.events]
            is_required = context.device == "cpu" or bool(options)
            yield Finding(
                what=f"{name}: {what}",
                value=sum(same),
                unit=f"of {len(same)} texts the same to the last bit",
                ok=bool(same) and all(same) if is_required else None,
                note=f"tokens the same in {sum(tokens)}",
            )


def _llama(context: StageContext) -> ModelConfig:
    return smaller(LAYOUTS["llama"]) if context.tiny else LAYOUTS["llama"]


def _mixed_requests(shape: ModelConfig, prefix: str, sizes: list[tuple[int, int]]) -> list[Request]:
    """Requests of these prompt lengths and numbers of tokens, greedy and sampled in turn."""
    sampled = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    requests = []
    for i, (length, tokens) in enumerate(sizes):
        prompt = random_prompt(length, shape.vocab_size, f"{prefix}{i}")
        params = {**sampled, "seed": i} if i % 2 else {}
        requests.append(request(f"{prefix}{i}", prompt, tokens, logprobs=2, **params))
    return requests


def syncs(context: StageContext) -> Iterator[Finding]:
    """Checks that steady decode steps never synchronize with the device needlessly, by torch's sync debug mode.

    The mode only warns here, and any warning fails the check: the engine would attribute an error to a request, compute
    the step again row by row, and go on.
    """
    shape = shape_of(context, "gpt2")
    rows, steps = (2, 2) if context.tiny else (8, 20)
    engine = build_device_engine(context, shape, max_running=rows, cache_tokens=rows * shape.context)
    for what, params in (("greedy", {}), ("drawn", {"temperature": 0.8, "top_k": 40, "top_p": 0.9})):
        for row in range(rows):
            prompt = random_prompt(20, shape.vocab_size, f"{what} {row}")
            engine.add(request(f"{what} {row}", prompt, steps + 40, **params))
        run_until_decoding(engine, rows)
        for _ in range(3):
            engine.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _set_sync_mode(context.device, "warn")
            for _ in range(steps):
                engine.step()
            _set_sync_mode(context.device, "default")
        cancel_all(engine)
        found = [warning for warning in caught if _SYNCHRONIZING in str(warning.message)]
        calls = Counter(f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in found)
        yield Finding(
            what=f"{what} decode x{rows}",
            value=calls.total(),
            unit=f"synchronizing calls in {steps} steps",
            ok=not calls if context.device == "cuda" else None,
            note="; ".join(f"{count} x {line}" for line, count in calls.most_common(4)),
        )


def _set_sync_mode(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def memory(context: StageContext) -> Iterator[Finding]:
    """A step that runs out of GPU memory fails only the request that needs it; its neighbors are unaffected.

    Runs neighbors without and with a large prompt, for which the allocator is limited to what it holds and a little
    more; then the same prompt with enough memory.
    """
    shape, per_step = shape_of(context, "1b"), 128 if context.tiny else 4096
    engine = build_device_engine(
        context,
        shape,
        max_running=4,
        tokens_per_step=per_step,
        prompt_tokens_beside=per_step,
        cache_tokens=4 * shape.context,
    )
    prompt = random_prompt(100 if context.tiny else 4000, shape.vocab_size, "large")

    def run_neighbors(*, with_large: bool) -> Outputs:
        """Runs three requests to their end, and adds the large one in the middle of them."""
        outputs = Outputs()
        for row in range(3):
            neighbor = random_prompt(12, shape.vocab_size, row)
            engine.add(request(f"neighbour {row}", neighbor, 8 if context.tiny else 32))
        run_until_decoding(engine, 3)
        if with_large:
            engine.add(request("large", prompt, 2))
        while engine.has_work:
            outputs.take(engine.step())
        return outputs

    undisturbed = run_neighbors(with_large=False)
    with _limited_memory(engine, context.device):
        disturbed = run_neighbors(with_large=True)
    same = [disturbed.tokens(name) == undisturbed.tokens(name) for name in undisturbed.events]
    yield Finding(what="neighbours", value=sum(same), unit=f"of {len(same)} untouched", ok=all(same))
    failed = disturbed.failed
    note = failed.get("large", "")
    yield Finding(what="failed", value=len(failed), unit="requests", ok={*failed} == {"large"}, note=note)
    again = run_all(engine, [request("again", prompt, 2)])
    n_tokens, note = len(again.tokens("again")), str(again.failed or "")
    yield Finding(what="with memory again", value=n_tokens, unit="of 2 tokens", ok=n_tokens == 2, note=note)


@contextmanager
def _limited_memory(engine: Engine, device: str) -> Iterator[None]:
    """Limits the memory; on a CPU, where tiny sizes always fit, steps of many tokens fail instead."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _SPARE_BYTES) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    runner: Any = engine.runner
    methods = [name for name in ("run", "launch") if hasattr(runner, name)]  # whichever the engine calls
    for name in methods:
        setattr(runner, name, partial(_fail_if_large, getattr(runner, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(runner, name)


def _fail_if_large(compute: Callable[[BatchPlan], Any], plan: BatchPlan) -> Any:
    if sum(chunk.stop - chunk.start for chunk in plan.chunks) > _MOST_TOKENS:
        raise torch.OutOfMemoryError("pretended")
    return compute(plan)
