"""Comparison of engines and servers: one model, one precision, every figure in every round, one at a time.

Bare engines decode and prefill. Servers take a load over HTTP, at /v1/completions; for comparison, bare engines take
the same load in their own processes. Whatever fails is dropped, with its reason, and the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.common import Percentiles, in_turn, percentiles_ms, range_of
from benchmarks.load import LevelProgress, LoadPlan, run_level
from benchmarks.peers.adapters.inkstream import dtype_for, quantize_for
from benchmarks.peers.peer_pool import AdapterProcess, Workspace, plain_environment
from benchmarks.peers.provision import OUR_PRECISIONS, OURS, PeerError, llama_library, llama_variables, program_of
from benchmarks.service_process import ServiceStartError, running, serve_command
from benchmarks.shapes import Model

_WARM_TOKENS = 8
_PREFILLS = 3
"""Prefills per sample, since a single one takes only milliseconds."""
_START_SECONDS = 600
"""vLLM compiles its model when it starts."""
_POLL_SECONDS = 0.1
_STREAMS = 32
_VLLM_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
_VLLM_KV_CACHE = 2 << 30
"""Bytes; by default vLLM wants nearly all memory."""
_VLLM_BATCH = 8192
"""Tokens of a step: all prompts of a load at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of an engine or a server."""

    what: Literal["decode", "prefill", "load"]
    rows: int
    """Rows of the batch, or streams of the load."""
    prompt: int = 64
    """Tokens, or words for a load."""
    tokens: int = 128

    @property
    def title(self) -> str:
        """Name in the table."""
        return {"prefill": f"prefill {self.prompt}", "load": f"{self.rows} streams"}.get(
            self.what, f"decode x{self.rows}"
        )

    @property
    def requests(self) -> int:
        """Requests of one round of a load."""
        return max(4, 2 * self.rows)


def engine_figures(parts: Sequence[str], batches: Sequence[int], context: int) -> list[Figure]:
    """Figures of bare engines; no sequence is longer than the model's context."""
    decode = [Figure(what="decode", rows=rows) for rows in batches] if "engine" in parts else []
    prefill = [Figure(what="prefill", rows=1, prompt=min(512, context - 1), tokens=1)] if "prefill" in parts else []
    return decode + prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One figure of one engine in one round."""

    tokens_per_second: float
    first_token_ms: Percentiles | None = None
    inter_token_ms: Percentiles | None = None


Row = list[int]
"""Greedy tokens of a batch's first row; empty for other figures."""
Target = Callable[[Figure, int], tuple[Sample, Row]]
"""Measures a figure in a round; round 0 is the warm-up. Raises PeerError."""
Start = Callable[[], AbstractContextManager[tuple[dict[str, str], Target]]]
"""Starts a target, and gives facts about it. Raises PeerError or ServiceStartError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One block of the table."""

    model: str
    precision: str
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why an engine is missing or was dropped."""
    samples: dict[str, dict[str, dict[int, Sample]]] = field(default_factory=dict)
    """By title of the figure, engine and round."""
    same_tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    """By title and engine: length of the common prefix with inkstream's greedy tokens, the shortest of all rounds."""

    def ratios(self, title: str) -> dict[str, float]:
        """Median ratio of inkstream to every other engine, round by round, so that a slow moment affects both."""
        engines = self.samples[title]
        ours, found = engines.get(OURS, {}), {}
        for name, theirs in engines.items():
            each = [ours[n].tokens_per_second / theirs[n].tokens_per_second for n in ours if n in theirs]
            if each and name != OURS:
                found[name] = statistics.median(each)
        return found


def compare(
    model: str, precision: str, starts: Mapping[str, Start], figures: Sequence[Figure], rounds: int
) -> Comparison:
    """Starts all targets, measures, stops them."""
    result = Comparison(model=model, precision=precision, samples={figure.title: {} for figure in figures})
    rows: dict[tuple[str, str, int], Row] = {}
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        for name, start in starts.items():
            try:
                result.facts[name], targets[name] = stack.enter_context(start())
            except (PeerError, ServiceStartError) as error:
                result.missing[name] = str(error)
        for number, figure in itertools.product(range(1 + rounds), figures):
            for name in in_turn(list(starts), number):
                if name not in targets:
                    continue
                try:
                    sample, row = targets[name](figure, number)
                except PeerError as error:
                    result.missing[name] = str(error)
                    del targets[name]
                    continue
                if number:
                    result.samples[figure.title].setdefault(name, {})[number] = sample
                    rows[figure.title, name, number] = row
    for (title, name, number), row in rows.items():
        if row and name != OURS and (ours := rows.get((title, OURS, number))):
            counts = result.same_tokens.setdefault(title, {})
            counts[name] = min(counts.get(name, len(row)), common_prefix_length(ours, row))
    return result


def common_prefix_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of equal tokens from the start."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))


def table(result: Comparison) -> str:
    """A row for each figure and engine: tokens per second with their spread, inkstream's ratio to it, latencies."""
    head = f"{'tokens/s [spread], ours/theirs':>33}{'first token p50/p99 ms':>25}{'between tokens p50/p99 ms':>28}"
    lines = [f"\n== {result.model}, {result.precision}; medians of the rounds", f"{'':34}{head}"]
    for title, by_engine in result.samples.items():
        ratios = result.ratios(title)
        for engine, rounds in by_engine.items():
            speed = range_of([sample.tokens_per_second for sample in rounds.values()])
            cell = f"{speed.median:,.0f} [{speed.least:,.0f}-{speed.most:,.0f}]"
            cell += f" {ratios[engine]:5.2f}x" if engine in ratios else " " * 7
            first = _medians([sample.first_token_ms for sample in rounds.values()])
            gap = _medians([sample.inter_token_ms for sample in rounds.values()])
            lines.append(f"{title:12} {engine:21}{cell:>33}{first:>25}{gap:>28}")
    lines += [f"{'':12} {engine:21}  not there: {reason}" for engine, reason in result.missing.items()]
    for title, same in result.same_tokens.items():
        counts = ", ".join(f"{engine} {count}" for engine, count in same.items())
        lines.append(f"greedy tokens equal to ours from the start, {title}: {counts}")
    return "\n".join(lines)


def _medians(samples: Sequence[Percentiles | None]) -> str:
    """Over the rounds; empty for figures without latencies."""
    known = [sample for sample in samples if sample]
    if not known:
        return ""
    return str(Percentiles(**{p: statistics.median(getattr(s, p) or 0 for s in known) for p in ("p50", "p99")}))


def engine_starts(workspace: Workspace, engines: Sequence[str], model: Model, precision: str) -> dict[str, Start]:
    """Bare engines, each in a process of its own."""
    return {
        name: partial(_engine, workspace, OURS, model, OUR_PRECISIONS[name])
        if name in OUR_PRECISIONS
        else partial(_engine, workspace, name, model, precision)
        for name in (OURS, *engines)
    }


def server_starts(workspace: Workspace, engines: Sequence[str], model: Model, precision: str) -> dict[str, Start]:
    """Servers, and the engines that take their load in process."""
    starts: dict[str, Start] = {OURS: partial(_our_service, workspace, model, precision)}
    for name in engines:
        if program_of(name) == "llama.cpp":
            starts[name] = partial(_llama_server, workspace, name, model, precision)
        if name == "vllm":
            starts[name] = partial(_vllm_server, workspace, model, precision)
        if name in OUR_PRECISIONS:
            starts[name] = partial(_our_service, workspace, model, OUR_PRECISIONS[name])
    starts["our bare engine"] = partial(_engine, workspace, OURS, model, precision)
    if "openvino" in engines:
        starts["openvino in process"] = partial(_engine, workspace, "openvino", model, precision)
    return starts


@contextmanager
def _engine(workspace: Workspace, name: str, model: Model, precision: str) -> Iterator[tuple[dict[str, str], Target]]:
    process = workspace.start(name, model, precision)
    try:
        yield process.facts(), partial(measure_engine, process, model.config.vocab_size)
    finally:
        process.close()


def measure_engine(process: AdapterProcess, vocab_size: int, figure: Figure, number: int) -> tuple[Sample, Row]:
    """Prompts differ between rounds and not between engines."""
    if figure.what == "load":
        return _load_in_process(process, figure, number), []
    prompts = {"vocab_size": vocab_size, "rows": figure.rows, "length": figure.prompt}
    if figure.what == "prefill":
        answers = [process.ask("prefill", seed=_PREFILLS * number + i, **prompts) for i in range(_PREFILLS)]
        return Sample(tokens_per_second=figure.prompt / statistics.median(a["seconds"] for a in answers)), []
    tokens = figure.tokens if number else min(figure.tokens, _WARM_TOKENS)
    answer = process.ask("decode", tokens=tokens, seed=number, **prompts)
    if answer["lengths"] != [tokens] * figure.rows:
        raise PeerError(f"asked for {figure.rows} x {tokens} tokens, it generated {answer['lengths']}")
    # The clock runs from the first token of each row on.
    return Sample(tokens_per_second=figure.rows * (tokens - 1) / answer["seconds"]), answer["ids"]


def _load_in_process(process: AdapterProcess, figure: Figure, number: int) -> Sample:
    plan = _plan(figure)
    prompts = [plan.prompt(index) for index in _indices(figure, number)]
    answer = process.ask(
        "load", streams=figure.rows, prompts=prompts, tokens=plan.max_tokens, temperature=plan.temperature
    )
    _check_tokens(figure, answer["tokens"])
    return Sample(
        tokens_per_second=answer["tokens"] / answer["seconds"],
        first_token_ms=percentiles_ms(answer["first"]),
        inter_token_ms=percentiles_ms(answer["gaps"]),
    )


@contextmanager
def _our_service(workspace: Workspace, model: Model, precision: str) -> Iterator[tuple[dict[str, str], Target]]:
    """The whole service with its own defaults."""
    flags: list[str | Path] = ["--weights", model.directory, "--device", "cpu"]
    flags += ["--dtype", dtype_for(precision, model.directory)]
    flags += ["--threads", str(workspace.threads), "--quantize", quantize_for(precision)]
    with _serving(workspace, serve_command(*flags), f"our-service-{precision}", "/health/ready") as target:
        yield {}, target


@contextmanager
def _llama_server(
    workspace: Workspace, name: str, model: Model, precision: str
) -> Iterator[tuple[dict[str, str], Target]]:
    """llama-server with as many slots as streams; its cache of old prompts, which costs time here, is off."""
    _, path = workspace.installed(name, model, precision)
    port = _free_port()
    context = _STREAMS * (-(-workspace.length // 256) * 256)
    command: list[str | Path] = [llama_library(workspace.folder) / "llama-server", "--model", path, "--port", str(port)]
    command += ["--parallel", str(_STREAMS), "--ctx-size", str(context), "--threads", str(workspace.threads)]
    command += ["--cache-ram", "0"]
    url, variables = f"http://127.0.0.1:{port}", llama_variables(workspace.folder)
    with _serving(workspace, command, f"{name}-server", "/health", url, variables) as target:
        yield {"file": path.name, "bytes": str(path.stat().st_size)}, target


@contextmanager
def _vllm_server(workspace: Workspace, model: Model, precision: str) -> Iterator[tuple[dict[str, str], Target]]:
    """vLLM's server without prefix cache.

    Its prompts are never split over steps: in version 0.32 a request with a seed whose prompt is ends the engine on a
    CPU ("CPU Generator does not use offset").
    """
    if precision not in _VLLM_DTYPES:
        raise PeerError(f"{precision} needs a checkpoint that was quantized before")
    python, path = workspace.installed("vllm", model, precision)
    port = _free_port()
    command: list[str | Path] = [python, "-m", "vllm.entrypoints.cli.main", "serve", path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", _VLLM_DTYPES[precision]]
    command += [
        "--max-model-len",
        str(min(model.config.context, 2 * workspace.length)),
        "--max-num-seqs",
        str(_STREAMS),
    ]
    command += ["--max-num-batched-tokens", str(_VLLM_BATCH), "--no-enable-chunked-prefill"]
    command += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(_VLLM_KV_CACHE)]
    command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    try:
        url, variables = f"http://127.0.0.1:{port}", workspace.variables("vllm")
        with _serving(workspace, command, "vllm-server", "/health", url, variables) as target:
            yield {}, target
    except ServiceStartError as error:
        raise PeerError(root_cause(workspace.log("vllm-server").read_text(errors="replace")) or str(error)) from None


def root_cause(log: str) -> str:
    """The first error that a log of Python processes names; the last one is often only its consequence. Else empty."""
    found = re.search(r"\b[A-Z]\w*(?:Error|Exception): .*", log)
    return found[0].strip()[:200] if found else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def _serving(
    workspace: Workspace,
    command: Sequence[str | Path],
    name: str,
    health: str,
    url: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    environment = {**plain_environment(), **(variables or {})}
    with running(command, url=url, log=workspace.log(name), environment=environment) as service:
        service.wait_for_route(health, most=_START_SECONDS, poll=_POLL_SECONDS)
        yield partial(_measure_server, service.url)


def _measure_server(url: str, figure: Figure, number: int) -> tuple[Sample, Row]:
    progress = LevelProgress(streams=figure.rows)
    asyncio.run(run_level(_plan(figure, url), iter(_indices(figure, number)), progress))
    level = progress.result()
    if level.first_error:
        raise PeerError(f"{level.errors} of {figure.requests} requests failed: {level.first_error}")
    _check_tokens(figure, level.output_tokens)
    sample = Sample(
        tokens_per_second=level.output_tokens_per_second,
        first_token_ms=level.first_token_ms,
        inter_token_ms=level.inter_token_ms,
    )
    return sample, []


def _plan(figure: Figure, url: str = "http://127.0.0.1:8000") -> LoadPlan:
    return LoadPlan(
        url=url,
        streams=(figure.rows,),
        max_tokens=figure.tokens,
        temperature=0.8,
        prompt_words=figure.prompt,
        seconds=300.0,
        api="openai",
    )


def _indices(figure: Figure, number: int) -> range:
    """Prompt numbers of a round. No two rounds share a prompt, so that prefix caches do not help."""
    return range(number * 1000, number * 1000 + figure.requests)


def _check_tokens(figure: Figure, tokens: int) -> None:
    if tokens != figure.requests * figure.tokens:
        raise PeerError(f"asked for {figure.requests} x {figure.tokens} tokens, it gave {tokens}")
