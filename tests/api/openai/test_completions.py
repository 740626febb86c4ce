"""POST /v1/completions: OpenAI's shapes, strict where clients are, and the same text as the native endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import chunks, whole
from tests.support.model.tiny_models import tiny_weights
from tests.support.promise_figures import Promise
from tests.support.servers import Server, running_server

pytestmark = pytest.mark.slow

SOME: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 12, "temperature": 1.1, "seed": 7, "ignore_eos": True}


def _post(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def _whole(server: Server, **body: Any) -> dict[str, Any]:
    response = _post(server, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _chunks(server: Server, **body: Any) -> list[dict[str, Any]]:
    return chunks(server.url, **body)


def test_usage_comes_in_a_chunk_of_its_own_where_asked(server: Server, promise: Promise) -> None:
    parts = _chunks(server, **SOME, stream_options={"include_usage": True})
    assert [c["usage"] for c in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 12
    many = {**SOME, "max_tokens": 200}  # so many that the first chunk is written before the last token is there
    options = {"include_usage": True, "continuous_usage_stats": True}

    def count() -> list[int]:
        return [c["usage"]["completion_tokens"] for c in _chunks(server, **many, stream_options=options)]

    counts = promise.measured(count, lambda counts: counts[0] < 200)  # one that got no CPU meanwhile writes all at once
    assert counts == sorted(counts) and counts[-1] == 200 and counts[0] < 200


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_have_the_legacy_shape_and_add_up_in_streams(server: Server, echo: bool) -> None:
    body = {**SOME, "logprobs": 3, "echo": echo, "max_tokens": 40}
    choice = _whole(server, **body)["choices"][0]
    shape, n_prompt = choice["logprobs"], 0
    if echo:
        n_prompt = _whole(server, **body)["usage"]["prompt_tokens"]
        assert shape["token_logprobs"][0] is None and shape["top_logprobs"][0] is None
    assert len(shape["tokens"]) == 40 + n_prompt
    for index, (name, own, top) in enumerate(
        zip(shape["tokens"], shape["token_logprobs"], shape["top_logprobs"], strict=True)
    ):
        if index or not echo:
            assert top[name] == own and 3 <= len(top) <= 4
    data = b"".join(bytes(t["bytes"]) for t in whole(server.url, **body)["choices"][0]["tokens"])
    assert choice["text"] == data.decode("utf-8", "replace")
    for name, offset in zip(shape["tokens"], shape["text_offset"], strict=True):
        assert name.startswith("bytes:") or choice["text"].startswith(name, offset)
    parts = [c["choices"][0] for c in _chunks(server, **body)]
    for key, values in shape.items():
        assert [v for c in parts if c["logprobs"] for v in c["logprobs"][key]] == values
    assert "".join(c["text"] for c in parts) == choice["text"]
    assert all(c["text"] for c in parts[:-1])


def test_best_of_answers_the_likeliest_of_those_drawn(server: Server) -> None:
    body = {**SOME, "logprobs": 0}
    drawn = _whole(server, **body, n=6)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 12 for c in drawn]
    ranked = [drawn[i]["text"] for i in sorted(range(6), key=lambda i: -means[i])]
    best = _whole(server, **SOME, n=2, best_of=6)
    assert [c["text"] for c in best["choices"]] == ranked[:2]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 6 * 12
    assert _post(server, **SOME, n=2, best_of=1).json()["error"]["type"] == "invalid_request_error"
    assert "best_of" in _post(server, **SOME, best_of=2, stream=True).json()["error"]["message"]


def test_null_means_the_default_for_every_field(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = document["components"]["schemas"]["CompletionsRequest"]
    nothing = dict.fromkeys(schema["properties"])
    assert len(nothing) > 30
    answer = _whole(server, **nothing)
    assert answer["usage"]["completion_tokens"] <= 16
    assert answer["usage"]["prompt_tokens"] == 1, "an absent prompt starts from nothing"


def test_unknown_fields_are_accepted_and_named(server: Server) -> None:
    assert "warnings" not in _whole(server, **SOME)
    (warning,) = _whole(server, **SOME, temprature=0.1)["warnings"]
    assert "temprature" in warning


def test_options_without_effect_are_named(server: Server) -> None:
    warnings = _whole(server, **SOME, stream_options={"include_usage": True, "colour": 1})["warnings"]
    assert len(warnings) == 2
    assert "stream_options.colour" in warnings[0] and "without stream" in warnings[1]


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [("model", "other", 404), ("temperature", -1, 400), ("n", 0, 400), ("prompt", [[]], 200), ("stop", [""], 400),
     ("best_of", 17, 400), ("stream_options", 5, 400), ("logprobs", True, 400), ("response_format", 5, 400)],
)  # fmt: skip
def test_errors_have_the_one_shape(server: Server, field: str, value: Any, status: int) -> None:
    response = _post(server, **{**SOME, field: value})
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert error["param"] == field
        assert error["request_id"] == response.headers["x-request-id"]


def test_silence_is_broken_by_a_single_line_that_every_client_skips(tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "tiny", context=16384)
    sabotage = "import app.api.openai.responder as answer; answer.PING_SECONDS = 0.2"
    # The first stream is suspended once 4,096 tokens wait for its reader, with native kernels too soon.
    flags = ("--max-running", "1", "--kernels", "torch")
    with running_server(tmp_path, weights, *flags, sabotage=sabotage) as server:
        busy = {"prompt": "a", "max_tokens": 16000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=busy, timeout=60) as first:
            parts = first.iter_text()
            next(parts)
            with httpx.stream("POST", f"{server.url}/v1/completions", json={**busy, "max_tokens": 2}) as second:
                text = next(second.iter_text())
        assert text.replace(": ping\n", "") == "", "nothing but the sign of life while it waits"
