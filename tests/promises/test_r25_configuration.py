"""A wrong setting ends the start within 2 s, with exit code 2 and one line that names it, before a port is bound.

Covers every flag and variable of app/common/settings.py by reflection. Errors that depend on the weights or the device
(a context longer than the model's, too few cache blocks) are found by the engine after the port is bound, with the same
exit code and line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from app.cli.serve import flag
from app.common.settings import Settings
from tests.support import ROOT
from tests.support.promise_figures import Promise

DIGITS = "9" * 5000
"""More digits than Python converts to an integer."""

WRONG = {
    "weights": ["", "/nonexistent", "README.md", "app", "x\ny"],
    "cache_dir": ["README.md", "/dev/null"],
    "keys_file": ["/nonexistent", "README.md", "app"],
    "host": ["", "0.0.0.0", "::", "nowhere.invalid", "a..b", "x" * 300, "127.0.0.1:80", "a\nb", "\udcff"],
    "allowed_hosts": ["a b", "http://a.example", "a.example:80", "x" * 300, "a\nb", "*"],
    "allow_origin": ["*", "null", "a.example", "https://a.example/", "https://A.example", "file://x", "a\nb"],
}
WRONG["compare_origin"] = WRONG["allow_origin"]
"""Wrong values that do not follow from the setting's type."""

PROGRAM = """
import contextlib, io, json, os, socket, sys, time
from app.common import event_loop
from app.cli.serve import main

class Started(BaseException): pass

def started(work):
    work.close()
    raise Started

event_loop.run = started
real, bound = socket.create_server, []
def create_server(*arguments, **named):
    bound.append(arguments)
    return real(*arguments, **named)
socket.create_server = create_server
def outcome(arguments, variables):
    os.environ.update(variables)
    bound.clear()
    errors, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        except Started:
            code = "started"
        except BaseException as error:
            code = repr(error)
    for name in variables:
        del os.environ[name]
    return [code, errors.getvalue(), len(bound), time.perf_counter() - began]

found = []
for case in json.load(sys.stdin):
    found.append(outcome(*case))
    for _ in range(2):  # repeat slow cases: the process may have had no CPU
        if found[-1][3] > 2:
            found[-1] = outcome(*case)
json.dump(found, sys.stdout)
"""
"""Runs all cases in one process, to import only once."""

Case = tuple[list[str], dict[str, str], str]
"""Flags, variables, and the text that the error line must contain."""


def wrong_values(name: str, field: FieldInfo) -> list[str]:
    """Invalid values for a setting."""
    if name in WRONG:
        return WRONG[name]
    if field.annotation is bool:
        return ["", "maybe", "2", "None"]
    if get_origin(field.annotation) is Literal:
        return ["", "x", f"{get_args(field.annotation)[0]} ", get_args(field.annotation)[0].upper(), "a\nb"]
    if field.annotation in (int, float):
        return ["", "x", "nan", "-1e400", "0x10", "1,5", "[1]", "a\nb", *_out_of_range(field)]
    pytest.fail(f"no wrong values known for {name}: {field.annotation}; add them to WRONG")


def _out_of_range(field: FieldInfo) -> list[str]:
    found = ["1.5", DIGITS] if field.annotation is int else []
    for bound in field.metadata:
        least, above, most = getattr(bound, "ge", None), getattr(bound, "gt", None), getattr(bound, "le", None)
        found += [] if least is None else [str(least - 1)]
        found += [] if above is None else [str(above), str(above - 1)]
        found += [] if most is None else [str(most + 1), "1e400"]
    return found


def cases(weights: Path) -> list[Case]:
    """Every wrong value as a flag and as a variable, and unknown flags and variables."""
    good = ["--weights", str(weights), "--port", "0"]
    found: list[Case] = []
    for name, field in Settings.model_fields.items():
        rest = good[2:] if name == "weights" else good[:2] if name == "port" else good
        for value in wrong_values(name, field):
            shown = "" if name in ("cache_dir", "keys_file") else name
            if name == "weights":
                shown = {"": "--weights", "app": "config.json"}.get(value, value.replace("\n", "\\n"))
            if field.annotation is bool:
                found.append(([*rest, f"{flag(name)}={value}"], {}, flag(name)))
            else:
                given = [f"{flag(name)}={value}"] if value.startswith("-") else [flag(name), value]
                found.append(([*rest, *given], {}, shown))
            found.append((rest, {f"INKSTREAM_{name.upper()}": value}, shown))
        if field.annotation is not bool:
            found.append(([*rest, flag(name)], {}, flag(name)))  # without its value
    near = "INKSTREAM_KV_BLOKS is not a setting: did you mean INKSTREAM_KV_BLOCKS?"
    far = "INKSTREAM_QQ is not a setting: inkstream serve --help lists the settings"
    small = ["--max-running", "64", "--tokens-per-step", "32"]
    return [
        *found,
        ([*good, "--nonsense"], {}, "--nonsense"),
        ([*good, "--por", "1"], {}, "--por"),
        ([*good, "weights"], {}, "weights"),
        (good, {"INKSTREAM_KV_BLOKS": "1"}, near),
        (good, {"INKSTREAM_QQ": "1"}, far),
        ([*good, *small], {}, "--tokens-per-step 32 is below --max-running 64"),
        ([*good, "--host", "a..b", "--insecure-no-auth"], {}, "a..b"),
        ([*good, "--host", "\udcff", "--insecure-no-auth"], {}, "--host"),
        ([*good, "--kernels", "native", "--device", "cuda"], {}, "native"),
        ([*good, "--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "--device cuda"),
        ([*good, "--max-runing", "4"], {}, "--max-runing 4; did you mean --max-running?"),
        ([*good, "--ctx-size=512"], {}, "--ctx-size=512; did you mean --max-context?"),
    ]


def _run(*command: str, given: str = "", variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | {"PYTHONPATH": str(ROOT)}
    environment |= variables or {}
    return subprocess.run(
        [sys.executable, *command],
        input=given, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def _outcomes(selected: list[Case]) -> list[list[Any]]:
    done = _run("-c", PROGRAM, given=json.dumps([case[:2] for case in selected]))
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def _problem(case: Case, outcome: list[Any]) -> str:
    """Description of a wrong outcome, or an empty string."""
    (arguments, variables, name), (code, text, bound, seconds) = case, outcome
    lines = text.splitlines()
    named = name.replace("_", "-") in text.replace("_", "-")
    if code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and named and not bound and seconds <= 2:
        return ""
    return f"{arguments[-2:]} {variables}: {code}, {bound} ports, {seconds:.2f} s, {text[-300:]!r}"[:700]


def test_wrong_settings_are_refused_in_one_line_before_binding(weights: Path, promise: Promise) -> None:
    selected = cases(weights)
    assert len(selected) > 8 * len(Settings.model_fields)
    problems = [_problem(case, outcome) for case, outcome in zip(selected, _outcomes(selected), strict=True)]
    print(*filter(None, problems), sep="\n")
    promise.all_of(
        "wrong settings refused with exit code 2 and one line, no port bound", problems.count(""), len(problems)
    )


def test_process_with_a_wrong_setting_exits_in_time(weights: Path, promise: Promise) -> None:
    """Separate processes: one case per setting; in CI only a few settings."""
    every = {str(case[1] or case[0][-2:]): case for case in cases(weights) if "\udcff" not in str(case)}
    selected = list(every.values())[:: promise.size(180, 1)]
    slowest = max(promise.measured(lambda case=case: _seconds(case), lambda seconds: seconds <= 4) for case in selected)  # type: ignore[misc]
    promise.at_most("slowest exit of a process with a wrong setting", slowest, target=2, floor=4, n=len(selected),
                    unit="s")  # fmt: skip


def _seconds(case: Case) -> float:
    """Seconds until a process with this setting exits; asserts its exit code and line."""
    arguments, variables, _ = case
    began = time.monotonic()
    done = _run("-m", "app", "serve", *arguments, variables=variables)
    seconds = time.monotonic() - began
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (arguments, done.stderr)
    return seconds


def test_successful_start_is_not_counted_as_refused(weights: Path) -> None:
    """Control: valid settings start, and the check reports them as not refused."""
    good = ["--weights", str(weights), "--port", "0"]
    for code, text, bound, seconds in _outcomes([(good, {}, ""), ([*good, "--host", "localhost"], {}, "")]):
        assert (code, bound) == ("started", 1)
        assert _problem((good, {}, ""), [code, text, bound, seconds])
