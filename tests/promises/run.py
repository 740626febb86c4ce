"""Runs the tests of promises at full size, then writes RELIABILITY.md: make promises [ONLY="r10 s08"].

Test files run one at a time, because most of them measure time. A file that fails or times out does not stop the
others. Exit status: 1 if a file failed, 2 for an unknown promise.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.promises import report
from tests.support.promise_figures import RESULTS

_MOST_SECONDS = 45 * 60.0
"""Timeout of one file. The longest is the soak test: half an hour, plus its control."""


def main() -> int:
    """Run the selected promises; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", metavar="PROMISE", help="r10, S8, ... (all)")
    parser.add_argument("--ci-size", action="store_true", help="the sizes that make test runs")
    parser.add_argument("--report", action="store_true", help="run nothing: record the results of the last test run")
    options = parser.parse_args()
    if options.report:
        report.write(report.merge(report.read_kept(), report.read_new()))
        return 0
    asked = {f"{name[:1].upper()}{name[1:].lstrip('0')}": name for name in options.only}
    if unknown := [name for number, name in asked.items() if number not in report.PROMISES]:
        print(f"error: there is no promise {unknown[0]}: they are {', '.join(report.PROMISES)}", file=sys.stderr)
        return 2
    for leftover in RESULTS.glob("*.json"):
        leftover.unlink()
    files = report.files_of_promises()
    paths = [path for number in asked or report.PROMISES for path in files.get(number, [])]
    failed = [path.name for path in paths if not _run(path, full=not options.ci_size)]
    report.write(report.merge(report.read_kept(), report.read_new()))
    result = f"Failed: {', '.join(failed)}" if failed else "All passed."
    print(f"RELIABILITY.md is written. {result}")
    return 1 if failed else 0


def _run(path: Path, *, full: bool) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", *(["--full-size"] if full else []), str(path)]
    print(f"{path.stem} ...", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=report.ROOT, start_new_session=True)
    try:
        passed = process.wait(_MOST_SECONDS) == 0
    except subprocess.TimeoutExpired:
        passed = False
    finally:
        if process.poll() is None:  # also kills its services, which share its process group
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{path.stem}: {'passed' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
