"""Comparison of servers under load: all stay up, one is under load at a time.

The load generator calls servers over HTTP, at /v1/completions; for comparison, bare engines take the same load in their
own processes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.common import Percentiles, percentiles_ms
from benchmarks.load import LevelProgress, run_level
from benchmarks.load_plan import LoadPlan
from benchmarks.peers.peer_pool import AdapterError, AdapterProcess, PeerPool, Workspace, plain_environment
from benchmarks.peers.plan import IN_PROCESS_NAMES, OURS, Sizes, schedule
from benchmarks.peers.provision import ConvertError, InstallError, llama_library
from benchmarks.peers.shapes import Model
from benchmarks.service_process import ServiceProcess, ServiceStartError, running, serve_command

_START_SECONDS = 300
_POLL_SECONDS = 0.1
_DTYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "bfloat16"}
_STREAMS = 32
_TEMPERATURE = 0.8
_SECONDS = 300.0


class ServiceError(RuntimeError):
    """A server that fails under load; the message is the reason in the table."""


@contextmanager
def our_service(workspace: Workspace, model: Model, precision: str) -> Iterator[ServiceProcess]:
    """The whole service with its own defaults. Raises ServiceStartError."""
    flags: list[str | Path] = ["--weights", model.directory, "--device", "cpu", "--dtype", _DTYPES[precision]]
    flags += ["--threads", str(workspace.threads), *(["--quantize", "int8"] if precision == "int8" else [])]
    log = workspace.log("our-service")
    with running(serve_command(*flags), log=log, environment=plain_environment()) as service:
        service.wait_for_route("/health/ready", most=_START_SECONDS, poll=_POLL_SECONDS)
        yield service


@contextmanager
def llama_server(workspace: Workspace, model: Model, precision: str) -> Iterator[ServiceProcess]:
    """llama-server with as many slots as streams; its cache of old prompts, which costs time here, is off.

    Raises InstallError, ConvertError, ServiceStartError.
    """
    path = workspace.converted("llama.cpp", model, precision)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    context = _STREAMS * (-(-workspace.length // 256) * 256)
    command: list[str | Path] = [llama_library(workspace.folder) / "llama-server", "--model", path, "--port", str(port)]
    command += ["--parallel", str(_STREAMS), "--ctx-size", str(context), "--threads", str(workspace.threads)]
    command += ["--cache-ram", "0"]
    log = workspace.log("llama-server")
    with running(command, url=f"http://127.0.0.1:{port}", log=log, environment=plain_environment()) as service:
        service.wait_for_route("/health", most=_START_SECONDS, poll=_POLL_SECONDS)
        yield service


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Client-side results of one round. Milliseconds."""

    tokens_per_second: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResult:
    """One block of the table."""

    model: str
    precision: str
    facts: dict[str, dict[str, str]]
    missing: dict[str, str]
    samples: dict[int, dict[str, dict[int, Sample]]]
    """By streams, engine and round."""


class LoadTarget(Protocol):
    """A server or engine that takes a load."""

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        """Runs one level of the plan. Raises AdapterError, ServiceError."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server."""

    service: ServiceProcess

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        (streams,), requests = plan.streams, plan.requests or 0
        progress = LevelProgress(streams=streams)
        asyncio.run(run_level(plan, iter(_indices(number, requests)), progress))
        level = progress.result()
        if level.first_error:
            raise ServiceError(f"{level.errors} of {requests} requests failed: {level.first_error}")
        if level.output_tokens != requests * plan.max_tokens:
            raise ServiceError(f"asked for {requests} x {plan.max_tokens} tokens, it gave {level.output_tokens}")
        return _sample(level.output_tokens_per_second, level.first_token_ms, level.inter_token_ms)


@dataclass(frozen=True, slots=True)
class InProcessTarget:
    """An engine without a server."""

    process: AdapterProcess

    def sample(self, plan: LoadPlan, number: int) -> Sample:
        (streams,), requests = plan.streams, plan.requests or 0
        prompts = [plan.prompt(index) for index in _indices(number, requests)]
        answer = self.process.ask(
            "serve", streams=streams, prompts=prompts, tokens=plan.max_tokens, temperature=plan.temperature
        )
        if answer["tokens"] != requests * plan.max_tokens:
            raise AdapterError(f"asked for {requests} x {plan.max_tokens} tokens, it gave {answer['tokens']}")
        speed = answer["tokens"] / answer["seconds"]
        return _sample(speed, percentiles_ms(answer["first"]), percentiles_ms(answer["gaps"]))


def _sample(tokens_per_second: float, first: Percentiles, gap: Percentiles) -> Sample:
    return Sample(
        tokens_per_second=tokens_per_second,
        first_p50=first.p50 or 0,
        first_p99=first.p99 or 0,
        gap_p50=gap.p50 or 0,
        gap_p99=gap.p99 or 0,
    )


def compare(workspace: Workspace, engines: Sequence[str], model: Model, precision: str, sizes: Sizes) -> ServerResult:
    """Starts all targets, measures, stops them. Drops a target that fails, with its reason; the others go on."""
    pool, targets, missing = PeerPool(), dict[str, LoadTarget](), dict[str, str]()
    samples: dict[int, dict[str, dict[int, Sample]]] = {streams: {} for streams in sizes.batches}
    with ExitStack() as stack:
        stack.callback(pool.close)
        _start_services(workspace, engines, model, precision, targets, missing, stack)
        in_process = [engine for engine in (OURS, *engines) if engine in (OURS, "openvino")]
        pool.load(workspace, in_process, model, precision)
        missing |= {IN_PROCESS_NAMES.get(engine, engine): reason for engine, reason in pool.missing.items()}
        targets |= {
            IN_PROCESS_NAMES.get(engine, engine): InProcessTarget(process) for engine, process in pool.processes.items()
        }
        for number, streams, engine in schedule(list(targets), sizes.batches, 1 + sizes.rounds):
            if engine not in targets:
                continue
            try:
                sample = targets[engine].sample(_plan(targets[engine], streams, sizes), number)
            except (AdapterError, ServiceError) as error:
                missing[engine] = str(error)
                del targets[engine]
                continue
            if number:  # the first round is the warm-up
                samples[streams].setdefault(engine, {})[number] = sample
    facts = {IN_PROCESS_NAMES.get(engine, engine): facts for engine, facts in pool.facts.items()}
    return ServerResult(model=model.name, precision=precision, facts=facts, missing=missing, samples=samples)


def _start_services(
    workspace: Workspace,
    engines: Sequence[str],
    model: Model,
    precision: str,
    targets: dict[str, LoadTarget],
    missing: dict[str, str],
    stack: ExitStack,
) -> None:
    starters = {OURS: our_service, "llama.cpp": llama_server}
    for engine in [engine for engine in (OURS, *engines) if engine in starters]:
        try:
            service = stack.enter_context(starters[engine](workspace, model, precision))
        except (InstallError, ConvertError, ServiceStartError) as error:
            missing[engine] = str(error)
        else:
            targets[engine] = HttpTarget(service)


def _plan(target: LoadTarget, streams: int, sizes: Sizes) -> LoadPlan:
    return LoadPlan(
        url=target.service.url if isinstance(target, HttpTarget) else LoadPlan().url,
        streams=(streams,),
        requests=sizes.requests_for(streams),
        max_tokens=sizes.tokens,
        temperature=_TEMPERATURE,
        prompt_words=sizes.prompt,
        seconds=_SECONDS,
        api="openai",
    )


def _indices(number: int, requests: int) -> range:
    """Prompt numbers of a round. No two rounds share a prompt, so that prefix caches do not help."""
    return range(number * 1000, number * 1000 + requests)
