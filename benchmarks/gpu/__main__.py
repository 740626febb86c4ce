"""All measurements that need a GPU, in one run of minutes: `make gpu-check`, or `python -m benchmarks.gpu`.

Made for a disposable machine without a network: it uses the installed torch and Triton, and installs nothing. Each
stage runs in a process of its own with its share of the time; a failed one is recorded, and the rest goes on. Findings
are written to disk at once, as JSON and as a table. The last line of stdout is one JSON object. Exit status: 0; 1 if a
stage or a check failed; 2 if the flags are invalid, or a GPU or a package is missing; 130 after Ctrl+C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.packages import WheelsError, download_hint, install, missing, version_of
from benchmarks.gpu.results import Record, Report, StageContext, file_name, line
from benchmarks.gpu.stages import ENGINE, HTTP, NAMES, Stage, choose, seconds_for
from benchmarks.gpu.subprocess_stage import StartMethod, run_in_subprocess
from model.command_line import OneLineParser

_ROOT = Path(__file__).parent.parent.parent
_NO_GPU = (
    "error: {problem}; this needs a CUDA GPU of compute capability 8.0 or above and a torch >= 2.11 built for it: "
    "run it there, with PYTHON=... naming that Python, or try this script without a GPU by --device cpu --tiny"
)
_PACKAGES = ("torch", "triton", *ENGINE[1:], *HTTP)
_LEAST_SECONDS = 5.0
"""Seconds of its share that a stage must have left to be run again after an error of CUDA."""


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with one line and status 2 if the flags are invalid."""
    parser = OneLineParser(prog="python -m benchmarks.gpu", description="All measurements that need a GPU.")
    add = parser.add_argument
    wheels, out = os.environ.get("WHEELS"), Path(os.environ.get("OUT") or _ROOT / "benchmarks/results")
    add("--only", default="", metavar="NAME,NAME", help=f"stages to run, out of {', '.join(NAMES)}")
    add("--minutes", type=float, default=8.0, metavar="M", help="time for all stages (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny (%(default)s)")
    add("--partial", action="store_true", help="on a GPU, skip the stages whose packages are missing")
    add("--tiny", action="store_true", help="tiny sizes, as a smoke test; their figures mean nothing")
    report = "folder of the report (the variable OUT, else benchmarks/results)"
    add("--out", type=Path, default=out, metavar="DIR", help=report)
    add("--weights", type=Path, default=_ROOT / "weights", metavar="DIR", help="weights directory of the default model")
    packages = "folder of wheels for missing packages (the variable WHEELS)"
    add("--wheels", type=Path, default=Path(wheels) if wheels else None, metavar="DIR", help=packages)
    options = parser.parse_args(argv)
    try:
        options.stages = choose([name for name in options.only.split(",") if name], tiny=options.tiny)
    except ValueError as error:
        parser.error(str(error))
    if not 0 < options.minutes <= 600:
        parser.error("--minutes must be above 0 and at most 600")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu only tries this script in tiny sizes; add --tiny")
    if options.wheels and not options.wheels.is_dir():
        parser.error(f"--wheels {options.wheels}: no such directory")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse_options(argv)
    if options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # with tiny sizes a second thread would only spin
    # One cache for all stages: a service would have another.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton/cache"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_deadline = time.monotonic() + 60 * options.minutes
    # A stage may leave files that cannot be deleted.
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            if options.wheels:
                install(options.wheels, folder / "site")
        except WheelsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        detected = _detect_device(options.device, folder)
        if detected is None:
            return 2
        absent = missing(name for stage in options.stages for name in stage.needs)
        if absent and options.device == "cuda" and not options.partial:
            names = ", ".join(stage.name for stage in options.stages if missing(stage.needs))
            print(f"error: {names}: no {', '.join(absent)}; {download_hint(absent)}, or add --partial", file=sys.stderr)
            return 2
        report = _new_report(options, detected[0])
        for index, stage in enumerate(options.stages):
            seconds = seconds_for(stage, options.stages[index + 1 :], run_deadline - time.monotonic())
            context = StageContext(
                device=options.device,
                tiny=options.tiny,
                weights=options.weights,
                folder=folder / stage.name,
                variant=stage.variant,
                deadline=time.monotonic() + seconds,
                numbers=report.numbers,
            )
            record = _run_stage(stage, context, report, detected[1])
            if record.is_device_error and context.seconds_left > _LEAST_SECONDS:
                again = replace(context, folder=folder / f"{stage.name} again", is_blocking=True)
                _run_stage(stage, again, report, detected[1])
    print(f"\n{report.table()}\n\n{report.path}\n{report.as_json()}", flush=True)
    return 0 if report.is_good else 1


def _detect_device(device: str, folder: Path) -> tuple[str, StartMethod] | None:
    """Name of the device, and how to start stage processes; None, with a message for the user, if there is no GPU."""
    if missing(("torch",)):
        print(_NO_GPU.format(problem=f"{sys.executable} has no torch"), file=sys.stderr)
        return None
    with suppress(Exception):  # the stages report what does not load
        importlib.import_module("benchmarks.gpu.engines" if not missing(ENGINE) else "torch")
    if device == "cpu":
        return "cpu", "fork"
    context = StageContext(device=device, tiny=True, weights=folder, folder=folder, deadline=time.monotonic() + 60)
    methods: tuple[StartMethod, ...] = ("fork", "spawn")
    for start in methods:
        record = Record(name="probe")
        run_in_subprocess("benchmarks.gpu.machine.probe", context, record, lambda: None, folder / "probe.log", start)
        if record.status == "done":
            return str(record.findings[0].value), start
        # With a driver, loading the modules may have initialized CUDA, which does not survive a fork.
        if not shutil.which("nvidia-smi"):
            break
    print(_NO_GPU.format(problem=record.why), file=sys.stderr)
    return None


def _new_report(options: argparse.Namespace, name: str) -> Report:
    """An empty report; prints which packages are missing."""
    now = datetime.now(UTC)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": now.isoformat(timespec="seconds"),
        "device": name,
        "tiny": options.tiny,
        "minutes": options.minutes,
        "python": platform.python_version(),
        "packages": {package: version_of(package) for package in _PACKAGES},
        "missing": missing(_PACKAGES),
    }
    print(f"{name}, at most {options.minutes:g} minutes, {len(options.stages)} stages", flush=True)
    return Report(path=options.out / (file_name(name, now.strftime("%Y-%m-%d-%H%M")) + ".json"), facts=facts)


def _run_stage(stage: Stage, context: StageContext, report: Report, start: StartMethod) -> Record:
    """Runs one stage; everything is on disk before the next one starts."""
    context.folder.mkdir()
    record = Record(name=stage.name + " (CUDA_LAUNCH_BLOCKING=1)" * context.is_blocking)
    report.records.append(record)

    def on_finding() -> None:
        print(line(record.name, record.findings[-1]), flush=True)
        report.write()

    if missing_packages := missing(stage.needs):
        record.status, record.why = "skipped", f"needs {', '.join(missing_packages)}"
    elif not context.seconds_left:
        record.status, record.why = "timed out", "no time was left"
    else:
        log = report.path.with_suffix(".log")
        run_in_subprocess(f"benchmarks.gpu.{stage.function}", context, record, on_finding, log, start)
    print(f"{record.name:>16}  {record.status} in {record.seconds:.1f} s  {record.why}", flush=True)
    report.write()
    return record


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
