"""The common format of all errors: {"error": {message, type, param, code, request_id, ...}}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

from msgspec import to_builtins
from pydantic import Field, ValidationError
from starlette.responses import JSONResponse, Response

from app.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    InvalidRequest,
    RateLimitExceeded,
    ResumeRefused,
    Unavailable,
)
from app.http.response_model import ResponseModel

_MAX_DETAILS = 100
_END_OF_NAME = re.compile(r"[ \[.:]")
_NAME_CHARACTERS = "must consist of letters, digits, _ and -"
_ALLOWED_CHARACTERS = {
    "logit_bias": 'each key must be a token id, such as "17"',
    "request_id": _NAME_CHARACTERS,
}
"""By field: what to say instead of the pattern that its text must match."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class ErrorBody(ResponseModel):
    """The error object."""

    message: Annotated[str, "What was wrong, what is allowed, what to change."]
    type: Annotated[str, "Type of the error.", Field(examples=["invalid_request_error"])]
    param: Annotated[str | None, "The field of the request that caused the error."]
    code: Annotated[str | None, "Error code for programs; some errors have none."]
    request_id: Annotated[str, "Request id, which is also in the server's log."]
    prompt_tokens: Annotated[int | None, "Number of tokens of a prompt that is too long."] = None
    max_model_len: Annotated[int | None, "Context length in tokens, if a prompt is too long."] = None


class ErrorResponse(ResponseModel):
    """The common format of all errors."""

    error: ErrorBody


class ApiError(Exception):
    """An error response. `extra` has further fields of ErrorBody."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    @property
    def type(self) -> str:
        """The error's `type` field."""
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self, request_id: str) -> dict[str, Any]:
        """The response body: an ErrorResponse as a dict."""
        error = ErrorBody(str(self), self.type, self.param, self.code, request_id, **self.extra)
        body: dict[str, Any] = to_builtins(ErrorResponse(error))
        return body

    def response(self, request_id: str) -> Response:
        """The error as a response."""
        return JSONResponse(self.body(request_id), self.status, {**self.headers, "X-Request-Id": request_id})


def from_engine(error: EngineError) -> ApiError:
    """Maps an engine error to an HTTP error."""
    match error:
        case ContextLengthExceeded():
            numbers = {"prompt_tokens": error.prompt_tokens, "max_model_len": error.max_model_len}
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded", extra=numbers)
        case ResumeRefused():
            return ApiError(409, str(error), param=error.param, code=error.code)
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case RateLimitExceeded():
            headers = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case Unavailable():
            return ApiError(503, str(error), headers={"Retry-After": str(error.retry_after)})
        case DeadlineExceeded():
            return ApiError(504, str(error), code="deadline_exceeded")
        case EngineFailed():
            return ApiError(500, str(error), code="engine_failed")
    return ApiError(500, "the request could not be completed")


def from_validation(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
    """Maps a pydantic error to one that names the field, what is allowed and what to change."""
    # For a union, the most specific error is about the type that the client meant.
    details = _details(error)
    first = max(
        details, key=lambda e: (e["loc"][:1] == details[0]["loc"][:1], not e["type"].endswith("_type"), len(e["loc"]))
    )
    name = str(first["loc"][0])[:60] if first["loc"] else None
    message = first["msg"].removeprefix("Value error, ")
    if name == "resume":
        path, is_unknown = _path(first["loc"]), first["type"] == "extra_forbidden"
        message = "unknown field: GET /docs lists all fields" if is_unknown else message
        return ApiError(400, f"{path}: {message}", param=path, code="unknown_field" if is_unknown else None)
    match first["type"]:
        case "json_invalid":
            reason = message.partition(": ")[2][:120]
            return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
        case "extra_forbidden":
            close_matches = get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {close_matches[0]!r}?" if close_matches else "GET /docs lists all fields"
            return ApiError(400, f"unknown field {name!r}: {hint}", param=name, code="unknown_field")
        case "too_many_fields" if name is None:
            return ApiError(400, message.replace("an object", "the body", 1), code="too_many_parts")
        case "model_type" if name is None:
            return ApiError(400, "the body must be a JSON object")
        case "missing":
            unknown = [str(other["loc"][0])[:60] for other in details if other["type"] == "extra_forbidden"]
            close_matches = get_close_matches(str(name), unknown, n=1)
            hint = f": {close_matches[0]!r} is not a field" if close_matches else ""
            return ApiError(400, f"{'.'.join(map(str, first['loc']))} is required{hint}", param=name)
        case "string_pattern_mismatch":
            message = _ALLOWED_CHARACTERS.get(str(name), message)
    if name is None:  # the message of an error about several fields starts with the name of one
        return ApiError(400, message, param=_END_OF_NAME.split(message, maxsplit=1)[0])
    if name == "prompt" and len(first["loc"]) > 1 and first["type"].endswith("_type"):  # one of several kinds
        message = "must be text, a list of token ids, a list of texts, or a list of lists of token ids"
    return ApiError(400, f"{name}: {message}", param=name)


def _path(location: Sequence[int | str]) -> str:
    """A place in the body, such as resume.choices[1].text, without pydantic's names of alternatives."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, str) and not part.isidentifier():
            break
        path += f"[{part}]" if isinstance(part, int) else f".{part[:60]}"
    return path


def _details(error: ValidationError) -> list[Mapping[str, Any]]:
    """pydantic's errors; only the first if there are very many, because each dict takes 4 us."""
    if error.error_count() <= _MAX_DETAILS:
        return [*error.errors(include_url=False, include_context=False, include_input=False)]
    text = error.json(include_url=False, include_context=False, include_input=False)
    return [json.JSONDecoder().raw_decode(text, 1)[0]]
