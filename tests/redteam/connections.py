"""Attacks on connections: slow readers and senders, odd orders of sending and closing, sheer numbers."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections import deque
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

from tests.redteam.attack import Attack, Budget, Report, Setting
from tests.redteam.http_client import MalformedAnswer, call, open_stream, read_until_close, request_bytes
from tests.redteam.service import Target, as_json, resident_bytes

DEADLINE = 3.0
"""Seconds that the attacked service gives to slow clients, by its own flags."""
GRACE = 2.5
MIB = 1 << 20


class SlowReaders(Attack):
    """Large answers that are asked for and not read: quotas stay reserved until the last byte, memory is bounded."""

    name = "slow-readers"
    share = 9.0
    needs_launcher = True
    concurrency = 4
    connections = 16

    def run(self, setting: Setting) -> None:
        launcher, report = setting.own_launcher, setting.report
        report.limit = f"{self.concurrency} held answers, 2 MiB each"
        quotas = ((), ("--concurrency", str(self.concurrency)))
        with launcher.running("--write-timeout", "60", quotas=quotas) as target:
            body = as_json({"prompt": "a b " * 60_000}).encode()  # an answer of 10 MB, more than sockets buffer
            call(target.address, "POST", "/tokenize", key=target.keys[1], body=body)
            before, peak = resident_bytes(target.pid), 0
            with ExitStack() as stack:
                unread = 0
                for _ in range(self.connections):
                    if not setting.budget and report.tries > 2 * self.concurrency:
                        break
                    report.tries += 1
                    connection = stack.enter_context(target.address.connect(timeout=10.0, receive_buffer=4096))
                    unread += self._ask_and_stall(connection, target, body)
                    peak = max(peak, resident_bytes(target.pid) - before)
            each = peak / max(1, report.tries) / MIB
            report.worst = f"{unread} held answers, {each:.1f} MiB a connection"
            sent = f"{report.tries} x POST /tokenize of {len(body)} bytes"
            repro = f"{sent}, answers unread, by a key of concurrency {self.concurrency}"
            if unread > self.concurrency:
                report.add("high", f"{unread} unread answers of a key whose concurrency is {self.concurrency}", repro)
            if each > 2 + 32 / max(1, report.tries):
                report.add(
                    "high", f"unread answers take {each:.1f} MiB a connection ({peak / MIB:.0f} MiB in all)", repro
                )

    @staticmethod
    def _ask_and_stall(connection: socket.socket, target: Target, body: bytes) -> bool:
        """Sends, reads the first bytes of the answer, then nothing more; whether it is an answer and no refusal."""
        with suppress(OSError):
            connection.sendall(request_bytes("POST", "/tokenize", key=target.keys[1], body=body))
            return connection.recv(12).startswith(b"HTTP/1.1 200")
        return False


class SlowSenders(Attack):
    """Heads, bodies and silence at a byte a second: each is cut at its deadline, and others get answers."""

    name = "slow-senders"
    share = 9.0
    needs_launcher = True
    connections = 120

    def run(self, setting: Setting) -> None:
        launcher, report, rng = setting.own_launcher, setting.report, setting.rng
        flags = [
            f"--{name}={DEADLINE}" for name in ("head-timeout", "body-timeout", "keep-alive-timeout", "write-timeout")
        ]
        report.limit = f"cut {DEADLINE + GRACE:.1f} s after the first byte"
        with launcher.running(*flags) as target, ExitStack() as stack:
            began, waiting = time.monotonic(), []
            for _ in range(self.connections):
                report.tries += 1
                data = self._message(rng, target)
                connection = stack.enter_context(target.address.connect(timeout=5.0))
                connection.sendall(data[: rng.randint(1, 40)])
                waiting.append((connection, data))
            latest = self._dribble(target, waiting, Budget(max(setting.budget.left(), 2 * DEADLINE)), began, report)
            report.worst = f"the last of {self.connections} was cut after {latest:.1f} s"
            if latest > DEADLINE + GRACE:
                report.add("medium", report.worst, "head or body at about 4 bytes a second")

    @staticmethod
    def _message(rng: Random, target: Target) -> bytes:
        """A request whose head, body or chunks never end."""
        head = f"POST /complete HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.keys[1]}\r\n"
        head += "Content-Type: application/json\r\n"
        kind = rng.randrange(3)
        if kind == 0:
            return (head + "X-Pad: " + "a" * 8000).encode()
        if kind == 1:
            return (head + "Content-Length: 5000\r\n\r\n").encode() + b'{"prompt": "' + b"a" * 4000
        return (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + b"1\r\na\r\n" * 2000

    def _dribble(
        self, target: Target, waiting: list[tuple[socket.socket, bytes]], budget: Budget, began: float, report: Report
    ) -> float:
        """Sends a few bytes to each in turn until the service has closed it; seconds until the last was closed."""
        latest, position = 0.0, 40
        # Half of a message arrives at once, so that bodies are tried and not only heads.
        for connection, data in waiting[::2]:
            with suppress(OSError):
                connection.sendall(data[40:400])
        while waiting and budget and time.monotonic() - began < DEADLINE * 3 + GRACE:
            time.sleep(0.25)
            position += 1
            still = []
            for connection, data in waiting:
                if self._is_cut(connection, data[position : position + 1]):
                    latest = max(latest, time.monotonic() - began)
                else:
                    still.append((connection, data))
            waiting = still
            if call(target.address, "GET", "/health/live", timeout=10).status != 200:
                report.add("medium", "health failed with slow senders connected", "")
        return time.monotonic() - began if waiting else latest

    @staticmethod
    def _is_cut(connection: socket.socket, more: bytes) -> bool:
        connection.setblocking(False)
        try:
            connection.send(more)
            return not connection.recv(4096) or True
        except BlockingIOError:
            return False
        except OSError:
            return True


class SendingOrder(Attack):
    """Expect, half-close, reset and bad chunks in every order: no traceback, and the service lives."""

    name = "sending-order"
    share = 5.0

    def run(self, setting: Setting) -> None:
        report, target = setting.report, setting.target
        report.limit = "no internals in the log"
        recent: deque[str] = deque(maxlen=3)  # a line in the log may belong to a connection that ended a moment ago
        while setting.budget and report.tries < min(setting.most_tries, 600):
            report.tries += 1
            steps = self._steps(setting.rng, target)
            recent.append(" | ".join(step if isinstance(step, str) else repr(step[-120:]) for step in steps))
            with suppress(OSError):
                self._play(target, steps)
            lines = [line for line in target.new_log().splitlines() if "Traceback" in line or "panicked" in line]
            if lines:
                description = "one of the last connections: " + " // ".join(recent)
                report.add(
                    "medium", f"a traceback in the log: {lines[-1][:600]}", description, group=_functions(lines[-1])
                )
            if report.tries % 50 == 0 and not target.is_alive():
                report.add("critical", "the service does not answer any more", " | ".join(map(str, steps)))
                break
        report.worst = f"{report.found} tracebacks in {report.tries} orders"

    @staticmethod
    def _steps(rng: Random, target: Target) -> list[bytes | str]:
        method, path = rng.choice([("POST", "/complete"), ("POST", "/tokenize"), ("GET", "/health/live"), ("GET", "/")])
        body = as_json({"prompt": "a", "max_tokens": 3}).encode()
        key = target.keys[0] or ""
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {key}",
            "Content-Type: application/json",
        ]
        if rng.random() < 0.8:
            lines.append(f"Expect: {rng.choice(['100-continue', '100-CONTINUE', 'x'])}")
        chunked = rng.random() < 0.6
        lines.append(
            "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body) + rng.choice([0, 0, 5, -1])}"
        )
        head = "\r\n".join([*lines, "", ""]).encode()
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        bodies = (
            [chunk + b"0\r\n\r\n", b"zz\r\n", chunk + b"zz\r\n\r\n", chunk[:5], b"0\r\n\r\n"]
            if chunked
            else [body, body[:3], b"x" * 99]
        )
        steps: list[bytes | str] = [head, rng.choice(bodies)]
        if rng.random() < 0.3:
            steps = [head + rng.choice(bodies)]
        for extra in rng.sample(["half-close", "pause", "read", "next"], rng.randint(0, 3)):
            steps.insert(rng.randint(1, len(steps)), head + rng.choice(bodies) if extra == "next" else extra)
        return [*steps, rng.choice(["reset", "close", "read to the end"])]

    @staticmethod
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


def _functions(line: str) -> str:
    """The service's functions in a traceback, which distinguish its kind from others."""
    return " ".join(re.findall(r"\b(?:app/[\w/]+\.py:\d+ \w+|httptools_impl\.py:\d+ \w+)", line)[:2])


class Exhaustion(Attack):
    """Numbers: connections, half-open requests, kept streams, distinct ids, stops and biases; memory must not grow."""

    name = "exhaustion"
    share = 10.0
    bytes_each = 16 * 1024

    def run(self, setting: Setting) -> None:
        target, report = setting.target, setting.report
        report.limit = f"{self.bytes_each >> 10} KiB a request, service answers"
        self._idle_connections(setting)
        series = len(target.call("GET", "/metrics").body.splitlines())
        growth, count = self._distinct_requests(setting)
        added = len(target.call("GET", "/metrics").body.splitlines()) - series
        each = growth / max(1, count)
        report.worst = f"{each / 1024:.1f} KiB a request over {count}, {added} new metric lines"
        if count >= 100 and each > self.bytes_each:
            report.add(
                "medium",
                f"memory grows by {each / 1024:.1f} KiB a request",
                f"{count} requests with distinct ids, stops and biases",
            )
        if added > 60:
            report.add("medium", f"{added} new lines of /metrics", "distinct ids and models in requests")

    @staticmethod
    def _idle_connections(setting: Setting) -> None:
        """Connections that send nothing or half a head; a plain request is answered all the same."""
        target, rng = setting.target, setting.rng
        with ExitStack() as stack:
            for _ in range(min(400, setting.most_tries)):
                setting.report.tries += 1
                with suppress(OSError):
                    connection = stack.enter_context(target.address.connect(timeout=5.0))
                    connection.sendall(
                        rng.choice([b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST /complete HTTP/1.1\r\n"])
                    )
            began = time.monotonic()
            answer = target.call("POST", "/tokenize", body={"prompt": "a"})
            seconds = time.monotonic() - began
            if answer.status != 200 or seconds > 5:
                setting.report.add(
                    "high",
                    f"status {answer.status} after {seconds:.1f} s with 400 idle connections",
                    "400 connections, idle or half a head",
                )

    def _distinct_requests(self, setting: Setting) -> tuple[float, int]:
        """Bytes of growth over the second half of the requests, and their number."""
        target, rng, report = setting.target, setting.rng, setting.report
        count = 0
        sizes: list[tuple[int, int]] = []
        while setting.budget and report.tries < setting.most_tries + 400:
            report.tries += 1
            count += 1
            body: dict[str, Any] = {"prompt": f"a{count}", "max_tokens": 2, "stream": False}
            body |= rng.choice([
                {"request_id": f"r{rng.getrandbits(60)}"}, {"user": f"u{rng.getrandbits(60)}"},
                {"stop": [f"{rng.getrandbits(60)}x" * 8 for _ in range(16)]},
                {"logit_bias": {str(rng.randrange(1000)): 1.0 for _ in range(300)}},
                {"regex": f"[a-z]{{1,{rng.randint(2, 900)}}}"}, {"stream": True, "max_tokens": 400},
            ])  # fmt: skip
            with suppress(OSError, MalformedAnswer):
                if body["stream"]:
                    with open_stream(target.address, body, key=target.keys[0], timeout=10) as (_, events):
                        next(events, None)  # the connection breaks off here, and the stream is kept
                else:
                    target.call("POST", "/complete", body=body, timeout=10)
            if target.is_local and count % 20 == 0:
                sizes.append((count, resident_bytes(target.pid)))
        if len(sizes) < 4:
            return 0.0, count
        (half, first), (count, last) = sizes[len(sizes) // 2], sizes[-1]
        return float(last - first), count - half
