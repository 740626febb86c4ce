"""Random requests generated from the service's own /openapi.json: valid, nearly valid, and hostile."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlencode

from tests.redteam.attack import Budget, Setting, attack
from tests.redteam.http_client import MalformedResponse, Response
from tests.redteam.service import INTERNALS

ALLOWED = {200, 400, 404, 405, 408, 409, 413, 415, 429, 503, 504}
PATH_OR_TRACE = re.compile(r"Traceback|File \"/|/site-packages/|\.py\b|0x[0-9a-f]{8,}|<class ")
HANG_SECONDS = 25.0


TEXTS = ("", "a", "Once\nupon", "\u00e9\u4e2d\U0001f600", "\u0000", " " * 9, "<|endoftext|>", "x" * 300)
SEGMENTS = ("x", "req-1", "%00", "%F0%9F%98%80", "..%2f..", "a" * 300, "%ff", "tiny")
"""Values of path parameters."""

SLOW = {"max_tokens": (0, 8), "max_completion_tokens": (0, 8), "min_tokens": (0, 4), "deadline_ms": (1, 8000)}
"""Least and most of numbers whose large values are right and only cost time."""


class Raw(str):
    """JSON text that no serializer would write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path, its parameters, and the schema of its body if it has one."""

    method: str
    path: str
    parameters: list[dict[str, Any]]
    schema: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is sent; a body is JSON, possibly damaged."""

    method: str
    path: str
    body: bytes | None


class RequestGenerator:
    """Requests for the operations of a document, with values that follow their schemas and values that do not."""

    def __init__(self, rng: Random, document: dict[str, Any]) -> None:
        self.rng = rng
        self._document = document
        self.operations = list(self._operations())

    def _operations(self) -> Iterator[Operation]:
        for path, methods in self._document["paths"].items():
            for method, described in methods.items():
                parameters = described.get("parameters", [])
                content = described.get("requestBody", {}).get("content", {})
                schemas = [schema for body in content.values() for schema in self.alternatives(body["schema"])]
                for schema in schemas or (None,):
                    yield Operation(method=method.upper(), path=path, parameters=parameters, schema=schema)

    def next(self) -> Request:
        """A request for any operation; two of five are valid."""
        rng = self.rng
        operation, is_valid = rng.choice(self.operations), rng.random() < 0.4
        method, path, query = operation.method, operation.path, {}
        for parameter in operation.parameters:
            name = parameter["name"]
            if parameter["in"] == "path":
                path = path.replace("{" + name + "}", rng.choice(SEGMENTS))
            elif parameter["in"] == "query" and rng.random() < 0.7:
                query[name] = self.text(self.valid(parameter["schema"]) if is_valid else self.hostile())[:300]
        if not is_valid and rng.random() < 0.1:
            method = rng.choice(["PUT", "PATCH", "TRACE", "OPTIONS"])
        body = None if operation.schema is None else self._body(operation.schema, is_valid=is_valid)
        return Request(method=method, path=f"{path}?{urlencode(query)}" if query else path, body=body)

    def _body(self, schema: dict[str, Any], *, is_valid: bool) -> bytes:
        body, properties = self.object(schema), list(schema.get("properties", {}))
        for name in SLOW.keys() & (body.keys() | {"max_tokens"}) & set(properties):
            body[name] = self.rng.randint(*SLOW[name])
        return self.text(body).encode() if is_valid else self.spoiled(body, properties)

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Resolves a reference to its schema."""
        while "$ref" in schema:
            found: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema

    def alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        schema = self.resolved(schema)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return [self.resolved(part) for part in schema[word]]
        return [schema]

    def valid(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value that the schema allows."""
        if schema.get("examples") and self.rng.random() < 0.3:
            return self.rng.choice(schema["examples"])
        chosen = self.rng.choice(self.alternatives(schema))
        if "anyOf" in chosen or "oneOf" in chosen:
            return self.valid(chosen, depth)
        if "const" in chosen:
            return chosen["const"]
        if "enum" in chosen:
            return self.rng.choice(chosen["enum"])
        kind = chosen.get("type")
        if kind == "object":
            return self.object(chosen, depth)
        if kind == "array":
            least, most = chosen.get("minItems", 0), min(chosen.get("maxItems", 4), 4)
            count = self.rng.randint(least, max(least, most))
            return [self.valid(chosen.get("items", {}), depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            return self.rng.choice(self.numbers(chosen))
        if kind == "string":
            text = self.rng.choice(TEXTS)
            return text[: chosen.get("maxLength", 300)] or "a" * chosen.get("minLength", 0)
        return {"boolean": self.rng.random() < 0.5, "null": None}.get(str(kind), "a")

    def numbers(self, schema: dict[str, Any]) -> list[Any]:
        """The bounds of a number, values between them, and integers written as floats."""
        low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 1000))
        if schema["type"] == "integer":
            low = math.ceil(low) + ("exclusiveMinimum" in schema)
            high = math.floor(high) - ("exclusiveMaximum" in schema)
            least = max(int(low), -(2**53))  # beyond it a float is no longer exact, and may be refused
            near = self.rng.randint(least, min(int(high), least + 20))
            return [int(low), int(high), near, Raw(f"{near}.0"), Raw(f"{near}e0")]
        middle = low + (high - low) / 3
        inclusive = [low] * ("minimum" in schema) + [high] * ("maximum" in schema)
        return [*inclusive, middle, Raw(repr(float(middle)))]

    def object(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        kept = [name for name in properties if name in required or (depth < 4 and self.rng.random() < 0.15)]
        return {name: self.valid(properties[name], depth + 1) for name in kept}

    def hostile(self) -> Any:
        """An invalid value, or one at a limit."""
        n = self.rng.choice([10, 1000, 100_000])
        return self.rng.choice([
            Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0.0"), Raw("1E400"), Raw("9" * 5000),
            Raw("11.0"), Raw('"\\ud800"'), Raw('"\\udfff\\ud800"'), Raw('"\\u0000"'), Raw("[" * n + "]" * n),
            Raw('{"a":' * n + "1" + "}" * n),
            2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, 0.5, -1, 0, True, None, "", "1", [], {}, [None], [[]],
            [-1], [2**40], {"a": 1}, "x" * n, ["x"] * min(n, 5000), [0] * n, Raw("1.5e-400"), Raw("1" + "0" * 400),
            [True, "a", 1.5], Raw("-9" + "9" * 30),
        ])  # fmt: skip

    def text(self, value: Any) -> str:
        """JSON with the raw parts as they are."""
        if isinstance(value, Raw):
            return str(value)
        if isinstance(value, dict):
            return "{" + ",".join(f"{json.dumps(k)}:{self.text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(self.text(v) for v in value) + "]"
        return json.dumps(value)

    def spoiled(self, body: dict[str, Any], properties: list[str]) -> bytes:
        """The body with some fields replaced or its text damaged."""
        for _ in range(self.rng.randint(1, 3)):
            name = self.rng.choice([*properties, *body, "prompt", "unknown", "", "__proto__"])
            kept = body.get(name)
            body[name] = self.rng.choice([self.hostile(), self.hostile(), [kept], {"a": kept}])
        text = self.text(body)
        how = self.rng.randrange(9)
        if how == 0:
            name = self.rng.choice(list(body))
            text = text[:-1] + f",{json.dumps(name)}:{self.text(self.hostile())}" + "}"
        elif how == 1:
            text = text[: self.rng.randrange(len(text) + 1)]
        elif how == 2:
            return self.rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xed\xa0\x80"]) + text.encode()
        elif how == 3:
            return text.encode("utf-16")
        elif how == 4:
            text = self.text(self.hostile())
        elif how == 5:
            at = self.rng.randrange(len(text) + 1)
            return text[:at].encode() + bytes([self.rng.randrange(256)]) + text[at:].encode()
        return text.encode()


@attack("json-bodies", share=14.0)
def json_bodies(setting: Setting) -> None:
    """No body gets a 5xx other than 503 and 504, an undocumented error, or no response; valid numbers are accepted."""
    report = setting.report
    report.limit = "documented responses only"
    generator = RequestGenerator(setting.rng, setting.target.call("GET", "/openapi.json").json())
    _boundaries(setting, generator, setting.budget.share(0.5))
    slowest = 0.0
    for _ in setting.tries():
        slowest = max(slowest, _send(setting, generator.next()))
    report.worst = f"{report.found} bad responses, slowest {slowest:.2f} s"


def _send(setting: Setting, request: Request) -> float:
    method, path, data = request.method, request.path, request.body or b""
    dots = "..." if len(data) > 300 else ""
    repro = f"{method} {path} {data[:300].hex()}{dots} ({len(data)} bytes: {data[:80]!r})"
    began = time.monotonic()
    try:
        response = setting.target.call(method, path, body=request.body, timeout=HANG_SECONDS)
    except (OSError, MalformedResponse) as error:
        if time.monotonic() - began >= HANG_SECONDS * 0.9 or isinstance(error, MalformedResponse):
            setting.report.add("high", f"no response or a broken one: {error}", repro)
    else:
        if problem := _problem(response):
            setting.report.add(*problem, repro)
    return time.monotonic() - began


def _problem(response: Response) -> tuple[str, str] | None:
    if response.status not in ALLOWED:
        return "high" if response.status >= 500 else "low", f"status {response.status}: {response.body[:120]!r}"
    if response.status == 200:
        ends = response.body.count(b"\nevent: done\n") + response.body.count(b"\nevent: error\n")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        is_wrong = is_stream and b"\nevent: start" in response.body and ends != 1
        return ("high", f"{ends} terminal events in a stream") if is_wrong else None
    error = error_object(response)
    if error is None:
        return "medium", f"an undocumented error: {response.body[:120]!r}"
    if INTERNALS.search(error["message"]) or PATH_OR_TRACE.search(error["message"]) or len(error["message"]) > 1000:
        return "medium", f"an error with internals: {error['message'][:160]!r}"
    return None


def _boundaries(setting: Setting, generator: RequestGenerator, budget: Budget) -> None:
    """Each number that the schema allows, alone in an otherwise plain body, must not be refused for its value."""
    skipped = {"min_tokens", "best_of", "stop_token_ids", "logit_bias", "created"}
    for operation in generator.operations:
        schema = operation.schema or {}
        properties = schema.get("properties", {})
        if "prompt" not in properties or not set(schema.get("required", ())) <= {"prompt"}:
            continue
        known = {"prompt": "a", "max_tokens": 1, "stream": False}
        plain = {name: value for name, value in known.items() if name in properties}
        for name in (name for name in properties if name not in skipped):
            kinds = [a for a in generator.alternatives(properties[name]) if a.get("type") in ("integer", "number")]
            for value in (value for kind in kinds for value in generator.numbers(kind) if budget):
                _boundary(setting, operation, generator.text(plain | {name: value}), name)


def _boundary(setting: Setting, operation: Operation, text: str, name: str) -> None:
    setting.report.tries += 1
    response = setting.target.call(operation.method, operation.path, body=text.encode(), timeout=HANG_SECONDS)
    error, repro = error_object(response), f"{operation.method} {operation.path} {text}"
    if problem := _problem(response):
        setting.report.add(*problem, repro)
    elif response.status == 400 and error and error["param"] == name:
        summary = f"/openapi.json allows it, the service does not: {error['message'][:120]}"
        setting.report.add("low", summary, repro, group=f"bounds of {name}")


def error_object(response: Response) -> dict[str, Any] | None:
    """The error of a response if it has the documented shape."""
    body = response.json()
    error = body.get("error") if isinstance(body, dict) else None
    wanted = {"message", "type", "param", "code", "request_id"}
    is_documented = isinstance(error, dict) and wanted <= set(error) and isinstance(error["message"], str)
    return error if is_documented else None
