"""Likely mistakes in the first hour: each error tells the user what to do next.

Only those whose messages no other test checks; typos in fields, unknown models and hosts, and bad values are in
tests/api, flags of serve and train with their verbs, misspelled verbs in test_verbs.py, `bench` without a service in
tests/benchmarks/test_load.py.
"""

from __future__ import annotations

import stat
from pathlib import Path

import httpx
import pytest

from app.__main__ import main
from tests.support.keyed_server import Keyring
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(serve_module: Services) -> Server:
    return serve_module("--max-body-bytes", "100000", fake_ms=0)


BODIES = [
    (b"{'prompt':'a'}", "the body is not valid JSON: key must be a string at line 1 column 2"),
    (b'["a"]', "the body must be a JSON object"),
    (b'{"max_tokens":5}', "prompt is required"),
    (b'{"promt":"a"}', "prompt is required: 'promt' is not a field"),
    (b'{"prompt":"a","logit_bias":{"the":1}}', 'logit_bias: each key must be a token id, such as "17"'),
    (b'{"prompt":"a","request_id":"a b"}', "request_id: must consist of letters, digits, _ and -"),
    (b'{"prompt":"a","max_tokens":"100"}', "max_tokens: Input should be a valid integer"),
    (b'{"prompt":"' + b"x " * 9000 + b'"}', "shorten the prompt, or keep only its end with truncate_prompt_tokens"),
    (b'{"prompt":"' + b"x" * 100_000 + b'"}', "shorten it, or start the service with a larger --max-body-bytes"),
]


@pytest.mark.parametrize(("body", "hint"), BODIES, ids=lambda part: repr(part[:30]))
def test_invalid_body_error_shows_a_valid_one(service: Server, body: bytes, hint: str) -> None:
    headers = {"content-type": "application/json"}
    assert hint in httpx.post(f"{service.url}/complete", content=body, headers=headers).json()["error"]["message"]


def test_errors_for_wrong_paths_methods_and_types_name_the_right_one(service: Server) -> None:
    def message(method: str, path: str, **options: object) -> str:
        return str(httpx.request(method, service.url + path, **options).json()["error"]["message"])  # type: ignore[arg-type]

    assert message("POST", "/generate") == "there is no route /generate: GET /docs lists the routes"
    assert message("GET", "/complete").endswith("use POST")
    assert "(curl: -H 'content-type: application/json')" in message("POST", "/complete", content=b'{"prompt":"a"}')


def test_invalid_key_error_names_the_command_that_creates_one(serve_module: Services, tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys.json")
    ring.add("alice")
    service = serve_module(ring=ring, fake_ms=0)
    response = httpx.get(f"{service.url}/v1/models", headers={"authorization": "Bearer ink-wrong"})
    assert "inkstream keys add NAME" in response.json()["error"]["message"]


COMMANDS = [
    (("serve", "--host", "http://0.0.0.0"), "without http:// and port"),
    (("complete", "hello", "world"), "; a text with spaces stands in quotes: inkstream complete 'hello world'"),
    (("complete", "a", "--url", "http://127.0.0.1:9/v1"), "leave /v1 out (http://127.0.0.1:9)"),
    (("keys", "revoke", "bob", "--keys-file", "{keys}"), "inkstream keys list shows the names"),
    (("keys", "add", "alice", "--keys-file", "{keys}"), "(inkstream keys revoke alice)"),
    (("keys", "add", "alice", "--keys-file", "/no/such/folder/keys.json"), "name one in a folder that exists"),
]


@pytest.mark.parametrize(("command", "hint"), COMMANDS, ids=lambda part: " ".join(part)[:40])
def test_wrong_command_suggests_the_right_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...], hint: str
) -> None:
    keys = tmp_path / "keys.json"
    assert main(["keys", "add", "alice", "--keys-file", str(keys)]) == 0
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    capsys.readouterr()
    words = [word.replace("{keys}", str(keys)) for word in command]
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code in (1, 2) and hint in error and error.count("\n") == 1, error
