"""Grammars for tests and measurements: typical ones (LEGITIMATE), and 60 bombs (BOMBS) that exhaust CPU or memory.

Each entry is the field of a request (`regex`, `json_schema` or `grammar`) and its value.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Guided(NamedTuple):
    """The request field of a grammar and its value."""

    field: str
    value: Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_STRING, _INTEGER, _NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))


def _array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


_TREE = {
    "$defs": {"node": _object(value=_INTEGER, children=_array({"$ref": "#/$defs/node"}))},
    "$ref": "#/$defs/node",
}
_PERSON = _object(name=_STRING, age={"type": "integer", "minimum": 0, "maximum": 150}, email={"type": "string"})
_AST = {
    "$defs": {
        "expression": {
            "anyOf": [
                _object(kind={"const": "number"}, value=_NUMBER),
                _object(kind={"const": "name"}, id=_STRING),
                _object(
                    kind={"const": "binary"},
                    operator={"enum": ["+", "-", "*", "/"]},
                    left={"$ref": "#/$defs/expression"},
                    right={"$ref": "#/$defs/expression"},
                ),
                _object(kind={"const": "call"}, function=_STRING, arguments=_array({"$ref": "#/$defs/expression"})),
            ]
        }
    },
    "$ref": "#/$defs/expression",
}

_ARITHMETIC = r"""
start: sum
sum: product | sum ("+" | "-") product
product: power | product ("*" | "/" | "%") power
power: atom ("^" power)?
atom: NUMBER | NAME | NAME "(" (sum ("," sum)*)? ")" | "(" sum ")" | "-" atom
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_]+/
"""
_AMBIGUOUS_ARITHMETIC = r"""
start: e
e: e "+" e | e "-" e | e "*" e | e "/" e | "(" e ")" | /[0-9]{1,9}/ | /[a-z]{1,9}/
"""
_SQL = r"""
start: query ";"
query: "SELECT " columns " FROM " table join* (" WHERE " condition)? (" GROUP BY " columns)? (" ORDER BY " columns)?
columns: column (", " column)* | "*"
column: name ("." name)? | function "(" column ")" | column " AS " name
table: name | "(" query ") AS " name
join: (" LEFT" | " INNER")? " JOIN " table " ON " condition
condition: comparison | condition " AND " condition | condition " OR " condition | "(" condition ")" | "NOT " condition
comparison: operand " " OPERATOR " " operand | operand " IS NULL"
    | operand " IN (" (query | literal (", " literal)*) ")"
operand: column | literal | operand " + " operand
literal: NUMBER | TEXT
function: "COUNT" | "SUM" | "AVG" | "MIN" | "MAX"
name: /[a-z_][a-z0-9_]{0,30}/
OPERATOR: "=" | "<>" | "<" | ">" | "<=" | ">=" | "LIKE"
NUMBER: /[0-9]+(\.[0-9]+)?/
TEXT: /'[^'\n]*'/
"""
_URL = r"https?://[a-z0-9-]+(\.[a-z0-9-]+){1,4}(:[0-9]{2,5})?(/[A-Za-z0-9._~%-]*)*(\?[a-z]+=[a-z0-9]*(&[a-z]+=[a-z0-9]*)*)?"

LEGITIMATE = {
    "yes or no": Guided("regex", "yes|no"),
    "email": Guided("regex", r"[a-z0-9._%+-]{1,64}@[a-z0-9-]{1,63}(\.[a-z]{2,24}){1,3}"),
    "url": Guided("regex", _URL),
    "long text": Guided("regex", r"(.|\n){1,2000}"),
    "unicode words": Guided("regex", r"\w{2,30}( \w{2,30}){0,40}"),
    "any JSON": Guided("json_schema", True),
    "person": Guided("json_schema", _PERSON),
    "tree": Guided("json_schema", _TREE),
    "expression tree": Guided("json_schema", _AST),
    "optional fields": Guided(
        "json_schema", {"type": "object", "properties": {f"field_{i}": _STRING for i in range(40)}}
    ),
    "bounds": Guided(
        "json_schema", _array({"type": "number", "minimum": -17.5, "maximum": 1234.5}, minItems=2, maxItems=50)
    ),
    "arithmetic": Guided("grammar", _ARITHMETIC),
    "ambiguous arithmetic": Guided("grammar", _AMBIGUOUS_ARITHMETIC),
    "SQL": Guided("grammar", _SQL),
}

_AMBIGUOUS = 's: s s s | s s | /[a-z ,.]/ | ""\n'


def _behind(prefix: int, rules: str = "start: PREFIX s\n" + _AMBIGUOUS) -> str:
    """A bomb after `prefix` fixed characters, which keep it cheap for the length of a trial run."""
    words = ("once upon a time " * (1 + prefix // 17))[:prefix]
    return f'{rules}PREFIX: "{words}"\n'


def _lark(rules: str) -> Guided:
    return Guided("grammar", rules)


def _regex(regex: str) -> Guided:
    return Guided("regex", regex)


def _schema(schema: Any) -> Guided:
    return Guided("json_schema", schema)


def _any_of_overlapping(count: int) -> dict[str, Any]:
    return {"anyOf": [_object(**{f"a{j}": {} for j in range(i % 7 + 1)}) for i in range(count)]}


def _recursion(branches: int) -> dict[str, Any]:
    node = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(branches)] + [_STRING]}
    return {"$defs": {"n": node}, "$ref": "#/$defs/n"}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"anyOf": [_STRING, _NUMBER, {}]}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": {}}}
    return schema


_MUTUAL = """
start: a b c
a: b c | c a b | "" | /[a-z ]/
b: a c | c b a | "" | /[a-z ]/
c: a b | b a c | "" | /[a-z ]/
"""

BOMBS = {
    "issue 19": _lark("start: s\n" + _AMBIGUOUS),
    **{f"ambiguous behind {n}": _lark(_behind(n)) for n in (1, 5, 20, 40, 80, 120, 160, 200)},
    **{f"parts of {n} ambiguous": _lark(f"start: (s{{{n}}} /[;\\n]/)+\n" + _AMBIGUOUS) for n in (1, 2, 3)},
    "ambiguous words": _lark("start: s\ns: s s | /[a-z]+/ | / /"),
    "short ambiguous parts": _lark('start: (p ".")+\np: q{1,12}\nq: q q | /[a-z ]/'),
    "left and right recursion": _lark("start: s\ns: s /[a-z]/ s | /[a-z]/ s | s /[a-z]/ | /[a-z ]/"),
    "five in a row": _lark('start: s\ns: s s s s s | s s s s | s s s | s s | /[a-z ]/ | ""'),
    "mutual recursion": _lark(_MUTUAL),
    "mutual recursion behind 100": _lark(_behind(100, _MUTUAL.replace("start: a b c", "start: PREFIX a b c"))),
    "nullable loop": _lark("start: (a* b* c*)*\na: /[a-z]/?\nb: /[a-z ]/?\nc: a? b?"),
    "nullable tower": _lark(
        "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | ""\n' for i in range(12)) + "r12: /[a-z ]/"
    ),
    "hundred names of one thing": _lark(
        "start: s+\ns: " + " | ".join(f"n{i}" for i in range(100)) + "".join(f"\nn{i}: /[a-z]/" for i in range(100))
    ),
    "three hundred names behind 60": _lark(
        _behind(60, "start: PREFIX s+\ns: " + " | ".join(f"n{i}" for i in range(300)) + "\n")
        + "".join(f"n{i}: /[a-z ]/ /[a-z ]/?\n" for i in range(300))
    ),
    "palindromes": _lark('start: p\np: /[a-z]/ p /[a-z]/ | /[a-z]/ | ""'),
    "balanced in every way": _lark('start: s\ns: "a" s "b" | s s | "a" s | s "b" | /[a-z ]/ | ""'),
    "dangling else": _lark('start: s\ns: "if " s | "if " s " else " s | s s | /[a-z ]/'),
    "ambiguous sums": _lark(_AMBIGUOUS_ARITHMETIC),
    "ambiguous sums of letters": _lark('start: e\ne: e e | e "+" e | e "*" e | "(" e ")" | /[a-z]/'),
    "repeated s": _lark('start: s{1,200}\ns: /[a-z]/ | s s | ""'),
    "many counters": _lark("start: (a{0,50} b{0,50} c{0,50}){1,50}\na: /[a-z]/\nb: /[a-z ]/\nc: /[a-z,]/"),
    "huge repetition of a rule": _lark('start: s{1,10000}\ns: /[a-z]/ | " "'),
    "deep chain": _lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1} | /[a-z]/ r{i + 1}\n" for i in range(400)) + "r400: s\n" + _AMBIGUOUS
    ),
    "thousand alternatives": _lark("start: s+\ns: " + " | ".join(f'"w{i} "' for i in range(1000))),
    "overlapping lexemes": _lark(
        "start: (A|B|C|D|E)+\nA: /[a-z]{1,9}/\nB: /[a-m]+ ?/\nC: /[e-z ]+/\nD: /.{1,7}/\nE: /[^q]+/"
    ),
    "fifty lexemes": _lark(
        "start: ("
        + "|".join(f"L{i}" for i in range(50))
        + ")+\n"
        + "".join(f"L{i}: /[a-z ]{{1,{i + 2}}}/\n" for i in range(50))
    ),
    "repetition 10,000": _regex("[a-z ]{1,10000}"),
    "nested repetition": _regex("(([a-z ]{1,20}){1,20}){1,20}"),
    "nested stars": _regex("((((a|b)*|[a-z]*)*|c)*[a-z ]*)*x"),
    "alternation of 2,000": _regex("|".join(f"[a-z]{{{i % 40}}}w{i}" for i in range(2000))),
    "the n-th from the end, 14": _regex("[ab ]*a[ab ]{14}"),
    "the n-th from the end, 18": _regex("[a-z ]*a[a-z ]{18}"),
    "the n-th from the end, 60": _regex("[a-z ]*e[a-z ]{60}"),
    "n-th from the end behind 50": _regex("once upon a time there was a fox who sang to moon [a-z ]*a[a-z ]{20}"),
    "wide classes": _regex(r"[\u0080-\uffff\w]{1,50}\W[\u0400-\u9fff]{1,50}"),
    "all scripts": _regex(r"(\w\W|\W\w|\d\D|\s\S){1,500}"),
    "any character, counted": _regex(r"(.|\n){500,1000}(.|\n){500,1000}"),
    "dots between words": _regex("(.*the.*and.*of.*a.*in.*to.*is.*){1,9}"),
    "words in any order": _regex(
        "(" + "|".join(".*" + w for w in ("fox", "owl", "moon", "sun", "tree", "day")) + ")*end"
    ),
    "optional letters": _regex("a?" * 200 + "[a-z ]{200}"),
    "emails, nested": _regex("(([a-z0-9._%+-]+@)*([a-z0-9-]+\\.)*)*[a-z]{2,}"),
    "anyOf of 300": _schema(_any_of_overlapping(300)),
    "anyOf of 40 in arrays": _schema(_array(_any_of_overlapping(40))),
    "recursion in 3 ways": _schema(_recursion(3)),
    "recursion in 40 ways": _schema(_recursion(40)),
    "150 optional fields": _schema({"type": "object", "properties": {f"f{i}": {} for i in range(150)}}),
    "optional fields with one prefix": _schema(
        {"type": "object", "properties": {"a" * i: _STRING for i in range(1, 80)}}
    ),
    "long patterns": _schema(
        _object(**{f"p{i}": {"type": "string", "pattern": "^(a|[a-z ]{1,500})*$"} for i in range(9)})
    ),
    "string lengths": _schema(
        _array({"type": "string", "minLength": 2000, "maxLength": 4000}, minItems=50, maxItems=100)
    ),
    "narrow numbers": _schema(_array({"type": "number", "minimum": 0.123456789, "maximum": 9876543210.123456})),
    "enum of 1,500": _schema({"enum": [f"{'ab' * (i % 30)}{i}" for i in range(1500)]}),
    "nested 30 deep": _schema(_nested(30)),
}
