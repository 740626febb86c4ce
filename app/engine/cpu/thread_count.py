"""Chooses the number of compute threads by measuring decode steps of the loaded model, once when an engine starts.

The number of physical cores is right for most models and machines. It is not where a step is so short that threads
wait for each other longer than they compute, where SMT siblings help, or where a neighbor keeps cores busy. Results do
not depend on the number of threads (tests/engine/cpu/test_executor.py), so each start may choose another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

BUDGET_SECONDS = 0.05
"""Of all measured steps."""
_MIN_ROUNDS, _HOPELESS_ROUNDS = 8, 3
_NEEDED_GAIN = 0.9
"""Share of the default's time within which a candidate must stay to replace it."""
_NEEDED_WINS = 0.8
"""Share of the rounds in which it must be faster."""
_HOPELESS = 1.1


def choose_threads(
    time_step: Callable[[int], float],
    default: int,
    candidates: Sequence[int],
    budget: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, str]:
    """Returns the number of threads, and why.

    The default and the candidates take steps in turn. A candidate replaces the default only if its steps took 10 % less
    time in all, it was faster in four of five rounds, and its fastest step was the faster one. At least eight
    rounds are taken, for a third of the budget, and for all of it while a candidate would win: what runs for a moment,
    such as the API process that starts at the same time, must not decide for the months that a service runs. A
    candidate that is 10 % slower after three rounds is measured no longer.

    time_step: seconds of a step with this number of threads. budget: seconds.
    """
    step = min(time_step(default) for _ in range(2))  # the first one also reserves memory
    if step * (1 + len(candidates)) * _MIN_ROUNDS > budget:
        return default, f"others are not measured: a step took {step * 1000:.1f} ms"
    for n in candidates:
        time_step(n)
    start, rounds = clock(), list[dict[int, float]]()
    left, took = list(candidates), 0.0
    while left:
        spend = budget if _winners(rounds, left, default) else budget / 3
        if len(rounds) >= _MIN_ROUNDS and clock() + took > start + spend:
            break
        began = clock()
        order = [default, *left]
        first = len(rounds) % len(order)
        rounds.append({n: time_step(n) for n in (*order[first:], *order[:first])})
        took = clock() - began
        if len(rounds) == _HOPELESS_ROUNDS:
            left = [n for n in left if _ratio(rounds, n, default) < _HOPELESS]
    ratios = {n: _ratio(rounds, n, default) for n in candidates}
    chosen = min(_winners(rounds, left, default), key=ratios.__getitem__, default=default)
    compared = ", ".join(f"{n} took {ratio:.2f} times as long" for n, ratio in ratios.items())
    return chosen, f"measured beside {default}: {compared}"


def _ratio(rounds: Sequence[dict[int, float]], candidate: int, default: int) -> float:
    """Time of the candidate's steps to that of the default's, in the rounds that have both."""
    both = [times for times in rounds if candidate in times]
    return sum(times[candidate] for times in both) / sum(times[default] for times in both)


def _winners(rounds: Sequence[dict[int, float]], candidates: Sequence[int], default: int) -> list[int]:
    """Candidates that would replace the default."""
    return [
        n
        for n in candidates
        if rounds
        and _ratio(rounds, n, default) <= _NEEDED_GAIN
        and sum(times[n] < times[default] for times in rounds) >= _NEEDED_WINS * len(rounds)
        and min(times[n] for times in rounds) < min(times[default] for times in rounds)
    ]
