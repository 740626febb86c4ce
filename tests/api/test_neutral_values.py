"""Fields without effect refuse no request: any user, empty stops, and other values that ask for nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.api.openai.responder import _HOLE
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow

BODY = {"prompt": "Once upon", "max_tokens": 3, "seed": 5}
USERS = (
    "",
    "ada@example.com",
    "Ada Lovelace",
    "auth0|5f7c8ec7",
    "\u00fcser \U0001f98a",
    "x" * 300,
    "\0",
    "a\nb\r\ndata: c",
    "x" * 1024,
)


@pytest.fixture(scope="module")
def fake_server(serve_module: Services) -> Server:
    """The service with the fake engine."""
    return serve_module(fake_ms=0.1)


def _post(server: Server, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={**BODY, "stream": False, **fields}, timeout=60)


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
def test_any_user_is_echoed(fake_server: Server, path: str) -> None:
    for user in USERS:
        response = _post(fake_server, path, user=user)
        assert response.status_code == 200 and response.json()["user"] == user, response.text
    assert _post(fake_server, path, user="\u00e9" * 9000).json()["user"] == "\u00e9" * 1024
    assert _post(fake_server, path, user=5).status_code == 400


@pytest.mark.parametrize("user", USERS)
def test_any_user_leaves_the_frames_of_a_stream_whole(fake_server: Server, user: str) -> None:
    response = _post(fake_server, "/v1/completions", user=user, stream=True)
    plain = _post(fake_server, "/v1/completions", stream=True)
    assert response.text.count("\n\n") == plain.text.count("\n\n")
    assert response.text.endswith("data: [DONE]\n\n") and _HOLE not in response.text


def test_score_takes_any_user(server: Server) -> None:
    response = httpx.post(f"{server.url}/score", json={"prompt": "a b", "user": "ada@example.com"}, timeout=60)
    assert response.json()["user"] == "ada@example.com"


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": ""},
        {"logprobs": False},
        {"stop": ""},
        {"stop": [""]},
        {"stop": ["", "never there"]},
        {"stop": [f"never {i}" for i in range(64)]},
        {"n": 1},
        {"logit_bias": {}},
        {"stop_token_ids": []},
    ],
)
def test_values_that_ask_for_nothing_change_nothing(fake_server: Server, path: str, fields: dict[str, Any]) -> None:
    texts = [choice["text"] for choice in _post(fake_server, path).json()["choices"]]
    response = _post(fake_server, path, **fields)
    assert response.status_code == 200, response.text
    assert [choice["text"] for choice in response.json()["choices"]] == texts


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
def test_up_to_64_continuations(fake_server: Server, path: str) -> None:
    choices = _post(fake_server, path, n=64, max_tokens=8).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(64))
    assert len({choice["text"] for choice in choices}) == 64


def test_the_best_of_64(server: Server) -> None:
    choices = _post(server, "/v1/completions", n=1, best_of=64).json()["choices"]
    assert len(choices) == 1


def _texts(response: httpx.Response) -> list[str]:
    return [choice["text"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("n", [1, 3])
def test_equal_prompts_get_different_texts_without_a_seed(fake_server: Server, n: int) -> None:
    body = {"prompt": ["a", "b", "a", "a"], "n": n, "seed": None, "max_tokens": 12}
    for path in ("/complete", "/v1/completions"):
        texts = _texts(_post(fake_server, path, **body))
        assert len(set(texts)) == len(texts) == 4 * n
    response = _post(fake_server, "/complete", **body)
    receipt = response.json()["receipt"]
    settings = {name: value for name, value in receipt["settings"].items() if value is not None}
    again = {**settings, "prompt": body["prompt"], "seed": receipt["seed"]}
    assert settings["vary_equal_prompts"] is True
    assert _texts(_post(fake_server, "/complete", **again)) == _texts(response)


def test_equal_prompts_get_equal_texts_with_a_seed_unless_they_are_to_vary(fake_server: Server) -> None:
    for path in ("/complete", "/v1/completions"):
        one = _texts(_post(fake_server, path, prompt="a", n=2, max_tokens=12))
        assert _texts(_post(fake_server, path, prompt=["a", "a"], n=2, max_tokens=12)) == [*one, *one]
        varied = _texts(_post(fake_server, path, prompt=["a", "a"], n=2, max_tokens=12, vary_equal_prompts=True))
        assert varied == _texts(_post(fake_server, path, prompt="a", n=4, max_tokens=12))


def test_prompts_that_differ_do_not_depend_on_each_other_without_a_seed(fake_server: Server) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 12}
    varied = _texts(_post(fake_server, "/complete", **body, vary_equal_prompts=True))
    assert varied == _texts(_post(fake_server, "/complete", **body))
