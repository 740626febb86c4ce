"""python -m app.chat.template_worker SECONDS: the sandboxed process that renders chat templates.

A template is untrusted code. Jinja's sandbox keeps it from reaching Python; the limits of app/sandbox/sandbox_child.py
bound its time and memory. Templates get the same functions and filters as in transformers.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from app.chat.template_client import RenderJob, RenderResult
from app.sandbox.sandbox_child import serve

_MEMORY_BYTES = 192 << 20
_MAX_CHARACTERS = 4 << 20
_FIELDS = {"tools", "documents", "reasoning_effort"}
"""Variables that are fields of the request; others are in chat_template_kwargs."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def render(chat: RenderJob) -> RenderResult:
    """Renders a chat, or returns the template's error."""
    try:
        template = _compiled(chat.source)
    except TemplateSyntaxError as error:
        return RenderResult(error=f"cannot be read (line {error.lineno}): {error.message}")
    except MemoryError:
        return RenderResult(error="takes too much memory")
    except Exception as error:  # such as blocks that are nested too deeply for Python's compiler
        return RenderResult(error=f"cannot be compiled: {error}")
    if chat.variables is None:
        return RenderResult()
    if chat.required and (unused := [name for name in chat.required if name not in _variables_of(chat.source)]):
        field = unused[0] if unused[0] in _FIELDS else "chat_template_kwargs"
        return RenderResult(error=f"has no place for {unused[0]}: leave it out", param=field)
    messages = chat.variables["messages"]
    try:
        parse_arguments(messages)
    except ValueError as error:
        return RenderResult(error=f"needs other messages: {error}")
    chat.variables["messages"] = list(map(_with_reasoning, messages))
    rendered = _rendered(template, chat.variables)
    return _until_mark(rendered, chat) if chat.mark and not rendered.error else rendered


def _until_mark(rendered: RenderResult, chat: RenderJob) -> RenderResult:
    """The text up to the mark; without the white space before it, if the template trims the message."""
    assert chat.variables
    content = chat.variables["messages"][-1]["content"].removesuffix(chat.mark)
    text, mark, problem = rendered.text, chat.mark.rstrip(), ""
    end = text.rfind(mark)
    if end < 0 or content.strip() not in text or "content" not in chat.source:
        problem = "does not write the text of the last message as it is, so nothing can continue it"
    elif mark in text[:end].lower():
        problem = "writes the text of the last message more than once, so nothing can continue it"
    if problem:
        return RenderResult(error=problem, param="continue_final_message")
    return RenderResult(text=text[:end] if text.startswith(chat.mark, end) else text[:end].rstrip())


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as in transformers."""
    named = (message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name) is not None)
    if (reasoning := next(named, None)) is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def parse_arguments(messages: list[dict[str, Any]]) -> None:
    """Replaces the arguments of tool calls, which are JSON text in OpenAI's messages, by the objects in that text.

    Raises ValueError, which names the place.
    """
    for i, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list):
            raise ValueError(f"messages[{i}].tool_calls must be a list")
        functions = [
            (f"tool_calls[{j}].function", call.get("function", call))
            if isinstance(call, dict)
            else (f"tool_calls[{j}]", call)
            for j, call in enumerate(calls)
        ]
        if "function_call" in message:
            functions.append(("function_call", message["function_call"]))
        for place, function in functions:
            if not isinstance(function, dict):
                raise ValueError(f"messages[{i}].{place} must be an object")
            if "arguments" in function:
                function["arguments"] = _arguments(function["arguments"], f"messages[{i}].{place}.arguments")


def _arguments(given: Any, place: str) -> dict[str, Any]:
    try:
        parsed = (
            (json.loads(given, parse_constant=_no_constant) if given.strip() else {})
            if isinstance(given, str)
            else given
        )
    except (ValueError, RecursionError):
        raise ValueError(f"{place} is not valid JSON") from None
    if parsed is not None and not isinstance(parsed, dict):
        raise ValueError(f"{place} must be JSON text of an object")
    return parsed or {}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _rendered(template: Template, variables: dict[str, Any]) -> RenderResult:
    parts, length = [], 0
    try:
        for part in template.generate(variables):
            length += len(part)
            if length > _MAX_CHARACTERS:
                return RenderResult(error=f"makes more than {_MAX_CHARACTERS} characters of these messages")
            parts.append(part)
    except TemplateError as error:
        return RenderResult(error=f"refuses these messages: {error.message}")
    except MemoryError:
        return RenderResult(error="takes too much memory for these messages")
    except Exception as error:  # any runtime error of the template, such as a wrong type or a division by zero
        return RenderResult(error=f"fails with these messages: {error}")
    text = "".join(parts)
    if surrogate := _SURROGATE.search(text):
        return RenderResult(error=f"writes half a character (U+{ord(surrogate[0]):04X}), which no text may hold")
    return RenderResult(text=text)


class _Generation(Extension):
    """Ignores {% generation %}, which marks assistant messages for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja wants a set here)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """dict() for templates, without exposing the type, from which all others are reachable."""

    def __call__(self, *pairs: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*pairs, **entries)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """namespace() for templates, without Python's special names."""

    def __init__(*pairs: Any, **entries: Any) -> None:
        itself, *pairs_ = pairs
        Namespace.__init__(itself)
        for name, value in dict(*pairs_, **entries).items():
            itself[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


@functools.lru_cache(maxsize=2)  # a model may have another template for requests with tools
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=2)
def _variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@functools.lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """tojson without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _handle(request: bytes) -> bytes:
    rendered = render(msgspec.json.decode(request, type=RenderJob))
    rendered.error = _SURROGATE.sub("\ufffd", rendered.error)  # a template may raise any text
    return msgspec.msgpack.encode(rendered)


if __name__ == "__main__":
    serve(_handle, seconds=float(sys.argv[1]), more_bytes=_MEMORY_BYTES)
