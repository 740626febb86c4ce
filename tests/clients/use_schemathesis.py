"""schemathesis over /openapi.json: data that fits the description, and data that does not. Argument: the service.

Variable: CLIENT_CASES, how many cases at least (2000).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import run_checks

URL = sys.argv[1]
N_CASES = int(os.environ.get("CLIENT_CASES", "2000"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
# Few are the same ones every time.
PHASES = ("examples,coverage,fuzzing",) if N_CASES >= 1000 else ("fuzzing", "--generation-deterministic")


def check_every_answer_is_as_described() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).parent / "schemathesis",
            "--config-file",
            Path(__file__).with_name("schemathesis.toml"),
        ]
        command += ["run", f"{URL}/openapi.json", "--no-color", "--checks", ",".join(CHECKS)]
        command += ["--phases", *PHASES, "--max-examples", str(N_CASES // 9)]
        command += ["--report", "json", "--report-json-path", f"{folder}/r.json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert Path(folder, "r.json").exists(), done.stderr
        report: dict[str, Any] = json.loads(Path(folder, "r.json").read_text())
    print(f"     {report['test_cases']['generated']} cases over {report['operations']['tested']} operations")
    assert done.returncode == 0, done.stdout[-6000:]
    assert report["operations"]["errored"] == 0 and report["complete"]
    assert report["test_cases"]["generated"] >= N_CASES


if __name__ == "__main__":
    run_checks(dict(vars()))
