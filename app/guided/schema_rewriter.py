"""Rewrites JSON schemas to what llguidance implements, so that what fits the result fits the schema.

llguidance refuses keywords that change nothing, unknown formats and most uses of oneOf, and it may repeat the names of
patternProperties. rewrite() removes what changes nothing, and expresses the rest with other keywords; what cannot be
expressed is a SchemaError with its place. Used in the validator's sandboxed process, which bounds time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from app.guided.exclusive_cases import additions
from app.guided.finite_patterns import MAX_NAMES, names_of

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats that llguidance enforces; others are annotations (JSON Schema 2020-12, validation, 7.2.1)."""

_HEX = "[0-9a-fA-F]"
_UUID = f"^{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$"
_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_STRICTER_FORMATS = {
    "date": f"^{_YEAR}",
    "date-time": rf"^{_YEAR}-..-..[Tt]..:..:[0-5]",
    "time": "^..:..:[0-5]",
}
"""llguidance also writes the year 0000 and second 60, which most parsers of dates refuse."""
_NO_DOTS = re.compile(r"^\^(?:\(\?!(?:\\\.|\.\*\\\.\\\.)\))+")
"""What zod puts before the pattern of an e-mail address, which then begins with no dot and has no two in a row."""
_MAX_DEPENDENCIES = 4
_MAX_COPIED_BYTES = 64
"""A larger schema that applies to several names moves to $defs."""

_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef")

_REMEDIES = {
    "not": "list what is allowed instead (enum, anyOf, a type)",
    "if": "write the cases as anyOf, each with its condition as const or enum",
    "uniqueItems": "leave it out; a grammar cannot compare items",
    "contains": "say with prefixItems and items which items there are",
    "propertyNames": "use an enum, lengths or one pattern without properties, or patternProperties",
    "dependentRequired": f"use at most {_MAX_DEPENDENCIES} names, or anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "unevaluatedProperties": "use additionalProperties in each case",
    "unevaluatedItems": "use items in each case",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}


class SchemaError(ValueError):
    """A schema that cannot be used, and the place where: a JSON pointer in a fragment (`#/properties/a`)."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"at {shown(place)}: {problem}")


def rewrite(schema: dict[str, Any]) -> dict[str, Any]:
    """An equivalent or stricter schema that llguidance can compile. Changes `schema`. Raises SchemaError."""
    options = schema.get("x-guidance")
    return _Rewriter(schema, options if isinstance(options, Mapping) else {}).run()


def pointer(place: str, *keys: str | int) -> str:
    """The place of a part of the schema at `place`."""
    return place + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def shown(place: str) -> str:
    """A place as an error shows it: printable, and not longer than a line."""
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in place)
    return text if len(text) <= 100 else f"#...{text[-96:]}"


def target_of(root: Any, reference: str) -> tuple[Any, str] | None:
    """The part of a schema that `#/...` points to, and its place; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found, place = root, "#"
    for token in reference.split("/")[1:]:
        key = unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
        place = pointer(place, key)
    return found, place


def subschemas(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas directly below a schema, without definitions, and their places."""
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), dict | bool):
            yield schema[keyword], pointer(place, keyword)
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((one, pointer(place, keyword, i)) for i, one in enumerate(schema[keyword]))
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((one, pointer(place, keyword, name)) for name, one in schema[keyword].items())


class _Rewriter:
    """Walks a schema from its root, along references, and changes each part once.

    Unused definitions stay as they are: they may be anything.
    """

    def __init__(self, root: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._root = root
        self._is_lenient = options.get("lenient") is True
        """llguidance then ignores what it does not implement."""
        self._coerces = options.get("coerce_one_of") is True
        self._has_ids = _has_ids(root)
        self._targets = {} if self._has_ids else _targets(root)
        self._visited: dict[int, dict[str, Any]] = {}
        """By identity; kept alive, so that no other schema gets the same one."""
        self._pending: list[tuple[Any, str]] = [(root, "#")]
        self._references: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Schemas with a $ref, and what it points to: that may move."""

    def run(self) -> dict[str, Any]:
        while self._pending:
            schema, place = self._pending.pop()
            if isinstance(schema, dict) and id(schema) not in self._visited:
                self._visited[id(schema)] = schema
                self._rewrite(schema, place)
                self._pending += subschemas(schema, place)
        self._update_references()
        return self._root

    def _rewrite(self, schema: dict[str, Any], place: str) -> None:
        self._follow_reference(schema, place)
        self._drop_what_changes_nothing(schema)
        self._restrict_format(schema)
        if not self._is_lenient:
            self._replace_unevaluated(schema)
            self._replace_property_names(schema)
            self._replace_dependencies(schema)
            for keyword, remedy in _REMEDIES.items():
                if keyword in schema:
                    raise SchemaError(pointer(place, keyword), f"{keyword} is not supported: {remedy}")
        self._name_pattern_properties(schema)
        if isinstance(schema.get("oneOf"), list) and schema["oneOf"] and not self._coerces:
            self._replace_one_of(schema, place)

    def _follow_reference(self, schema: dict[str, Any], place: str) -> None:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or self._has_ids:
            return  # with $id, llguidance resolves references
        if not reference.startswith("#"):
            raise SchemaError(pointer(place, "$ref"), "$ref must point into the schema itself (#/...)")
        _, target = self._targets.get(id(schema)) or (schema, target_of(self._root, reference))
        if target and isinstance(target[0], dict):
            self._pending.append(target)
            self._references.append((schema, target[0]))

    def _resolve(self, reference: str) -> Any:
        target = None if self._has_ids else target_of(self._root, reference)
        return target[0] if target else None

    def _update_references(self) -> None:
        places: dict[int, str] = {}
        pending: list[tuple[Any, str]] = [(self._root, "#")] if self._references else []
        while pending:
            value, place = pending.pop()
            if isinstance(value, dict):
                if id(value) in places:
                    continue
                places[id(value)] = place
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            pending += [(entry, pointer(place, key)) for key, entry in entries]
        for schema, target in self._references:
            previous = target_of(self._root, schema["$ref"])
            if (previous is None or previous[0] is not target) and id(target) in places:
                schema["$ref"] = places[id(target)].replace("%", "%25")

    def _drop_what_changes_nothing(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
            del schema["format"]
        if schema.get("format") == "email" and isinstance(schema.get("pattern"), str):
            schema["pattern"] = _NO_DOTS.sub("^", schema["pattern"])  # the format says the same
        for keyword in _COUNTS:
            count = schema.get(keyword)
            if isinstance(count, float) and count.is_integer():
                schema[keyword] = int(count)
        if "if" not in schema or ("then" not in schema and "else" not in schema):
            for keyword in ("if", "then", "else"):
                schema.pop(keyword, None)
        if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
            for keyword in ("contains", "minContains", "maxContains"):
                schema.pop(keyword, None)
        max_items = schema.get("maxItems")
        is_short = isinstance(max_items, int) and max_items <= 1
        for keyword, is_empty in (
            ("uniqueItems", schema.get("uniqueItems") is False or is_short),
            ("not", schema.get("not") is False),
            ("propertyNames", schema.get("propertyNames") in (True, {}, {"type": "string"})),
            ("unevaluatedProperties", schema.get("unevaluatedProperties") in (True, {})),
            ("unevaluatedItems", schema.get("unevaluatedItems") in (True, {})),
            *((name, schema.get(name) == {}) for name in ("dependentRequired", "dependentSchemas", "dependencies")),
            ("$dynamicAnchor", True),
            ("$recursiveAnchor", True),
        ):
            if is_empty:
                schema.pop(keyword, None)

    @staticmethod
    def _restrict_format(schema: dict[str, Any]) -> None:
        name = schema.get("format")
        pattern = _STRICTER_FORMATS.get(name) if isinstance(name, str) else None
        if pattern is None or not isinstance(schema.get("allOf", []), list):
            return
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern

    def _replace_unevaluated(self, schema: dict[str, Any]) -> None:
        """Without other schemas for the same value, what is not evaluated is what is additional."""
        if any(keyword in schema for keyword in _IN_PLACE):
            return
        for keyword, others in (
            ("unevaluatedProperties", ("additionalProperties",)),
            ("unevaluatedItems", ("items", "contains")),
        ):
            if keyword in schema and not any(other in schema for other in others):
                schema[others[0]] = schema.pop(keyword)

    def _replace_property_names(self, schema: dict[str, Any]) -> None:
        names = schema.get("propertyNames")
        for _ in range(4):  # pydantic refers to an enum
            if isinstance(names, Mapping) and isinstance(names.get("$ref"), str):
                names = self._resolve(names["$ref"])
        if not isinstance(names, Mapping):
            return
        rest = schema.get("additionalProperties", True)
        values = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(values, list) and not schema.get("patternProperties"):
            known = schema.get("properties", {})
            texts = list(dict.fromkeys(filter(_is_text, values)))
            if not isinstance(known, dict) or any(name not in texts for name in known):
                return
            rest = self._shared(rest, len(texts))
            schema["properties"] = {**known, **{name: rest for name in texts if name not in known}}
        elif not schema.get("patternProperties") and not schema.get("properties") and (pattern := _name_pattern(names)):
            schema["patternProperties"] = {pattern: rest}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _replace_dependencies(self, schema: dict[str, Any]) -> None:
        """`a` requires `b`: there is no `a`, or there are both."""
        for keyword in ("dependentRequired", "dependencies"):
            needs = schema.get(keyword)
            if not isinstance(needs, Mapping) or not all(isinstance(value, list) for value in needs.values()):
                continue
            if not isinstance(schema.get("required", []), list) or not isinstance(schema.get("allOf", []), list):
                continue
            required, cases = list(schema.get("required", [])), []
            for name, others in needs.items():
                if name in required:
                    required += [other for other in others if other not in required]
                elif others:
                    cases.append({"anyOf": [{"properties": {name: False}}, {"required": [name, *others]}]})
            if len(cases) > _MAX_DEPENDENCIES:
                continue
            del schema[keyword]
            if required:
                schema["required"] = required
            if cases:
                schema["allOf"] = [*schema.get("allOf", []), *cases]

    def _name_pattern_properties(self, schema: dict[str, Any]) -> None:
        """Replaces a pattern that matches few names by properties of these names, so that each occurs once."""
        patterns, known = schema.get("patternProperties"), schema.get("properties", {})
        if (
            isinstance(patterns, dict)
            and isinstance(known, dict)
            and all(isinstance(one, dict | bool) for one in patterns.values())
        ):
            found = {pattern: names for pattern in patterns if (names := names_of(pattern)) is not None}
            every = dict.fromkeys([*known, *(name for names in found.values() for name in names)])
            if len(every) - len(known) <= MAX_NAMES and self._counts_still_hold(schema, len(every), found):
                values = {name: [known[name]] if name in known else [] for name in every}
                for pattern, names in found.items():
                    value = self._shared(patterns.pop(pattern), len(names))
                    for name in names:
                        values[name].append(value)
                schema["properties"] = {name: _all_of(schemas) for name, schemas in values.items()}
                if not patterns:
                    del schema["patternProperties"]
        self._drop_counts_that_hold(schema)

    @staticmethod
    def _counts_still_hold(schema: Mapping[str, Any], n_names: int, found: Mapping[str, list[str]]) -> bool:
        """llguidance counts properties only if all that are listed are required."""
        if "minProperties" not in schema and "maxProperties" not in schema:
            return True
        is_closed = schema.get("additionalProperties") is False and len(found) == len(schema["patternProperties"])
        return (
            is_closed
            and n_names <= _number(schema, "maxProperties", n_names)
            and (_number(schema, "minProperties", 0) <= len(_names(schema.get("required"))))
        )

    @staticmethod
    def _drop_counts_that_hold(schema: dict[str, Any]) -> None:
        n_required = len(_names(schema.get("required")))
        if "minProperties" in schema and _number(schema, "minProperties", n_required + 1) <= n_required:
            del schema["minProperties"]
        properties = schema.get("properties")
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if is_closed and isinstance(properties, dict) and len(properties) <= _number(schema, "maxProperties", -1):
            del schema["maxProperties"]

    def _replace_one_of(self, schema: dict[str, Any], place: str) -> None:
        found = additions(schema, self._resolve)
        if isinstance(found, tuple):
            first, second = found
            advice = 'require a property with another "const" in each, or use anyOf if both may hold'
            raise SchemaError(pointer(place, "oneOf"), f"one value may fit cases {first} and {second}: {advice}")
        cases = [
            {"allOf": [case, addition.schema]} if addition.schema else case
            for case, addition in zip(schema.pop("oneOf"), found, strict=True)
        ]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": cases}]
        else:
            schema["anyOf"] = cases

    def _shared(self, value: Any, n_uses: int) -> Any:
        """A schema for several names: itself if it is small, else a reference to it."""
        if n_uses <= 1 or self._has_ids or len(json.dumps(value)) <= _MAX_COPIED_BYTES:
            return value
        definitions = self._root.setdefault("$defs", {})
        if not isinstance(definitions, dict):
            return value
        name = next(name for i in range(len(definitions) + 1) if (name := f"shared-{i}") not in definitions)
        definitions[name] = value
        return {"$ref": f"#/$defs/{name}"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _number(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    value = schema.get(keyword, default)
    return value if isinstance(value, int) else default


def _all_of(schemas: list[Any]) -> Any:
    plain = [schema for schema in schemas if schema is not True and schema != {}]
    return plain[0] if len(plain) == 1 else {"allOf": plain} if plain else True


def _name_pattern(names: Mapping[str, Any]) -> str | None:
    """A regex for what `propertyNames` allows, if one keyword says it."""
    limits = {keyword: value for keyword, value in names.items() if keyword not in ("type", "title", "description")}
    pattern = limits.get("pattern")
    if set(limits) == {"pattern"} and isinstance(pattern, str):
        return pattern
    if limits == {"format": "uuid"}:
        return _UUID
    if limits and set(limits) <= {"minLength", "maxLength"} and all(isinstance(n, int) for n in limits.values()):
        return rf"^[\s\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$"
    return None


def _has_ids(schema: Mapping[str, Any]) -> bool:
    """Whether a part has an $id, which changes what references mean; a root's own does not for `#/...`."""
    pending: list[Any] = [value for key, value in schema.items() if key != "$id"]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return isinstance(schema.get("$id"), str) and _refers_outside(schema)


_Target = tuple[Any, str]


def _targets(root: dict[str, Any]) -> dict[int, tuple[dict[str, Any], _Target | None]]:
    """What each $ref of a schema points to before anything moves, by the identity of the schema that has it."""
    found = {}
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                found[id(value)] = value, target_of(root, value["$ref"])
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return found


def _refers_outside(schema: Any) -> bool:
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str) and not value["$ref"].startswith("#"):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False


_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\b)')


def rewrite_grammar(lark: str) -> str:
    """Rewrites each schema after %json in a Lark grammar. Raises SchemaError."""
    parts, end = [], 0
    for schema, start, stop in _embedded(lark):
        before = json.dumps(schema)
        if (after := json.dumps(rewrite(schema))) != before:
            parts += [lark[end:start], after]
            end = stop
    return "".join([*parts, lark[end:]])


def schemas_of(lark: str) -> list[dict[str, Any]]:
    """The schemas after %json in a Lark grammar."""
    return [schema for schema, _, _ in _embedded(lark)]


def _embedded(lark: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Each schema after %json, with the place of its text; llguidance gets what is no JSON object."""
    at = 0
    while found := _JSON.search(lark, at):
        at = found.end()
        if not found["json"]:
            continue
        start = len(lark) - len(lark[at:].lstrip())
        try:
            schema, at = json.JSONDecoder().raw_decode(lark, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            yield schema, start, at
