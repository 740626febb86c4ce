"""Compares every kernel with a reference in higher precision: runs the checks in conformance/."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from benchmarks.gpu import conformance
from benchmarks.gpu.results import Finding, StageContext, Unsupported

_PREFIX = "check_"
_OURS = ("app", "model", "benchmarks")
_MAX_VIOLATIONS = 10
"""Reported violations per check."""


def conform(context: StageContext) -> Iterator[Finding]:
    """Runs all checks of all modules; a check that raises has failed, and the rest goes on."""
    names = sorted(found.name for found in pkgutil.iter_modules(conformance.__path__))
    if not names:
        raise Unsupported("there are no kernel checks")
    for name in names:
        try:
            module = importlib.import_module(f"{conformance.__name__}.{name}")
        except ImportError as error:
            yield Finding(what=name, value="does not load", ok=None if _is_missing(error) else False, note=str(error))
            continue
        for check in _checks(module):
            yield from _outcome(f"{name}: {check.__name__.removeprefix(_PREFIX)}", check, context)


def _checks(module: ModuleType) -> list[Callable[..., Any]]:
    return [value for name, value in vars(module).items() if name.startswith(_PREFIX) and callable(value)]


def _outcome(what: str, check: Callable[..., Any], context: StageContext) -> Iterator[Finding]:
    """Reports each violation, then how many comparisons hold."""
    rows: list[Mapping[str, Any]] = []
    error: Exception | None = None
    try:
        for row in check(device=context.device, tiny=context.tiny) or ():
            rows.append(row)
            if row["ok"] is False and _n_violations(rows) <= _MAX_VIOLATIONS:
                yield _violation(what, row)
    except Unsupported as reason:
        yield Finding(what=what, value="not asked", note=str(reason))
        return
    except Exception as raised:  # whatever a kernel raises is a failure of its own
        if _is_missing(raised):
            yield Finding(what=what, value="not asked", note=str(raised))
            return
        traceback.print_exc()
        error = raised
    text = f"then {type(error).__name__}: {' '.join(str(error).split())[:300]}" if error else _worst(rows)
    n_held = len(rows) - _n_violations(rows)
    yield Finding(
        what=what,
        value=n_held,
        unit=f"of {len(rows)} comparisons hold",
        ok=n_held == len(rows) and not error,
        note=text,
    )


def _is_missing(error: Exception) -> bool:
    """Whether a package is missing on this machine, which the run reports at the start. Our own modules must load."""
    return isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(_OURS)


def _n_violations(rows: list[Mapping[str, Any]]) -> int:
    return sum(row["ok"] is False for row in rows)


def _violation(what: str, row: Mapping[str, Any]) -> Finding:
    fields = {"value": "", "unit": "", "note": "", **row}
    known = {name: fields[name] for name in ("value", "unit", "note", "ok")}
    return Finding(what=f"{what}, {row['what']}", **known)


def _worst(rows: list[Mapping[str, Any]]) -> str:
    """Largest values by unit: 0.8 of what is allowed."""
    worst: dict[str, float] = {}
    for row in rows:
        if isinstance(row.get("value"), int | float):
            unit = row.get("unit", "")
            worst[unit] = max(worst.get(unit, float("-inf")), row["value"])
    few = sorted(worst.items(), key=lambda pair: -pair[1])[:2]
    return ", ".join(f"{value:.3g} {unit}" for unit, value in few)
