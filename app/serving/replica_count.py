"""Chooses the number of engine processes (--replicas auto) by a model of how a decode step scales with threads.

A step is a list of operations (model/decoder_program.py). Each is divided into tasks, which threads claim one by
one, and waits for all of them (app/engine/cpu/source/threads.h). With t threads it takes

    max(ceil(tasks / t) / tasks * seconds of one thread, bytes / bandwidth of the memory) + synchronization

and a step adds what the engine's Python does on one thread. So threads stop helping where tasks or memory bandwidth run
out, where synchronization costs more than the work, or where the host's part dominates; a second engine has a host part
of its own, and reads the weights again. All engines deliver through one API process, which bounds their sum.
`python -m benchmarks.scaling` measures the rates and compares the model with steps on one and two threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from app.common.cpu_topology import Topology, divide
from app.common.logs import START
from app.common.settings import Settings
from model.checkpoint.config_file import load_config
from model.config import ModelConfig
from model.decoder_program import Kind, Operation, cost, decoder_program
from model.machine import free_memory, has_native_bfloat16, may_have_gpu
from model.parameter_shapes import count_parameters
from model.weight_formats import weight_format

_start_log = logging.getLogger(START)
_OUTPUTS_PER_TASK, _ROWS_PER_TASK = 64, 8  # as in app/engine/cpu/source/steps.h
_CONTEXT_TOKENS = 256
_NEEDED_GAIN = 1.3
"""By the model, for twice as many engines: they take twice the memory, and a single stream gets half the threads."""
_MEMORY_SHARE, _MOST = 0.5, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one thread unless noted. Defaults: an Intel Xeon with AMX in bfloat16 (benchmarks/scaling.py)."""

    weights: float = 25e9
    """Bytes of weights a second in products of few rows."""
    products: float = 220e9
    """Multiplications a second in products of many rows."""
    cache: float = 13e9
    """Bytes of keys and values a second in attention."""
    numbers: float = 0.85e9
    """Numbers a second in norms and rotations."""
    synchronization: float = 5e-6
    """Seconds of an operation that threads share, for each doubling of their number."""
    host: float = 35e-6
    host_row: float = 2.5e-6
    """Seconds of Python for a step and for each of its rows."""
    api: float = 30e-6
    """Seconds of the API process for a token."""
    node: float = 100e9
    """Bytes a second that the memory of one NUMA node gives all threads; assumed, not measured."""


class OperationCost(NamedTuple):
    """The work of one operation of a step."""

    tasks: int
    weight_bytes: int = 0
    products: int = 0
    cache_bytes: int = 0
    numbers: int = 0


def operations(
    config: ModelConfig, rows: int, item_bytes: int, context: int = _CONTEXT_TOKENS
) -> Iterator[OperationCost]:
    """The operations of a decode step of `rows` sequences, each of `context` tokens.

    item_bytes: of a weight and of a number in the cache.
    """
    by_row = -(-rows // _ROWS_PER_TASK)

    def of(operation: Operation) -> OperationCost:
        each = cost(config, operation, context)
        match operation.kind:
            case Kind.LINEAR | Kind.HEAD:
                tasks, size = -(-operation.weights[0].shape[0] // _OUTPUTS_PER_TASK), each.flops // 2
                return OperationCost(tasks, weight_bytes=size * item_bytes, products=size * rows)
            case Kind.ATTENTION:
                return OperationCost(rows * config.n_kv_heads, cache_bytes=rows * each.cached * item_bytes)
        return OperationCost(by_row, numbers=rows * each.numbers)

    embed, *body, final_norm, head = map(of, decoder_program(config))
    yield from body
    yield OperationCost(by_row, numbers=embed.numbers + final_norm.numbers)
    yield head
    yield OperationCost(rows, numbers=rows * config.vocab_size)  # the draw


def step_seconds(
    config: ModelConfig,
    rows: int,
    threads: int,
    rates: Rates,
    *,
    item_bytes: int = 2,
    context: int = _CONTEXT_TOKENS,
    sharers: int = 1,
    nodes: int = 1,
) -> float:
    """Seconds of a decode step. sharers: engines that read from the same `nodes` nodes at the same time."""
    seconds, bandwidth = rates.host + rates.host_row * rows, rates.node * nodes / sharers
    for one in operations(config, rows, item_bytes, context):
        alone = max(one.weight_bytes / rates.weights, one.products / rates.products)
        alone += one.cache_bytes / rates.cache + one.numbers / rates.numbers
        used = min(threads, one.tasks)
        shared = alone * -(-one.tasks // used) / one.tasks
        seconds += max(shared, (one.weight_bytes + one.cache_bytes) / bandwidth)
        seconds += rates.synchronization * (used.bit_length() - 1)
    return seconds


def tokens_per_second(
    config: ModelConfig,
    topology: Topology,
    engines: int,
    rows: int,
    rates: Rates,
    *,
    threads: int = 0,
    item_bytes: int = 2,
) -> float:
    """Tokens a second of `engines` engines with `rows` sequences each, through one API process."""
    nodes = len(topology.nodes)
    step = step_seconds(
        config,
        rows,
        divide(topology, engines, threads)[0].threads,
        rates,
        item_bytes=item_bytes,
        sharers=max(1, engines // nodes),
        nodes=max(1, nodes // engines),
    )
    # The API process takes its time from the same CPUs, and is one thread.
    return min(1 / (step / (engines * rows) + rates.api / topology.n_cpus), 1 / rates.api)


def choose_replicas(settings: Settings, topology: Topology, rates: Rates | None = None) -> int:
    """The number of engines for --replicas auto; logs it with its reason. Raises CheckpointError.

    One for each NUMA node, as far as the memory allows, and twice as many as long as the model promises 1.3 times the
    tokens a second. One on a GPU: the number of GPUs is known to torch only, which this process does not import.
    """
    if settings.device == "cuda" or (settings.device == "auto" and may_have_gpu()):
        chosen, reason = 1, "there may be a GPU: give the number of GPUs to use several"
    else:
        chosen, reason = _engines_on_cpu(settings, topology, rates or Rates())
    _start_log.info("--replicas auto: %d (%s)", chosen, reason)
    return chosen


def _engines_on_cpu(settings: Settings, topology: Topology, rates: Rates) -> tuple[int, str]:
    config, nodes = load_config(settings.weights), len(topology.nodes)
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if has_native_bfloat16() else "float32"
    item_bytes, context = 4 if dtype == "float32" else 2, settings.max_context or config.context
    size = weight_format(dtype, settings.quantize).n_bytes(count_parameters(config))
    cached = 16 * settings.kv_blocks or context * settings.max_running  # BLOCK of app/engine/cpu/packed_decoder.py
    size += config.kv_elements_per_token * item_bytes * cached
    most = max(1, int(free_memory() * _MEMORY_SHARE) // size)
    if nodes > most:
        return most, f"each takes {size >> 20} MiB of weights and cache, and more do not fit into half of the memory"
    chosen, reason = nodes, f"one for each of {nodes} NUMA nodes" if nodes > 1 else "one NUMA node"
    if config.n_encoder_layers:
        return chosen, reason
    threads = settings.threads or topology.compute_threads
    speeds = {
        n: tokens_per_second(config, topology, n, settings.max_running, rates, threads=threads, item_bytes=item_bytes)
        for n in (nodes << doubling for doubling in range(7))
        if n <= min(most, threads, _MOST)
    }
    while (more := chosen * 2) in speeds and speeds[more] >= _NEEDED_GAIN * speeds[chosen]:
        chosen = more
    modeled = ", ".join(f"{n}: {speed:,.0f}" for n, speed in speeds.items())
    return chosen, f"{reason}; tokens/s at {settings.max_running} requests each, by the model, by engines: {modeled}"
