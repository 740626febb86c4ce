"""Random JSON schemas, each with a function that says whether a value fits: no validator is needed to check outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Fits = Callable[[Any], bool]
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> tuple[Schema, Fits]:
    """A schema whose texts are short, and what fits it."""
    kinds = [_integer, _string, _pattern, _enum, _const, _plain]
    if depth:
        kinds += [_object, _object, _array, _any_of, _reference]
    return rng.choice(kinds)(rng, depth)


def _integer(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    low = rng.randint(-2000, 2000)
    high = low + rng.randint(0, 5000)
    return {"type": "integer", "minimum": low, "maximum": high}, lambda x: _is_int(x) and low <= x <= high


def _string(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    low = rng.randint(0, 3)
    high = low + rng.randint(0, 5)
    schema = {"type": "string", "minLength": low, "maxLength": high}
    return schema, lambda x: isinstance(x, str) and low <= len(x) <= high


def _pattern(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    letters, n = rng.choice(["abc", "x ", "\u00e9\u4e2d"]), rng.randint(1, 4)
    schema = {"type": "string", "pattern": f"^[{letters}]{{{n}}}-?$"}
    return schema, lambda x: isinstance(x, str) and len(x.removesuffix("-")) == n and set(x) <= {*letters, "-"}


def _enum(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    values = rng.sample(["red", "gr\u00fcn", "\u4e2d", "", 7, -1, True, None, ["a", 1], {"k": "v"}], rng.randint(1, 5))
    return {"enum": values}, lambda x: any(_same(x, value) for value in values)


def _const(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    value = rng.choice([{"a": [1, 2]}, 'const "quoted"', 12, False])
    return {"const": value}, lambda x: _same(x, value)


def _plain(rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    if rng.random() < 0.5:
        return {"type": ["boolean", "null"]}, lambda x: x is None or isinstance(x, bool)
    return {"type": "boolean"}, lambda x: isinstance(x, bool)


def _object(rng: random.Random, depth: int) -> tuple[Schema, Fits]:
    names = rng.sample(["a", "name", "k\u00e9y", "with space", "x/y", "n"], rng.randint(0, 3))
    inner = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: Schema = {
        "type": "object",
        "properties": {name: part for name, (part, _) in inner.items()},
        "required": required,
        "additionalProperties": False,
    }

    def fits(x: Any) -> bool:
        named = isinstance(x, dict) and set(required) <= set(x) <= set(names)
        return named and all(inner[name][1](value) for name, value in x.items())

    return schema, fits


def _array(rng: random.Random, depth: int) -> tuple[Schema, Fits]:
    low = rng.randint(0, 2)
    high = low + rng.randint(0, 2)
    items, item_fits = random_schema(rng, depth - 1)
    schema = {"type": "array", "items": items, "minItems": low, "maxItems": high}
    return schema, lambda x: isinstance(x, list) and low <= len(x) <= high and all(map(item_fits, x))


def _any_of(rng: random.Random, depth: int) -> tuple[Schema, Fits]:
    parts = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"anyOf": [schema for schema, _ in parts]}, lambda x: any(fits(x) for _, fits in parts)


def _reference(_rng: random.Random, _depth: int) -> tuple[Schema, Fits]:
    """A list of lists of lists, or nothing; the schema's own definitions are filled in by whole()."""
    return {"$ref": "#/$defs/nest"}, _is_nest


def whole(schema: Schema) -> Schema:
    """`schema` with what it may refer to."""
    nest = {"type": "array", "items": {"$ref": "#/$defs/nest"}, "maxItems": 1}
    return {**schema, "$defs": {"nest": nest}}


def _is_nest(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= 1 and all(map(_is_nest, x))


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _same(x: Any, value: Any) -> bool:
    return type(x) is type(value) and x == value
