"""Request smuggling: messages whose end two parsers might see at different bytes."""

from __future__ import annotations

import time
from contextlib import suppress
from random import Random

from tests.redteam.attack import Setting, attack
from tests.redteam.http_client import (
    Address,
    MalformedResponse,
    Response,
    next_response,
    parse_responses,
    read_until_close,
    request_bytes,
)
from tests.redteam.messages import Message, MessageGenerator, split

SMUGGLED = b'"object":"list"'
"""Only the response to the request inside a body contains this: GET /v1/models."""
LAST = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
"""Follows every message, so that the service closes and no response has to be waited for."""


def send_in_pieces(address: Address, data: bytes, rng: Random, *, seconds: float) -> tuple[bytes, bool]:
    """Sends the bytes in random packets; returns what was received and whether the service closed the connection."""
    with address.connect(timeout=seconds) as connection:
        with suppress(OSError):
            for packet in split(rng, data):
                connection.sendall(packet)
                if rng.random() < 0.1:
                    time.sleep(0.001)
        began = time.monotonic()
        return read_until_close(connection, seconds=seconds), time.monotonic() - began < seconds * 0.95


def judge(message: Message, raw: bytes, closed: bool) -> tuple[str, str] | None:
    """What is wrong with the responses to a message and the last request behind it: severity and summary, or None."""
    try:
        responses = parse_responses(raw)
    except MalformedResponse as error:
        return "high", f"the responses are not HTTP: {error}"
    statuses = [response.status for response in responses]
    failed = [status for status in statuses if status >= 500 and status not in (501, 503, 505)]
    if failed:
        return "high", f"status {failed[0]}"
    if message.kind == "mutated":
        return None
    if SMUGGLED in raw.replace(b'"object": "list"', SMUGGLED):
        return "critical", f"the body was answered as a request: {statuses}"
    if len(responses) > message.requests + 1:
        return "critical", f"{len(responses) - 1} responses to {message.requests} requests: {statuses}"
    # A request that needs no body may be answered before the bad part of its framing arrives; nothing may follow.
    if message.must_refuse and statuses and statuses[0] < 400 and (len(statuses) > 1 or not closed):
        return "high", f"ambiguous framing was accepted: {statuses}"
    says_close = bool(responses) and responses[-1].headers.get("connection", "").lower() == "close"
    says_close |= b"\r\nConnection: close\r\n" in message.data
    if message.must_answer and len(responses) < message.requests + 1 and not says_close:
        end = "closed" if closed else "left open"
        return (
            "medium",
            f"{len(responses)} of {message.requests + 1} responses to valid requests, then {end}: {statuses}",
        )
    return None


def _second_response(address: Address, first: bytes, second: bytes) -> Response | None:
    """Acts as a proxy that shares one connection: one response belongs to each message."""
    with address.connect(timeout=1.5) as connection, suppress(OSError):
        file = connection.makefile("rb")
        connection.sendall(first)
        try:
            next_response(file)
        except TimeoutError:  # the first message waits for more
            file = connection.makefile("rb")
        connection.sendall(second)
        return next_response(file)
    return None


@attack("framing", share=14.0)
def framing(setting: Setting) -> None:
    """One request, one response, whatever the framing; and no tenant gets the response to another one's bytes."""
    report = setting.report
    report.limit = "one response a request"
    generator = MessageGenerator(setting.rng, setting.target.keys[0])
    bad = 0
    for number in setting.tries():
        message = generator.next()
        data = message.data + LAST
        try:
            if number % 8 == 7 and message.kind not in ("mutated", "pipeline"):
                problem, data = _shared_connection(setting, message)
            else:
                seconds = 8.0 if message.must_answer else 0.5
                raw, closed = send_in_pieces(setting.target.address, data, setting.rng, seconds=seconds)
                problem = judge(message, raw, closed)
        except OSError as error:
            problem = "high", f"no connection: {error}"
        if problem:
            bad += 1
            summary = f"{message.kind}: {problem[1]} (try {report.tries})"
            report.add(problem[0], summary, data.hex(), group=message.kind)
    report.worst = f"{bad} of {report.tries} messages"


def _shared_connection(setting: Setting, message: Message) -> tuple[tuple[str, str] | None, bytes]:
    """Tenant A's message, one response, then tenant B's request: B must not get a response to A's bytes."""
    body, key = {"prompt": setting.canary}, setting.target.keys[1]
    victim = request_bytes("POST", "/tokenize", key=key, body=body)
    response = _second_response(setting.target.address, message.data, victim)
    is_foreign = response is not None and response.status < 300 and b'"tokens"' not in response.body
    problem = ("critical", "tenant B got the response to tenant A's body") if is_foreign else None
    return problem, message.data + victim
