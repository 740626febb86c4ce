"""Generator of HTTP/1.1 byte streams: valid requests, requests that are wrong in one way, and mutations of both.

A message is what one client sends on one connection: one to three requests, split into
packets. The seed and the index of a message give the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes of one connection, in packets."""

    kind: str
    packets: tuple[bytes, ...]

    @property
    def data(self) -> bytes:
        """All packets together."""
        return b"".join(self.packets)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A request before it is written: each kind of message changes a part of it."""

    method: bytes = b"POST"
    target: bytes = b"/complete"
    version: bytes = b"HTTP/1.1"
    fields: list[bytes]
    body: bytes = b""
    newline: bytes = b"\r\n"
    before: bytes = b""
    spaces: tuple[bytes, bytes] = (b" ", b" ")

    def written(self) -> bytes:
        line = self.method + self.spaces[0] + self.target + self.spaces[1] + self.version
        return self.before + self.newline.join([line, *self.fields, b"", b""]) + self.body


_SMUGGLED = [
    b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer victim\r\nContent-Length: 4\r\n\r\n{ab}",
    b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\nX: ",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
_METHODS = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH"]
_ODD_METHODS = [b"CONNECT", b"PRI", b"get", b"SOURCE", b"TRACE", b"M-SEARCH", b"DESCRIBE", b"X", b"G\tT", b"", b"QUERY"]
_TARGETS = [b"/", b"/complete", b"/a?b=c", b"/%41%2f?x=%00", b"//x/y", b"/a//b/../c", b"/?", b"/a?b?c=/&;"]
_ODD_TARGETS = [b"*", b"x:80", b"/a#b", b"http://x/a?b", b"http://x", b"http://x?y", b"http://u:p@x/", b"HTTP://X/a"]
_ODD_TARGETS += [b"", b"ftp://x/y", b"http:///a", b"http:/a", b"a/b", b"/\xc3\xa9", b"/a\tb", b"/\x7f"]
_ODD_TARGETS += [b"http://[::1]:8/a", b"?a", b'/"<>\\^`{|}', b"http://x:99999/", b"http://x:/a", b"/a?\xff", b"[/"]
_ODD_TARGETS += [b"http://x/a#b", b"#", b"/a b"]
_ODD_VERSIONS = [b"HTTP/1.0", b"HTTP/1.0", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.2", b"http/1.1"]
_ODD_VERSIONS += [b"HTTP/1.1 ", b"RTSP/1.0", b"RTSP/1.1", b"ICE/1.0", b"HTTP/1", b"HTTP/1.10", b"HTTP/01.1"]
_ODD_VERSIONS += [b"HTTP/1,1", b"", b"HTTPS/1.1"]
_CONNECTIONS = [b"upgrade", b"Upgrade", b"keep-alive, Upgrade", b"Upgrade, HTTP2-Settings", b"close, upgrade"]
_CONNECTIONS += [b"UPGRADE ,", b"upgrade, close", b"keep-alive", b"close", b"upgraded", b"x-upgrade", b""]
_CONNECTIONS += [b"close\tupgrade", b"Close"]
_PROTOCOLS = [b"h2c", b"websocket", b"x", b"TLS/1.0", b"h2c, websocket", b"", b"HTTP/2.0", b"chunked"]
_EXPECTS = [b"100-continue", b"100-Continue", b"100-continue, x", b"200-ok", b""]
_ODD_LENGTHS = [b"+%d", b"-%d", b"%d, %d", b"%d,%d", b"0x%x", b"%d ", b"%d\t", b"\t%d", b"0000%d", b"%d.0", b"%de0"]
_ODD_LENGTHS += [b"%d;", b'"%d"', b"", b"%d%d", b"99999999999999999999", b"18446744073709551616"]
_ODD_LENGTHS += [b"18446744073709551615", b"%d\x0b", b" %d", b"%d x"]
_ODD_CODINGS = [b"Chunked", b"chunked, chunked", b"gzip, chunked", b"chunked, gzip", b"chunked;q=1", b"identity"]
_ODD_CODINGS += [b"\x0bchunked", b"", b"chunked ", b"\tchunked", b'"chunked"', b"x", b"chunked,", b",chunked"]
_ODD_CODINGS += [b"chun ked", b"chunked\x00", b"CHUNKED"]
_ODD_SIZES = [b"0x%x", b"+%x", b"-%x", b" %x", b"%x ", b"\t%x", b"%x\t", b"0%x", b"000000000000000000%x", b"1%016x"]
_ODD_SIZES += [b"%x;", b"ffffffffffffffff", b"10000000000000000", b"%xg", b"", b"%X;a", b'%x;a="b;c"', b'%x;a="\\""']
_ODD_SIZES += [b"%x;a=b;c", b"%x ;a", b"%x;a=\xff", b"%x;\x00", b'%x;a="', b"%x;a b", b"%x,%x", b"%x\n", b"%x\r"]
_ODD_SIZES += [b"%x;a\rb", b"%x;a=b\n", b"%x; a=b", b";a"]
_TRAILERS = [b"X-Checksum: 1", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Connection: close", b"Host: y"]
_TRAILERS += [b"X", b"Connection: upgrade", b"Upgrade: x", b"X : y", b" fold", b": x", b"GET /smuggled HTTP/1.1"]
_TRAILERS += [b"X: \x00"]
_ODD_FIELDS = [b"X : y", b"X\t: y", b" X: y", b"\tX: y", b": y", b"X", b"X: a\x00b", b"X: a\rb", b"X: a\nb"]
_ODD_FIELDS += [b"X: \x01", b"X:", b"X: a\x7f", b"X: \xff\xfe", b"X\x00: y", b"X\xff: y", b"(X): y", b"X: y\r\n z"]
_ODD_FIELDS += [b"X:\r\n y", b"Content-Length : 3", b"Content_Length: 3", b"Transfer-Encoding : chunked"]
_ODD_FIELDS += [b"Transfer\x0bEncoding: chunked", b"X: " + b"y" * 300, b"Host: y", b"Host : x", b"Host:"]
_ODD_FIELDS += [b"Content-Length: 0", b"X:a", b"X:\ta\t", b"\x0bContent-Length: 3", b"\xa0X: y"]
_NEWLINES = [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\n\n", b" \r\n", b"\r\n "]
_EMPTY_LINES = [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" \r\n", b"\r\n ", b"\x00", b"\n\n\n"]


def _body(rng: Random) -> bytes:
    if rng.random() < 0.002:  # more than the service buffers before it stops reading
        return rng.randbytes(1000) * 100 + rng.choice(_SMUGGLED)
    match rng.randrange(5):
        case 0:
            return b""
        case 1:
            return rng.randbytes(rng.randrange(1, 40))
        case 2:
            return b'{"prompt": "a", "max_tokens": 2}'
        case _:
            return rng.choice(_SMUGGLED)


def _with_length(draft: _Draft, body: bytes) -> None:
    draft.fields.append(b"Content-Length: %d" % len(body))
    draft.body = body


def _chunks(rng: Random, body: bytes, size: bytes | None = None, trailers: list[bytes] | None = None) -> bytes:
    """The body in chunks; one of them has the given form of a size."""
    parts: list[bytes] = []
    while body:
        n = rng.randrange(1, len(body) + 1)
        parts.append(body[:n])
        body = body[n:]
    odd = rng.randrange(len(parts) + 1) if size is not None else -1
    written = b""
    for at, part in enumerate([*parts, b""]):
        form = size if at == odd and size is not None else rng.choice([b"%x", b"%x", b"%X", b"0%x"])
        written += form % ((len(part),) * form.count(b"%")) + b"\r\n"
        written += part + b"\r\n" if part else b""
    return written + b"".join(line + b"\r\n" for line in trailers or ()) + b"\r\n"


def _with_chunks(draft: _Draft, chunks: bytes) -> None:
    draft.fields.append(b"Transfer-Encoding: chunked")
    draft.body = chunks


def _framed(rng: Random, draft: _Draft) -> None:
    """A body with valid framing, or none."""
    match rng.randrange(5):
        case 0:
            draft.method = rng.choice(_METHODS)
        case 1 | 2:
            _with_length(draft, _body(rng))
        case _:
            _with_chunks(draft, _chunks(rng, _body(rng)))


def _valid(rng: Random, draft: _Draft) -> None:
    draft.method, draft.target = rng.choice(_METHODS), rng.choice(_TARGETS)
    _framed(rng, draft)


def _upgrade(rng: Random, draft: _Draft) -> None:
    draft.method = rng.choice([b"GET", b"POST", b"POST", rng.choice(_METHODS)])
    offer = [b"Connection: " + rng.choice(_CONNECTIONS[: rng.choice([3, 99])]), b"Upgrade: " + rng.choice(_PROTOCOLS)]
    offer += [b"HTTP2-Settings: AAMAAABkAAQAAP__"] if rng.random() < 0.2 else []
    offer += [b"Expect: " + rng.choice(_EXPECTS)] if rng.random() < 0.3 else []
    _framed(rng, draft)
    draft.fields += offer
    rng.shuffle(draft.fields)
    if rng.random() < 0.15:
        draft.version = b"HTTP/1.0"


def _connect(rng: Random, draft: _Draft) -> None:
    _upgrade(rng, draft)
    draft.method = b"CONNECT"
    draft.target = rng.choice([b"x:80", b"/", b"http://x/", b"x", b"*", b"[::1]:80"])


def _expect(rng: Random, draft: _Draft) -> None:
    _framed(rng, draft)
    draft.fields.insert(rng.randrange(len(draft.fields) + 1), b"Expect: " + rng.choice(_EXPECTS))
    if rng.random() < 0.2:
        draft.version = b"HTTP/1.0"
    if rng.random() < 0.2 and draft.body:
        draft.body = b"zz\r\n" + draft.body


def _length(rng: Random, draft: _Draft) -> None:
    body = _body(rng)
    form = rng.choice(_ODD_LENGTHS)
    n = len(body) + rng.choice([0, 0, 0, -1, 1, 40]) if body else 0
    name = rng.choice([b"Content-Length", b"content-length", b"CONTENT-LENGTH"])
    draft.fields.append(name + b": " + form % ((max(0, n),) * form.count(b"%")))
    if rng.random() < 0.25:
        draft.fields.append(b"Content-Length: %d" % (n + rng.choice([0, 0, 1])))
    draft.body = body


def _coding(rng: Random, draft: _Draft) -> None:
    draft.fields.append(b"Transfer-Encoding: " + rng.choice(_ODD_CODINGS))
    if rng.random() < 0.2:
        draft.fields.append(b"Transfer-Encoding: chunked")
    draft.body = _chunks(rng, _body(rng))
    if rng.random() < 0.2:
        draft.version = b"HTTP/1.0"


def _both(rng: Random, draft: _Draft) -> None:
    body = _body(rng)
    chunks = _chunks(rng, body)
    draft.fields.append(b"Content-Length: %d" % rng.choice([len(body), len(chunks), 0, 4]))
    draft.fields.insert(
        rng.randrange(len(draft.fields) + 1), b"Transfer-Encoding: " + rng.choice([b"chunked", *_ODD_CODINGS])
    )
    draft.body = chunks
    if rng.random() < 0.2:
        draft.fields += [b"Connection: upgrade", b"Upgrade: x"]


def _chunk_size(rng: Random, draft: _Draft) -> None:
    chunks = _chunks(rng, _body(rng), rng.choice(_ODD_SIZES))
    if rng.random() < 0.3:
        chunks = chunks.replace(b"\r\n", rng.choice(_NEWLINES), rng.choice([1, 2]))
    _with_chunks(draft, chunks)


def _trailers(rng: Random, draft: _Draft) -> None:
    lines = [rng.choice(_TRAILERS) for _ in range(rng.randrange(1, 4))]
    _with_chunks(draft, _chunks(rng, _body(rng), trailers=lines))
    if rng.random() < 0.2:
        draft.fields += [b"Connection: upgrade", b"Upgrade: x"]


def _target(rng: Random, draft: _Draft) -> None:
    _framed(rng, draft)
    draft.method = rng.choice([draft.method, draft.method, rng.choice(_ODD_METHODS)])
    draft.target = rng.choice(_ODD_TARGETS)


def _request_line(rng: Random, draft: _Draft) -> None:
    _framed(rng, draft)
    draft.method = rng.choice([draft.method, draft.method, rng.choice(_ODD_METHODS)])
    draft.version = rng.choice([b"HTTP/1.1", rng.choice(_ODD_VERSIONS)])
    if rng.random() < 0.3:
        draft.spaces = (rng.choice([b" ", b"  ", b"\t", b""]), rng.choice([b" ", b"  ", b" \t", b""]))
    if rng.random() < 0.3:
        draft.before = rng.choice(_EMPTY_LINES)


def _field_syntax(rng: Random, draft: _Draft) -> None:
    _framed(rng, draft)
    draft.fields.insert(rng.randrange(len(draft.fields) + 1), rng.choice(_ODD_FIELDS))
    if rng.random() < 0.15:
        draft.fields = [field for field in draft.fields if not field.startswith(b"Host")]


def _line_ends(rng: Random, draft: _Draft) -> None:
    _framed(rng, draft)
    if rng.random() < 0.3:
        draft.newline = rng.choice(_NEWLINES)
        return
    at = rng.randrange(len(draft.fields))
    draft.fields[at] += rng.choice([b"\n", b"\r", b"\n\r"]) + rng.choice([b"X: y", b"Content-Length: 7", b"", b"X"])


KINDS: dict[str, Callable[[Random, _Draft], None]] = {
    "valid": _valid,
    "upgrade": _upgrade,
    "CONNECT": _connect,
    "Expect": _expect,
    "Content-Length": _length,
    "Transfer-Encoding": _coding,
    "both framings": _both,
    "chunk size": _chunk_size,
    "trailers": _trailers,
    "target": _target,
    "request line": _request_line,
    "field syntax": _field_syntax,
    "line ends": _line_ends,
}
_SPICE = [b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b",", b";", b"0\r\n\r\n", b"\r\n\r\n", b"%", b"#", b"\xff"]
_SPICE += [
    b"0",
    b"5",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"HTTP/1.0",
    b"Connection: close\r\n",
]
_SPICE += [
    b"Connection: upgrade\r\nUpgrade: x\r\n",
    b"Expect: 100-continue\r\n",
    b"CONNECT ",
    b"Host: x\r\n",
    *_SMUGGLED,
]


def generate(seed: str, index: int) -> Message:
    """Message number `index` of a seed."""
    rng = Random(f"{seed} {index}")
    kinds = list(KINDS)
    kind = kinds[index % len(kinds)]
    data = _request(rng, kind)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        other = _request(rng, rng.choice(["valid", "valid", "valid", rng.choice(kinds)]))
        data = data + other if rng.random() < 0.6 else other + data
    if rng.random() < 0.25:
        data, kind = mutated(rng, data), f"{kind}, mutated"
    return Message(kind, _split(rng, data))


def _request(rng: Random, kind: str) -> bytes:
    draft = _Draft(fields=[b"Host: x"])
    KINDS[kind](rng, draft)
    if rng.random() < 0.1:
        draft.fields.append(b"Connection: " + rng.choice([b"close", b"keep-alive", b"upgrade"]))
    return draft.written()


def mutated(rng: Random, data: bytes, spice: Sequence[bytes] = _SPICE) -> bytes:
    """The bytes with one to three changes: pieces of spice, and bytes removed, replaced or repeated."""
    wounded = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(wounded) + 1)
        match rng.randrange(5):
            case 0:
                wounded[at:at] = rng.choice(spice)
            case 1:
                del wounded[at : at + rng.randrange(1, 12)]
            case 2:
                wounded[at : at + 1] = rng.randbytes(1)
            case 3:
                wounded[at:at] = wounded[rng.randrange(len(wounded) + 1) :][: rng.randrange(1, 50)]
            case _:
                wounded[at : at + rng.randrange(1, 8)] = rng.choice(spice)
    return bytes(wounded)


def _split(rng: Random, data: bytes) -> tuple[bytes, ...]:
    match rng.randrange(8):
        case 0 | 1 | 2:
            return (data,)
        case 3:
            size = rng.choice([1, 1, 2, 7])
            return tuple(data[at : at + size] for at in range(0, len(data), size))
        case _:
            cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 5)))
            return tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b)
