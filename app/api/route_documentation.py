"""What a route declares for the OpenAPI document: its response, body and stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, cast

from pydantic import BaseModel

from app.http.response_model import ResponseModel, json_schema


def documented(
    response: type[ResponseModel],
    body: type[BaseModel] | None = None,
    examples: Mapping[str, Any] | None = None,
    chunk: type[ResponseModel] | None = None,
) -> dict[str, Any]:
    """A route's openapi_extra: its response, the body that read_body() parses, and the data-only frames of its stream.

    Not as FastAPI's response_model, which makes FastAPI build a validator. `examples` maps titles to bodies that
    the service accepts as they are.
    """
    return cast("dict[str, Any]", _LazyMapping(partial(_describe, response, body, examples or {}, chunk)))


class _LazyMapping(Mapping[str, Any]):
    """Made when the OpenAPI document is, not at import, where the schemas of all bodies delayed the start."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __bool__(self) -> bool:
        return True  # without making it


def _describe(
    response: type[ResponseModel],
    body: type[BaseModel] | None,
    examples: Mapping[str, Any],
    chunk: type[ResponseModel] | None,
) -> dict[str, Any]:
    answers = {"application/json": {"schema": json_schema(response)}}
    if chunk:
        answers["text/event-stream"] = {"schema": json_schema(chunk)}
    described: dict[str, Any] = {"responses": {"200": {"content": answers}}}
    if body:
        content = {
            "schema": json_schema(body),
            "examples": {title: {"value": value} for title, value in examples.items()},
        }
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described
