"""POST /v1/chat/completions: the model's template renders the messages to a prompt; the rest is a completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
MESSAGES = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": "a time"}]
SOME: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 10, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with a chat template, and a name in its manifest."""
    weights = tiny_weights(tmp_path_factory.mktemp("chat") / "tiny")
    (weights / MANIFEST_FILE).write_bytes(manifest_file({}, "plays-5m"))
    (weights / "chat_template.jinja").write_text(TEMPLATE)
    server = start_server(tmp_path_factory.mktemp("server"), weights)
    yield server
    assert stop_server(server) == 0


def _post(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def _plain(server: Server, **body: Any) -> dict[str, Any]:
    prompt = "[user] Once upon\n[assistant] a time\n[assistant]"
    choices = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **body}, timeout=60).json()["choices"]
    answer: dict[str, Any] = choices[0]
    return answer


def test_chat_is_a_completion_of_the_rendered_template(chat_server: Server) -> None:
    answer = _post(chat_server, **SOME).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    plain = _plain(chat_server, max_tokens=10, seed=4, ignore_eos=True)
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert choice["finish_reason"] == "length"


def test_content_parts_are_joined(chat_server: Server) -> None:
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]
    messages = [{"role": "user", "content": parts}, MESSAGES[1]]
    first, second = _post(chat_server, **SOME).json(), _post(chat_server, **{**SOME, "messages": messages}).json()
    assert first["choices"] == second["choices"]


def test_streamed_chat_equals_the_whole_response(chat_server: Server) -> None:
    body = {**SOME, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = _post(chat_server, **body).json()
    blocks = _post(chat_server, **body, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in answer["choices"]:
        parts = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [t for p in parts if p["logprobs"] for t in p["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == "length"
        assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == 20


def test_model_without_a_template_refuses_chats(server: Server) -> None:
    error = _post(server, **SOME).json()["error"]
    assert error["code"] == "no_chat_template" and "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("messages", []), ("messages", "hello"), ("messages", [{"content": "a"}]), ("top_logprobs", 3), ("logprobs", 3),
     ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])],
)  # fmt: skip
def test_bad_chats_are_refused(chat_server: Server, field: str, value: Any) -> None:
    response = _post(chat_server, **{**SOME, field: value})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


def test_default_max_tokens_is_the_rest_of_the_context(chat_server: Server) -> None:
    body = {name: value for name, value in SOME.items() if name != "max_tokens"}
    usage = _post(chat_server, **body).json()["usage"]
    assert usage["total_tokens"] == 256
    assert _post(chat_server, **body, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_named_model_is_served_under_its_name_and_its_directory(chat_server: Server) -> None:
    (model,) = httpx.get(f"{chat_server.url}/v1/models").json()["data"]
    assert model["id"] == "plays-5m"
    native = {"prompt": "x", "max_tokens": 2, "stream": False}
    for name in ("plays-5m", "tiny"):
        assert _post(chat_server, **SOME, model=name).json()["model"] == "plays-5m"
        plain = httpx.post(f"{chat_server.url}/v1/completions", json={**native, "model": name})
        assert plain.json()["model"] == "plays-5m"
        assert httpx.get(f"{chat_server.url}/v1/models/{name}").json() == model
    assert httpx.post(f"{chat_server.url}/complete", json=native).json()["model"] == "plays-5m"
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused = httpx.post(f"{chat_server.url}{path}", json={**SOME, "model": "weights-32m"})
        assert refused.status_code == 404 and "the served model is 'plays-5m'" in refused.json()["error"]["message"]
