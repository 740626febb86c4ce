"""Simon Willison's llm, the command: a model of extra-openai-models.yaml that completes. Argument: the service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from checks import run_checks

URL = f"{sys.argv[1]}/v1"
PROMPT = "Once upon a time"
MODEL = json.load(urllib.request.urlopen(f"{URL}/models"))["data"][0]["id"]
HOME = Path(tempfile.mkdtemp())
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: ink\n  model_name: {json.dumps(MODEL)}\n  api_base: {URL}\n  completion: true\n"
)


def check_the_model_is_listed() -> None:
    assert "OpenAI Completion: ink" in llm("models")


def check_stream_equals_the_whole_response() -> None:
    asked = ("-m", "ink", "-o", "max_tokens", "20", "-o", "seed", "7", PROMPT)
    text = llm("prompt", *asked)
    assert len(text) > 10 and llm("prompt", "--no-stream", *asked) == text


def check_log_probabilities_and_usage_are_logged() -> None:
    llm("prompt", "-m", "ink", "-o", "max_tokens", "5", "-o", "logprobs", "2", "-o", "temperature", "0", PROMPT)
    (entry,) = json.loads(llm("logs", "-n", "1", "--json"))
    response = entry["response_json"]
    assert response["usage"]["completion_tokens"] == len(response["logprobs"]) == 5
    assert entry["response"] == "".join(token["text"] for token in response["logprobs"])


def check_a_conversation_continues() -> None:
    assert llm("prompt", "-m", "ink", "-c", "-o", "max_tokens", "5", "And then")


def check_an_error_is_reported() -> None:
    message = llm("prompt", "-m", "ink", "-o", "top_p", "1", "-o", "max_tokens", "3", "word " * 9000, fails=True)
    assert "tokens" in message and "Traceback" not in message


def llm(*arguments: str, fails: bool = False) -> str:
    """The command's stdout, or its stderr if it must fail."""
    environment = {**os.environ, "LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "none"}
    command = [Path(sys.executable).parent / "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


if __name__ == "__main__":
    run_checks(dict(vars()))
