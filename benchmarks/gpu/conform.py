"""Compares every kernel with a reference in higher precision: runs the checks in conformance/."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.gpu import conformance
from benchmarks.gpu.results import Finding, StageContext, shortened

_PREFIX = "check_"
_OURS = ("app", "model", "benchmarks")
_MAX_VIOLATIONS = 10
"""Reported violations per check."""
Check = Callable[..., Iterator[Finding]]


def conform(context: StageContext) -> Iterator[Finding]:
    """Runs all checks of all modules; a check that raises has failed, and the rest goes on."""
    for name in sorted(found.name for found in pkgutil.iter_modules(conformance.__path__)):
        try:
            module = importlib.import_module(f"{conformance.__name__}.{name}")
        except ImportError as error:
            yield Finding(what=name, value="does not load", ok=None if _is_missing(error) else False, note=str(error))
            continue
        checks: dict[str, Check] = {key: check for key, check in vars(module).items() if key.startswith(_PREFIX)}
        for key, check in checks.items():
            yield from _outcome(f"{name}: {key.removeprefix(_PREFIX)}", check, context)


def _outcome(what: str, check: Check, context: StageContext) -> Iterator[Finding]:
    """Reports each violation, then how many comparisons hold, and the largest values: 0.8 of what is allowed."""
    n_held, n_broken, note, worst = 0, 0, "", dict[str, float]()
    try:
        for found in check(device=context.device, tiny=context.tiny):
            n_held, n_broken = n_held + (found.ok is not False), n_broken + (found.ok is False)
            if found.ok is False and n_broken <= _MAX_VIOLATIONS:
                yield replace(found, what=f"{what}, {found.what}")
            if not isinstance(found.value, str):
                worst[found.unit] = max(worst.get(found.unit, float("-inf")), found.value)
    except Exception as error:  # whatever a kernel raises is a failure of its own
        if _is_missing(error):
            yield Finding(what=what, value="not asked", note=str(error))
            return
        traceback.print_exc()
        note = f"then {type(error).__name__}: {shortened(str(error))}"
    few = sorted(worst.items(), key=lambda pair: -pair[1])[:2]
    yield Finding(
        what=what,
        value=n_held,
        unit=f"of {n_held + n_broken} comparisons hold",
        ok=not n_broken and not note,
        note=note or ", ".join(f"{value:.3g} {unit}" for unit, value in few),
    )


def _is_missing(error: Exception) -> bool:
    """Whether a package is missing on this machine, which the run reports at the start. Our own modules must load."""
    return isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(_OURS)
