"""schemathesis over /openapi.json: valid and invalid data. Argument: the service."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import run_checks

URL = sys.argv[1]
N_CASES = 2000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def check_every_response_matches_the_description() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).parent / "schemathesis",
            "--config-file",
            Path(__file__).with_name("schemathesis.toml"),
        ]
        command += ["run", f"{URL}/openapi.json", "--no-color", "--checks", ",".join(CHECKS)]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(N_CASES // 20)]
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
