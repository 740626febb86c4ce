"""The OpenAPI document is complete, and the service accepts and returns what it describes."""

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

from app.api.direct_routes import DirectRoutes
from app.api.native.routes import CompleteRequest
from app.api.openai.schemas import ChatRequest, CompletionsRequest, CompletionsResponse
from app.api.schemas import EVENTS, SamplingFields
from app.common.settings import Settings
from app.common.types import SamplingParams
from app.main import create_app
from tests.support.completion_client import stream
from tests.support.servers import Server

POSTS = ("/complete", "/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize")
REQUIRED: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1]}
NEEDED = {"top_logprobs": {"logprobs": True}, "min_tokens": {"max_tokens": 30}, "best_of": {"n": 1}}
FEW = {"max_tokens": 2, "n": 1, "best_of": 2, "deadline_ms": 5000, "max_completion_tokens": 2, "min_tokens": 1}
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


def test_every_route_has_a_description_and_a_tag(document: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in document["tags"]}
    names = [operation["operationId"] for _, operation in _operations(document)]
    assert len(set(names)) == len(names) >= 10
    for name, operation in _operations(document):
        assert operation["description"], name
        assert len(operation["tags"]) == 1 and set(operation["tags"]) <= tags, name


def test_every_field_has_a_description(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name
        for field, field_schema in schema.get("properties", {}).items():
            assert "$ref" in field_schema or field_schema.get("description"), f"{name}.{field}"


def test_every_reference_resolves_and_every_schema_is_referenced(document: dict[str, Any]) -> None:
    found = {reference.rpartition("/")[2] for reference in _references(document)}
    assert found == set(document["components"]["schemas"])


def test_every_error_has_the_common_shape_and_a_description(document: dict[str, Any]) -> None:
    for name, operation in _operations(document):
        for status, response in operation["responses"].items():
            assert response["description"] not in ("Successful Response", "Validation Error") or status == "200", name
            if int(status) >= 400 and "/health" not in name:
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}, f"{name} {status}"
                assert ("Retry-After" in response.get("headers", {})) == (status in ("409", "429", "503")), name


def test_routes_that_need_a_key_declare_it(document: dict[str, Any]) -> None:
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
def test_documented_defaults_equal_those_of_absent_fields(
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
    assert ("temperature" in defaults) == (model is not CompleteRequest), "the model may set another default there"
    for name, value in defaults.items():
        assert effective(**{name: value}) == effective(), name
    assert effective(n=2) != effective(), "positive control"


def _body_schema(document: dict[str, Any], route: str) -> dict[str, Any]:
    content = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    schema: dict[str, Any] = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    return schema


def _integers(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (route, field, schema) for each field that accepts an integer or a list of integers."""
    for route in POSTS:
        for field, schema in _body_schema(document, route)["properties"].items():
            if field == "source":  # needs an encoder, which the tiny model does not have; of the prompt's type
                continue
            for kind in schema.get("anyOf", [schema]):
                if kind.get("type") == "integer" or kind.get("items", {}).get("type") == "integer":
                    yield route, field, kind


def _post(server: Server, document: dict[str, Any], route: str, fields: dict[str, Any]) -> httpx.Response:
    """A body with these fields and those that the document requires."""
    required = {field: REQUIRED[field] for field in _body_schema(document, route).get("required", [])}
    return httpx.post(f"{server.url}{route}", json=required | fields, timeout=60)


def _is_accepted(answer: httpx.Response) -> bool:
    """The tiny model has no chat template; the service reports that once the fields of a chat are valid."""
    return answer.status_code == 200 or answer.json()["error"]["code"] == "no_chat_template"


def test_integers_may_be_written_as_floats(server: Server, document: dict[str, Any]) -> None:
    def post(route: str, field: str, value: Any) -> httpx.Response:
        short = {"max_tokens": 2, "stream": False} if "complet" in route else {}
        return _post(server, document, route, {**short, **NEEDED.get(field, {}), field: value})

    tried = list(_integers(document))
    assert len(tried) > 25
    for route, field, kind in tried:
        number = FEW.get(field, max(1, kind.get("minimum", 1)))
        for value, is_right in ((float(number), True), (number + 0.5, False)):
            answer = post(route, field, [value] if kind["type"] == "array" else value)
            assert _is_accepted(answer) == is_right, (route, field, answer.text)
            assert is_right or answer.json()["error"]["param"] == field, (route, field, answer.text)
    assert post("/complete", "seed", 2.0**53).status_code == post("/complete", "seed", 2**54).status_code == 200
    assert post("/complete", "seed", 2.0**54).json()["error"]["param"] == "seed", "no float holds it exactly"


def test_maximum_deadline_is_documented_and_enforced(server: Server, document: dict[str, Any]) -> None:
    described = {route: kind["maximum"] for route, field, kind in _integers(document) if field == "deadline_ms"}
    assert described == dict.fromkeys(POSTS[:4], 600_000)
    for route in described.keys() - {"/v1/chat/completions"}:  # needs a template
        assert _post(server, document, route, {"deadline_ms": 600_000}).status_code == 200
        error = _post(server, document, route, {"deadline_ms": 600_001}).json()["error"]
        assert error["param"] == "deadline_ms" and "600000" in error["message"]


@pytest.mark.parametrize("route", POSTS)
def test_null_means_the_default_for_every_field(server: Server, document: dict[str, Any], route: str) -> None:
    schema = _body_schema(document, route)
    optional = dict.fromkeys(schema["properties"].keys() - schema.get("required", []))
    answer = _post(server, document, route, optional)
    assert _is_accepted(answer), answer.text
    if route == "/v1/completions":
        for prompt in (None, [[]]):
            usage = _post(server, document, route, {**optional, "prompt": prompt}).json()["usage"]
            assert usage["prompt_tokens"] == 1, "an absent prompt starts from nothing"
            assert usage["completion_tokens"] <= 16


def test_every_example_is_accepted(server: Server, document: dict[str, Any]) -> None:
    number = 0
    for name, operation in _operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for title, example in content.get("examples", {}).items():
            answer = httpx.post(f"{server.url}{name.split()[1]}", json=example["value"], timeout=300)
            is_without_template = "chat" in name and "chat template" in answer.text
            assert answer.status_code == 200 or is_without_template, f"{name} {title}: {answer.text}"
            number += 1
    assert number > 10


def test_stream_and_its_events_are_documented(document: dict[str, Any]) -> None:
    answer = document["paths"]["/complete"]["post"]["responses"]["200"]
    event_schemas = [event["properties"] for event in answer["content"]["text/event-stream"]["schema"]["anyOf"]]
    assert [event["event"]["const"] for event in event_schemas] == list(EVENTS)
    named = [f"#/components/schemas/{model.__name__}" for model in EVENTS.values()]
    assert [event["data"]["contentSchema"]["$ref"] for event in event_schemas] == named
    assert all(f"`{name}`" in answer["description"] for name in EVENTS)


def test_events_match_their_schemas(server: Server) -> None:
    seen = set()
    fields = {"max_tokens": 5, "logprobs": 2, "n": 2, "user": "u", "request_id": "r", "truncate_prompt_tokens": 2}
    for event in stream(server.url, prompt="The moon", **fields):
        seen.add(event.name)
        model = EVENTS[event.name]
        assert set(event.data) <= set(model.__struct_fields__), event.name
        TypeAdapter(model).validate_python(event.data)
    assert {"start", "token", "done"} <= seen


def test_openai_chunks_match_their_schemas(server: Server, document: dict[str, Any]) -> None:
    response = document["paths"]["/v1/completions"]["post"]["responses"]["200"]
    chunk, error, done = response["content"]["text/event-stream"]["schema"]["anyOf"]
    assert chunk["properties"]["data"]["contentSchema"] == response["content"]["application/json"]["schema"]
    assert error["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    assert done["properties"]["data"] == {"const": "[DONE]"}
    fields = {"prompt": "The moon", "max_tokens": 3, "logprobs": 2, "echo": True, "user": "u", "other": 1}
    for stream_it in (False, True):
        body = {**fields, "stream": stream_it, "stream_options": {"include_usage": True} if stream_it else None}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
        responses = [line[6:] for line in text.split("\n\n")[:-2]] if stream_it else [text]
        for answer in map(json.loads, responses):
            assert set(answer) <= set(CompletionsResponse.__struct_fields__)
            TypeAdapter(CompletionsResponse).validate_python(answer)


def test_service_serves_the_document(server: Server, document: dict[str, Any]) -> None:
    published = httpx.get(f"{server.url}/openapi.json").json()
    assert published == json.loads(json.dumps(document))
    for path in ("/health", "/v1/models", "/tokenizer_info"):
        schema = published["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = published["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(httpx.get(f"{server.url}{path}").json()) <= set(fields["properties"])


def test_route_keeps_its_declared_dependencies() -> None:
    """DirectRoutes calls endpoints without solving dependencies; it must not skip one that refuses."""

    async def refuse() -> None:
        raise HTTPException(403)

    async def endpoint(request: Request) -> Response:
        return Response(request.url.path)

    router = APIRouter()
    router.add_api_route("/open", endpoint)
    router.add_api_route("/closed", endpoint, dependencies=[Depends(refuse)])
    app = FastAPI()
    app.include_router(router)
    app.router.middleware_stack = DirectRoutes(app.router.middleware_stack, [router])
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/open", "/closed")] == [200, 403]
