"""POST /score: its results equal a forward pass of the model, for every form of input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model.checkpoint.checkpoint import load
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from tests.support.servers import Server

pytestmark = pytest.mark.slow

TEXTS = ["Once upon a time there was a fox", "caf\u00e9 \U0001f98a", "The moon answered him. " * 16]


def _scores(url: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx.post(f"{url}/score", json=body, timeout=60)
    assert response.status_code == 200, response.text
    scores: list[dict[str, Any]] = response.json()["scores"]
    return scores


def _decoder(weights: Path) -> Decoder:
    return load(weights, device=torch.device("cpu"), dtype=torch.float32).decoder


def test_scores_equal_those_of_a_forward_pass(server: Server, weights: Path) -> None:
    scores = _scores(server.url, prompt=TEXTS, logprobs=5)
    tokenizer, decoder = Tokenizer.load(weights), _decoder(weights)
    for text, score in zip(TEXTS, scores, strict=True):
        ids = tokenizer.encode(text)
        expected_TV = logits(decoder, ids).log_softmax(-1)
        reported = score["tokens"]
        assert [token["id"] for token in reported] == ids
        assert reported[0]["logprob"] is None and reported[0]["top"] == []
        for index in range(1, len(ids)):
            assert reported[index]["logprob"] == pytest.approx(float(expected_TV[index - 1, ids[index]]), abs=1e-4)
            best = expected_TV[index - 1].topk(5).values.tolist()
            assert [top["logprob"] for top in reported[index]["top"]] == pytest.approx(best, abs=1e-4)
        total = sum(token["logprob"] for token in reported[1:])
        assert score["logprob"] == pytest.approx(total)
        assert score["perplexity"] == pytest.approx(math.exp(-total / (len(ids) - 1)))
        n_bytes = sum(len(token["bytes"]) for token in reported[1:])
        assert score["bits_per_byte"] == pytest.approx(-total / math.log(2) / n_bytes)


def test_batched_and_cached_scores_equal_those_of_each_text_alone(server: Server) -> None:
    together = _scores(server.url, prompt=TEXTS, logprobs=2)
    for index, text in enumerate(TEXTS):
        (alone,) = _scores(server.url, prompt=text, logprobs=2)
        assert {**alone, "index": index} == together[index]


def test_one_token_has_no_score(server: Server) -> None:
    (score,) = _scores(server.url, prompt=[70])
    assert (score["logprob"], score["n_scored"], score["perplexity"], score["bits_per_byte"]) == (0.0, 0, None, None)


def test_text_longer_than_the_context_is_refused_with_what_score_accepts(server: Server) -> None:
    for prompt in ("x " * 9000, [70] * 9000):
        response = httpx.post(f"{server.url}/score", json={"prompt": prompt})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].endswith("shorten the prompt, or score it in parts")


def test_native_echo_reports_the_same_scores(server: Server) -> None:
    (score,) = _scores(server.url, prompt=TEXTS[0], logprobs=3)
    body = {"prompt": TEXTS[0], "echo": True, "logprobs": 3, "max_tokens": 0, "stream": False}
    choice = httpx.post(f"{server.url}/complete", json=body).json()["choices"][0]
    assert choice["tokens"] == score["tokens"] and choice["text"] == TEXTS[0]
