"""aiperf, a benchmark: synthetic prompts, streamed and whole. Argument: the service. Variable: CLIENT_WEIGHTS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from checks import run_checks

URL = sys.argv[1]
WEIGHTS = os.environ["CLIENT_WEIGHTS"]
MODEL = json.load(urllib.request.urlopen(f"{URL}/v1/models"))["data"][0]["id"]
N_REQUESTS, OUTPUT_TOKENS = 12, 24


def check_streams() -> None:
    report = measure("--streaming")
    assert report["time_to_first_token"]["avg"] > 0


def check_whole_responses() -> None:
    measure()


def measure(*flags: str) -> dict[str, Any]:
    """Runs the benchmark; checks that no request failed and that all have as many tokens as they asked for."""
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).parent / "aiperf", "profile", "--model", MODEL, "--url", URL, "--ui", "none"]
        command += ["--endpoint-type", "completions", "--tokenizer", WEIGHTS, "--use-server-token-count", *flags]
        command += ["--concurrency", "4", "--request-count", str(N_REQUESTS), "--output-artifact-dir", folder]
        command += ["--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", str(OUTPUT_TOKENS)]
        command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{OUTPUT_TOKENS}"]
        environment = {**os.environ, "HF_HOME": folder, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (file,) = Path(folder).rglob("profile_export_aiperf.json")
        report: dict[str, Any] = json.loads(file.read_text())
    assert report["request_count"]["avg"] == N_REQUESTS and not report.get("error_request_count", {}).get("avg"), report
    assert report["output_sequence_length"]["avg"] == OUTPUT_TOKENS, report["output_sequence_length"]
    return report


if __name__ == "__main__":
    run_checks(dict(vars()))
