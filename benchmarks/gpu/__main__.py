"""All measurements that need a GPU, in one run of minutes: `make gpu-check`, or `python -m benchmarks.gpu`.

Made for a disposable machine without a network: it uses the installed torch and Triton, and installs nothing. Each
stage runs in a process of its own with its share of the time; a failed one is recorded, and the rest goes on. Findings
are written to disk at once, as JSON and as a table. The last line of stdout is one JSON object. Exit status: 0; 1 if a
stage or a check failed; 2 if the flags are invalid or there is no GPU; 130 after Ctrl+C.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.packages import WheelsError, download_hint, install, missing, version_of
from benchmarks.gpu.results import Finding, Outcome, Record, Report, StageContext, file_name, line
from benchmarks.gpu.stages import ENGINE, HTTP, NAMES, Stage, choose, seconds_for
from benchmarks.gpu.subprocess_stage import StartMethod, run_in_subprocess
from model.command_line import OneLineParser

_ROOT = Path(__file__).parent.parent.parent
_NO_GPU = (
    "error: {problem}; this needs a CUDA GPU of compute capability 8.0 or above and a torch >= 2.11 built for it: "
    "run it there, with PYTHON=... naming that Python, or try this script without a GPU by --device cpu --tiny"
)
_PACKAGES = ("torch", "triton", "transformers", *ENGINE[1:], *HTTP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command-line flags."""

    stages: tuple[Stage, ...]
    minutes: float
    device: str
    tiny: bool
    out: Path
    weights: Path
    wheels: Path | None


def parse_options(argv: Sequence[str] | None) -> Options:
    """Exits with one line and status 2 if the flags are invalid."""
    parser = _parser()
    flags = parser.parse_args(argv)
    only = [name for name in flags.only.split(",") if name]
    try:
        stages = choose(only, tiny=flags.tiny)
    except ValueError as error:
        parser.error(str(error))
    if not 0 < flags.minutes <= 600:
        parser.error("--minutes must be above 0 and at most 600")
    if flags.device == "cpu" and not flags.tiny:
        parser.error("--device cpu only tries this script in tiny sizes; add --tiny")
    if flags.wheels and not flags.wheels.is_dir():
        parser.error(f"--wheels {flags.wheels}: no such directory")
    return Options(
        stages=stages,
        minutes=flags.minutes,
        device=flags.device,
        tiny=flags.tiny,
        out=flags.out,
        weights=flags.weights,
        wheels=flags.wheels,
    )


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m benchmarks.gpu", description="All measurements that need a GPU.")
    add = parser.add_argument
    wheels, out = os.environ.get("WHEELS"), os.environ.get("OUT")
    add("--only", default="", metavar="NAME,NAME", help=f"stages to run, out of {', '.join(NAMES)}")
    add("--minutes", type=float, default=8.0, metavar="M", help="time for all stages (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny (%(default)s)")
    add("--tiny", action="store_true", help="tiny sizes, as a smoke test; their figures mean nothing")
    add(
        "--out",
        type=Path,
        default=Path(out) if out else _ROOT / "benchmarks/results",
        metavar="DIR",
        help="folder of the report (the variable OUT, else benchmarks/results)",
    )
    add("--weights", type=Path, default=_ROOT / "weights", metavar="DIR", help="weights directory of the default model")
    add(
        "--wheels",
        type=Path,
        default=Path(wheels) if wheels else None,
        metavar="DIR",
        help="folder of wheels for missing packages (the variable WHEELS)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse_options(argv)
    if options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # with tiny sizes a second thread would only spin
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_deadline = time.monotonic() + 60 * options.minutes
    with _temporary_folder() as folder:
        try:
            if options.wheels:
                install(options.wheels, folder / "site")
        except WheelsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        detected = _detect_device(options.device, folder)
        if detected is None:
            return 2
        report = _new_report(options, detected[0])
        for index, stage in enumerate(options.stages):
            seconds = seconds_for(stage, options.stages[index + 1 :], run_deadline - time.monotonic())
            context = _stage_context(options, stage, folder / stage.name, time.monotonic() + seconds, report)
            _run_stage(stage, context, report, detected[1])
    print(f"\n{report.table()}\n\n{report.path}\n{report.as_json()}", flush=True)
    return 0 if report.is_good else 1


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A temporary folder that is removed on exit, even if a stage left files that cannot be deleted."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _detect_device(device: str, folder: Path) -> tuple[str, StartMethod] | None:
    """Name of the device, and how to start stage processes; None, with a message for the user, if there is no GPU."""
    if missing(("torch",)):
        print(_NO_GPU.format(problem=f"{sys.executable} has no torch"), file=sys.stderr)
        return None
    with suppress(Exception):  # the stages report what does not load
        importlib.import_module("benchmarks.gpu.engines" if not missing(ENGINE) else "torch")
    if device == "cpu":
        return "cpu", "fork"
    methods: tuple[StartMethod, ...] = ("fork", "spawn")
    for start in methods:
        findings: list[Finding] = []
        context = StageContext(device=device, tiny=True, weights=folder, folder=folder, deadline=time.monotonic() + 60)
        outcome = run_in_subprocess("benchmarks.gpu.probe", context, findings.append, folder / "probe.log", start)
        if outcome.status == "done":
            return str(findings[0].value), start
        if not shutil.which(
            "nvidia-smi"
        ):  # with a driver, loading the modules may have initialized CUDA, which does not survive a fork
            break
    print(_NO_GPU.format(problem=outcome.why), file=sys.stderr)
    return None


def _new_report(options: Options, name: str) -> Report:
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
    if missing(ENGINE):
        print(f"no engine can be built here without {', '.join(missing(ENGINE))}: {download_hint(missing(ENGINE))}")
    if missing(HTTP):
        print(f"no HTTP here without {', '.join(missing(HTTP))}: {download_hint(missing(HTTP))}")
    print(f"{name}, at most {options.minutes:g} minutes, {len(options.stages)} stages", flush=True)
    return Report(path=options.out / (file_name(name, now.strftime("%Y-%m-%d-%H%M")) + ".json"), facts=facts)


def _stage_context(options: Options, stage: Stage, folder: Path, deadline: float, report: Report) -> StageContext:
    folder.mkdir()
    return StageContext(
        device=options.device,
        tiny=options.tiny,
        weights=options.weights,
        folder=folder,
        variant=stage.variant,
        deadline=deadline,
        numbers=report.numbers,
    )


def _run_stage(stage: Stage, context: StageContext, report: Report, start: StartMethod) -> None:
    """Runs one stage; everything is on disk before the next one starts."""
    record = Record(name=stage.name)
    report.records.append(record)

    def on_finding(finding: Finding) -> None:
        record.findings.append(finding)
        print(line(stage.name, finding), flush=True)
        report.write()

    if missing_packages := missing(stage.needs):
        record.outcome = Outcome(status="skipped", seconds=0.0, why=f"needs {', '.join(missing_packages)}")
    elif not context.seconds_left:
        record.outcome = Outcome(status="timed out", seconds=0.0, why="no time was left")
    else:
        record.outcome = run_in_subprocess(stage.module, context, on_finding, report.path.with_suffix(".log"), start)
    outcome = record.outcome
    print(f"{stage.name:>16}  {outcome.status} in {outcome.seconds:.1f} s  {outcome.why}", flush=True)
    report.write()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
