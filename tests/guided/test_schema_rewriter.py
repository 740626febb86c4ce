"""Rewritten schemas: what a grammar writes fits the schema that was asked for; refusals name the place."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, TypeAdapter

from app.common.llguidance_adapter import GrammarVocabulary
from app.guided.schema_rewriter import SchemaError, rewrite, rewrite_grammar, target_of
from app.guided.validator_worker import checked, problem_of
from tests.support.json_schema_oracle import fits

_BYTES = GrammarVocabulary([bytes([value]) for value in range(256)], 256)
_NULL = {"type": "null"}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **others}


def _tagged(tag: str, **properties: Any) -> dict[str, Any]:
    return _closed({"kind": {"const": tag}, **properties}, required=["kind", *properties])


def _texts(schema: dict[str, Any], samples: int) -> list[str]:
    """Random complete texts of a schema's grammar; a text that gets long is given up."""
    grammar = json.dumps({**schema, "x-guidance": {"whitespace_pattern": ""}})
    found = [_text(f"start: %json {grammar}", random.Random(seed)) for seed in range(samples)]
    return [text for text in found if text]


def _text(grammar: str, rng: random.Random) -> str:
    matcher, text = _BYTES.matcher(grammar), bytearray()
    while len(text) < 400:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), f"{text!r}: {matcher.get_error()[:300]}"
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        assert allowed or mask, f"nothing may follow {text!r}"
        if mask >> 256 and (not allowed or rng.random() < 0.7):
            return text.decode()
        plain = [byte for byte in allowed if 32 <= byte < 127] or allowed
        closing = [byte for byte in plain if byte in b'}]"']
        byte = rng.choice(closing if closing and rng.random() < 0.4 else plain)
        text.append(byte)
        assert matcher.consume_token(byte)
        if matcher.is_stopped():
            return text.decode()
    return ""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a name occurs twice: {[name for name, _ in pairs]}"
    return dict(pairs)


def _check(schema: dict[str, Any], samples: int = 12) -> list[Any]:
    """Samples a rewritten schema; every text fits the original. Returns the values."""
    texts = _texts(rewrite(copy.deepcopy(schema)), samples)
    values = [json.loads(text) for text in texts]
    for value in values:
        assert fits(value, schema), value
    return values


_WRITABLE: dict[str, dict[str, Any]] = {
    "properties and patternProperties name one key": _closed(
        {"score": _DIGIT}, patternProperties={"^score$": {"type": "integer"}}, required=["score"]
    ),
    "a pattern narrows a property": _closed({"score": {}}, patternProperties={"^s": _DIGIT}, required=["score"]),
    "unknown format": _closed({"a": {"type": "string", "format": "phone"}}, required=["a"]),
    "format of a type that it does not concern": {"type": "integer", "format": "int64", "maximum": 9, "minimum": 0},
    "oneOf of tagged objects": {"oneOf": [_tagged("a", n=_DIGIT), _tagged("b")]},
    "oneOf of objects whose tag has a default": {
        "discriminator": {"propertyName": "kind"},
        "oneOf": [_closed({"kind": {"const": "a"}}), _closed({"n": _DIGIT, "kind": {"const": "b"}})],
    },
    "oneOf of required properties": _closed(
        {"a": _NULL, "b": _NULL, "c": _NULL}, oneOf=[{"required": [name]} for name in "abc"]
    ),
    "oneOf of open objects": {
        "oneOf": [{"type": "object", "properties": {name: _NULL}, "required": [name]} for name in "ab"]
    },
    "oneOf of references": {
        "$defs": {"A": _tagged("a"), "B": _tagged("b", next={"$ref": "#/$defs/A"})},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    "oneOf of ranges": {
        "type": "integer",
        "minimum": 0,
        "maximum": 99,
        "oneOf": [{"maximum": 4}, {"exclusiveMinimum": 4}],
    },
    "oneOf of lengths": {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 2, "maxLength": 3}]},
    "oneOf of arrays": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "oneOf": [{"prefixItems": [_NULL], "items": _NULL}, {"prefixItems": [_DIGIT], "items": _NULL}],
    },
    "oneOf beside anyOf": {"anyOf": [_DIGIT, _NULL], "oneOf": [{"type": "integer"}, {"type": "null"}]},
    "reference into a oneOf": _closed(
        {"x": {"oneOf": [_DIGIT, _NULL]}, "y": {"$ref": "#/properties/x/oneOf/1"}}, required=["y"]
    ),
    "reference into patternProperties": _closed(
        {"z": {"$ref": "#/patternProperties/^k$"}}, patternProperties={"^k$": _DIGIT}, required=["z"]
    ),
    "propertyNames with an enum": {
        "type": "object",
        "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": _DIGIT,
    },
    "propertyNames with a reference": {
        "$defs": {"Name": {"enum": ["x", "y"]}},
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Name"},
        "additionalProperties": _DIGIT,
    },
    "propertyNames of any text": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0},
    "dependentRequired": _closed({"a": _NULL, "b": _NULL, "c": _NULL}, dependentRequired={"a": ["b"], "c": ["a"]}),
    "dependentRequired of a required property": _closed(
        {"a": _NULL, "b": _NULL}, required=["a"], dependentRequired={"a": ["b"]}
    ),
    "unevaluatedProperties": {"type": "object", "properties": {"a": _NULL}, "unevaluatedProperties": False},
    "keywords that change nothing": _closed(
        {
            "a": {"type": "array", "uniqueItems": False, "maxItems": 1, "items": _NULL},
            "b": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": _NULL},
            "c": {**_NULL, "then": {"type": "string"}},
            "d": {**_NULL, "if": {"type": "null"}},
            "e": {**_NULL, "not": False},
            "f": {"type": "array", "maxItems": 0, "contains": {}, "minContains": 0},
        }
    ),
    "counts as 2.0": {"type": "string", "minLength": 2.0, "maxLength": 2.0},
    "counts of listed properties": _closed(
        {"a": _NULL, "b": _NULL}, patternProperties={"^c$": _NULL}, minProperties=1, maxProperties=3, required=["b"]
    ),
    "unused definitions may be anything": {"$defs": {"X": {"not": {}}}, "type": "null"},
    "properties with names of keywords": _closed(
        {"not": _NULL, "format": _NULL, "$ref": _NULL, "oneOf": _NULL}, required=["not", "format", "$ref", "oneOf"]
    ),
    "values with names of keywords": {"enum": [{"format": "x", "uniqueItems": True, "$ref": "http://x"}]},
}


@pytest.mark.parametrize("name", _WRITABLE)
def test_what_is_written_fits_the_schema(name: str) -> None:
    assert _check(_WRITABLE[name])


@pytest.mark.parametrize("pattern", ["^n$", "^(n|m)$", "^n[0-3]$", "^n?m$"])
def test_names_of_few_patterns_occur_once(pattern: str) -> None:
    schema = _closed({"ok": _NULL}, patternProperties={pattern: _NULL}, required=["ok"])
    for text in _texts(rewrite(schema), 20):
        json.loads(text, object_pairs_hook=_without_repeats)


def test_large_schema_of_several_names_is_not_copied() -> None:
    value = _closed({f"a-rather-long-name-{i}": {"enum": ["alpha", "beta"]} for i in range(40)})
    schema = _closed({}, patternProperties={"^[a-z]$": value})
    size = len(json.dumps(schema))
    assert len(json.dumps(rewrite(schema))) < size + 3000


class _Login(BaseModel):
    password: SecretStr
    when: dict[str, int | None]


@pytest.mark.parametrize("kind", [_Login, bytes, Path, dict[str, int], tuple[int, str], float | None])
def test_schemas_of_pydantic_are_writable(kind: Any) -> None:
    assert _check(TypeAdapter(kind).json_schema())


def test_email_of_zod_is_writable_and_has_no_two_dots_in_a_row() -> None:
    pattern = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    assert _check({"type": "string", "format": "email", "pattern": pattern}, 30)


def _rewritten(schema: dict[str, Any]) -> dict[str, Any] | str:
    """The rewritten schema, or why it is refused."""
    try:
        return rewrite(schema)
    except SchemaError as error:
        return str(error)


def _random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        _NULL,
        _DIGIT,
        {"type": "boolean"},
        {"enum": ["a", 1, None]},
        {"const": "b"},
        {"type": "string", "maxLength": 2, "format": rng.choice(["path", "binary"])},
        {"type": ["integer", "null"], "minimum": 5, "maximum": 7},
    ]
    if depth == 0:
        return rng.choice(leaves)
    names = rng.sample("abcde", 3)
    below = {name: _random_schema(rng, depth - 1) for name in names}
    required = rng.sample(names, rng.randrange(3))
    closed = _closed(below, required=required)
    match rng.randrange(7):
        case 0:
            return closed | {"patternProperties": {f"^[{names[0]}x]$": _random_schema(rng, 0)}}
        case 1:
            return {"oneOf": [_closed({"k": {"const": name}, **below}) for name in names[:2]]}
        case 2:
            return {"oneOf": [_random_schema(rng, depth - 1), _random_schema(rng, depth - 1)]}
        case 3:
            return closed | {"dependentRequired": {names[0]: [names[1]]}}
        case 4:
            return {"type": "array", "maxItems": 2, "items": _random_schema(rng, depth - 1)}
        case 5:
            return {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": below[names[0]]}
        case _:
            return closed | {"oneOf": [{"required": [names[0]]}, {"required": [names[1]]}]}


def test_random_schemas_are_written_as_asked_or_refused_with_a_place() -> None:
    rng, outcomes = random.Random(7), {"written": 0, "refused": 0}
    for _ in range(150):
        schema = _random_schema(rng, 2)
        rewritten = _rewritten(copy.deepcopy(schema))
        if isinstance(rewritten, str):
            assert rewritten.startswith("at #")
            outcomes["refused"] += 1
            continue
        if problem_of(_BYTES, f"start: %json {json.dumps(rewritten)}"):
            continue  # nothing fits, or llguidance cannot compute it
        outcomes["written"] += bool(_check(schema, 4))
    assert outcomes["written"] > 60
    assert outcomes["refused"] > 5


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (_closed({"o": _closed({"a": {"type": "array", "uniqueItems": True}})}), "at #/properties/o/properties/a/uniq"),
        (_closed({"a": {"not": {}}}), "at #/properties/a/not: not is not supported"),
        ({"items": {"if": {}, "then": {}}}, "at #/items/if: if is not supported"),
        ({"anyOf": [_NULL, {"contains": {}}]}, "at #/anyOf/1/contains"),
        ({"$ref": "#/$defs/X", "$defs": {"X": {"dependentSchemas": {"a": {}}}}}, "at #/$defs/X/dependentSchemas"),
        ({"items": {"$ref": "http://elsewhere"}}, "at #/items/$ref: $ref must point into the schema itself"),
        ({"items": {"$dynamicRef": "#x"}}, "at #/items/$dynamicRef"),
        (
            {"properties": {"a/b": {"oneOf": [{}, _NULL]}}},
            "at #/properties/a~1b/oneOf: one value may fit cases 0 and 1",
        ),
        ({"oneOf": [{"type": "integer", "maximum": 9}, {"type": "integer", "minimum": 5}]}, "at #/oneOf: one value"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "at #/oneOf: one value may fit cases 0 and 1"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "at #/oneOf: one value may fit"),  # any number fits
        ({"properties": {"a": {"type": "foo"}}}, "at #/properties/a: Invalid type: foo"),
        ({"properties": {"a": {"pattern": "("}}}, "at #/properties/a: unclosed group"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "at #/properties/a: look-around"),
        ({"items": {"minimum": "3"}, "type": "array"}, "at #/items: Expected f64"),
        (
            {"prefixItems": [{}, {"enum": []}], "minItems": 2, "type": "array"},
            "at #: Unsatisfiable schema: prefix",
        ),
        (_closed({"a": {"minimum": 3, "maximum": 2, "type": "integer"}}, required=["a"]), "at #: Unsatisfiable"),
        ({"items": {"$ref": "#/$defs/X"}, "$defs": {"X": {"items": {"type": "foo"}}}}, "at #/$defs/X/items: Invalid"),
        (_closed({"a": {"$ref": "#/$defs/none"}}), "at #/properties/a: Pointer"),
        (_closed({"a": _closed({f"p{i}": {} for i in range(400)})}), "at #/properties/a: it is too complex"),
        ({"properties": {"x" * 300: {"not": {}}}}, "at #...xxx"),
        ({"properties": {"\x1b[1m\n": {"not": {}}}}, r"at #/properties/\x1b[1m\n/not: not is"),
    ],
)
def test_refusals_name_the_place(schema: dict[str, Any], problem: str) -> None:
    found, _ = checked(_BYTES, f"start: %json {json.dumps(schema)}")
    assert problem in found
    assert len(found) <= 200
    assert "coerce_one_of" not in found


def test_schemas_inside_grammars_are_rewritten_and_the_rest_stays() -> None:
    grammar = 'start: "%json {" /%json/ a // %json {}\na: %json {"type": "string", "format": "path"} "x"\n'
    assert rewrite_grammar(grammar) == grammar.replace(', "format": "path"', "")
    assert rewrite_grammar("start: %json {broken") == "start: %json {broken"
    with pytest.raises(SchemaError, match="at #/not"):
        rewrite_grammar('start: %json {"not": {}}')


def test_options_of_llguidance_still_hold() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert "oneOf" in rewrite({**overlapping, "x-guidance": {"coerce_one_of": True}})
    assert "not" in rewrite({"not": {}, "x-guidance": {"lenient": True}})


def test_malformed_keywords_are_no_exception_of_the_rewriter() -> None:
    wrong: list[Any] = [None, 1, "a", [], [1], {}, {"a": 1}, True, [[]], [{"oneOf": 1}], 1e30, -1]
    keywords = [
        "type",
        "const",
        "enum",
        "allOf",
        "anyOf",
        "oneOf",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "items",
        "prefixItems",
        "propertyNames",
        "dependentRequired",
        "dependencies",
        "minProperties",
        "maxProperties",
        "minItems",
        "maxItems",
        "minLength",
        "format",
        "pattern",
        "$ref",
        "$defs",
        "$id",
        "discriminator",
        "if",
        "then",
        "not",
        "contains",
        "uniqueItems",
        "unevaluatedProperties",
    ]
    for first in keywords:
        for second in ("oneOf", "properties", "propertyNames", "patternProperties", "dependentRequired"):
            for value in wrong:
                cases = [{first: value}, {"required": ["a"], "type": "object"}] if second == "oneOf" else {"a": {}}
                schema = {second: copy.deepcopy(cases), first: copy.deepcopy(value)}
                found = _rewritten(schema)
                assert isinstance(found, dict) or found.startswith("at #")


def test_references_in_circles_end() -> None:
    circle = {"$ref": "#/$defs/A", "$defs": {"A": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}}
    with pytest.raises(SchemaError, match="one value may fit"):
        rewrite(circle)
    assert target_of({"a": [{"b": 1}]}, "#/a/0/b") == (1, "#/a/0/b")
    assert target_of({"a": 1}, "#/a/b") is None


def test_one_of_with_hundreds_of_constants_costs_little() -> None:
    started = time.process_time()
    rewrite({"oneOf": [{"const": f"value {i}", "title": "t"} for i in range(1500)]})
    assert time.process_time() - started < 1
