"""The examples of docs/clients.md, run as they stand there against a running service."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest

from tests.support import ROOT
from tests.support.nodejs import NODE
from tests.support.servers import Server

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/clients.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _text(server: Server) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 7}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["text"])


def test_the_curl_example_streams(server: Server) -> None:
    (command,) = re.findall(r"^curl -N .*$", PAGE, re.MULTILINE)
    command = command.replace("localhost:8000", server.url.removeprefix("http://"))
    printed = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.startswith("data: {") and printed.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("program", PYTHON, ids=["openai", "httpx"])
def test_the_python_examples_print_the_text(program: str, server: Server) -> None:
    program = program.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == _text(server)


@pytest.mark.skipif(NODE is None, reason="no Node.js to run the JavaScript with")
def test_the_javascript_example_shows_the_text(server: Server) -> None:
    (program,) = re.findall(r"```js\n(.*?)```", PAGE, re.DOTALL)
    command = [NODE, "--input-type=module", "-e", program.replace("http://127.0.0.1:8000", server.url)]
    shown = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
    assert shown.replace("\n", "") == _text(server).replace("\n", "")
