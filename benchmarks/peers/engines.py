"""Comparison of bare engines: one model, one precision, every figure in every round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.peers.peer_pool import AdapterError, AdapterProcess, PeerPool, Workspace
from benchmarks.peers.plan import OURS, Figure, common_prefix_length, length_error, schedule
from benchmarks.peers.shapes import Model
from benchmarks.roofline import Limits, work_of

T = TypeVar("T")
_WARM_TOKENS = 8
_PREFILLS = 3
"""Prefills per sample, since a single one takes only milliseconds."""


@dataclass(slots=True, kw_only=True)
class EngineSamples:
    """Samples of one engine for one figure."""

    speeds: dict[int, float] = field(default_factory=dict)
    """Tokens per second, by round."""
    first_rows: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of the first row, by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One block of the table."""

    model: str
    precision: str
    n_params: int
    facts: dict[str, dict[str, str]]
    missing: dict[str, str]
    """Why an engine is missing or was dropped."""
    speeds: dict[str, dict[str, dict[int, float]]]
    """Tokens per second, by title of the figure, engine and round."""
    same_tokens: dict[str, dict[str, int]]
    """By title and engine: length of the common prefix with inkstream's greedy tokens, the shortest of all rounds."""
    limits: Limits
    fastest: dict[str, float]
    """Tokens per second that the limits allow, by title."""


def compare(
    workspace: Workspace, engines: Sequence[str], model: Model, precision: str, figures: Sequence[Figure], rounds: int
) -> EngineResult:
    """Starts the engines, measures, stops them. Drops an engine that fails, with its reason; the others go on."""
    pool, machine_limits = PeerPool(), workspace.start_machine_limits()
    try:
        machine_limits.facts()
        pool.load(workspace, [OURS, *engines], model, precision)
        for _, figure, engine in schedule(list(pool.processes), figures, 1):
            _sample(pool, engine, model, figure, seed=-1, tokens=min(figure.tokens, _WARM_TOKENS))
        samples_by_key: dict[tuple[str, str], EngineSamples] = {}
        answers: list[Mapping[str, Mapping[str, float]]] = []
        for number, figure, engine in schedule(list(pool.processes), figures, rounds):
            if number == len(answers):
                answers.append(machine_limits.ask("limits"))
            if sample := _sample(pool, engine, model, figure, seed=number, tokens=figure.tokens):
                samples = samples_by_key.setdefault((figure.title, engine), EngineSamples())
                samples.speeds[number], samples.first_rows[number] = sample
    finally:
        pool.close()
        machine_limits.close()
    limits = limits_of(answers)
    return EngineResult(
        model=model.name,
        precision=precision,
        n_params=model.size.body + model.size.head,
        facts=pool.facts,
        missing=pool.missing,
        speeds=_by_title(figures, {key: samples.speeds for key, samples in samples_by_key.items()}),
        same_tokens=_by_title(figures, _same_tokens(samples_by_key)),
        limits=limits,
        fastest={figure.title: _fastest(model, precision, figure, limits) for figure in figures},
    )


def limits_of(answers: Sequence[Mapping[str, Mapping[str, float]]]) -> Limits:
    """Medians over the rounds."""
    read, multiply = (
        {name: statistics.median(answer[kind][name] for answer in answers) for name in answers[0][kind]}
        for kind in ("read", "multiply")
    )
    return Limits(read={int(size): speed for size, speed in read.items()}, multiply=multiply)


def _sample(
    pool: PeerPool, engine: str, model: Model, figure: Figure, *, seed: int, tokens: int
) -> tuple[float, list[int]] | None:
    """(tokens per second, tokens of the first row); None if the engine was dropped."""
    if engine not in pool.processes:
        return None
    try:
        measure = _decode if figure.what == "decode" else _prefill
        return measure(pool.processes[engine], model, figure, seed, tokens)
    except AdapterError as error:
        pool.drop(engine, str(error))
        return None


def _decode(process: AdapterProcess, model: Model, figure: Figure, seed: int, tokens: int) -> tuple[float, list[int]]:
    """Decode speed: times all tokens but the first of each row."""
    answer = process.ask("decode", tokens=tokens, **_prompts(model, figure, seed))
    if error := length_error(figure.rows, tokens, answer["lengths"]):
        raise AdapterError(error)
    return figure.rows * (tokens - 1) / answer["seconds"], answer["ids"]


def _prefill(process: AdapterProcess, model: Model, figure: Figure, seed: int, tokens: int) -> tuple[float, list[int]]:
    answers = [
        process.ask("prefill", tokens=tokens, **_prompts(model, figure, _PREFILLS * seed + i)) for i in range(_PREFILLS)
    ]
    if any(answer["tokens"] != figure.prompt for answer in answers):
        raise AdapterError(f"asked to read {figure.prompt} tokens, it read {answers[0]['tokens']}")
    return figure.prompt / statistics.median(answer["seconds"] for answer in answers), []


def _prompts(model: Model, figure: Figure, seed: int) -> dict[str, int]:
    return {"vocab_size": model.config.vocab_size, "rows": figure.rows, "length": figure.prompt, "seed": seed}


def _same_tokens(samples_by_key: Mapping[tuple[str, str], EngineSamples]) -> dict[tuple[str, str], int]:
    result = {}
    for (title, engine), samples in samples_by_key.items():
        ours = samples_by_key.get((title, OURS))
        if engine != OURS and ours and any(samples.first_rows.values()):
            common = samples.first_rows.keys() & ours.first_rows.keys()
            result[title, engine] = min(
                common_prefix_length(ours.first_rows[number], samples.first_rows[number]) for number in common
            )
    return result


def _by_title(figures: Sequence[Figure], values: Mapping[tuple[str, str], T]) -> dict[str, dict[str, T]]:
    result: dict[str, dict[str, T]] = {figure.title: {} for figure in figures}
    for (title, engine), value in values.items():
        result[title][engine] = value
    return result


def _fastest(model: Model, precision: str, figure: Figure, limits: Limits) -> float:
    """Tokens per second at the roofline; a decode step in the middle has half of the output in its cache."""
    if figure.what == "decode":
        kept = figure.prompt + figure.tokens / 2
        work = work_of(model.size, tokens=figure.rows, rows=figure.rows, kept=kept, precision=precision)
        return figure.rows / limits.least_seconds(work)
    work = work_of(model.size, tokens=figure.prompt, rows=1, kept=0, precision=precision)
    return figure.prompt / limits.least_seconds(work)
