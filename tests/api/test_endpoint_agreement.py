"""One request in four forms: both APIs, streamed or not, also interrupted and resumed. All give the same completion."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from app.generation.receipt import SAMPLING_FIELDS
from tests.support.completion_client import fetch_completion, parse_events, stream, stream_chunks
from tests.support.servers import Server

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_STOPS = st.lists(st.sampled_from(["e", " t", "\u201c", "ab", "\ufffd", "o"]), max_size=2, unique=True)
_BODIES = st.fixed_dictionaries(
    {"prompt": st.one_of(_TEXT, st.lists(_TEXT, min_size=1, max_size=3)), "seed": st.integers(0, 2**53)},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 24),
        "min_tokens": st.integers(0, 3),
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "top_p": st.sampled_from([0.9, 1]),
        "stop": _STOPS,
        "stop_token_ids": st.lists(st.integers(1, 319), max_size=20, unique=True),
        "logprobs": st.integers(0, 3),
        "echo": st.booleans(),
        "ignore_eos": st.booleans(),
        "truncate_prompt_tokens": st.integers(1, 8),
    },
).map(lambda body: body | {"max_tokens": max(body.get("max_tokens", 16), body.get("min_tokens", 0))})
_FACTS = ("index", "finish_reason", "stop_reason")


def _facts(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(choice[name] for name in _FACTS) for choice in choices]


@settings(max_examples=40)
@given(body=_BODIES, include=st.booleans(), cut=st.integers(0, 60))
def test_all_request_forms_give_the_same_completion(
    server: Server, body: dict[str, Any], include: bool, cut: int
) -> None:
    native = {**body, "include_stop": include}
    answer = fetch_completion(server.url, **native)
    if not (include or body.get("echo") or body.get("min_tokens")):
        assert not any(stop in choice["text"] for stop in body.get("stop", []) for choice in answer["choices"])
    _compare_native(server, answer, stream(server.url, **native), cut)
    openai = {**body, "include_stop_str_in_output": include}
    response = httpx.post(f"{server.url}/v1/completions", json=openai, timeout=60)
    assert response.status_code == 200, response.text
    _compare_openai(
        answer, response.json(), stream_chunks(server.url, **openai, stream_options={"include_usage": True})
    )


def _compare_native(server: Server, answer: dict[str, Any], events: list[Any], cut: int) -> None:
    name, after = events[0].data["id"], min(cut, len(events) - 1)
    assert [event.id for event in events] == [f"{name}:{number}" for number in range(len(events))]
    assert [event.name for event in events] == ["start", *["token"] * (len(events) - 2), "done"]
    resumed = httpx.get(f"{server.url}/complete/{name}/events", params={"after": after - 1}, timeout=60)
    assert parse_events(resumed.text) == events[after:]
    for choice in answer["choices"]:
        mine = [e.data for e in events if e.name == "token" and e.data["index"] == choice["index"]]
        assert "".join(data["text"] for data in mine) == choice["text"]
        sent = [token for data in mine for token in data.get("tokens", [])]
        assert sent == (choice["tokens"] or [])
    done = events[-1].data
    assert _facts(done["choices"]) == _facts(answer["choices"])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    n_prompt, n_completion, n_total = (done["usage"][key] for key in counts)
    assert [n_prompt, n_completion, n_total] == [answer["usage"][key] for key in counts]
    assert n_prompt == events[0].data["prompt_tokens"] and n_total == n_prompt + n_completion
    assert done["receipt"] == answer["receipt"] and done["receipt"]["seed"] == events[0].data["seed"]


def _compare_openai(answer: dict[str, Any], other: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    assert _facts(other["choices"]) == _facts(answer["choices"])
    assert parts[-1]["choices"] == [], "a separate chunk has the usage"
    for mine, theirs in zip(answer["choices"], other["choices"], strict=True):
        assert theirs["text"] == mine["text"]
        pieces = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == mine["index"]]
        assert "".join(piece["text"] for piece in pieces) == mine["text"]
        assert all(piece["text"] for piece in pieces[1:-1]), "the first one may echo an empty prompt"
        assert pieces[-1]["finish_reason"] == mine["finish_reason"]
        if mine["tokens"] is not None:
            _compare_tokens(mine, theirs["logprobs"], answer["receipt"]["settings"])
            for key, values in theirs["logprobs"].items():
                assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][key]] == values
    for key in ("prompt_tokens", "completion_tokens"):
        assert other["usage"][key] == parts[-1]["usage"][key] == answer["usage"][key]


def _compare_tokens(choice: dict[str, Any], legacy: dict[str, Any], settings: dict[str, Any]) -> None:
    """The tokens of a choice, and its log-probabilities in OpenAI's legacy shape."""
    tokens, text, n_top = choice["tokens"], choice["text"], settings["logprobs"]
    assert legacy["token_logprobs"] == [token["logprob"] for token in tokens]
    without = [index for index, token in enumerate(tokens) if token["logprob"] is None]
    assert without in ([], [0]) if settings["echo"] else not without
    for token, name, top in zip(tokens, legacy["tokens"], legacy["top_logprobs"], strict=True):
        if token["logprob"] is None:
            assert top is None, "the first token of a prompt has no context"
        else:
            values = [other["logprob"] for other in token["top"]]
            assert len(values) == n_top and values == sorted(values, reverse=True)
            assert all(token["logprob"] <= best for best in values[:1])
            assert top[name] == token["logprob"] and len(top) - n_top in (0, 1)
    if choice["finish_reason"] == "length":  # no stop string cut a token short
        assert text == b"".join(bytes(token["bytes"]) for token in tokens).decode("utf-8", "replace")
        for token, name, offset in zip(tokens, legacy["tokens"], legacy["text_offset"], strict=True):
            assert not token["bytes"] or name.startswith("bytes:") or text.startswith(name, offset)


NARROWING = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "typical_p": 0.3,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
}


def test_each_sampling_field_changes_the_completion_alike_on_both_apis(server: Server) -> None:
    """A field that is accepted but never reaches the sampler would change nothing."""
    assert NARROWING.keys() == set(SAMPLING_FIELDS)
    body = {"prompt": "Once upon", "max_tokens": 30, "temperature": 1.2, "seed": 5, "ignore_eos": True}
    plain = fetch_completion(server.url, **body)["choices"][0]["text"]
    for name, value in NARROWING.items():
        changed = body | {name: value}
        text = fetch_completion(server.url, **changed)["choices"][0]["text"]
        assert text != plain, name
        response = httpx.post(f"{server.url}/v1/completions", json=changed, timeout=60)
        assert response.json()["choices"][0]["text"] == text, name
