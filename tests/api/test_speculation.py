"""The field `speculate`, and what a response says of drafts."""

from __future__ import annotations

import httpx
import pytest

from tests.support.completion_client import fetch_completion
from tests.support.servers import Server

PROMPT = "one two three four, one two three four, one two three four, one two"


def test_text_is_the_same_with_and_without_drafts_and_timings_count_them(server: Server) -> None:
    fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    default, on, off = (
        fetch_completion(server.url, prompt=PROMPT, **fields, **more)
        for more in ({}, {"speculate": True}, {"speculate": False})
    )
    assert default["choices"] == on["choices"] == off["choices"]
    assert off["timings"]["drafted_tokens"] == off["timings"]["accepted_tokens"] == 0
    assert 0 <= on["timings"]["accepted_tokens"] <= on["timings"]["drafted_tokens"]
    assert "speculate" not in on["receipt"]["settings"], "it changes no text"


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
def test_speculate_that_is_no_boolean_is_refused(server: Server, path: str) -> None:
    response = httpx.post(f"{server.url}{path}", json={"prompt": "x", "speculate": "lookup", "max_tokens": 1})
    assert response.status_code == 400 and "speculate" in response.text
