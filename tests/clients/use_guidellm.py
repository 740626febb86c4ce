"""guidellm, a benchmark: synthetic prompts, streamed and whole. Argument: the service. Variable: CLIENT_WEIGHTS."""

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
WEIGHTS = os.environ["CLIENT_WEIGHTS"]
N_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 64, 24


def check_streams() -> None:
    benchmark = measure(stream=True)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


def check_whole_responses() -> None:
    measure(stream=False)


def measure(*, stream: bool) -> dict[str, Any]:
    """Runs the benchmark; checks that no request failed and that all have as many tokens as they asked for."""
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target={URL},request_format=/v1/completions,stream={stream}"]
        command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={N_REQUESTS}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
        command += [
            "--tokenizer",
            f"kind=huggingface_auto,model={WEIGHTS}",
            "--output",
            f"kind=json,path={folder}/r.json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=_environment(folder))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (benchmark,) = json.loads(Path(folder, "r.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and len(requests["successful"]) == N_REQUESTS, requests["errored"]
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS, request["output_tokens"]
    return benchmark


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder, "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    run_checks(dict(vars()))
