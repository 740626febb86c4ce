"""Request smuggling: messages whose end two parsers might see at different bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from tests.redteam.attack import Setting, attack
from tests.redteam.http_client import (
    Address,
    Answer,
    MalformedAnswer,
    next_answer,
    parse_answers,
    read_until_close,
    request_bytes,
)

SMUGGLED = b'"object":"list"'
"""Only the answer to the request inside a body contains this: GET /v1/models."""
LAST = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
"""Follows every message, so that the service closes and no answer has to be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes, and how many answers RFC 9112 allows for them (the last request's not counted).

    `must_answer` means that the message is valid: exactly `requests` answers. Else a refusal is fine, too, and expected
    where `must_refuse` is set.
    """

    kind: str
    data: bytes
    requests: int = 1
    must_answer: bool = False
    must_refuse: bool = False


class MessageGenerator:
    """Messages of every class that smuggled a request somewhere; bodies are requests themselves."""

    def __init__(self, rng: Random, key: str | None) -> None:
        self.rng = rng
        self._authorization = [] if key is None else [f"Authorization: Bearer {key}"]
        self._kinds: list[Callable[[], Message]] = [
            self._plain, self._chunked, self._upgrade, self._upgrade, self._connect, self._both_lengths,
            self._transfer_encoding, self._content_length, self._version, self._chunk_size, self._header_syntax,
            self._pipeline, self._expect, self._mutated,
        ]  # fmt: skip

    def next(self) -> Message:
        return self.rng.choice(self._kinds)()

    def _message(self, kind: str, *headers: str, body: bytes, first: str | None = None, **judged: bool) -> Message:
        """The headers in any order, with the key or without."""
        method = self.rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
        path = self.rng.choice(["/complete", "/tokenize", "/health/live", "/", "/nowhere"])
        own = self.rng.sample(headers, len(headers))
        lines = [first or f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
        lines += self._authorization * self.rng.randrange(2) + own
        return Message(kind=kind, data="\r\n".join([*lines, "", ""]).encode("latin-1") + body, **judged)

    def _inner(self) -> bytes:
        """A whole request with an answer that gives it away."""
        return "\r\n".join(["GET /v1/models HTTP/1.1", "Host: 127.0.0.1", *self._authorization, "", ""]).encode()

    def _body(self) -> bytes:
        return self.rng.choice([b"", b"\r\n", b"0\r\n\r\n", b"x" * self.rng.randrange(200)]) + self._inner()

    def _as_chunks(self, body: bytes) -> bytes:
        out = b""
        while body:
            size = self.rng.randint(1, len(body))
            spelled = self.rng.choice(["%x", "%X", "0%x", "000%X"]) % size
            extension = self.rng.choice(["", "", ";a", ";a=b", ';a="b;c"'])
            out, body = out + f"{spelled}{extension}\r\n".encode() + body[:size] + b"\r\n", body[size:]
        return out + b"0\r\n" + self.rng.choice([b"", b"X-Trailer: 1\r\n"]) + b"\r\n"

    def _plain(self) -> Message:
        body = self._body()
        return self._message("plain", f"Content-Length: {len(body)}", body=body, must_answer=True)

    def _chunked(self) -> Message:
        encoding = self.rng.choice(["chunked", "Chunked", "CHUNKED", " \tchunked"])
        body = self._as_chunks(self._body())
        return self._message("chunked", f"Transfer-Encoding: {encoding}", body=body, must_answer=True)

    def _upgrade(self) -> Message:
        protocol = self.rng.choice(["h2c", "websocket", "TLS/1.0", "x", "h2c, websocket", "HTTP/2.0"])
        listed = self.rng.choice(["Upgrade", "upgrade", "keep-alive, Upgrade", "Upgrade, HTTP2-Settings", "UPGRADE"])
        headers = [f"Connection: {listed}", f"Upgrade: {protocol}"]
        if "HTTP2" in listed:
            headers.append("HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
        if protocol == "websocket":
            headers += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
        body = self._body()
        if self.rng.random() < 0.7:
            headers.append(f"Content-Length: {len(body)}")
        else:
            headers.append("Transfer-Encoding: chunked")
            body = self._as_chunks(body)
        return self._message("upgrade", *headers, body=body, must_answer=True)

    def _connect(self) -> Message:
        target = self.rng.choice(["127.0.0.1:80", "/complete", "example.com:443", "*", "http://127.0.0.1/"])
        body = self._body()
        return self._message("connect", f"Content-Length: {len(body)}", first=f"CONNECT {target} HTTP/1.1", body=body)

    def _both_lengths(self) -> Message:
        body = self._body()
        chunks = self._as_chunks(body)
        length = self.rng.choice([0, 1, len(chunks), len(chunks) - len(self._inner()), len(body)])
        return self._message("both lengths", f"Content-Length: {length}", "Transfer-Encoding: chunked", body=chunks)

    def _transfer_encoding(self) -> Message:
        header = self.rng.choice([
            "Transfer-Encoding: identity", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, chunked",
            "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked;q=1", "Transfer-Encoding : chunked",
            "Transfer-Encoding: \x0bchunked", "Transfer-Encoding: chunked\x00", "Transfer-Encoding:\r\n chunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", "Transfer-Encoding: 'chunked'",
            "Transfer-Encoding: chunked, identity", "Transfer-Encoding: \x85chunked", "Transfer\x00-Encoding: chunked",
            "Transfer-Encoding: chun\r\n ked", "Transfer-Encoding: gzip",
            "Transfer-Encoding: cow\r\nTransfer-Encoding: chunked",
        ])  # fmt: skip
        headers = [header, "Content-Length: 5"][: self.rng.choice([1, 1, 2])]
        return self._message("transfer encoding", *headers, body=b"0\r\n\r\n" + self._inner(), must_refuse=True)

    def _content_length(self) -> Message:
        body = self._body()
        n = len(body)
        header = self.rng.choice([
            f"Content-Length: +{n}", f"Content-Length: -{n}", f"Content-Length: 0x{n:x}", f"Content-Length: {n} 0",
            "Content-Length:", f"Content-Length: {n};", f"Content-Length: {n}\r\nContent-Length: 0",
            f"Content-Length: {n}_0", f"Content-Length: 0\r\nContent-Length: {n}", f"Content-Length : {n}",
            f"Content-Length: {n}, 0", "Content-Length: 1e2", f"Content-Length: {n}.0", f"Content-Length: {2**64 + n}",
            f"Content-Length:\x0b{n}", f"Content-Length: {n}\x00", f"Content-Length:\r\n {n}", "Content-Length: \xb2",
            f"Content-Length: {n},",
        ])  # fmt: skip
        return self._message("content length", header, body=body, must_refuse=True)

    def _version(self) -> Message:
        first = self.rng.choice([
            "GET /", "GET / HTTP/0.9", "GET / HTTP/1.2", "GET / HTTP/2.0", "PRI * HTTP/2.0", "GET / http/1.1",
            "GET / HTTP/11", "GET / HTTP/1.1 x", "GET / HTTP/1.1/", "GET /  x HTTP/1.1", "GET\t/\tHTTP/1.1",
            "POST / HTTP/1.0",
        ])  # fmt: skip
        body = b"0\r\n\r\n" + self._inner()
        headers = ["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"][: self.rng.choice([1, 1, 2])]
        return self._message("version", *headers, first=first, body=body, must_refuse=True)

    def _chunk_size(self) -> Message:
        body = self._inner()
        size = f"{len(body):x}"
        line = self.rng.choice([
            f"0x{size}\r\n", f"+{size}\r\n", f"-{size}\r\n", f" {size}\r\n", f"{size}_0\r\n", "\r\n", ";\r\n", "g\r\n",
            f"ffffffffffffffff{size}\r\n", f"1{int(size, 16):016x}\r\n", f"{size}\r\r\n", f"{size}\x00\r\n",
            f"{size}\x0b\r\n", f"{size};a\x00=b\r\n", f"{size};a\rb\r\n", "0\r\nContent-Length: x y z\r\n : bad\r\n",
            f"{size}.0\r\n",
        ])  # fmt: skip
        data = line.encode("latin-1") + body + b"\r\n0\r\n\r\n"
        return self._message("chunk size", "Transfer-Encoding: chunked", body=data, must_refuse=True)

    def _header_syntax(self) -> Message:
        header = self.rng.choice([
            "X: a\r\n b", "X : a", " X: a", "X", ": a", "X: a\x00b", "X: a\rb", "X\x00: a", "X Y: a", "X: a\r\n\tb",
            "(X): a", "X\x80: a", "Host: 127.0.0.1", "\r: a",
        ])  # fmt: skip
        body = self._body()
        return self._message("header syntax", header, f"Content-Length: {len(body)}", body=body)

    def _pipeline(self) -> Message:
        messages = [self.rng.choice([self._plain, self._chunked])() for _ in range(self.rng.randint(2, 6))]
        data = b"".join(message.data for message in messages)
        return Message(kind="pipeline", data=data, requests=len(messages), must_answer=True)

    def _expect(self) -> Message:
        body = self._body()
        expect = self.rng.choice(["100-continue", "100-Continue", "200-ok", "100-continue, 100-continue", ""])
        return self._message("expect", f"Content-Length: {len(body)}", f"Expect: {expect}", body=body)

    def _mutated(self) -> Message:
        """A valid message with a few bytes changed in its head; only the form of the answers can be judged."""
        data = bytearray(self.rng.choice([self._plain, self._chunked, self._upgrade, self._pipeline])().data)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(min(len(data), 300))
            data[at : at + self.rng.randrange(2)] = bytes([self.rng.choice(b"\x00\r\n \t:;,0129afAF\xff")])
        return Message(kind="mutated", data=bytes(data), requests=99)


def send_in_pieces(address: Address, data: bytes, rng: Random, *, seconds: float) -> tuple[bytes, bool]:
    """Sends the bytes split at random positions; what came back, and whether the service closed by itself."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 3, 12])))
    with address.connect(timeout=seconds) as connection:
        with suppress(OSError):
            for begin, end in pairwise([0, *cuts, len(data)]):
                connection.sendall(data[begin:end])
                if cuts and rng.random() < 0.3:
                    time.sleep(0.001)
        began = time.monotonic()
        return read_until_close(connection, seconds=seconds), time.monotonic() - began < seconds * 0.95


def judge(message: Message, raw: bytes, closed: bool) -> tuple[str, str] | None:
    """What is wrong with the answers to a message and the last request behind it: severity and summary, or None."""
    try:
        answers = parse_answers(raw)
    except MalformedAnswer as error:
        return "high", f"the answers are not HTTP: {error}"
    statuses = [answer.status for answer in answers]
    failed = [status for status in statuses if status >= 500 and status not in (501, 503, 505)]
    if failed:
        return "high", f"status {failed[0]}"
    if message.kind == "mutated":
        return None
    if SMUGGLED in raw.replace(b'"object": "list"', SMUGGLED):
        return "critical", f"the body was answered as a request: {statuses}"
    if len(answers) > message.requests + 1:
        return "critical", f"{len(answers) - 1} answers to {message.requests} requests: {statuses}"
    # A request that needs no body may be answered before the bad part of its framing arrives; nothing may follow.
    if message.must_refuse and statuses and statuses[0] < 400 and (len(statuses) > 1 or not closed):
        return "high", f"ambiguous framing was accepted: {statuses}"
    says_close = bool(answers) and answers[-1].headers.get("connection", "").lower() == "close"
    if message.must_answer and len(answers) < message.requests + 1 and not says_close:
        end = "closed" if closed else "left open"
        return "medium", f"{len(answers)} of {message.requests + 1} answers to valid requests, then {end}: {statuses}"
    return None


def _second_answer(address: Address, first: bytes, second: bytes) -> Answer | None:
    """As a proxy that shares one connection: one answer belongs to each message."""
    with address.connect(timeout=1.5) as connection, suppress(OSError):
        file = connection.makefile("rb")
        connection.sendall(first)
        try:
            next_answer(file)
        except TimeoutError:  # the first message waits for more
            file = connection.makefile("rb")
        connection.sendall(second)
        return next_answer(file)
    return None


@attack("framing", share=14.0)
def framing(setting: Setting) -> None:
    """One request, one answer, whatever the framing; and no tenant gets the answer to another one's bytes."""
    report = setting.report
    report.limit = "one answer a request"
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
    """Tenant A's message, one answer, then tenant B's request: B must not get an answer to A's bytes."""
    body, key = {"prompt": setting.canary}, setting.target.keys[1]
    victim = request_bytes("POST", "/tokenize", key=key, body=body)
    answer = _second_answer(setting.target.address, message.data, victim)
    is_foreign = answer is not None and answer.status < 300 and b'"tokens"' not in answer.body
    problem = ("critical", "tenant B got the answer to tenant A's body") if is_foreign else None
    return problem, message.data + victim
