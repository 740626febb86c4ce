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
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from app.chat.template import RenderJob, RenderResult
from app.sandbox.sandbox_child import serve

_MEMORY_BYTES = 192 << 20
_MAX_CHARACTERS = 4 << 20
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
    return RenderResult() if chat.variables is None else _rendered(template, chat.variables)


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


@functools.lru_cache(maxsize=1)
def _compiled(source: str) -> Template:
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
    return environment.from_string(source)


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
    rendered = render(msgspec.msgpack.decode(request, type=RenderJob))
    rendered.error = _SURROGATE.sub("\ufffd", rendered.error)  # a template may raise any text
    return msgspec.msgpack.encode(rendered)


if __name__ == "__main__":
    serve(_handle, seconds=float(sys.argv[1]), more_bytes=_MEMORY_BYTES)
