"""Frames: the incremental decoder and the blocking reader return the bodies that were written, whatever the cuts."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from app.common.frames import FrameDecoder, encode_body, read_body


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 50), min_size=1))
def test_bodies_are_the_same_for_every_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream, decoder, decoded = b"".join(map(encode_body, bodies)), FrameDecoder(), list[bytes]()
    start = 0
    while start < len(stream):
        size = cuts[start % len(cuts)]
        decoded += decoder.feed(stream[start : start + size])
        start += size
    assert decoded == bodies
    file = io.BytesIO(stream)
    assert [read_body(file) for _ in bodies] == bodies
    assert read_body(file) is None


@given(st.binary(min_size=1, max_size=50), st.data())
def test_end_inside_a_frame_and_a_long_body_are_no_body(body: bytes, data: st.DataObject) -> None:
    frame = encode_body(body)
    assert read_body(io.BytesIO(frame[: data.draw(st.integers(0, len(frame) - 1))])) is None
    assert read_body(io.BytesIO(frame), len(body) - 1) is None
    assert read_body(io.BytesIO(frame), len(body)) == body
