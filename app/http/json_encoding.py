"""Encoding of JSON bodies: UTF-8, with or without a byte order mark."""

from __future__ import annotations

import codecs
import json

from app.http.errors import ApiError


def utf8_json(body: bytearray) -> bytes:
    """The body without a byte order mark, as Windows' editors and shells write one. Raises ApiError 400.

    RFC 8259, 8.1: JSON that systems exchange is UTF-8, and a parser may ignore a byte order mark.
    """
    encoding = json.detect_encoding(body[:4])
    if encoding == "utf-8-sig":
        return bytes(memoryview(body)[len(codecs.BOM_UTF8) :])
    if encoding != "utf-8":
        name = encoding[:6].upper()
        message = f"the body is {name}, and JSON is UTF-8: convert it, for example with iconv -f {name} -t UTF-8"
        raise ApiError(400, message, code="invalid_json")
    return bytes(body)
