"""The OpenAPI document is complete, and the service's answers match it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from app.api.dependencies import RequestRoute
from app.api.native.routes import CompleteRequest
from app.api.openai.schemas import ChatRequest, CompletionsRequest, CompletionsResponse
from app.api.schemas import EVENTS, SamplingFields
from app.common.settings import Settings
from app.common.types import SamplingParams
from app.main import create_app
from tests.support.completion_client import stream
from tests.support.servers import Server

METHODS = ("get", "post", "delete", "put", "patch", "head")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return create_app(Settings(weights=tmp_path_factory.mktemp("no weights"))).openapi()


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield f"{method.upper()} {path}", operation


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def test_every_route_is_told_with_words_and_a_place(document: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in document["tags"]}
    names = [operation["operationId"] for _, operation in _operations(document)]
    assert len(set(names)) == len(names) >= 10
    for name, operation in _operations(document):
        assert operation["description"], name
        assert len(operation["tags"]) == 1 and set(operation["tags"]) <= tags, name


def test_every_field_is_told(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name
        for field, field_schema in schema.get("properties", {}).items():
            assert "$ref" in field_schema or field_schema.get("description"), f"{name}.{field}"


def test_every_reference_leads_somewhere_and_everything_is_referred_to(document: dict[str, Any]) -> None:
    found = {reference.rpartition("/")[2] for reference in _references(document)}
    assert found == set(document["components"]["schemas"])


def test_every_error_has_the_one_shape_and_its_words(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        for status, response in operation["responses"].items():
            assert response["description"] not in ("Successful Response", "Validation Error") or status == "200", name
            if int(status) >= 400 and "/health" not in name:
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}, f"{name} {status}"
                assert ("Retry-After" in response.get("headers", {})) == (status in ("429", "503")), name


def test_what_asks_for_a_key_says_so(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        assert ("security" in operation) == ("401" in operation["responses"]) == ("/health" not in name), name
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_bodies_are_components_with_examples(document: dict[str, Any]) -> None:
    bodies = {name: operation["requestBody"] for name, operation in _operations(document) if "requestBody" in operation}
    assert {"POST /complete", "POST /tokenize", "POST /detokenize"} <= set(bodies)
    for name, body in bodies.items():
        schema = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = document["components"]["schemas"][schema]
        assert "$defs" not in fields
        assert body["content"]["application/json"]["examples"], name
        for required in fields.get("required", []):
            assert fields["properties"][required]["examples"], f"{name} {required}"


@pytest.mark.parametrize(
    ("model", "required"),
    [(CompleteRequest, {"prompt": "a"}), (CompletionsRequest, {}), (ChatRequest, {"messages": [{"role": "user"}]})],
)
def test_a_default_is_what_an_absent_field_stands_for(
    model: type[SamplingFields], required: dict[str, Any], document: dict[str, Any]
) -> None:
    def effective(**fields: Any) -> Any:
        body = model.model_validate({**required, **fields})
        request = body.generation_request_for("") if isinstance(body, ChatRequest) else body.generation_request
        neutral = SamplingParams()
        sampling = {
            name: getattr(neutral, name) if value is None else value for name, value in request.sampling.items()
        }
        return replace(request, sampling=sampling)

    properties = document["components"]["schemas"][model.__name__]["properties"]
    defaults = {name: field["default"] for name, field in properties.items() if "default" in field}
    assert {"n", "stream", "presence_penalty"} <= defaults.keys()
    assert ("temperature" in defaults) == (model is not CompleteRequest), "the weights may have another default there"
    for name, value in defaults.items():
        assert effective(**{name: value}) == effective(), name
    assert effective(n=2) != effective(), "the control"


def test_every_example_is_accepted_as_it_is(server: Server, document: dict[str, Any]) -> None:
    number = 0
    for name, operation in _operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for title, example in content.get("examples", {}).items():
            answer = httpx.post(f"{server.url}{name.split()[1]}", json=example["value"], timeout=300)
            is_without_template = "chat" in name and "chat template" in answer.text
            assert answer.status_code == 200 or is_without_template, f"{name} {title}: {answer.text}"
            number += 1
    assert number > 10


def test_the_stream_and_its_events_are_told(document: dict[str, Any]) -> None:
    answer = document["paths"]["/complete"]["post"]["responses"]["200"]
    event_schemas = [event["properties"] for event in answer["content"]["text/event-stream"]["schema"]["anyOf"]]
    assert [event["event"]["const"] for event in event_schemas] == list(EVENTS)
    named = [f"#/components/schemas/{model.__name__}" for model in EVENTS.values()]
    assert [event["data"]["contentSchema"]["$ref"] for event in event_schemas] == named
    assert all(f"`{name}`" in answer["description"] for name in EVENTS)


def test_events_are_what_is_told_of_them(server: Server) -> None:
    seen = set()
    fields = {"max_tokens": 5, "logprobs": 2, "n": 2, "user": "u", "request_id": "r", "truncate_prompt_tokens": 2}
    for event in stream(server.url, prompt="The moon", **fields):
        seen.add(event.name)
        model = EVENTS[event.name]
        assert set(event.data) <= set(model.__struct_fields__), event.name
        TypeAdapter(model).validate_python(event.data)
    assert {"start", "token", "done"} <= seen


def test_chunks_of_openais_door_are_what_is_told_of_them(server: Server, document: dict[str, Any]) -> None:
    response = document["paths"]["/v1/completions"]["post"]["responses"]["200"]
    chunk, error, done = response["content"]["text/event-stream"]["schema"]["anyOf"]
    assert chunk["properties"]["data"]["contentSchema"] == response["content"]["application/json"]["schema"]
    assert error["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    assert done["properties"]["data"] == {"const": "[DONE]"}
    fields = {"prompt": "The moon", "max_tokens": 3, "logprobs": 2, "echo": True, "user": "u", "other": 1}
    for stream_it in (False, True):
        body = {**fields, "stream": stream_it, "stream_options": {"include_usage": True} if stream_it else None}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
        answers = [line[6:] for line in text.split("\n\n")[:-2]] if stream_it else [text]
        for answer in map(json.loads, answers):
            assert set(answer) <= set(CompletionsResponse.__struct_fields__)
            TypeAdapter(CompletionsResponse).validate_python(answer)


def test_the_service_hands_it_out(server: Server, document: dict[str, Any]) -> None:
    published = httpx.get(f"{server.url}/openapi.json").json()
    assert published == json.loads(json.dumps(document))
    for path in ("/health", "/v1/models", "/tokenizer_info"):
        schema = published["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = published["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(httpx.get(f"{server.url}{path}").json()) <= set(fields["properties"])


def test_a_route_keeps_the_dependencies_it_declares() -> None:
    """RequestRoute calls endpoints without solving dependencies; it must not skip one that refuses."""

    async def refuse() -> None:
        raise HTTPException(403)

    async def endpoint(request: Request) -> Response:
        return Response(request.url.path)

    router = APIRouter(route_class=RequestRoute)
    router.add_api_route("/open", endpoint)
    router.add_api_route("/closed", endpoint, dependencies=[Depends(refuse)])
    app = FastAPI()
    app.include_router(router)
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/open", "/closed")] == [200, 403]
