"""HTTP/1.1 messages whose end two parsers might see at different bytes: valid ones, and ones that are wrong in one way.

`make redteam` sends them to a service; tests/promises/test_s25_framing.py compares how the service and h11 read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
ODD_METHODS = ("CONNECT", "PRI", "get", "SOURCE", "TRACE", "M-SEARCH", "DESCRIBE", "X", "G\tT", "", "QUERY")
TARGETS = (
    "/complete", "/tokenize", "/health/live", "/", "/nowhere", "/a?b=c", "/?x=%00", "/%41%2f", "//x/y", "/a//b/../c",
    "/?", "/a?b?c=/&;",
)  # fmt: skip
ODD_TARGETS = (
    "*", "x:80", "/a#b", "http://x/a?b", "http://x", "http://x?y", "http://u:p@x/", "HTTP://X/a", "", "ftp://x/y",
    "http:///a", "http:/a", "a/b", "/\xc3\xa9", "/a\tb", "/\x7f", "http://[::1]:8/a", "?a", '/"<>\\^`{|}', "/a b",
    "http://x:99999/", "http://x:/a", "/a?\xff", "[/", "http://x/a#b", "#",
)  # fmt: skip
CONNECT_TARGETS = ("127.0.0.1:80", "/complete", "example.com:443", "*", "http://127.0.0.1/", "x", "[::1]:80")
WRONG_LINES = (
    "GET /", "GET / HTTP/0.9", "GET / HTTP/1.2", "GET / HTTP/2.0", "PRI * HTTP/2.0", "GET / http/1.1", "GET / HTTP/11",
    "GET / HTTP/1.1 x", "GET / HTTP/1.1/", "GET /  x HTTP/1.1", "GET\t/\tHTTP/1.1", "POST / HTTP/1.0",
)  # fmt: skip
ODD_VERSIONS = (
    "HTTP/1.0", "HTTP/1.0", "HTTP/1.0", "HTTP/1.1 ", "RTSP/1.0", "RTSP/1.1", "ICE/1.0", "HTTP/1", "HTTP/1.10",
    "HTTP/01.1", "HTTP/1,1", "", "HTTPS/1.1",
)  # fmt: skip
EMPTY_LINES = ("\r\n", "\n", "\r", "\r\n\r\n", " \r\n", "\r\n ", "\x00", "\n\n\n")
NEWLINES = ("\n", "\r", "\r\r\n", "\n\r", "\n\n", " \r\n", "\r\n ")
UPGRADES = ("Upgrade", "upgrade", "keep-alive, Upgrade", "Upgrade, HTTP2-Settings", "UPGRADE")
ODD_CONNECTIONS = (
    "close, upgrade", "UPGRADE ,", "upgrade, close", "keep-alive", "close", "upgraded", "x-upgrade", "",
    "close\tupgrade", "Close",
)  # fmt: skip
PROTOCOLS = ("h2c", "websocket", "TLS/1.0", "x", "h2c, websocket", "HTTP/2.0", "", "chunked")
EXPECTS = ("100-continue", "100-Continue", "200-ok", "100-continue, 100-continue", "100-continue, x", "")
WRONG_LENGTHS = (
    ": +{n}", ": -{n}", ": 0x{n:x}", ": {n} 0", ":", ": {n};", ": {n}\r\nContent-Length: 0", ": {n}_0", ": {n} x",
    ": 0\r\nContent-Length: {n}", " : {n}", ": {n}, 0", ": 1e2", ": {n}.0", ": {n}e0", ":\x0b{n}", ": {n}\x0b",
    ": {n}\x00", ":\r\n {n}", ": \xb2", ": {n},", ': "{n}"', ": 99999999999999999999", ": 18446744073709551616",
)  # fmt: skip
ODD_LENGTHS = (
    ": {n} ", ": {n}\t", ":\t{n}", ": 0000{n}", ":  {n}", ": {n}, {n}", ": {n},{n}", ": {n}{n}",
    ": 18446744073709551615", ": {n}\r\nContent-Length: {n}", ": {n}\r\nContent-Length: {n}1",
)  # fmt: skip
WRONG_CODINGS = (
    "Transfer-Encoding: identity", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked;q=1", "Transfer-Encoding : chunked",
    "Transfer-Encoding: \x0bchunked", "Transfer-Encoding: chunked\x00", "Transfer-Encoding:\r\n chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", "Transfer-Encoding: 'chunked'",
    "Transfer-Encoding: chunked, identity", "Transfer-Encoding: \x85chunked", "Transfer\x00-Encoding: chunked",
    "Transfer-Encoding: chun\r\n ked", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, gzip",
    "Transfer-Encoding: cow\r\nTransfer-Encoding: chunked", 'Transfer-Encoding: "chunked"', "Transfer-Encoding: x",
    "Transfer-Encoding: chun ked",
)  # fmt: skip
ODD_CODINGS = ("Chunked", "CHUNKED", "", "chunked ", "\tchunked", "chunked,", ",chunked")
WRONG_SIZES = (
    "0x{n:x}\r\n", "+{n:x}\r\n", "-{n:x}\r\n", " {n:x}\r\n", "{n:x}_0\r\n", "\r\n", ";\r\n", "g\r\n", "{n:x}g\r\n",
    "ffffffffffffffff{n:x}\r\n", "1{n:016x}\r\n", "{n:x}\r\r\n", "{n:x}\x00\r\n", "{n:x}\x0b\r\n", "{n:x};a\x00=b\r\n",
    "{n:x};a\rb\r\n", "0\r\nContent-Length: x y z\r\n : bad\r\n", "{n:x}.0\r\n",
)  # fmt: skip
ODD_SIZES = (
    "{n:x} ", "\t{n:x}", "{n:x}\t", "0{n:x}", "000000000000000000{n:x}", "{n:x};", "ffffffffffffffff", "{n:x},{n:x}",
    "10000000000000000", "{n:X};a", '{n:x};a="b;c"', '{n:x};a="\\""', "{n:x};a=b;c", "{n:x} ;a", "{n:x};a=\xff",
    "{n:x};\x00", '{n:x};a="', "{n:x};a b", "{n:x}\n", "{n:x}\r", "{n:x};a=b\n", "{n:x}; a=b", ";a",
)  # fmt: skip
TRAILERS = (
    "X-Checksum: 1", "Content-Length: 5", "Transfer-Encoding: chunked", "Connection: close", "Host: y", "X", "X: \x00",
    "Connection: upgrade", "Upgrade: x", "X : y", " fold", ": x", "GET /v1/models HTTP/1.1",
)  # fmt: skip
ODD_HEADERS = (
    "X: a\r\n b", "X : a", "X\t: a", " X: a", "\tX: a", "X", ": a", "X: a\x00b", "X: a\rb", "X: a\nb", "X\x00: a",
    "X Y: a", "X: a\r\n\tb", "X:\r\n a", "(X): a", "X\x80: a", "X\xff: a", "X: \x01", "X:", "X:a", "X:\ta\t",
    "X: a\x7f", "X: \xff\xfe", "X: " + "y" * 300, "Host: 127.0.0.1", "Host: y", "Host : x", "Host:", "\r: a",
    "\xa0X: a", "Content-Length : 3", "Content_Length: 3", "\x0bContent-Length: 3", "Content-Length: 0",
    "Transfer-Encoding : chunked", "Transfer\x0bEncoding: chunked",
)  # fmt: skip
ODD_BODIES = (
    b"5\r\nhello\r\n0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer victim\r\nContent-Length: 4\r\n\r\n{ab}",
)  # fmt: skip
SPICE = (
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b",", b";", b"%", b"#", b"\xff", b"0", b"5", b"aF", b"0\r\n\r\n",
    b"\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: x\r\n", b"Expect: 100-continue\r\n", b"CONNECT ", b"Host: x\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes, and how many responses RFC 9112 allows for them (the last request's not counted).

    `must_answer` means that the message is valid: exactly `requests` responses. Otherwise a refusal is fine, too, and
    expected if `must_refuse` is set.
    """

    kind: str
    data: bytes
    requests: int = 1
    must_answer: bool = False
    must_refuse: bool = False


class MessageGenerator:
    """Messages of every class that has smuggled a request somewhere; most bodies are requests themselves."""

    def __init__(self, rng: Random, key: str | None, *, methods: Sequence[str] = METHODS) -> None:
        self.rng = rng
        self._methods = methods
        self._authorization = [] if key is None else [f"Authorization: Bearer {key}"]
        inner = ["GET /v1/models HTTP/1.1", "Host: 127.0.0.1", *self._authorization, "", ""]
        self._inner = "\r\n".join(inner).encode()
        """A whole request with a response that gives it away."""
        self.kinds: dict[str, Callable[[], Message]] = {
            "valid": self._valid, "upgrade": self._upgrade, "connect": self._connect, "expect": self._expect,
            "both lengths": self._both_lengths, "transfer encoding": self._transfer_encoding,
            "content length": self._content_length, "chunk size": self._chunk_size, "trailers": self._trailers,
            "target": self._target, "request line": self._request_line, "header syntax": self._header_syntax,
            "line ends": self._line_ends, "pipeline": self._pipeline, "mutated": self._mutated,
        }  # fmt: skip

    def next(self) -> Message:
        """A message of any kind; offers to upgrade, which once smuggled requests, come twice as often."""
        return self.rng.choice([*self.kinds.values(), self._upgrade])()

    def _message(
        self, kind: str, headers: Sequence[str], body: bytes, *, first: str = "", newline: str = "\r\n", **judged: bool
    ) -> Message:
        """The headers in any order, with or without the key."""
        lines = [first or self._line(), "Host: 127.0.0.1", *self._authorization * self.rng.randrange(2)]
        lines += self.rng.sample(headers, len(headers))
        if self.rng.random() < 0.1:
            lines.append("Connection: " + self.rng.choice(["close", "keep-alive", "upgrade"]))
        return Message(kind=kind, data=newline.join([*lines, "", ""]).encode("latin-1") + body, **judged)

    def _line(self, *, method: str | None = None, target: str | None = None, version: str = "HTTP/1.1") -> str:
        method = self.rng.choice(self._methods) if method is None else method
        return f"{method} {self.rng.choice(TARGETS) if target is None else target} {version}"

    def _version(self, share_of_old: float) -> str:
        return "HTTP/1.0" if self.rng.random() < share_of_old else "HTTP/1.1"

    def _hidden(self) -> bytes:
        """A body that contains a request."""
        prefixes = [b"", b"\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n", b"x" * self.rng.randrange(200)]
        return self.rng.choice(prefixes) + self._inner

    def _body(self) -> bytes:
        if self.rng.random() < 0.002:  # more than the service buffers before it stops reading
            return self.rng.randbytes(1000) * 100 + self._inner
        match self.rng.randrange(8):
            case 0:
                return b""
            case 1:
                return self.rng.randbytes(self.rng.randrange(1, 40))
            case 2:
                return b'{"prompt": "a", "max_tokens": 2}'
            case 3:
                return self.rng.choice(ODD_BODIES)
            case 4:
                return b"\r\n0\r\n\r\n" + self._inner[:-2] + b"X: "
        return self._hidden()

    def _as_chunks(self, body: bytes, *, odd_size: str = "", trailers: Sequence[str] = ()) -> bytes:
        """The body in chunks, the size of one of them in the odd form."""
        parts = []
        while body:
            size = self.rng.randint(1, len(body))
            parts.append(body[:size])
            body = body[size:]
        odd = self.rng.randrange(len(parts) + 1) if odd_size else -1
        out = b""
        for at, part in enumerate([*parts, b""]):
            form = self.rng.choice(["{n:x}", "{n:X}", "0{n:x}", "000{n:X}"])
            form += self.rng.choice(["", "", "", ";a", ";a=b", ';a="b;c"'])
            out += (odd_size if at == odd else form).format(n=len(part)).encode("latin-1") + b"\r\n"
            out += part + b"\r\n" if part else b""
        return out + "".join(f"{line}\r\n" for line in trailers).encode("latin-1") + b"\r\n"

    def _framed(self) -> tuple[list[str], bytes]:
        """A header and the bytes of a body with valid framing, or of none."""
        match self.rng.randrange(5):
            case 0:
                return [], b""
            case 1 | 2:
                body = self._body()
                return [f"Content-Length: {len(body)}"], body
        coding = self.rng.choice(["chunked", "chunked", "Chunked", "CHUNKED", " \tchunked"])
        trailers = self.rng.choice([[], ["X-Trailer: 1"]])
        return [f"Transfer-Encoding: {coding}"], self._as_chunks(self._body(), trailers=trailers)

    def _valid(self) -> Message:
        return self._message("valid", *self._framed(), must_answer=True)

    def _offer(self) -> tuple[list[str], bytes, bool]:
        """Headers and body of an offer to upgrade, and whether it is a plain one."""
        headers, body = self._framed()
        is_plain = self.rng.random() < 0.6
        protocol = self.rng.choice(PROTOCOLS)
        headers += [f"Connection: {self.rng.choice(UPGRADES if is_plain else ODD_CONNECTIONS)}", f"Upgrade: {protocol}"]
        if protocol == "websocket":
            headers += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
        if self.rng.random() < 0.3:
            headers.append("HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
        if not is_plain and self.rng.random() < 0.5:
            headers.append(f"Expect: {self.rng.choice(EXPECTS)}")
        return headers, body, is_plain

    def _upgrade(self) -> Message:
        headers, body, is_plain = self._offer()
        first = self._line(version="HTTP/1.1" if is_plain else self._version(0.4))
        return self._message("upgrade", headers, body, first=first, must_answer=is_plain)

    def _connect(self) -> Message:
        headers, body, _ = self._offer()
        if self.rng.random() < 0.5:
            headers, body = self._framed()
        first = self._line(method="CONNECT", target=self.rng.choice(CONNECT_TARGETS))
        return self._message("connect", headers, body, first=first)

    def _expect(self) -> Message:
        headers, body = self._framed()
        headers.append(f"Expect: {self.rng.choice(EXPECTS)}")
        body = b"zz\r\n" + body if body and self.rng.random() < 0.2 else body
        return self._message("expect", headers, body, first=self._line(version=self._version(0.2)))

    def _both_lengths(self) -> Message:
        body = self._body()
        chunks = self._as_chunks(body)
        length = self.rng.choice([0, 1, 4, len(chunks), max(0, len(chunks) - len(self._inner)), len(body)])
        coding = self.rng.choice(["chunked"] * len(ODD_CODINGS) + list(ODD_CODINGS))
        headers = [f"Content-Length: {length}", f"Transfer-Encoding: {coding}"]
        headers += ["Connection: upgrade", "Upgrade: x"] if self.rng.random() < 0.2 else []
        return self._message("both lengths", headers, chunks)

    def _transfer_encoding(self) -> Message:
        if self.rng.random() < 0.5:
            headers = [self.rng.choice(WRONG_CODINGS), "Content-Length: 5"][: self.rng.choice([1, 1, 2])]
            return self._message("transfer encoding", headers, b"0\r\n\r\n" + self._inner, must_refuse=True)
        headers = [f"Transfer-Encoding: {self.rng.choice(ODD_CODINGS)}"]
        headers += ["Transfer-Encoding: chunked"] if self.rng.random() < 0.2 else []
        first = self._line(version=self._version(0.2))
        return self._message("transfer encoding", headers, self._as_chunks(self._body()), first=first)

    def _content_length(self) -> Message:
        is_wrong = self.rng.random() < 0.5
        body = self._hidden() if is_wrong else self._body()
        form = self.rng.choice(WRONG_LENGTHS if is_wrong else ODD_LENGTHS)
        n = len(body) if is_wrong or not body else len(body) + self.rng.choice([0, 0, 0, -1, 1, 40])
        header = self.rng.choice(["Content-Length", "content-length", "CONTENT-LENGTH"]) + form.format(n=n)
        return self._message("content length", [header], body, must_refuse=is_wrong)

    def _chunk_size(self) -> Message:
        headers = ["Transfer-Encoding: chunked"]
        if self.rng.random() < 0.5:
            size = self.rng.choice(WRONG_SIZES).format(n=len(self._inner)).encode("latin-1")
            return self._message("chunk size", headers, size + self._inner + b"\r\n0\r\n\r\n", must_refuse=True)
        chunks = self._as_chunks(self._body(), odd_size=self.rng.choice(ODD_SIZES))
        if self.rng.random() < 0.3:
            chunks = chunks.replace(b"\r\n", self.rng.choice(NEWLINES).encode(), self.rng.choice([1, 2]))
        return self._message("chunk size", headers, chunks)

    def _trailers(self) -> Message:
        trailers = self.rng.choices(TRAILERS, k=self.rng.randint(1, 3))
        headers = ["Transfer-Encoding: chunked"]
        headers += ["Connection: upgrade", "Upgrade: x"] if self.rng.random() < 0.2 else []
        return self._message("trailers", headers, self._as_chunks(self._body(), trailers=trailers))

    def _target(self) -> Message:
        method = self.rng.choice([None, None, self.rng.choice(ODD_METHODS)])
        first = self._line(method=method, target=self.rng.choice(ODD_TARGETS))
        return self._message("target", *self._framed(), first=first)

    def _request_line(self) -> Message:
        if self.rng.random() < 0.5:
            body = b"0\r\n\r\n" + self._inner
            headers = ["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"][: self.rng.choice([1, 1, 2])]
            return self._message("request line", headers, body, first=self.rng.choice(WRONG_LINES), must_refuse=True)
        method = self.rng.choice([*self._methods, *ODD_METHODS])
        before, (space, other_space) = "", (" ", " ")
        if self.rng.random() < 0.3:
            space, other_space = self.rng.choice([" ", "  ", "\t", ""]), self.rng.choice([" ", "  ", " \t", ""])
        if self.rng.random() < 0.3:
            before = self.rng.choice(EMPTY_LINES)
        version = self.rng.choice(["HTTP/1.1", self.rng.choice(ODD_VERSIONS)])
        first = f"{before}{method}{space}{self.rng.choice(TARGETS)}{other_space}{version}"
        return self._message("request line", *self._framed(), first=first)

    def _header_syntax(self) -> Message:
        headers, body = self._framed()
        message = self._message("header syntax", [*headers, self.rng.choice(ODD_HEADERS)], body)
        if self.rng.random() < 0.15:
            return Message(kind=message.kind, data=message.data.replace(b"Host: 127.0.0.1\r\n", b"", 1))
        return message

    def _line_ends(self) -> Message:
        headers, body = self._framed()
        if self.rng.random() < 0.3:
            return self._message("line ends", headers, body, newline=self.rng.choice(NEWLINES))
        end = self.rng.choice(["\n", "\r", "\n\r"]) + self.rng.choice(["X: y", "Content-Length: 7", "", "X"])
        headers = headers or ["X: y"]
        return self._message("line ends", [headers[0] + end], body)

    def _pipeline(self) -> Message:
        messages = [self._valid() for _ in range(self.rng.randint(2, 6))]
        data = b"".join(message.data for message in messages)
        return Message(kind="pipeline", data=data, requests=len(messages), must_answer=True)

    def _mutated(self) -> Message:
        """Only the form of the responses can be judged."""
        data = self.rng.choice([self._valid, self._upgrade, self._pipeline])().data
        return Message(kind="mutated", data=mutated(self.rng, data), requests=99)


def mutated(rng: Random, data: bytes, spice: Sequence[bytes] = SPICE) -> bytes:
    """The bytes with one to three changes: inserted special bytes, and bytes removed, replaced or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at:at] = rng.choice(spice)
            case 1:
                del changed[at : at + rng.randrange(1, 12)]
            case 2:
                changed[at : at + 1] = rng.randbytes(1)
            case 3:
                changed[at:at] = changed[rng.randrange(len(changed) + 1) :][: rng.randrange(1, 50)]
            case _:
                changed[at : at + rng.randrange(1, 8)] = rng.choice(spice)
    return bytes(changed)


def split(rng: Random, data: bytes) -> tuple[bytes, ...]:
    """The bytes in packets: one, several, or many of a few bytes."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            return (data,)
        case 3:
            size = rng.choice([1, 1, 2, 7])
            return tuple(data[at : at + size] for at in range(0, len(data), size))
        case _:
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 5)))
            return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b)
