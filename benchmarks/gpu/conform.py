"""Every kernel against a reference in higher precision: runs what lies in conformance/. Knows no kernel."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from benchmarks.gpu import conformance
from benchmarks.gpu.finding import Bench, Finding, Unsupported

_PREFIX = "check_"


def run(bench: Bench) -> Iterator[Finding]:
    """All checks of all files; one that raises is a broken law, and the rest goes on."""
    names = sorted(found.name for found in pkgutil.iter_modules(conformance.__path__) if found.name[0] != "_")
    if not names:
        raise Unsupported("there is no kernel to check")
    for name in names:
        try:
            module = importlib.import_module(f"{conformance.__name__}.{name}")
        except ImportError as error:
            yield Finding(
                what=name, value="does not load", ok=None if bench.device == "cpu" else False, note=str(error)
            )
            continue
        for check in _checks(module):
            yield from _outcome(f"{name}: {check.__name__.removeprefix(_PREFIX)}", check, bench)


def _checks(module: ModuleType) -> list[Callable[..., Any]]:
    return [value for name, value in vars(module).items() if name.startswith(_PREFIX) and callable(value)]


def _outcome(what: str, check: Callable[..., Any], bench: Bench) -> Iterator[Finding]:
    count = 0
    try:
        for row in check(device=bench.device, tiny=bench.tiny) or ():
            count += 1
            yield _finding(what, row)
    except Unsupported as error:
        yield Finding(what=what, value="not asked", note=str(error))
    except Exception as error:  # whatever a kernel raises is its own failure
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        yield Finding(what=what, value="raised", ok=False, note=f"{type(error).__name__}: {text}")
    else:
        if not count:
            yield Finding(what=what, value="ran", ok=True)


def _finding(what: str, row: Mapping[str, Any] | Finding) -> Finding:
    """As check_* functions give it: `what`, `ok`, and if need be `value`, `unit`, `note`."""
    if isinstance(row, Finding):
        return Finding(what=f"{what}, {row.what}", value=row.value, unit=row.unit, ok=row.ok, note=row.note)
    fields = {"value": "", "unit": "", "note": "", "ok": None, **row}
    known = {name: fields[name] for name in ("value", "unit", "note", "ok")}
    return Finding(what=f"{what}, {row['what']}", **known)
