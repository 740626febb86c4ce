"""The tokenizer endpoints and model metadata: round trips, character offsets, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer.tokenizer import SEPARATOR, Tokenizer
from tests.support.model.tiny_models import TEXT, VOCAB
from tests.support.servers import Server

_TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", "\0", "a\0b", "\ufeffx", "e\u0301", f"a{SEPARATOR}b", SEPARATOR, "\u2028\x7f", TEXT]
)


def _post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _refused(server: Server, path: str, body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@settings(max_examples=20)
@given(text=_TEXTS)
def test_text_to_tokens_to_text_is_exact(server: Server, text: str) -> None:
    answer = _post(server, "/tokenize", prompt=text)
    back = _post(server, "/detokenize", tokens=answer["tokens"])
    assert back["prompt"] == text
    assert answer["count"] == len(answer["tokens"]) == len(answer["pieces"])
    assert b"".join(bytes(piece["bytes"]) for piece in answer["pieces"]) == text.encode()
    pieces = [
        {**piece, "start": here["start"], "end": here["end"]}
        for piece, here in zip(back["pieces"], answer["pieces"], strict=True)
    ]
    assert pieces == answer["pieces"]


def test_each_piece_has_id_text_bytes_and_offsets(server: Server, weights: Path) -> None:
    text = f"The moon{SEPARATOR} \U0001f98b"
    answer = _post(server, "/tokenize", prompt=text, add_special_tokens=True)
    assert set(answer) == {"count", "max_model_len", "tokens", "pieces"}
    assert answer["tokens"] == Tokenizer.load(weights).encode(text)
    assert answer["max_model_len"] == 256
    assert [piece["id"] for piece in answer["pieces"]] == answer["tokens"]
    (special,) = [piece for piece in answer["pieces"] if piece["special"]]
    assert special == {
        "id": 0,
        "text": SEPARATOR,
        "bytes": list(SEPARATOR.encode()),
        "special": True,
        "start": 8,
        "end": 21,
    }
    last = answer["pieces"][-1]
    assert (last["text"], last["bytes"], text[last["start"] : last["end"]]) == ("\ufffd", [0x8B], "\U0001f98b")


def test_texts_longer_than_the_context_are_tokenized(server: Server) -> None:
    text = TEXT * 6  # responses are written in parts of 2,000 tokens, and 20,000 characters count as long
    answer = _post(server, "/tokenize", prompt=text, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["pieces"]) > 10 * answer["max_model_len"]
    assert len(text) > 20_000
    assert b"".join(bytes(piece["bytes"]) for piece in answer["pieces"]) == text.encode()
    assert _post(server, "/detokenize", tokens=answer["tokens"] * 5)["prompt"] == text * 5


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "required"),
        ("/tokenize", {"prompt": None}, "prompt", "string"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "string"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "unknown field"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "boolean"),
        ("/tokenize", b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        ("/tokenize", b'{"prompt": "\xff"}', None, "not valid JSON"),
        ("/detokenize", {"tokens": "a"}, "tokens", "array"),
        ("/detokenize", {"tokens": [0, VOCAB]}, "tokens", f"from 0 to {VOCAB - 1}"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "greater than"),
        ("/detokenize", {"tokens": [True]}, "tokens", "integer"),
        ("/detokenize", {"tokens": [1.5]}, "tokens", "integer"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", ""),
        ("/detokenize", {"tokens": [[1]]}, "tokens", "integer"),
        ("/detokenize", {"tokens": [1], "model": "x"}, "model", "unknown field"),
    ],
)
def test_invalid_fields_are_refused_by_name(
    server: Server, path: str, body: Any, param: str | None, message: str
) -> None:
    error = _refused(server, path, body)
    assert error["param"] == param
    assert message in error["message"]


def test_tokenizer_info_has_all_that_clients_read(server: Server) -> None:
    """lm-eval's remote tokenizer reads eos_token, bos_token and chat_template, and encodes their names."""
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert info == {
        "model": model["id"],
        "kind": "byte-level BPE",
        "vocab_size": VOCAB,
        "max_model_len": 256,
        "bos_token": SEPARATOR,
        "bos_token_id": 0,
        "add_bos_token": False,
        "eos_token": SEPARATOR,
        "eos_token_id": 0,
        "eos_token_ids": [0],
        "special_tokens": [{"id": 0, "text": SEPARATOR}],
        "chat_template": None,
    }
    assert _post(server, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [0]


def test_served_model_is_found_and_others_are_404(server: Server) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert httpx.get(f"{server.url}/v1/models/{listed['id']}").json() == listed
    for name in ("", "other", "meta/llama", "a%2Fb", listed["id"] + "/x"):
        response = httpx.get(f"{server.url}/v1/models/{name}")
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (404, "not_found_error", "model_not_found")
