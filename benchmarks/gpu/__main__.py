"""All measurements that need a GPU, in one run of minutes: `make gpu-check`, or `python -m benchmarks.gpu`.

For a machine that may be thrown away afterwards: no network, its own torch and Triton, nothing installed. Each stage is
a process with its share of the time; one that fails is recorded, and the rest goes on. Findings are on disk at once,
as JSON and as a table. The last line of stdout is one JSON object. Exit status: 0; 1 where a stage failed or a law is
broken; 2 if the flags are wrong or there is no GPU; 130 after Ctrl+C.
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
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.apart import Outcome, Start, run_apart
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.options import Options, parse_options
from benchmarks.gpu.packages import WheelsError, advice, install, missing, version_of
from benchmarks.gpu.report import Record, Report, file_name, line
from benchmarks.gpu.stages import ENGINE, HTTP, Stage, seconds_for

_NO_GPU = (
    "error: {problem}; this needs a CUDA GPU of compute capability 8.0 or above and a torch >= 2.11 built for it: "
    "run it there, with PYTHON=... naming that Python, or try the script itself with --device cpu --tiny"
)
_PACKAGES = ("torch", "triton", "transformers", *ENGINE[1:], *HTTP)


def main(argv: Sequence[str] | None = None) -> int:
    """See above."""
    options = parse_options(argv)
    if options.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny sizes: a second thread would only spin
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ends = time.monotonic() + 60 * options.minutes
    with _folder() as folder:
        try:
            if options.wheels:
                install(options.wheels, folder / "site")
        except WheelsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        found = _device(options.device, folder)
        if found is None:
            return 2
        report = _report(options, found[0])
        for index, stage in enumerate(options.stages):
            seconds = seconds_for(stage, options.stages[index + 1 :], ends - time.monotonic())
            bench = _bench(options, stage, folder / stage.name, time.monotonic() + seconds, report)
            _run(stage, bench, report, found[1])
    print(f"\n{report.table()}\n\n{report.path}\n{report.as_json()}", flush=True)
    return 0 if report.is_good else 1


@contextmanager
def _folder() -> Iterator[Path]:
    """Gone in the end, also if what a stage left in it resists."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _device(device: str, folder: Path) -> tuple[str, Start] | None:
    """Its name, and how a stage's process gets at it; None, with a line for the user, where there is none."""
    if missing(("torch",)):
        print(_NO_GPU.format(problem=f"{sys.executable} has no torch"), file=sys.stderr)
        return None
    with suppress(Exception):  # what does not load is for the stages to tell
        importlib.import_module("benchmarks.gpu.engines" if not missing(ENGINE) else "torch")
    if device == "cpu":
        return "cpu", "fork"
    ways: tuple[Start, ...] = ("fork", "spawn")
    for start in ways:
        found: list[Finding] = []
        bench = Bench(device=device, tiny=True, weights=folder, folder=folder, deadline=time.monotonic() + 60)
        outcome = run_apart("benchmarks.gpu.probe", bench, found.append, folder / "probe.log", start)
        if outcome.status == "done":
            return str(found[0].value), start
        if not shutil.which("nvidia-smi"):  # where there is a driver, loading all that may have spoilt the fork
            break
    print(_NO_GPU.format(problem=outcome.why), file=sys.stderr)
    return None


def _report(options: Options, name: str) -> Report:
    """An empty one, and a line on what is missing here."""
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
        print(f"no engine can be built here without {', '.join(missing(ENGINE))}: {advice(missing(ENGINE))}")
    if missing(HTTP):
        print(f"no HTTP here without {', '.join(missing(HTTP))}: {advice(missing(HTTP))}")
    print(f"{name}, at most {options.minutes:g} minutes, {len(options.stages)} stages", flush=True)
    return Report(path=options.out / (file_name(name, now.strftime("%Y-%m-%d-%H%M")) + ".json"), facts=facts)


def _bench(options: Options, stage: Stage, folder: Path, deadline: float, report: Report) -> Bench:
    folder.mkdir()
    return Bench(
        device=options.device,
        tiny=options.tiny,
        weights=options.weights,
        folder=folder,
        subject=stage.subject,
        deadline=deadline,
        found=report.numbers,
    )


def _run(stage: Stage, bench: Bench, report: Report, start: Start) -> None:
    """One stage, with everything on disk before the next begins."""
    record = Record(name=stage.name)
    report.records.append(record)

    def hear(finding: Finding) -> None:
        record.findings.append(finding)
        print(line(stage.name, finding), flush=True)
        report.write()

    if lacks := missing(stage.needs):
        record.outcome = Outcome(status="skipped", seconds=0.0, why=f"needs {', '.join(lacks)}")
    elif not bench.seconds_left:
        record.outcome = Outcome(status="timed out", seconds=0.0, why="no time was left for it")
    else:
        record.outcome = run_apart(stage.module, bench, hear, report.path.with_suffix(".log"), start)
    outcome = record.outcome
    print(f"{stage.name:>16}  {outcome.status} in {outcome.seconds:.1f} s  {outcome.why}", flush=True)
    report.write()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
