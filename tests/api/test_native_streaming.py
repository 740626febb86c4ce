"""POST /complete over a real socket: events, parity without streaming and with running alone, early disconnects."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import parse_events, stream, text_of, whole
from tests.support.servers import Server, is_clean, running_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "seed": 7}


def test_a_stream_has_start_tokens_and_one_done_in_numbered_events(server: Server) -> None:
    events = stream(server.url, prompt="Once upon a time", max_tokens=20, seed=1, ignore_eos=True)
    names = [event.name for event in events]
    assert names[0] == "start" and names[-1] == "done"
    assert set(names[1:-1]) == {"token"}
    request_id = events[0].data["id"]
    assert [event.id for event in events] == [f"{request_id}:{n}" for n in range(len(events))]
    done = events[-1].data
    assert done["usage"]["completion_tokens"] == 20
    assert done["usage"]["total_tokens"] == 20 + events[0].data["prompt_tokens"]
    assert done["choices"] == [{"index": 0, "finish_reason": "length", "stop_reason": None}]
    assert re.fullmatch(r"[0-9a-f]{64}", done["receipt"]["weights_version"])
    assert done["receipt"]["seed"] == events[0].data["seed"] == 1
    assert done["timings"]["first_token_ms"] > 0


def test_headers_tell_proxies_to_keep_their_hands_off(server: Server) -> None:
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == parse_events(response.text)[0].data["id"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thirty_two_clients_at_once_get_what_each_gets_alone(tmp_path: Path, weights: Path, dtype: str) -> None:
    with running_server(tmp_path, weights, "--dtype", dtype, "--threads", "2") as server:
        _compare_alone_and_together(server)


def _compare_alone_and_together(server: Server) -> None:
    bodies = [{"prompt": f"Client {i} " * (1 + i % 9), "seed": i, "max_tokens": 40, "top_p": 0.9} for i in range(32)]
    alone = [whole(server.url, **body)["choices"] for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda body: whole(server.url, **body)["choices"], bodies))
    assert together == alone
    assert len({choices[0]["text"] for choices in alone}) > 16, "the texts were meant to differ"


def test_the_seed_that_was_used_is_returned_and_gives_the_text_again(server: Server) -> None:
    first = stream(server.url, prompt="The moon", max_tokens=25)
    again = stream(server.url, prompt="The moon", max_tokens=25, seed=first[0].data["seed"])
    assert text_of(first) == text_of(again)


def test_token_details_carry_bytes_and_ordered_alternatives(server: Server) -> None:
    answer = whole(server.url, prompt="The fox", max_tokens=30, seed=3, logprobs=5, ignore_eos=True)
    tokens = answer["choices"][0]["tokens"]
    assert len(tokens) == 30
    for token in tokens:
        assert len(token["top"]) == 5
        values = [candidate["logprob"] for candidate in token["top"]]
        assert values == sorted(values, reverse=True)
        assert token["logprob"] <= values[0]
    data = b"".join(bytes(token["bytes"]) for token in tokens)
    assert answer["choices"][0]["text"] == data.decode("utf-8", errors="replace")


def test_tokens_of_a_stop_string_are_not_shown_not_even_half_characters(server: Server) -> None:
    """The fox is four byte tokens to a tokenizer that never merged it."""
    body = {"prompt": "The fox", "max_tokens": 60, "seed": 3, "ignore_eos": True, "logprobs": 0}
    (choice,) = whole(server.url, **body)["choices"]
    text, pieces = choice["text"], [token["text"] for token in choice["tokens"]]
    starts = [len("".join(pieces[:i])) for i in range(len(pieces))]
    # A token that stands nowhere before: all of it is hidden.
    stop = next(p for p, start in zip(pieces, starts, strict=True) if start > 10 and text.find(p) == start)
    answer = whole(server.url, **body, stop=stop)
    choice = answer["choices"][0]
    assert (choice["stop_reason"], choice["text"]) == (stop, text[: text.index(stop)])
    shown = b"".join(bytes(token["bytes"]) for token in choice["tokens"])
    assert shown.decode("utf-8", errors="replace").startswith(choice["text"])
    assert len(choice["tokens"]) < answer["usage"]["completion_tokens"]


def test_a_second_request_finds_its_prompt_in_the_cache(server: Server) -> None:
    body = {"prompt": "A prompt that no other test sends, long enough for blocks. " * 4, "max_tokens": 5, "seed": 1}
    first, second = whole(server.url, **body), whole(server.url, **body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert second["choices"] == first["choices"]


def test_no_tokens_asked_for_gives_no_text(server: Server) -> None:
    answer = whole(server.url, prompt="x", max_tokens=0)
    assert answer["choices"][0] == {
        "index": 0, "text": "", "finish_reason": "length", "stop_reason": None, "tokens": None,
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_starts_from_nothing(server: Server, prompt: Any) -> None:
    assert whole(server.url, prompt=prompt, max_tokens=5, seed=1)["usage"]["prompt_tokens"] == 1


def test_ids_are_taken_as_they_are(server: Server) -> None:
    answer = whole(server.url, prompt=[65, 66, 67], max_tokens=2, seed=1)
    assert answer["usage"]["prompt_tokens"] == 3


def test_max_tokens_beyond_the_context_are_clamped_to_it(server: Server) -> None:
    answer = whole(server.url, prompt="Hi", max_tokens=100_000, ignore_eos=True, seed=1)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_cancelled_stream_ends_with_cancelled(tmp_path: Path, weights: Path) -> None:
    """Around the fake engine, with which it lasts for minutes: it still runs when the DELETE comes."""
    with running_server(tmp_path, weights, fake_ms=20) as server:
        body = {**LONG, "max_tokens": 8000}
        with httpx.stream("POST", f"{server.url}/complete", json=body, timeout=60) as response:
            request_id = response.headers["x-request-id"]
            lines = response.iter_lines()
            while next(lines) != "event: token":
                pass
            answer = httpx.delete(f"{server.url}/complete/{request_id}")
            rest = list(lines)
        assert answer.json() == {"id": request_id, "cancelled": True}
        done = json.loads(rest[-2].removeprefix("data: "))
        assert done["choices"][0]["finish_reason"] == "cancelled"
        assert done["usage"]["completion_tokens"] < 8000
        assert is_clean(server, 30.0)
        assert httpx.delete(f"{server.url}/complete/{request_id}").status_code == 404
