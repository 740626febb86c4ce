"""Audits the packages of constraints.txt for vulnerabilities: python -m tests.tools.audit (in make lint).

Exits with 1 if an advisory service reports a vulnerability. If no service responds (no internet, an index that only
mirrors packages), it prints a warning that nothing was audited, and exits with 0, so that work can go on; with
AUDIT_REQUIRED in the environment, as in .github/workflows/ci.yml, that is an error. pip-audit itself exits with 0 if
the index has no advisories at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support import ROOT

_SECONDS = 60


def main() -> int:
    """Audits the pins; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pins", type=Path, default=ROOT / "constraints.txt", help="file to audit (constraints.txt)")
    parser.add_argument("--osv-url", help="query only this OSV service")
    options = parser.parse_args()
    services = [["osv", "--osv-url", options.osv_url]] if options.osv_url else [["pypi"], ["osv"]]
    for service in services:
        packages = _query(options.pins, service)
        answered = [package for package in packages if "skip_reason" not in package]
        if answered:
            return _report(answered, len(packages), service[0])
    is_required = os.environ.get("AUDIT_REQUIRED", "") not in ("", "0")
    level = "error" if is_required else "warning"
    print(f"{level}: pip-audit: no service that knows of holes can be reached: nothing was audited", file=sys.stderr)
    return int(is_required)


def _query(pins: Path, service: list[str]) -> list[dict[str, Any]]:
    """The service's report on each package; empty if it does not answer."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--no-deps", "--disable-pip"]
    command += ["--progress-spinner", "off", "--format", "json", "--timeout", "5", "-s", *service]
    with TemporaryDirectory() as cache:  # the home directory may be read-only
        try:
            command += ["--cache-dir", cache]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return []
    if done.returncode not in (0, 1):  # 1: vulnerabilities, or no response
        sys.exit(f"error: pip-audit does not run: {done.stderr.strip()[-300:]}")
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        return []
    return packages


def _report(answered: list[dict[str, Any]], count: int, service: str) -> int:
    holes = [(package, hole) for package in answered for hole in package["vulns"]]
    for package, hole in holes:
        fixed = f"fixed in {', '.join(hole['fix_versions'])}" if hole["fix_versions"] else "not fixed yet"
        print(f"error: {package['name']} {package['version']} has {hole['id']}, {fixed}", file=sys.stderr)
    print(f"pip-audit: {len(holes)} known holes in {len(answered)} of {count} packages, says {service}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
