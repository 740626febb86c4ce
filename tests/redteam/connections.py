"""Attacks on connections: slow readers and senders, odd orders of sending and closing, large numbers."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections import deque
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

from tests.redteam.attack import Setting, attack
from tests.redteam.http_client import as_json, call, open_stream, read_until_close, request_bytes
from tests.redteam.service import Target, resident_bytes

DEADLINE = 3.0
"""Seconds that the attacked service gives to slow clients, by its own flags."""
GRACE = 2.5
MIB = 1 << 20
CONCURRENCY = 4
BYTES_EACH = 16 * 1024
UNREAD, SENDERS = 16, 120
"""Connections of slow readers and senders."""


@attack("slow-readers", share=9.0, needs_launcher=True)
def slow_readers(setting: Setting) -> None:
    """Large responses that are requested and not read: quotas stay reserved until the last byte, memory is bounded."""
    report = setting.report
    report.limit = f"{CONCURRENCY} held responses, 2 MiB each"
    quotas = ((), ("--concurrency", str(CONCURRENCY)))
    with setting.own_launcher.running("--write-timeout", "60", quotas=quotas) as target, ExitStack() as stack:
        body = {"prompt": "a b " * 60_000}  # a response of 10 MB, more than sockets buffer
        message = request_bytes("POST", "/tokenize", key=target.keys[1], body=body)
        target.call("POST", "/tokenize", tenant=1, body=body)
        before, peak, unread = resident_bytes(target.pid), 0, 0
        for _ in range(UNREAD):
            if not setting.budget and report.tries > 2 * CONCURRENCY:
                break
            report.tries += 1
            connection = stack.enter_context(target.address.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with suppress(OSError):
                connection.sendall(message)
                unread += connection.recv(12).startswith(b"HTTP/1.1 200")  # and no further byte
            peak = max(peak, resident_bytes(target.pid) - before)
    each = peak / report.tries / MIB
    report.worst = f"{unread} held responses, {each:.1f} MiB a connection"
    sent = f"{report.tries} x POST /tokenize of {len(message)} bytes"
    repro = f"{sent}, responses unread, by a key of concurrency {CONCURRENCY}"
    if unread > CONCURRENCY:
        report.add("high", f"{unread} unread responses of a key whose concurrency is {CONCURRENCY}", repro)
    if each > 2 + 32 / report.tries:
        report.add("high", f"unread responses take {each:.1f} MiB a connection ({peak / MIB:.0f} MiB in all)", repro)


@attack("slow-senders", share=9.0, needs_launcher=True)
def slow_senders(setting: Setting) -> None:
    """Heads, bodies and silence at a byte a second: each is cut at its deadline, and other clients get responses."""
    report, rng = setting.report, setting.rng
    report.tries = SENDERS
    report.limit = f"cut {DEADLINE + GRACE:.1f} s after the first byte"
    flags = [f"--{name}-timeout={DEADLINE}" for name in ("head", "body", "keep-alive", "write")]
    with setting.own_launcher.running(*flags) as target, ExitStack() as stack:
        began, waiting = time.monotonic(), []
        for number in range(SENDERS):
            data = _message(rng, target)
            connection = stack.enter_context(target.address.connect())
            at_once = 400 if number % 2 else rng.randint(1, 40)  # so that tries cover bodies and not only heads
            connection.sendall(data[:at_once])
            connection.setblocking(False)
            waiting.append((connection, iter(data[at_once:])))
        latest = 0.0
        while waiting and time.monotonic() - began < DEADLINE * 3 + GRACE:
            time.sleep(0.25)
            left = [(one, rest) for one, rest in waiting if not _is_cut(one, next(rest))]
            latest = time.monotonic() - began if len(left) < len(waiting) or left else latest
            waiting = left
            if call(target.address, "GET", "/health/live", timeout=10).status != 200:
                report.add("medium", "health failed with slow senders connected", "")
    report.worst = f"the last of {SENDERS} was cut after {latest:.1f} s"
    if latest > DEADLINE + GRACE:
        report.add("medium", report.worst, "head or body at about 4 bytes a second")


def _message(rng: Random, target: Target) -> bytes:
    """A request whose head, body or chunks never end."""
    head = f"POST /complete HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.keys[1]}\r\n"
    head += "Content-Type: application/json\r\n"
    rest = rng.choice([
        "X-Pad: " + "a" * 8000, "Content-Length: 5000\r\n\r\n" + '{"prompt": "' + "a" * 4000,
        "Transfer-Encoding: chunked\r\n\r\n" + "1\r\na\r\n" * 2000,
    ])  # fmt: skip
    return (head + rest).encode()


def _is_cut(connection: socket.socket, byte: int) -> bool:
    try:
        connection.send(bytes([byte]))
        connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@attack("sending-order", share=5.0)
def sending_order(setting: Setting) -> None:
    """Expect, half-close, reset and bad chunks in every order: no traceback, and the service keeps running."""
    report, target = setting.report, setting.target
    report.limit = "no internals in the log"
    recent: deque[str] = deque(maxlen=3)  # a line in the log may belong to a connection that ended a moment ago
    for _ in setting.tries(most=min(setting.most_tries, 600)):
        steps = _steps(setting.rng, target)
        recent.append(" | ".join(step if isinstance(step, str) else repr(step[-120:]) for step in steps))
        with suppress(OSError):
            _play(target, steps)
        lines = [line for line in target.new_log().splitlines() if "Traceback" in line or "panicked" in line]
        if lines:
            functions = re.findall(r"\b(?:app/[\w/]+\.py:\d+ \w+|httptools_impl\.py:\d+ \w+)", lines[-1])
            summary, repro = f"a traceback in the log: {lines[-1][:600]}", " // ".join(recent)
            report.add("medium", summary, f"one of the last connections: {repro}", group=" ".join(functions[:2]))
        if report.tries % 50 == 0 and not target.is_alive():
            report.add("critical", "the service does not answer any more", " | ".join(map(str, steps)))
            break
    report.worst = f"{report.found} tracebacks in {report.tries} orders"


def _steps(rng: Random, target: Target) -> list[bytes | str]:
    method, path = rng.choice([("POST", "/complete"), ("POST", "/tokenize"), ("GET", "/health/live"), ("GET", "/")])
    body = as_json({"prompt": "a", "max_tokens": 3}).encode()
    headers = ["Content-Type: application/json"]
    if rng.random() < 0.8:
        headers.append(f"Expect: {rng.choice(['100-continue', '100-CONTINUE', 'x'])}")
    if rng.random() < 0.6:
        headers.append("Transfer-Encoding: chunked")
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        bodies = [chunk + b"0\r\n\r\n", b"zz\r\n", chunk + b"zz\r\n\r\n", chunk[:5], b"0\r\n\r\n"]
    else:
        headers.append(f"Content-Length: {len(body) + rng.choice([0, 0, 5, -1])}")
        bodies = [body, body[:3], b"x" * 99]
    head = request_bytes(method, path, key=target.keys[0], headers=headers)
    steps: list[bytes | str] = [head, rng.choice(bodies)]
    if rng.random() < 0.3:
        steps = [head + rng.choice(bodies)]
    for extra in rng.sample(["half-close", "pause", "read", "next"], rng.randint(0, 3)):
        steps.insert(rng.randint(1, len(steps)), head + rng.choice(bodies) if extra == "next" else extra)
    return [*steps, rng.choice(["reset", "close", "read to the end"])]


def _play(target: Target, steps: list[bytes | str]) -> None:
    with target.address.connect(timeout=0.1) as connection:
        for step in steps:
            if isinstance(step, bytes):
                connection.sendall(step)
            elif step == "half-close":
                connection.shutdown(socket.SHUT_WR)
            elif step == "pause":
                time.sleep(0.005)
            elif step == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif step == "read":
                connection.recv(4096)
            elif step == "read to the end":
                read_until_close(connection, seconds=0.1)


@attack("exhaustion", share=10.0)
def exhaustion(setting: Setting) -> None:
    """Many connections, half-open requests, kept streams, distinct ids, stops and biases: memory must not grow."""
    target, report = setting.target, setting.report
    report.limit = f"{BYTES_EACH >> 10} KiB a request, service answers"
    _idle_connections(setting)
    series = len(target.call("GET", "/metrics").body.splitlines())
    growth, count = _distinct_requests(setting)
    added = len(target.call("GET", "/metrics").body.splitlines()) - series
    each = growth / max(1, count)
    report.worst = f"{each / 1024:.1f} KiB a request over {count}, {added} new metric lines"
    if count >= 100 and each > BYTES_EACH:
        repro = f"{count} requests with distinct ids, stops and biases"
        report.add("medium", f"memory grows by {each / 1024:.1f} KiB a request", repro)
    if added > 60:
        report.add("medium", f"{added} new lines of /metrics", "distinct ids and models in requests")


def _idle_connections(setting: Setting) -> None:
    """Connections that send nothing or incomplete headers; a plain request must still get a response."""
    target, rng = setting.target, setting.rng
    starts = [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST /complete HTTP/1.1\r\n"]
    with ExitStack() as stack:
        for _ in range(min(400, setting.most_tries)):
            setting.report.tries += 1
            with suppress(OSError):
                stack.enter_context(target.address.connect(timeout=5.0)).sendall(rng.choice(starts))
        response = target.call("POST", "/tokenize", body={"prompt": "a"})
    if response.status != 200 or response.seconds > 5:
        summary = f"status {response.status} after {response.seconds:.1f} s with 400 idle connections"
        setting.report.add("high", summary, "400 connections, idle or with incomplete headers")


def _distinct_requests(setting: Setting) -> tuple[float, int]:
    """Bytes of growth during the second half of the requests, and the number of requests."""
    target, rng = setting.target, setting.rng
    count, sizes = 0, []
    for _ in setting.tries(most=setting.most_tries + 400):
        count += 1
        body: dict[str, Any] = {"prompt": f"a{count}", "max_tokens": 2, "stream": False}
        body |= rng.choice([
            {"request_id": f"r{rng.getrandbits(60)}"}, {"user": f"u{rng.getrandbits(60)}"},
            {"stop": [f"{rng.getrandbits(60)}x" * 8 for _ in range(16)]},
            {"logit_bias": {str(rng.randrange(1000)): 1.0 for _ in range(300)}},
            {"regex": f"[a-z]{{1,{rng.randint(2, 900)}}}"}, {"stream": True, "max_tokens": 400},
        ])  # fmt: skip
        with suppress(OSError, ValueError):
            if body["stream"]:
                with open_stream(target.address, body, key=target.keys[0], timeout=10) as (_, events):
                    next(events, None)  # the connection breaks off here, and the stream is kept
            else:
                target.call("POST", "/complete", body=body, timeout=10)
        if target.process and count % 20 == 0:
            sizes.append((count, resident_bytes(target.pid)))
    if len(sizes) < 4:
        return 0.0, count
    (half, first), (count, last) = sizes[len(sizes) // 2], sizes[-1]
    return float(last - first), count - half
