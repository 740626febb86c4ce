"""Grammars from a request's fields, and errors that need no compilation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.common.errors import InvalidRequest
from app.common.llguidance_adapter import GrammarVocabulary
from app.guided.grammar import MAX_BYTES, MAX_DEPTH, Grammar, grammar_from


def _schema(grammar: Grammar | None) -> dict[str, Any]:
    assert grammar
    text = grammar.lark.removeprefix("start: %json ").partition("\n%llguidance")[0]
    schema: dict[str, Any] = json.loads(text)
    assert "whitespace_pattern" in schema.pop("x-guidance")
    return schema


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_response_format_text_is_no_grammar() -> None:
    assert grammar_from("response_format", {"type": "text"}) is None


def test_all_forms_of_a_schema_give_the_same_grammar() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for grammar in (
        grammar_from("json_schema", schema),
        grammar_from("json_schema", json.dumps(schema)),
        grammar_from("response_format", wrapped),
    ):
        found = _schema(grammar)
        assert found == schema
        assert list(found["properties"]) == ["b", "a"], "the output must keep the order of properties"
    assert _schema(grammar_from("json_schema", True)) == _schema(grammar_from("json_schema", "true")) == {}
    assert _schema(grammar_from("response_format", {"type": "json_object"})) == {"type": "object"}


@pytest.mark.parametrize("options", [{"whitespace_flexible": False}, {"whitespace_pattern": ""}])
def test_no_default_overrides_a_schemas_own_whitespace(options: dict[str, Any]) -> None:
    grammar = grammar_from("json_schema", {"x-guidance": options, "type": "array"})
    assert grammar
    matcher = GrammarVocabulary([bytes([byte]) for byte in range(256)], 256).matcher(grammar.lark)
    assert matcher.validate_tokens(list(b"[1, 2]")) == len(b"[1,")


def test_schema_may_set_its_own_whitespace() -> None:
    grammar = grammar_from("json_schema", {"x-guidance": {"whitespace_pattern": "", "lenient": True}})
    assert grammar
    assert '"x-guidance": {"whitespace_pattern": "", "lenient": true}' in grammar.lark


def test_slashes_in_a_regex_are_escaped() -> None:
    grammar = grammar_from("regex", "a/b\\/c\\\\/\n")
    assert grammar == Grammar("start: /a\\/b\\/c\\\\\\/\\n/", "regex")


@pytest.mark.parametrize(
    "text", ['start: "<[0]> @a stop="', "start: /<[0]> stop= %llguidance/", 'start: "a" # <[0]> @b\n']
)
def test_text_that_looks_like_a_special_token_is_accepted(text: str) -> None:
    assert grammar_from("grammar", text)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"regex": "a\\"}, "regex", "incomplete escape"),
        ({"regex": "\ud800"}, "regex", "half a character"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex", f"at most {MAX_BYTES}"),
        ({"grammar": "#" * (MAX_BYTES + 1)}, "grammar", f"at most {MAX_BYTES}"),
        ({"grammar": 'start: <[0]> "a"'}, "grammar", "is not supported: leave out"),
        ({"grammar": "start: <|endoftext|>"}, "grammar", "is not supported: leave out"),
        ({"grammar": "start: @other"}, "grammar", "'@other' is not supported"),
        ({"grammar": 'start[stop="a"]: /b*/'}, "grammar", "'stop=' is not supported"),
        ({"grammar": "start[temperature=2]: /b*/"}, "grammar", "'temperature=' is not supported"),
        ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "grammar", "%llguidance"),
        ({"json_schema": '{"a"'}, "json_schema", "not JSON (line 1, column 5)"),
        ({"json_schema": False}, "json_schema", "true for any JSON"),
        ({"json_schema": "[]"}, "json_schema", "must be a JSON object"),
        ({"json_schema": "[" * 60_000}, "json_schema", "nested too deeply"),
        ({"json_schema": _nested(MAX_DEPTH + 1)}, "json_schema", "nested too deeply"),
        ({"json_schema": {"enum": ["a" * MAX_BYTES]}}, "json_schema", f"at most {MAX_BYTES}"),
        ({"json_schema": {"const": float("nan")}}, "json_schema", "JSON cannot represent"),
        ({"json_schema": {"x-guidance": 1}}, "json_schema", "x-guidance must be an object"),
        ({"response_format": {}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shema": 1}}},
            "response_format",
            "no field 'shema'",
        ),
    ],
)
def test_invalid_grammars_are_refused_by_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_from(*next(iter(fields.items())))
    assert caught.value.param == field
    assert message in str(caught.value)


def test_schema_of_the_maximum_depth_is_accepted() -> None:
    assert grammar_from("json_schema", _nested(MAX_DEPTH))
