"""The undocumented code of uvicorn and httptools that app/http builds on: http_protocol.UVICORN_INTERNALS names it.

uvicorn promises nothing about it. A test fails if a new version changes it, before a client notices.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn

from app import server
from app.common import event_loop
from app.http import connection_limits
from app.http.http_protocol import UVICORN_INTERNALS, HttpProtocol
from app.http.sse import BodyWriter
from tests.support import ROOT

DIGESTS = {
    "uvicorn.protocols.http.httptools_impl": "1d4e1c579df41684",
    "uvicorn.protocols.http.flow_control": "d39d16560df512f3",
    "uvicorn.config": "cf91c6ffae283a2b",
    "uvicorn.server": "c1be9d133467a42a",
    "httptools.parser.parser": "c7405463d1331cd2",
}
"""SHA-256 of the source files of uvicorn 0.54.0 and httptools 0.9.0, shortened."""
USERS = {
    # Our class, and the name in its source for an object of uvicorn's or httptools' class.
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol": [(HttpProtocol, "self", "super()")],
    "uvicorn.protocols.http.httptools_impl.RequestResponseCycle": [
        (HttpProtocol, "self.cycle", "self._running", "cycle"),
        (BodyWriter, "self._cycle", "cycle"),
    ],
    "uvicorn.protocols.http.flow_control.FlowControl": [
        (connection_limits.ConnectionFlowControl, "self", "super()"),
        (HttpProtocol, "self.flow"),
        (server._Server, "connection.flow"),
        (BodyWriter, "cycle.flow"),
    ],
    "uvicorn.config.Config": [(event_loop.run, "uvicorn.Config('', log_config=None)"), (server._Server, "self.config")],
    "uvicorn.server.Server": [(server._Server, "self", "super()"), (server._on_signal, "server")],
    "uvicorn.server.ServerState": [(HttpProtocol, "self.server_state"), (server._Server, "self.server_state")],
    "httptools.HttpRequestParser": [(HttpProtocol, "self.parser")],
}


def _members(owner: Any) -> set[str]:
    """Methods, fields, and attributes that methods set."""
    set_in_methods = set() if owner is httptools.HttpRequestParser else _attributes(owner, "self")
    return {name for name in {*dir(owner), *set_in_methods} if not name.startswith("__")}


def _attributes(owner: Any, *objects: str) -> set[str]:
    nodes = ast.walk(ast.parse(inspect.getsource(owner)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects}


@pytest.mark.parametrize("name", UVICORN_INTERNALS)
def test_list_names_exactly_the_internals_in_use(name: str) -> None:
    used = set[str]()
    for ours, *objects in USERS[name]:
        used |= _attributes(ours, *objects)
        if "super()" in objects:
            used |= set(vars(ours))
    assert " ".join(sorted(used & _members(pydoc.locate(name)))) == UVICORN_INTERNALS[name]


def _imports() -> Iterator[str]:
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uvicorn."):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_other_class_of_uvicorn_is_used() -> None:
    classes = {name for name in _imports() if isinstance(pydoc.locate(name), type)}
    assert classes <= set(UVICORN_INTERNALS)


@pytest.mark.parametrize("name", DIGESTS)
def test_internals_are_unchanged(name: str) -> None:
    module = pydoc.locate(name)
    path = Path(module.__file__ or "")  # type: ignore[union-attr]
    source = path if path.suffix == ".py" else path.parent / "parser.pyx"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    assert digest == DIGESTS[name], (
        f"{name} has changed (uvicorn {uvicorn.__version__}, httptools {httptools.__version__}): read what changed in "
        "the members that UVICORN_INTERNALS names, check app/http/http_protocol.py, app/http/connection_limits.py and "
        f"app/server.py against it, then record the digest {digest}"
    )
