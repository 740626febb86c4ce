"""Sandboxed process that test-compiles grammars before the engine does.

Started by validator.py as `python -m app.guided.validator_worker SECONDS WEIGHTS`; WEIGHTS is what encode_directory()
made. The cost of a grammar is unknown until it is compiled, and the compiler cannot be
interrupted: this process may run out of time or memory without affecting the service.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from app.common.llguidance_adapter import GrammarVocabulary
from app.guided.schema_rewriter import (
    SchemaError,
    rewrite_grammar,
    schemas_of,
    shown,
    subschemas,
    target_of,
)
from app.sandbox.sandbox_child import serve
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import Directory, decode_directory

MEMORY_BYTES = 64 << 20
"""Memory limit of a grammar in addition to the vocabulary; the engine spends it again for each request."""
_STEPS = 24
_MAX_REWRITTEN = 256 << 10
"""Characters of a grammar whose schemas were rewritten."""
_MAX_CHARACTERS = 200
_SEARCH_SECONDS = 0.3
"""CPU time for finding the place of a problem; then the smallest schema found so far is the place."""
_TOO_COMPLEX = "it is too complex: make it simpler"
_COST_MESSAGES = ("fuel", "lexer error", "Parser Error", "parser error", "schema too large", "Unable to determine")


def main(seconds: float, weights: Directory) -> None:
    """Runs until the pipe closes, or a grammar exceeds a limit."""
    tokenizer = Tokenizer.load(weights)
    vocabulary = GrammarVocabulary(tokenizer.bytes_of, tokenizer.vocab_size)

    def handle(grammar: bytes) -> bytes:
        return json.dumps(checked(vocabulary, grammar.decode())).encode()

    serve(handle, seconds=seconds, more_bytes=MEMORY_BYTES)


def checked(vocabulary: GrammarVocabulary, grammar: str) -> tuple[str, str | None]:
    """The problem of a grammar, or an empty string; and the grammar to use instead, if its schemas were rewritten."""
    try:
        rewritten = rewrite_grammar(grammar)
    except SchemaError as error:
        return str(error)[:_MAX_CHARACTERS], None
    if len(rewritten) > _MAX_REWRITTEN:
        return _TOO_COMPLEX, None
    problem = problem_of(vocabulary, rewritten)
    if problem:
        return _with_place(vocabulary, rewritten, problem), None
    return "", None if rewritten == grammar else rewritten


def _with_place(vocabulary: GrammarVocabulary, grammar: str, problem: str) -> str:
    """The problem, and the place in the schema that has it, if a schema alone has it."""
    text = _without_line(problem)
    for schema in schemas_of(grammar):
        if place := _place_of(vocabulary, schema, text):
            return f"at {place}: {text}"[:_MAX_CHARACTERS]
    return problem


def _place_of(vocabulary: GrammarVocabulary, root: dict[str, Any], problem: str) -> str:
    """The smallest part of a schema that has the problem alone; empty if not even the root has."""
    shared = {key: value for key, value in root.items() if key in ("$defs", "definitions", "x-guidance")}
    ends = time.process_time() + _SEARCH_SECONDS

    def has_problem(schema: Any) -> bool:
        if not isinstance(schema, dict) or time.process_time() > ends:
            return False
        return _without_line(problem_of(vocabulary, f"start: %json {json.dumps({**shared, **schema})}")) == problem

    if not has_problem(root):
        return ""
    schema, place, seen = root, "#", {id(root)}
    while True:
        below = [*subschemas(schema, place), *_targets(root, schema)]
        for part, where in below:
            if id(part) not in seen and has_problem(part):
                schema, place = part, where
                seen.add(id(part))
                break
        else:
            return shown(place)


def _targets(root: dict[str, Any], schema: Mapping[str, Any]) -> list[tuple[Any, str]]:
    reference = schema.get("$ref")
    target = target_of(root, reference) if isinstance(reference, str) else None
    return [target] if target else []


def _without_line(problem: str) -> str:
    """The problem without a place in the text of a generated grammar, which means nothing to the user."""
    return re.sub(r"^line \d+, column \d+: ", "", problem)


def problem_of(vocabulary: GrammarVocabulary, grammar: str) -> str:
    """Compiles a grammar and takes a few random steps, as a model would. Returns the problem, or an empty string."""
    matcher, rng = vocabulary.matcher(grammar), random.Random(0)
    if matcher.is_error():
        return explain(matcher.get_error())
    for step in range(_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return _problem_of_step(step, matcher.get_error())
        text = mask & ((1 << vocabulary.size) - 1)
        if not text:
            return "" if step else "it allows no text at all"
        matcher.consume_token(rng.choice([i for i, bit in enumerate(bin(text)[:1:-1]) if bit == "1"]))
        if matcher.is_error():
            return _problem_of_step(step, matcher.get_error())
        if matcher.is_stopped():
            break
    return ""


def explain(message: str) -> str:
    """llguidance's message as one short line, without internals."""
    if message.startswith("panic"):
        return "it cannot be compiled"
    if any(message_part in message for message_part in _COST_MESSAGES):
        return _TOO_COMPLEX
    text = message.split("\n   1 |")[0].split("\n<")[0]
    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", text)
    text = re.sub(r"failed to compile JSON schema: ", "", text)
    text = re.sub(r'(?:invalid regex ".*" \(in regex\): )?regex parse error:.*\nerror: ', "", text, flags=re.DOTALL)
    text = re.sub(r'Unimplemented keys: \["(.*)"\]', r"not supported: \1", text).replace('", "', ", ")
    line = " ".join(re.sub(r"[^ -~]+", " ", text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."


def _problem_of_step(step: int, message: str) -> str:
    if not message.startswith("NoExtension"):
        return _TOO_COMPLEX
    return (
        "it reaches a state from which no token can follow" if step else "no text of this model's tokens can follow it"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), decode_directory(sys.argv[2]))
