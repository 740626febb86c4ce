"""Bare engines side by side: one model, one precision, every figure in every round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.peers.child import Child, ChildError
from benchmarks.peers.crew import Crew, Workshop
from benchmarks.peers.numbers import Limits, work_of
from benchmarks.peers.plan import OURS, Figure, agreement, complaint, schedule
from benchmarks.peers.shapes import Model

T = TypeVar("T")
_WARM_TOKENS = 8
_PREFILLS = 3
"""In one sample: a single one takes few milliseconds."""


@dataclass(slots=True, kw_only=True)
class Track:
    """Mutable, owned by one comparison: what one side gave for one figure."""

    speeds: dict[int, float] = field(default_factory=dict)
    """Tokens a second, by round."""
    texts: dict[int, list[int]] = field(default_factory=dict)
    """The first row's tokens, by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One block of the table."""

    model: str
    precision: str
    n_params: int
    facts: dict[str, dict[str, str]]
    missing: dict[str, str]
    """Why a side is not there, or did not stay."""
    speeds: dict[str, dict[str, dict[int, float]]]
    """Tokens a second by title of the figure, side and round."""
    same_tokens: dict[str, dict[str, int]]
    """By title and side: how many tokens of a greedy text were ours too, in the round where they were fewest."""
    limits: Limits
    fastest: dict[str, float]
    """Tokens a second that the limits allow, by title."""


def compare(
    shop: Workshop, sides: Sequence[str], model: Model, precision: str, figures: Sequence[Figure], rounds: int
) -> EngineResult:
    """Starts the sides, measures, ends them. A side that breaks is lost with its reason; the others go on."""
    crew, machine = Crew(), shop.machine()
    try:
        machine.facts()
        crew.gather(shop, [OURS, *sides], model, precision)
        for _, figure, side in schedule(list(crew.children), figures, 1):
            _sample(crew, side, model, figure, seed=-1, tokens=min(figure.tokens, _WARM_TOKENS))
        tracks: dict[tuple[str, str], Track] = {}
        answers: list[Mapping[str, Mapping[str, float]]] = []
        for number, figure, side in schedule(list(crew.children), figures, rounds):
            if number == len(answers):
                answers.append(machine.ask("limits"))
            if sample := _sample(crew, side, model, figure, seed=number, tokens=figure.tokens):
                track = tracks.setdefault((figure.title, side), Track())
                track.speeds[number], track.texts[number] = sample
    finally:
        crew.dismiss()
        machine.close()
    limits = limits_of(answers)
    return EngineResult(
        model=model.name,
        precision=precision,
        n_params=model.size.body + model.size.head,
        facts=crew.facts,
        missing=crew.missing,
        speeds=_by_title(figures, {key: track.speeds for key, track in tracks.items()}),
        same_tokens=_by_title(figures, _same_tokens(tracks)),
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
    crew: Crew, side: str, model: Model, figure: Figure, *, seed: int, tokens: int
) -> tuple[float, list[int]] | None:
    """(tokens a second, first row's tokens); None from a side that is lost, if only now."""
    if side not in crew.children:
        return None
    try:
        measure = _decode if figure.what == "decode" else _prefill
        return measure(crew.children[side], model, figure, seed, tokens)
    except ChildError as error:
        crew.lose(side, str(error))
        return None


def _decode(child: Child, model: Model, figure: Figure, seed: int, tokens: int) -> tuple[float, list[int]]:
    """From the moment that every row has its first token: the others are timed."""
    answer = child.ask("decode", tokens=tokens, **_prompts(model, figure, seed))
    if wrong := complaint(figure.rows, tokens, answer["lengths"]):
        raise ChildError(wrong)
    return figure.rows * (tokens - 1) / answer["seconds"], answer["ids"]


def _prefill(child: Child, model: Model, figure: Figure, seed: int, tokens: int) -> tuple[float, list[int]]:
    answers = [
        child.ask("prefill", tokens=tokens, **_prompts(model, figure, _PREFILLS * seed + i)) for i in range(_PREFILLS)
    ]
    if any(answer["tokens"] != figure.prompt for answer in answers):
        raise ChildError(f"asked to read {figure.prompt} tokens, it read {answers[0]['tokens']}")
    return figure.prompt / statistics.median(answer["seconds"] for answer in answers), []


def _prompts(model: Model, figure: Figure, seed: int) -> dict[str, int]:
    return {"vocab_size": model.config.vocab_size, "rows": figure.rows, "length": figure.prompt, "seed": seed}


def _same_tokens(tracks: Mapping[tuple[str, str], Track]) -> dict[tuple[str, str], int]:
    found = {}
    for (title, side), track in tracks.items():
        ours = tracks.get((title, OURS))
        if side != OURS and ours and any(track.texts.values()):
            common = track.texts.keys() & ours.texts.keys()
            found[title, side] = min(agreement(ours.texts[number], track.texts[number]) for number in common)
    return found


def _by_title(figures: Sequence[Figure], values: Mapping[tuple[str, str], T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {figure.title: {} for figure in figures}
    for (title, side), value in values.items():
        found[title][side] = value
    return found


def _fastest(model: Model, precision: str, figure: Figure, limits: Limits) -> float:
    """Behind half of the text, as a step in the middle has it."""
    if figure.what == "decode":
        kept = figure.prompt + figure.tokens / 2
        work = work_of(model.size, tokens=figure.rows, rows=figure.rows, kept=kept, precision=precision)
        return figure.rows / limits.least_seconds(work)
    work = work_of(model.size, tokens=figure.prompt, rows=1, kept=0, precision=precision)
    return figure.prompt / limits.least_seconds(work)
