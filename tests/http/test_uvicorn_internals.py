"""Every undocumented member of uvicorn and httptools that app/http uses: http_protocol, flow_control, request_parser.

uvicorn promises nothing about them. This test fails where a new version drops or changes one, before a client notices.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.server import ServerState

from app.http import http_protocol

PROTOCOL_METHODS = {
    "__init__": "(self, config, server_state, app_state, _loop=None)",
    "connection_made": "(self, transport)",
    "connection_lost": "(self, exc)",
    "eof_received": "(self)",
    "data_received": "(self, data)",
    "pause_writing": "(self)",
    "on_message_begin": "(self)",
    "on_url": "(self, url)",
    "on_header": "(self, name, value)",
    "on_headers_complete": "(self)",
    "on_body": "(self, body)",
    "on_message_complete": "(self)",
    "on_response_complete": "(self)",
    "shutdown": "(self)",
    "_start_asgi_task": "(self, cycle, app)",
}
PROTOCOL_FIELDS = {"app", "client", "cycle", "expect_100_continue", "flow", "parser", "pipeline", "scope"}
PROTOCOL_FIELDS |= {"server_state", "transport", "url"}
CYCLE_FIELDS = {"body", "disconnected", "keep_alive", "message_event", "response_complete", "response_started", "scope"}
CYCLE_FIELDS |= {"waiting_for_100_continue"}
CYCLE_PARAMETERS = {"scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers"}
CYCLE_PARAMETERS |= {"message_event", "expect_100_continue", "keep_alive", "on_response"}
FLOW_METHODS = {"__init__": "(self, transport)", "drain": "(self)"}
FLOW_METHODS |= dict.fromkeys(("pause_reading", "resume_reading", "pause_writing", "resume_writing"), "(self)")
PARSER_CALLBACKS = ["on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"]


def _signature(function: Any) -> str:
    """Names and defaults, without annotations."""
    found = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


async def _application(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError


def _new_protocol() -> httptools_impl.HttpToolsProtocol:
    async def make() -> httptools_impl.HttpToolsProtocol:
        config = uvicorn.Config(_application, log_config=None, ws="none", interface="asgi3")
        return httptools_impl.HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("owner", "methods"),
    [(httptools_impl.HttpToolsProtocol, PROTOCOL_METHODS), (flow_control.FlowControl, FLOW_METHODS)],
)
def test_the_methods_are_there_with_their_parameters(owner: type, methods: dict[str, str]) -> None:
    assert {name: _signature(getattr(owner, name)) for name in methods} == methods


def test_the_fields_are_there() -> None:
    made = _new_protocol()
    made.on_message_begin()
    assert not PROTOCOL_FIELDS - set(vars(made))
    assert {"connections", "default_headers", "tasks", "total_requests"} <= set(vars(ServerState()))
    assert {"read_paused", "write_paused"} <= set(vars(flow_control.FlowControl(asyncio.Transport())))
    assert isinstance(flow_control.HIGH_WATER_LIMIT, int)
    assert httptools_impl.STATUS_LINE[400] == b"HTTP/1.1 400 Bad Request\r\n"
    cycle = httptools_impl.RequestResponseCycle
    assert set(inspect.signature(cycle).parameters) == CYCLE_PARAMETERS
    assert not CYCLE_FIELDS - set(vars(cycle(**dict.fromkeys(CYCLE_PARAMETERS))))


def test_the_list_is_complete() -> None:
    tree = ast.parse(Path(http_protocol.__file__).read_text())
    (own,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "HttpProtocol"]
    methods = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    used = {ast.unparse(node.value): set[str]() for node in ast.walk(own) if isinstance(node, ast.Attribute)}
    for node in ast.walk(own):
        if isinstance(node, ast.Attribute):
            used[ast.unparse(node.value)].add(node.attr)
    set_here = {
        "address",
        "_connections",
        "_limits",
        "_is_within_limits",
        "_request_limits",
        "_running",
        "_is_last",
        "_response_deadline",
        "_timeouts",
    }
    assert used["self"] - methods - set_here <= PROTOCOL_FIELDS | set(PROTOCOL_METHODS)
    assert used["super()"] | {name for name in methods if hasattr(httptools_impl.HttpToolsProtocol, name)} == set(
        PROTOCOL_METHODS
    )
    assert used["self.cycle"] | used["self._running"] | used["cycle"] == CYCLE_FIELDS


class _Events:
    def __init__(self, *, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        if name not in PARSER_CALLBACKS:
            raise AttributeError(name)

        def called(*_: bytes) -> None:
            self.calls.append(name)
            if name == self._failing:
                raise LookupError(name)

        return called


def test_httptools_stops_behind_the_head_of_an_offer_and_names_the_position() -> None:
    head, body = b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 2\r\n\r\n", b"ab"
    events = _Events()
    parser = httptools.HttpRequestParser(events)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    with pytest.raises(httptools.HttpParserUpgrade) as offer:
        parser.feed_data(head + body)
    assert offer.value.args == (len(head),)
    assert events.calls == [*PARSER_CALLBACKS[:2], *["on_header"] * 3, "on_headers_complete", "on_message_complete"]
    assert (parser.get_method(), parser.get_http_version(), parser.should_upgrade()) == (b"POST", "1.1", True)


@pytest.mark.parametrize("failing", PARSER_CALLBACKS)
def test_httptools_reports_what_a_callback_raised_as_the_context(failing: str) -> None:
    parser = httptools.HttpRequestParser(_Events(failing=failing))
    with pytest.raises(httptools.HttpParserError) as error:
        parser.feed_data(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab")
    assert isinstance(error.value.__context__, LookupError)
