"""Refusing a body costs no more than reading one: however many mistakes it has, few are listed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from app.api.native.routes import CompleteRequest
from app.api.openai.schemas import ChatRequest, CompletionsRequest
from app.api.score import ScoreRequest
from app.api.tokens import DetokenizeRequest, TokenizeRequest
from app.http.errors import from_validation
from tests.support.async_test import async_test
from tests.support.fake_app import running_app
from tests.support.keyed_server import Keyring

MODELS: tuple[type[BaseModel], ...] = (
    CompleteRequest,
    CompletionsRequest,
    ChatRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
N = 20_000
MOST_ERRORS = 300
_FIELDS = {f"f{i}": i for i in range(N)}
_WRONG: dict[str, dict[str, Any]] = {
    "unknown fields": _FIELDS,
    "fractions as ids": {"prompt": [1.5] * N, "tokens": [1.5] * N},
    "texts among ids": {"prompt": [1, "a"] * N, "tokens": [1, "a"] * N},
    "negative ids": {"prompt": [-1] * N, "tokens": [-1] * N},
    "nulls as prompts": {"prompt": [None] * N, "tokens": [None] * N},
    "lists of texts as prompts": {"prompt": [["a"]] * N},
    "lists of fractions as prompts": {"prompt": [[1.5]] * N},
    "bad keys of logit_bias": {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(N)}},
    "bad values of logit_bias": {"prompt": "a", "logit_bias": {f"{i}": "x" for i in range(N)}},
    "few bad keys of logit_bias": {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(300)}},
    "few bad values of logit_bias": {"prompt": "a", "logit_bias": {f"{i}": 101 for i in range(300)}},
    "numbers as stops": {"prompt": "a", "stop": [1] * N},
    "too many stops": {"prompt": "a", "stop": ["a"] * N},
    "texts as stop tokens": {"prompt": "a", "stop_token_ids": ["a"] * N},
    "fractions as stop tokens": {"prompt": "a", "stop_token_ids": [1.5] * N},
    "a list as schema": {"prompt": "a", "json_schema": [1] * N},
    "empty messages": {"messages": [{}] * N},
    "numbers as messages": {"messages": [1] * N},
    "messages without a role": {"messages": [{"content": "a"}] * 1000},
    "message of many fields": {"messages": [{"role": "user", **_FIELDS}]},
    "parts of other types": {"messages": [{"role": "user", "content": [{"type": "image"}] * N}]},
    "numbers as parts": {"messages": [{"role": "user", "content": [1] * N}]},
    "options of many fields": {"prompt": "a", "messages": [], "stream": True, "stream_options": _FIELDS},
    "every field is a list": {name: [{}] for model in MODELS for name in model.model_fields},
}


def _error(model: type[BaseModel], body: dict[str, Any]) -> ValidationError | None:
    """Why the body is refused; None if it is accepted."""
    try:
        model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error
    return None


@pytest.mark.parametrize("name", _WRONG)
def test_long_bodies_with_many_mistakes_give_few_errors(name: str) -> None:
    found = [(model, error) for model in MODELS if (error := _error(model, _WRONG[name]))]
    assert found
    assert {error.error_count() for _, error in found} <= set(range(1, MOST_ERRORS))
    assert all(len(str(from_validation(error, model.model_fields))) < 500 for model, error in found)


@pytest.mark.parametrize("model", MODELS)
def test_body_has_a_limited_number_of_fields(model: type[BaseModel]) -> None:
    body = {f"f{i}": 1 for i in range(257)}
    with pytest.raises(ValidationError) as raised:
        model.model_validate_json(json.dumps(body))
    error = from_validation(raised.value, model.model_fields)
    assert str(error) == "the body has 257 fields, at most 256 are allowed: GET /docs lists all fields"
    assert (error.status, error.param, error.code) == (400, None, "too_many_parts")


def _errors(**fields: Any) -> list[tuple[tuple[int | str, ...], str]]:
    with pytest.raises(ValidationError) as raised:
        CompleteRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))
    return [(error["loc"], error["type"]) for error in raised.value.errors()]


def test_the_first_invalid_bias_is_the_one_that_is_named() -> None:
    good = {str(i): i - 100 for i in range(200)}
    assert _errors(logit_bias={**good, "1000": 101, "x": 1}) == [(("logit_bias", "1000"), "less_than_equal")]
    assert _errors(logit_bias={**good, "-1": 1, "1000": 101}) == [
        (("logit_bias", "-1", "[key]"), "string_pattern_mismatch")
    ]
    assert _errors(logit_bias={**good, "7": True}) == [(("logit_bias", "7"), "float_type")]
    assert _errors(logit_bias={str(i): 1 for i in range(301)}) == [(("logit_bias",), "too_long")]
    assert _errors(logit_bias={"7": math.nan})[0][0] == ("logit_bias", "7")
    assert _errors(logit_bias=[1])[0] == (("logit_bias",), "dict_type")


def test_valid_biases_are_accepted_as_they_are() -> None:
    biases = {"0": -100, "7": 0.5, "999999999": 100.0}
    request = CompleteRequest.model_validate_json(json.dumps({"prompt": "a", "logit_bias": biases}))
    assert request.logit_bias == biases


@pytest.mark.parametrize("ids", [[1.0, 2, 3.0], [0.0], [2.0**31 - 1]])
def test_whole_numbers_are_ids_however_they_are_written(ids: list[float]) -> None:
    request = DetokenizeRequest.model_validate_json(json.dumps({"tokens": ids}))
    assert request.tokens == [int(token) for token in ids]
    assert all(type(token) is int for token in request.tokens)


@pytest.mark.parametrize(
    "ids",
    [[1.0, 1.5], [1.0, True], [1.0, "2"], [1.0, None], [1.0, -1.0], [1e300], [2.0**31], [10**400, 1.5], [1.0, [1]]],
)
def test_other_numbers_and_types_are_no_ids(ids: list[Any]) -> None:
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate_json(json.dumps({"tokens": ids}))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_infinite_numbers_are_no_ids(number: str) -> None:
    with pytest.raises(ValidationError):
        DetokenizeRequest.model_validate_json(f'{{"tokens": [1.0, {number}]}}')


_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "an invalid field": ("/v1/completions", {"prompt": "a", "n": 0}),
    "a field that is not supported": ("/v1/completions", {"prompt": "a", "xtc_probability": 0.5}),
    "a misspelled field": ("/v1/chat/completions", {"messages": [{"role": "user"}], "temprature": 1}),
    "another model": ("/v1/completions", {"prompt": "a", "model": "other"}),
    "an id outside the vocabulary": ("/detokenize", {"tokens": [2**30]}),
    "a deadline beyond the limit": ("/complete", {"prompt": "a", "max_tokens": 1, "deadline_ms": 2**31 - 1}),
    "a score with such a deadline": ("/score", {"prompt": "a", "deadline_ms": 2**31 - 1}),
    "more tokens than a minute has": ("/v1/completions", {"prompt": "a", "max_tokens": 100}),
}


@pytest.mark.slow
@async_test
async def test_every_refused_body_counts_as_a_request(weights: Path, tmp_path: Path) -> None:
    ring = Keyring.of(tmp_path / "keys")
    for name in _REFUSED:
        ring.add(name.replace(" ", "-"), requests_per_minute=1, tokens_per_minute=10)
    found: dict[str, list[int]] = {}
    async with running_app(weights, keys_file=ring.file) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            for name, (path, body) in _REFUSED.items():
                headers = ring.headers(name.replace(" ", "-"))
                found[name] = [(await client.post(path, json=body, headers=headers)).status_code for _ in range(2)]
    first = {name: 404 if name == "another model" else 400 for name in _REFUSED}
    assert found == {name: [status, 429] for name, status in first.items()}
