"""Slow oracle: whether a value fits a JSON schema, keyword by keyword as the specification says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether the value fits; of `format`, which is an annotation, nothing is checked."""
    root = schema if root is None else root
    return schema if isinstance(schema, bool) else all(_checks(value, schema, root))


def _checks(value: Any, schema: dict[str, Any], root: Any) -> Iterator[bool]:
    if "$ref" in schema:
        yield fits(value, _target(root, schema["$ref"]), root)
    if "type" in schema:
        kinds = schema["type"]
        yield any(_has_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))
    if "const" in schema:
        yield _key(value) == _key(schema["const"])
    if "enum" in schema:
        yield _key(value) in [_key(one) for one in schema["enum"]]
    for keyword, test in (("allOf", all), ("anyOf", any), ("oneOf", lambda found: sum(found) == 1)):
        if keyword in schema:
            yield test([fits(value, case, root) for case in schema[keyword]])
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _number_checks(value, schema)
    elif isinstance(value, str):
        yield schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        yield "pattern" not in schema or re.search(schema["pattern"], value, re.ASCII) is not None
    elif isinstance(value, list):
        yield from _array_checks(value, schema, root)
    elif isinstance(value, dict):
        yield from _object_checks(value, schema, root)


def _number_checks(value: float, schema: dict[str, Any]) -> Iterator[bool]:
    yield schema.get("minimum", value) <= value <= schema.get("maximum", value)
    yield "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
    yield "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"]


def _array_checks(value: list[Any], schema: dict[str, Any], root: Any) -> Iterator[bool]:
    prefix = schema.get("prefixItems", [])
    yield schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    yield all(fits(item, one, root) for item, one in zip(value, prefix, strict=False))
    yield all(fits(item, schema.get("items", True), root) for item in value[len(prefix) :])


def _object_checks(value: dict[str, Any], schema: dict[str, Any], root: Any) -> Iterator[bool]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    yield schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
    yield {*schema.get("required", [])} <= {*value}
    for name, needed in schema.get("dependentRequired", {}).items():
        yield name not in value or {*needed} <= {*value}
    for name, one in value.items():
        schemas = [properties[name]] if name in properties else []
        schemas += [found for pattern, found in patterns.items() if re.search(pattern, name)]
        additional = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        yield all(fits(one, found, root) for found in schemas or [additional])
        yield fits(name, schema.get("propertyNames", True), root)


def _has_type(value: Any, kind: str) -> bool:
    if kind == "integer":
        return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _target(root: Any, reference: str) -> Any:
    for key in reference.split("/")[1:]:
        root = root[int(key)] if isinstance(root, list) else root[key]
    return root


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
