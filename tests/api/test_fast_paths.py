"""The fast paths that nearly all tokens take give byte for byte the result of the slow paths."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from app.api.metrics import _InterTokenLatency
from app.api.native.resumable_stream import token_frame
from app.api.openai.responder import Responder
from app.api.openai.routes import _ChatResponder, _CompletionsResponder
from app.api.openai.schemas import StreamOptions
from app.api.schemas import TokenEvent, Usage
from app.common.frames import FrameDecoder
from app.common.ipc import Cancel, FrameReceiver, decode_down, decode_up, encode_frame
from app.common.types import Counters, FinishReason, RequestStarted, SampledEvent, StepReport
from app.generation.request import Delta
from app.http import sse


@given(st.integers(0, 20), st.text())
def test_token_frame_equals_the_generic_event(index: int, text: str) -> None:
    event = TokenEvent(index, text)
    assert token_frame(index, text, "req-1:5") == sse.event("token", event, "req-1:5")
    assert json.loads(sse.ascii_json(event)) == {"index": index, "text": text}


@pytest.mark.parametrize("kind", [_CompletionsResponder, _ChatResponder])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@given(
    texts=st.lists(st.text(min_size=1), min_size=1, max_size=4),
    unknown=st.text(),
    user=st.none() | st.text(),
)
def test_chunk_equals_the_encoding_of_its_model(
    kind: type[Responder], options: dict[str, bool], texts: list[str], unknown: str, user: str | None
) -> None:
    completion = SimpleNamespace(prompt_tokens=3, n_tokens=2, cached_tokens=1)
    admitted = SimpleNamespace(truncated=False, tokenizer=None, request=SimpleNamespace(resumption=None))
    handle: Any = SimpleNamespace(completion=completion, admitted=admitted)
    warnings = [f"unknown field {unknown!r} has no effect"]
    stream_options = StreamOptions(**options)
    body: Any = SimpleNamespace(
        stream=True, stream_options=stream_options, user=user, request_id=None, warnings=warnings
    )
    head = {"id": "x", "object": "o", "created": 1, "model": f"model {unknown}", "system_fingerprint": "f", "seed": 2}
    responder, reference = kind(handle, body, head), kind(handle, body, head)
    usage: dict[str, Any] = {"usage": None} if options else {}
    for text in texts:
        completion.n_tokens += 1
        if len(options) == 2:
            usage["usage"] = Usage.of(handle.completion)
        choice = reference.chunk_choice(Delta(3, text), None)
        reference.started.add(3)
        chunk = kind.chunk_type(**head, choices=[choice], user=user, warnings=warnings, **usage)
        assert responder._chunk(Delta(3, text)) == f"data: {json.dumps(to_builtins(chunk))}\n\n".encode("ascii")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 10_000])
def test_frames_decode_the_same_wherever_reads_split_them(size: int) -> None:
    report = StepReport(
        events=(SampledEvent("a", 0, 7, -0.5, ((7, -0.5),)), SampledEvent("b", 3, None, finish=FinishReason.LENGTH)),
        started=(RequestStarted("c", 4),),
        counters=Counters(running=2),
        at=1.5,
    )
    reports = [report, StepReport(), report]
    data = b"".join(map(encode_frame, reports))
    frames = FrameDecoder()
    bodies = [body for at in range(0, len(data), size) for body in frames.feed(data[at : at + size])]
    assert [decode_up(body) for body in bodies] == reports


def test_ipc_reader_returns_pending_messages_and_ends_with_its_pipe() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        inbox = FrameReceiver(theirs)
        with ours:
            assert inbox.receive(0.0) == []
            ours.sendall(encode_frame(Cancel("a")) + encode_frame(Cancel("b"))[:5])
            assert inbox.receive(5.0) == [Cancel("a")]
            ours.sendall(encode_frame(Cancel("b"))[5:])
            assert inbox.receive(5.0) == [Cancel("b")] == [decode_down(encode_frame(Cancel("b"))[4:])]
        with pytest.raises(EOFError):
            inbox.receive(5.0)


def test_gap_histogram_has_the_buckets_of_prometheus() -> None:
    gaps = _InterTokenLatency()
    gaps.add([0.001, 0.0011, 0.3, 99.0])
    (family,) = gaps.collect()
    counted = {sample.labels.get("le"): sample.value for sample in family.samples}
    assert [counted[le] for le in ("0.001", "0.002", "0.2", "0.5", "5.0", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert counted[None] == pytest.approx(99.3021)
