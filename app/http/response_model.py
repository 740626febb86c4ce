"""Response models: one class is what a route builds, what is encoded, and what the OpenAPI document shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import NODEFAULT, UNSET, Struct
from pydantic import BaseModel, Field, GetCoreSchemaHandler, TypeAdapter, create_model
from starlette.responses import Response

NOT_SENT: Any = UNSET
"""Default of a field that is left out unless it has a value, which may be None."""


class ResponseModel(Struct, omit_defaults=True):
    """A JSON object of a response. A field whose value is its default is not sent.

    The JSON has the fields in this order. `Annotated[int, "Number of tokens."]` describes a field.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(_documentation(cls))


SCHEMA_PATH = "#/components/schemas/{model}"


def json_schema(model: type[BaseModel | ResponseModel]) -> dict[str, Any]:
    """The schema of a request or response, with others that it refers to under `$defs`."""
    mode: Literal["validation", "serialization"] = "validation" if issubclass(model, BaseModel) else "serialization"
    return TypeAdapter(model).json_schema(ref_template=SCHEMA_PATH, mode=mode)


def json_response(content: ResponseModel, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A short response."""
    return Response(msgspec.json.encode(content), status_code, headers, media_type="application/json")


@cache
def _documentation(model: type[ResponseModel]) -> type[BaseModel]:
    """The pydantic model with the same fields, from which FastAPI makes the schema."""
    defaults = {NODEFAULT: ..., UNSET: None}
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(model):
        description = next((text for text in getattr(field.type, "__metadata__", ()) if isinstance(text, str)), None)
        default = defaults.get(field.default, field.default)
        fields[field.name] = (field.type, Field(default, description=description))
    return create_model(model.__name__, __doc__=model.__doc__, __module__=model.__module__, **fields)
