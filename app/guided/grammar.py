"""Converts regex, json_schema, grammar and response_format to one Lark grammar in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.common.errors import InvalidRequest

MAX_BYTES = 64 << 10
"""Limit of a regex, a schema or a grammar."""
MAX_DEPTH = 64
"""Limit of nested lists and objects in a schema."""

# One space, or a line break and an indent: otherwise a model could generate white space without end.
_SPACE = r" |\n[ \t]{0,16}"
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}

# Tokens of a Lark grammar: the group is unsupported; strings, comments and regexes may contain the same text.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/'
    r"|(?P<unsupported>\b(?:stop|stop_capture|temperature|max_tokens)\s*=|%llguidance\b|<[^<>\s]+>|@\w+)",
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's dialect of Lark, and the field of the request that it came from."""

    lark: str
    field: str


def grammar_from(field: str, value: Any) -> Grammar | None:
    """Converts the value of a request's `field`; None if it means no grammar. Raises InvalidRequest, naming the field.

    regex and grammar are text; json_schema is an object, JSON text or true; response_format is as OpenAI writes it.
    """
    match field:
        case "regex":
            return Grammar(_from_regex(value), field)
        case "json_schema":
            return Grammar(_from_schema(value, field), field)
        case "grammar":
            return Grammar(_from_lark(value), field)
        case _:
            assert field == "response_format"
            return _from_response_format(value)


def _from_regex(regex: str) -> str:
    _check_text(regex, "regex")
    # A slash would end the regex, and an empty regex would be a comment.
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL
    )
    if re.fullmatch(r"(?:[^\\]|\\.)*", regex, flags=re.DOTALL) is None:
        raise InvalidRequest("regex: it ends with an incomplete escape (\\)", "regex")
    return f"start: /{escaped or '(?:)'}/"


def _from_lark(grammar: str) -> str:
    _check_text(grammar, "grammar")
    for found in _LARK_TOKEN.finditer(grammar):
        if found.lastgroup:
            reason = "leave out options, names of tokens and of other grammars"
            raise InvalidRequest(f"grammar: {found[0][:40]!r} is not supported: {reason}", "grammar")
    return grammar


def _from_response_format(response_format: Mapping[str, Any]) -> Grammar | None:
    field = "response_format"
    match response_format.get("type"):
        case "text" | "json_object" if len(response_format) > 1:
            raise InvalidRequest(f"response_format has no field {min(set(response_format) - {'type'})[:40]!r}", field)
        case "text":
            return None
        case "json_object":
            return Grammar(_from_schema({"type": "object"}, field), field)
        case "json_schema":
            inner = response_format.get("json_schema")
            if not isinstance(inner, Mapping) or inner.get("schema") is None:
                raise InvalidRequest("response_format.json_schema.schema is missing", field)
            if unknown := sorted(map(str, set(inner) - _SCHEMA_KEYS)):
                raise InvalidRequest(f"response_format.json_schema has no field {unknown[0][:40]!r}", field)
            return Grammar(_from_schema(inner["schema"], field), field)
        case _:
            raise InvalidRequest("response_format.type must be text, json_object or json_schema", field)


def _from_schema(given: Mapping[str, Any] | str | bool, field: str) -> str:
    schema = _parsed(given, field) if isinstance(given, str) else given
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{field}: a schema must be a JSON object, or true for any JSON", field)
    _check_depth(schema, field)
    options = schema.get("x-guidance", {})
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"{field}: x-guidance must be an object", field)
    try:
        # The order of properties is the order of the text.
        # With a pattern, llguidance ignores whitespace_flexible.
        defaults = {} if options.get("whitespace_flexible") is False else {"whitespace_pattern": _SPACE}
        text = json.dumps({**schema, "x-guidance": {**defaults, **options}}, allow_nan=False)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{field}: the schema has a value that JSON cannot represent", field) from None
    _check_text(text, field)
    return f"start: %json {text}"


def _parsed(text: str, field: str) -> Any:
    _check_text(text, field)
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP.format(field, MAX_DEPTH), field) from None
    except ValueError as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequest(f"{field}: the text is not JSON{where}", field) from None


_TOO_DEEP = "{}: the schema is nested too deeply, {} levels are allowed"


def _check_depth(schema: Mapping[str, Any], field: str) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for value in level:
            next_level += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        if not (level := next_level):
            return
    raise InvalidRequest(_TOO_DEEP.format(field, MAX_DEPTH), field)


def _check_text(text: str, field: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: the text holds half a character (a lone surrogate)", field) from None
    if size > MAX_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes, at most {MAX_BYTES} are allowed", field)
