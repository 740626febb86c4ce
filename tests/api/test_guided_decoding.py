"""Guided decoding through the service: the output follows the grammar in every form of response."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import fetch_completion, joined_text, stream
from tests.support.servers import Server, running_server

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["merry", "sad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 200, "seed": 3}


def test_all_choices_and_streams_follow_the_schema(server: Server) -> None:
    response = fetch_completion(server.url, **BODY, json_schema=SCHEMA, n=3)
    texts = [choice["text"] for choice in response["choices"]]
    for choice in response["choices"]:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["text"])) == {"mood", "age"}
    assert joined_text(stream(server.url, **BODY, json_schema=SCHEMA)) == texts[0]
    assert fetch_completion(server.url, **BODY, json_schema=json.dumps(SCHEMA))["choices"][0]["text"] == texts[0]


def test_earlier_guided_requests_do_not_block_later_ones(tmp_path: Path, weights: Path) -> None:
    """Earlier requests: scored only, finished at once, or disconnected while waiting."""
    with running_server(tmp_path, weights, "--max-running", "2") as server:
        for _ in range(3):
            fetch_completion(server.url, **BODY | {"max_tokens": 0}, regex="[ab]+")
            fetch_completion(server.url, prompt=[5] * 256, max_tokens=9, regex="[ab]+")
            fetch_completion(server.url, **BODY, regex="a")
            for _ in range(3):
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(f"{server.url}/complete", json=BODY | {"regex": "[ab]{200}"}, timeout=0.05)
        assert fetch_completion(server.url, **BODY, regex="abc")["choices"][0]["text"] == "abc"


def test_output_follows_regex_and_grammar_to_the_last_token(server: Server) -> None:
    response = fetch_completion(server.url, **BODY, regex="[abc]{5}/", ignore_eos=True)
    assert re.fullmatch("[abc]{5}/", response["choices"][0]["text"])
    response = fetch_completion(server.url, **BODY, grammar='start: "<" /[xy]{3}/ ">"')
    assert re.fullmatch("<[xy]{3}>", response["choices"][0]["text"])


def test_engine_follows_the_rewritten_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
        "patternProperties": {"^score$": {"type": "integer"}, "^n$": {"type": "boolean"}},
        "required": ["score"],
        "additionalProperties": False,
    }
    response = fetch_completion(server.url, **BODY, json_schema=schema, n=8)
    for choice in response["choices"]:
        assert choice["finish_reason"] == "stop"
        names = [name for name, _ in json.loads(choice["text"], object_pairs_hook=list)]
        assert names in (["score"], ["score", "n"])


def test_refusal_names_the_place_in_the_schema(server: Server) -> None:
    inner = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": inner}}}}
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "response_format": schema})
    assert response.status_code == 400
    assert "at #/properties/a/properties/tags/uniqueItems: " in response.json()["error"]["message"]
