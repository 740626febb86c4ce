"""Several continuations of several prompts in one response: indexes, seeds, usage, echo, stops, receipts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.completion_client import fetch_completion, stream
from tests.support.servers import Server

SOME: dict[str, Any] = {"max_tokens": 12, "temperature": 1.1, "seed": 7, "ignore_eos": True}


def _texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_choices_follow_the_order_of_prompts_and_equal_those_of_each_prompt_alone(server: Server) -> None:
    together = _texts(fetch_completion(server.url, prompt=["Once", "The moon"], n=3, **SOME))
    alone = [_texts(fetch_completion(server.url, prompt=prompt, n=3, **SOME)) for prompt in ("Once", "The moon")]
    assert together == [*alone[0], *alone[1]]
    assert _texts(fetch_completion(server.url, prompt="Once", **SOME)) == alone[0][:1]


def test_greedy_choices_are_equal_and_a_prompt_counts_once(server: Server) -> None:
    answer = fetch_completion(server.url, prompt="Once upon", n=4, max_tokens=5, temperature=0, ignore_eos=True)
    assert len(set(_texts(answer))) == 1
    single = fetch_completion(server.url, prompt="Once upon", max_tokens=5, temperature=0, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 4 * 5
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 20


def test_bad_prompt_in_a_batch_is_named_and_no_prompt_runs(server: Server) -> None:
    body = {"prompt": [[1], [320]], "stream": False}
    error = httpx.post(f"{server.url}/complete", json=body).json()["error"]
    assert "prompt 1" in error["message"] and error["param"] == "prompt"


def test_receipts_reproduce_completions_under_load(server: Server) -> None:
    kinds: list[dict[str, Any]] = [
        {"prompt": "Once", "n": 3, "typical_p": 0.9, "frequency_penalty": 0.3},
        {"prompt": "Once", "top_k": 40, "logit_bias": {"5": -3.5}, "presence_penalty": 0.5},
        {"prompt": ["The moon", "An owl"], "top_p": 0.8, "min_p": 0.05, "logprobs": 2, "echo": True},
        {"prompt": [5, 6, 7], "repetition_penalty": 1.3, "stop": ["e"], "include_stop": True},
        {"prompt": "Two", "regex": "[a-z ]{5,20}", "n": 2},
    ]
    firsts = [fetch_completion(server.url, **kind, max_tokens=20, temperature=1.2) for kind in kinds]
    bodies = [
        {"prompt": kind["prompt"], "seed": first["receipt"]["seed"], **first["receipt"]["settings"]}
        for kind, first in zip(kinds, firsts, strict=True)
    ]
    with ThreadPoolExecutor(24) as pool:
        again = list(pool.map(lambda body: fetch_completion(server.url, **body), bodies * 6))
    for index, answer in enumerate(again):
        assert answer["choices"] == firsts[index % len(kinds)]["choices"]
        assert answer["receipt"] == firsts[index % len(kinds)]["receipt"]


def test_stop_tokens_end_the_completion_and_are_reported(server: Server) -> None:
    first = fetch_completion(server.url, prompt="Once", logprobs=0, **SOME)["choices"][0]
    token = first["tokens"][4]
    body = {"prompt": "Once", "stop_token_ids": [token["id"]], **SOME}
    cut = fetch_completion(server.url, **body)["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == token["id"]
    kept = fetch_completion(server.url, **body, include_stop=True)["choices"][0]
    assert kept["text"] == cut["text"] + token["text"]


def test_prompts_are_truncated_only_on_request_and_the_response_reports_it(server: Server) -> None:
    ids = [5 + i % 200 for i in range(300)]
    cut = fetch_completion(server.url, prompt=ids, truncate_prompt_tokens=20, **SOME)
    assert cut["truncated"] is True and cut["usage"]["prompt_tokens"] == 20
    short = fetch_completion(server.url, prompt=ids[-20:], truncate_prompt_tokens=20, **SOME)
    assert _texts(cut) == _texts(short) and "truncated" not in short


def test_client_supplied_names_are_echoed(server: Server) -> None:
    names = {"user": "someone_1", "request_id": "mine-2"}
    answer = fetch_completion(server.url, prompt="a", max_tokens=1, **names)
    assert {name: answer[name] for name in names} == names
    assert answer["id"] != "mine-2"
    start = stream(server.url, prompt="a", max_tokens=1, **names)[0]
    assert {name: start.data[name] for name in names} == names


@pytest.mark.parametrize("streamed", [True, False])
def test_more_choices_than_the_queue_fits_are_invalid(server: Server, streamed: bool) -> None:
    body = {"prompt": ["a"] * 100, "n": 16, "max_tokens": 1, "stream": streamed}
    response = httpx.post(f"{server.url}/complete", json=body)
    assert response.status_code == 400
    assert "1600" in response.json()["error"]["message"]


def test_more_log_probabilities_than_a_response_may_contain_are_refused(server: Server) -> None:
    body = {"prompt": [[5] * 250] * 60, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": False}
    response = httpx.post(f"{server.url}/complete", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert "200000" in response.json()["error"]["message"]
    assert httpx.post(f"{server.url}/complete", json={**body, "n": 1, "logprobs": 0}, timeout=60).status_code == 200
