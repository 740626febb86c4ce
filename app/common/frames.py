"""Length-prefixed frames: what processes of the service write to each other's pipes. Needs the standard library only.

A frame is the number of bytes of its body (32 bits, little-endian), then the body.
"""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct("<I")


def encode_body(body: bytes) -> bytes:
    """The frame of a body."""
    return _LENGTH.pack(len(body)) + body


def read_body(file: IO[bytes], max_bytes: int | None = None) -> bytes | None:
    """The body of the next frame; None at the end of the file, inside a frame, too, or if it is over `max_bytes`."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    if max_bytes is not None and length > max_bytes:
        return None
    body = file.read(length)
    return body if len(body) == length else None


class FrameDecoder:
    """Incremental decoder: bytes of a pipe in, bodies of complete frames out."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the bodies that `data` completes, in order."""
        data = self._pending + data if self._pending else data
        bodies, start = [], 0
        while len(data) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + _LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                break
            bodies.append(data[body:end])
            start = end
        self._pending = data[start:]
        return bodies
