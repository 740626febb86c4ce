"""Decides whether the cases of a oneOf exclude each other, and what to add to objects so that they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_MAX_ALTERNATIVES = 16
_MAX_NESTING = 8

Resolve = Callable[[str], Any]
"""The schema that a $ref points to; None if it is not in the document."""


@dataclass(slots=True)
class Additions:
    """What a case of a oneOf needs in addition, so that an object that fits it fits no other case."""

    required: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)

    @property
    def schema(self) -> dict[str, Any]:
        """The additions as a schema; empty if there are none."""
        found: dict[str, Any] = {"required": self.required} if self.required else {}
        return found | ({"properties": dict.fromkeys(self.forbidden, False)} if self.forbidden else {})


@dataclass(slots=True)
class _Facts:
    """What is known of the values that fit a schema without alternatives; less is known than is true."""

    types: frozenset[str] = _TYPES
    values: list[Any] | None = None
    number: tuple[float, float] = (-inf, inf)
    is_open: tuple[bool, bool] = (False, False)
    """Whether the lowest and the highest number are themselves excluded."""
    length: tuple[float, float] = (0, inf)
    n_items: tuple[float, float] = (0, inf)
    prefix: list[Any] = field(default_factory=list)
    items: Any = None
    properties: dict[str, list[Any]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    names: set[str] | None = None
    """The only names that the object may have; None if others are possible."""

    def forbids(self, name: str) -> bool:
        """Whether no object that fits has this property."""
        return (self.names is not None and name not in self.names) or False in self.properties.get(name, ())


def additions(schema: Mapping[str, Any], resolve: Resolve) -> list[Additions] | tuple[int, int]:
    """What to add to each case of a schema's oneOf, or the first two cases that one value may fit."""
    cases: list[Any] = schema["oneOf"]
    shared = {keyword: value for keyword, value in schema.items() if keyword not in ("oneOf", "anyOf", "allOf", "$ref")}
    discriminator = schema.get("discriminator")
    prover = _Prover(resolve, discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None)
    found = [Additions() for _ in cases]
    facts = [prover.alternatives(case, shared=shared) for case in cases]
    if _all_values_differ(facts):
        return found
    for i, ours in enumerate(facts):
        for j, theirs in enumerate(facts[:i]):
            if not all(prover.separate(a, b, found[i], found[j]) for a in ours for b in theirs):
                return j, i
    for i, (addition, alternatives) in enumerate(zip(found, facts, strict=True)):
        needed = {*addition.required, *(name for one in alternatives for name in one.required)}
        if needed & {*addition.forbidden}:
            return (0, 1) if i == 0 else (0, i)
    return found


def _all_values_differ(cases: Sequence[list[_Facts]]) -> bool:
    """Whether every case is a list of values and no two cases share one: quick, for the many cases of an enum."""
    lists = [one.values for alternatives in cases for one in alternatives]
    if len(lists) != len(cases) or any(values is None for values in lists):
        return False
    keys = [key for values in lists for key in {*map(_key, values or ())}]
    return len(keys) == len({*keys})


class _Prover:
    def __init__(self, resolve: Resolve, tag: Any) -> None:
        self._resolve = resolve
        self._tag = tag

    def alternatives(self, schema: Any, nesting: int = 0, shared: Mapping[str, Any] | None = None) -> list[_Facts]:
        """What is known of each alternative of a schema, to which `shared` applies too."""
        if schema is False:
            return []
        return [_facts([shared or {}, *parts]) for parts in self._parts(schema, nesting)]

    def _parts(self, schema: Any, nesting: int) -> list[list[Mapping[str, Any]]]:
        """The schema as alternatives of conjunctions of plain keywords."""
        if not isinstance(schema, Mapping) or nesting > _MAX_NESTING:
            return [[]]
        found: list[list[Mapping[str, Any]]] = [[schema]]
        conjuncts = [schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
        reference = schema.get("$ref")
        every = [*(one for some in conjuncts for one in some)]
        if isinstance(reference, str):
            every.append(self._resolve(reference))
        for one in every:
            found = _product(found, self._parts(one, nesting + 1))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(cases := schema.get(keyword), list) and cases:
                some = [parts for case in cases if case is not False for parts in self._parts(case, nesting + 1)]
                found = _product(found, some)
        return found

    def separate(self, a: _Facts, b: _Facts, to_a: Additions, to_b: Additions) -> bool:
        """Whether no value fits both, if necessary with additions for objects."""
        common = _common_types(a, b)
        if not common or _values_differ(a, b):
            return True
        if any(not self._differ(kind, a, b, 0) for kind in common - {"object"}):
            return False
        if "object" not in common or self._differ("object", a, b, 0):
            return True
        return self._separate_objects(a, b, to_a, to_b)

    def _separate_objects(self, a: _Facts, b: _Facts, to_a: Additions, to_b: Additions) -> bool:
        names = [name for name in a.properties if name in b.properties]
        for name in sorted(names, key=lambda name: name != self._tag):
            if self._properties_differ(name, a, b, 0):
                for facts, to in ((a, to_a), (b, to_b)):
                    if name not in facts.required and name not in to.required:
                        to.required.append(name)
                return True
        only_a, only_b = _first_only(a, b), _first_only(b, a)
        if only_a is None or only_b is None:
            return False
        for name, to in ((only_b, to_a), (only_a, to_b)):
            if name not in to.forbidden:
                to.forbidden.append(name)
        return True

    def _are_disjoint(self, first: Any, second: Any, nesting: int) -> bool:
        if nesting > _MAX_NESTING:
            return False
        theirs = self.alternatives(second, nesting)
        return all(self._all_differ(a, b, nesting) for a in self.alternatives(first, nesting) for b in theirs)

    def _all_differ(self, a: _Facts, b: _Facts, nesting: int) -> bool:
        return _values_differ(a, b) or all(self._differ(kind, a, b, nesting) for kind in _common_types(a, b))

    def _differ(self, kind: str, a: _Facts, b: _Facts, nesting: int) -> bool:
        """Whether no value of this type fits both."""
        match kind:
            case "integer" | "fraction":
                return _is_below(a, b) or _is_below(b, a)
            case "string":
                return a.length[1] < b.length[0] or b.length[1] < a.length[0]
            case "array":
                return self._arrays_differ(a, b, nesting)
            case "object":
                return any(b.forbids(name) for name in a.required) or any(
                    a.forbids(name) or (name in a.required and self._properties_differ(name, a, b, nesting))
                    for name in b.required
                )
            case _:
                return False

    def _arrays_differ(self, a: _Facts, b: _Facts, nesting: int) -> bool:
        if a.n_items[1] < b.n_items[0] or b.n_items[1] < a.n_items[0]:
            return True
        for index in range(min(int(min(max(a.n_items[0], b.n_items[0]), 64)), max(len(a.prefix), len(b.prefix), 1))):
            ours = a.prefix[index] if index < len(a.prefix) else a.items
            theirs = b.prefix[index] if index < len(b.prefix) else b.items
            if self._are_disjoint(ours, theirs, nesting + 1):
                return True
        return False

    def _properties_differ(self, name: str, a: _Facts, b: _Facts, nesting: int) -> bool:
        return any(
            self._are_disjoint(ours, theirs, nesting + 1)
            for ours in a.properties.get(name, ())
            for theirs in b.properties.get(name, ())
        )


def _product(
    left: list[list[Mapping[str, Any]]], right: list[list[Mapping[str, Any]]]
) -> list[list[Mapping[str, Any]]]:
    if len(left) * len(right) > _MAX_ALTERNATIVES:
        return left  # knowing less is safe
    return [[*a, *b] for a in left for b in right]


def _facts(parts: Sequence[Mapping[str, Any]]) -> _Facts:
    facts = _Facts()
    for part in parts:
        _add_values(facts, part)
        _add_bounds(facts, part)
        _add_contents(facts, part)
    return facts


def _add_values(facts: _Facts, part: Mapping[str, Any]) -> None:
    kinds = part.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
    if names is not None:
        facts.types &= {
            kind for name in names for kind in (("integer", "fraction") if name == "number" else (str(name),))
        }
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        known = facts.values
        facts.values = values if known is None else [one for one in known if _key(one) in set(map(_key, values))]
        facts.types &= {_type_of(value) for value in facts.values}


def _add_bounds(facts: _Facts, part: Mapping[str, Any]) -> None:
    for sign, bound, exclusive in ((-1, "minimum", "exclusiveMinimum"), (1, "maximum", "exclusiveMaximum")):
        for value, is_open in ((part.get(bound), part.get(exclusive) is True), (part.get(exclusive), True)):
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            index = sign > 0
            if sign * value < sign * facts.number[index] or (value == facts.number[index] and is_open):
                facts.number = (facts.number[0], value) if index else (value, facts.number[1])
                facts.is_open = (facts.is_open[0], is_open) if index else (is_open, facts.is_open[1])
    facts.length = _narrowed(facts.length, part.get("minLength"), part.get("maxLength"))
    facts.n_items = _narrowed(facts.n_items, part.get("minItems"), part.get("maxItems"))


def _add_contents(facts: _Facts, part: Mapping[str, Any]) -> None:
    items, prefix = part.get("items"), part.get("prefixItems")
    if isinstance(items, list):
        items, prefix = part.get("additionalItems"), items
    if isinstance(prefix, list) and not facts.prefix:
        facts.prefix = prefix
        facts.items = items
    elif items is not None and facts.items is None and not facts.prefix:
        facts.items = items
    if items is False:
        facts.n_items = _narrowed(facts.n_items, None, len(prefix) if isinstance(prefix, list) else 0)
    properties = part.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    for name, schema in properties.items():
        facts.properties.setdefault(name, []).append(schema)
    required = part.get("required")
    facts.required |= {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        facts.names = {*properties} if facts.names is None else facts.names & {*properties}


def _narrowed(known: tuple[float, float], low: Any, high: Any) -> tuple[float, float]:
    lowest = max(known[0], low) if isinstance(low, int | float) else known[0]
    return lowest, min(known[1], high) if isinstance(high, int | float) else known[1]


def _common_types(a: _Facts, b: _Facts) -> frozenset[str]:
    return a.types & b.types


def _values_differ(a: _Facts, b: _Facts) -> bool:
    if a.values is None and b.values is None:
        return False
    if a.values is not None and b.values is not None:
        return not {*map(_key, a.values)} & {*map(_key, b.values)}
    values, other = (a.values, b) if a.values is not None else (b.values, a)
    return not any(_may_fit(value, other) for value in values or ())


def _may_fit(value: Any, facts: _Facts) -> bool:
    kind = _type_of(value)
    if kind not in facts.types:
        return False
    if kind in ("integer", "fraction"):
        point = _Facts(number=(value, value))
        return not (_is_below(point, facts) or _is_below(facts, point))
    if kind == "string":
        return facts.length[0] <= len(value) <= facts.length[1]
    if kind == "array":
        return facts.n_items[0] <= len(value) <= facts.n_items[1]
    return kind != "object" or not (facts.required - {*value} or any(facts.forbids(name) for name in value))


def _is_below(a: _Facts, b: _Facts) -> bool:
    high, low = a.number[1], b.number[0]
    return high < low or (high == low and (a.is_open[1] or b.is_open[0]))


def _first_only(a: _Facts, b: _Facts) -> str | None:
    """A property that `a` requires and `b` does not."""
    return next((name for name in sorted(a.required) if name not in b.required), None)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _key(value: Any) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else value
