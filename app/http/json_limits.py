"""How many lists and objects a JSON body is made of, told before it is parsed.

Each becomes an object of ours: a megabyte of the smallest ones took 0.2 s and 80 MB. No request needs many.
"""

from __future__ import annotations

import re

MOST_PARTS = 32_768
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def has_too_many_parts(body: bytes | bytearray) -> bool:
    """Whether more than MOST_PARTS lists and objects begin in it; brackets in texts do not count."""
    # Nearly all bodies are through after the first count; those with many brackets in texts pay some milliseconds.
    return _count(body) > MOST_PARTS and _count(_STRING.sub(b"", body)) > MOST_PARTS


def _count(body: bytes | bytearray) -> int:
    return body.count(b"[") + body.count(b"{")
