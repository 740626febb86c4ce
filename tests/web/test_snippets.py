"""Runs the programs that the page generates (app/web/request/snippets.js): curl, Python and JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.nodejs import NODE
from tests.support.scripted_service import ScriptedService, scripted_service
from tests.support.servers import Server

if NODE is None or shutil.which("curl") is None:
    pytest.skip("no node (make install brings playwright's), or no curl on PATH", allow_module_level=True)

NASTY = (
    "it's \"quoted\" $HOME ${HOME} `id` $(id) \\ \\n \\u0041 %s !! #{x} ${'x'}\n\r\n\tJSON\n\nJSON\n"
    "EOF\u2028\u2029\x7f\x01\x00 \U0001f600 \u4e2d \u202e {{x}} f'{x}' \"\"\" ''' </script> \ufeff*/ // '''#"
)
LANGUAGES = {"curl": ["bash"], "python": [sys.executable], "node": [NODE, "--input-type=module"]}
PARAMETERS = [
    {"name": "stop", "kind": "texts"},
    {"name": "logit_bias", "kind": "json"},
    {"name": "regex", "kind": "text"},
]
EVENTS = (
    'event: start\ndata: {"seed": 1}\n\n',
    'event: token\ndata: {"index": 0, "text": "caf\\u00e9"}\n\n: ping\n\n',
    'event: token\ndata: {"index": 0, "text": " \\ud83d\\ude00\\n"}\n\n',
    'event: done\ndata: {"receipt": {}}\n\n',
)


@pytest.fixture(scope="module")
def recording() -> Iterator[ScriptedService]:
    """A service with a quote in its path."""
    with scripted_service() as service:
        service.url += "/it's/complete"
        yield service


@pytest.fixture(autouse=True)
def reset_response(recording: ScriptedService) -> None:
    """Resets the service's response before each test."""
    recording.status, recording.parts = 200, ["".join(EVENTS).encode()]


def generate_programs(url: str, prompt: str, typed: Mapping[str, str], *, keyed: bool = False) -> dict[str, str]:
    """Generates the program in each language, as the page does."""
    script = f"""
        import {{ readFileSync }} from "node:fs";
        import {{ snippet }} from "{ROOT}/app/web/request/snippets.js";
        import {{ requestFields }} from "{ROOT}/app/web/request/request-body.js";
        const {{ url, prompt, typed, keyed, parameters, languages }} = JSON.parse(readFileSync(0));
        const fields = requestFields(prompt, typed, parameters);
        const programs = languages.map((name) => [name, snippet(name, {{ url, fields, keyed }})]);
        console.log(JSON.stringify(Object.fromEntries(programs)));
    """
    given: dict[str, object] = {"url": url, "prompt": prompt, "typed": typed, "keyed": keyed, "parameters": PARAMETERS}
    given["languages"] = list(LANGUAGES)
    command = [NODE, "--input-type=module", "-e", script]
    done = subprocess.run(command, input=json.dumps(given), check=True, capture_output=True, text=True)
    programs: dict[str, str] = json.loads(done.stdout)
    return programs


def run_program(language: str, program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8", "NO_PROXY": "*", **environment}
    return subprocess.run(
        LANGUAGES[language], input=program, capture_output=True, text=True, cwd=folder, env=variables, timeout=60
    )


def test_any_text_is_sent_unchanged_and_never_executed(recording: ScriptedService, tmp_path: Path) -> None:
    typed = {
        "temperature": "0.7",
        "seed": "9223372036854775807",
        "stop": "\\n\n'$x'",
        "logit_bias": '{"5": -100,\n "6": 1e1, "__proto__": {"a": null}, "true": true, "x": [false, "null", -0.5e-3]}',
        "regex": NASTY.replace("\x00", ""),
    }
    expected = {
        "prompt": NASTY,
        "stream": True,
        "temperature": 0.7,
        "seed": 9223372036854775807,
        "stop": ["\n", "'$x'"],
        "logit_bias": json.loads(typed["logit_bias"]),
        "regex": typed["regex"],
    }
    for language, program in generate_programs(recording.url, NASTY, typed, keyed=True).items():
        done = run_program(language, program, tmp_path, INKSTREAM_KEY="ink-secret", HOME="/nowhere")
        assert done.returncode == 0, f"{language}: {done.stderr}\n{program}"
        assert recording.bodies[-1] == expected, language
        assert recording.keys[-1] == "Bearer ink-secret", language
        assert "INKSTREAM_KEY" in program
        shown = "".join(EVENTS) if language == "curl" else "caf\u00e9 \U0001f600\n"
        assert done.stdout == shown, language
    assert list(tmp_path.iterdir()) == []


def test_programs_for_a_service_without_keys_send_no_key(recording: ScriptedService, tmp_path: Path) -> None:
    for language, program in generate_programs(recording.url, "Once", {}).items():
        assert "KEY" not in program and run_program(language, program, tmp_path).returncode == 0
        assert recording.keys[-1] is None
        assert recording.bodies[-1] == {"prompt": "Once", "stream": True}


def test_programs_show_the_error_of_a_failed_request(recording: ScriptedService, tmp_path: Path) -> None:
    error = json.dumps({"error": {"message": "temperature: too hot"}})
    for status, body in [(400, error), (200, f"event: error\ndata: {error}\n\n")]:
        recording.status, recording.parts = status, [body.encode()]
        for language, program in generate_programs(recording.url, "Once", {}).items():
            done = run_program(language, program, tmp_path)
            assert "temperature: too hot" in done.stdout + done.stderr, language
            assert language == "curl" or done.returncode != 0


def test_a_long_text_is_not_passed_as_a_command_line_argument(recording: ScriptedService, tmp_path: Path) -> None:
    """Linux limits an argument to 128 KiB."""
    prompt = "all work and no play " * 10_000
    for language, program in generate_programs(recording.url, prompt, {}).items():
        assert run_program(language, program, tmp_path).returncode == 0
        assert recording.bodies[-1]["prompt"] == prompt, language


def test_programs_print_the_same_texts_of_the_real_service(server: Server, tmp_path: Path) -> None:
    url, body = f"{server.url}/complete", {"prompt": "Once", "stream": False, "seed": 5, "max_tokens": 4, "n": 2}
    texts = [choice["text"] for choice in httpx.post(url, json=body, timeout=60).json()["choices"]]
    programs = generate_programs(url, "Once", {"seed": "5", "max_tokens": "4", "n": "2"})
    for language in ("python", "node"):
        shown = run_program(language, programs[language], tmp_path).stdout
        assert normalize_line_ends(shown) == normalize_line_ends(
            "".join(f"[{i}] {text}\n" for i, text in enumerate(texts))
        ), language
    answer = json.loads(run_program("curl", programs["curl"], tmp_path).stdout)
    assert [choice["text"] for choice in answer["choices"]] == texts


def normalize_line_ends(text: str) -> str:
    """Replaces CR LF and CR by LF, as subprocess does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
