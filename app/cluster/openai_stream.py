"""A streamed answer of /v1: sent again as long as nothing was said, then ended by an error. Knows no chunk."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from app.cluster.messages import ReplicaLost
from app.cluster.retry import ReplicaAnswer, RetryingRequest
from app.http.errors import ApiError

_PING = b": ping\n"
_END = b"data: [DONE]\n\n"


async def openai_frames(asking: RetryingRequest, answer: ReplicaAnswer) -> AsyncGenerator[bytes, None]:
    """The frames of `answer`, or of the one that takes its place; never those of two."""
    was_said = False
    try:
        while True:
            try:
                piece = await answer.next()
                if piece is None:
                    raise ReplicaLost  # it has ended without a word
                was_said = was_said or bool(piece.replace(_PING, b""))
                yield piece
                if piece.endswith(_END):  # who is lost now has said all
                    return
            except ReplicaLost:
                await answer.close()
                answer = await _another(asking, was_said=was_said)
    except ApiError as error:
        asking.counts.failed.inc()
        yield f"data: {json.dumps(error.body(asking.call.request_id))}\n\n".encode("ascii") + _END
    finally:
        await answer.close()


async def _another(asking: RetryingRequest, *, was_said: bool) -> ReplicaAnswer:
    """Raises ApiError where the client must be told."""
    while not was_said:
        asking.lost(has_begun=False)
        try:
            answer = await asking.begin()
            if answer.head.status == 200:
                return answer
            raise await answer.refusal()
        except ReplicaLost:
            continue
    raise ApiError(503, "the replica that wrote this text is gone: send the request again", code="replica_lost")
