"""Requests generated from an OpenAPI document: bodies that fit it, and bodies that do not. Seeded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

Schema = dict[str, Any]
TEXTS = ["", "a", "Once upon a time", "\u00e9\u4e2d\U0001f600", "x" * 300, "<|endoftext|>", "a\nb", "\ud800", "\x00"]
ODD = [None, True, 0, -1, 1.5, 2**63, -(2**70), 1e308, "", "x", [], [[]], {}, {"a": 1}, [None], "\ud800", "x" * 5000]
RAW = [
    "{", "[" * 2000, '{"a":' * 500, "null", "1e999", '"x"', "\x00", '{"prompt": NaN}', '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "\\ud800"}', '{"prompt": "a", "seed": ' + "9" * 4400 + "}", "",
]  # fmt: skip
SLOW = {"max_tokens": (0, 8), "n": (1, 2), "best_of": (1, 2), "deadline_ms": (1, 5000), "min_tokens": (0, 4)}
"""Fields of which large values are right and only cost time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str]
    content: bytes | None
    fits: bool
    """Whether it was made to fit the document."""


class Maker:
    """Makes requests for every operation of a document in turn."""

    def __init__(self, document: Schema, rng: Random) -> None:
        self._schemas: dict[str, Schema] = document["components"]["schemas"]
        self._rng = rng
        self.operations = [
            (path, method, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def requests(self, count: int) -> Iterator[Asked]:
        """Half of them fit."""
        for number in range(count):
            path, method, operation = self.operations[number % len(self.operations)]
            fits = self._rng.random() < 0.5
            for parameter in (p for p in operation.get("parameters", []) if p["in"] == "path"):
                path = (
                    path.replace("{" + parameter["name"], "{").replace("{:path}", "{}").replace("{}", self._segment())
                )
            content = None
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                content = self._body(schema, fits=fits)
            asked = [p for p in operation.get("parameters", []) if p["in"] == "query" and self._rng.random() < 0.7]
            query = {p["name"]: str(self.value(p["schema"]) if fits else self._rng.choice(ODD)) for p in asked}
            method = (
                method if fits or self._rng.random() < 0.9 else self._rng.choice(["put", "patch", "trace", "options"])
            )
            yield Asked(method=method.upper(), path=path, query=query, content=content, fits=fits)

    def value(self, schema: Schema, depth: int = 0) -> Any:
        """Something that fits."""
        rng = self._rng
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(rng.choice(kinds), depth)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else rng.choice(schema["enum"])
        if schema.get("examples") and rng.random() < 0.3:
            return rng.choice(schema["examples"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                low = schema.get("minItems", 0)
                high = min(schema.get("maxItems", 3), low + 3)
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(rng.randint(low, high))]
            case "string":
                return rng.choice(TEXTS)[: schema.get("maxLength", 300)] or "a" * schema.get("minLength", 0)
            case "integer":
                return rng.randint(*_range(schema))
            case "number":
                return rng.uniform(*_range(schema))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case _:
                return rng.choice(ODD)

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        fields, required = schema.get("properties", {}), schema.get("required", [])
        share = self._rng.choice([0.05, 0.2, 0.5]) / (depth + 1)
        made = {
            name: self.value(field_schema, depth + 1)
            for name, field_schema in fields.items()
            if name in required or self._rng.random() < share
        }
        for name in made.keys() & SLOW.keys():
            made[name] = self._rng.randint(*SLOW[name])
        if not fields and isinstance(schema.get("additionalProperties"), dict):
            values = schema["additionalProperties"]
            made = {str(self._rng.randrange(400)): self.value(values, depth + 1) for _ in range(self._rng.randrange(3))}
        if "max_tokens" in fields:
            made.setdefault("max_tokens", 4)
        return made

    def _body(self, schema: Schema, *, fits: bool) -> bytes:
        body = self.value(schema)
        if fits:
            return json.dumps(body).encode()
        rng = self._rng
        match rng.randrange(4):
            case 0:
                return rng.choice(RAW).encode("utf-8", "surrogatepass")
            case 1:
                text = bytearray(json.dumps(body).encode())
                for _ in range(rng.randint(1, 4)):
                    text[rng.randrange(len(text))] = rng.randrange(256)
                return bytes(text)
            case 2:
                body[rng.choice([*self._names(schema), "unknown"])] = rng.choice(ODD)
            case _:
                for name in rng.sample(sorted(body), min(len(body), 2)):
                    body[name] = rng.choice([rng.choice(ODD), [body[name]], {"a": body[name]}])
        return json.dumps(body).encode()

    def _names(self, schema: Schema) -> list[str]:
        whole = self._schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        return sorted(whole.get("properties", {}))

    def _segment(self) -> str:
        return self._rng.choice(["x", "req-1", "%00", "%F0%9F%98%80", "..%2f..", "a" * 300, "%ff", "tiny"])


def _range(schema: Schema) -> tuple[int, int]:
    """Small ones: long answers are no part of the question."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
    high = schema.get("maximum", schema.get("exclusiveMaximum", 1000))
    return int(low), int(max(low, min(high, low + 1000)))
