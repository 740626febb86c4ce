"""What a step did, to the streams that it is for. Knows no engine and no queue."""

from __future__ import annotations

from collections.abc import Mapping

from app.common.errors import EngineFailed, InvalidRequest
from app.common.types import PromptScores, RequestStarted, SampledEvent, StepReport
from app.engine_client.token_stream import TokenStream


def deliver(report: StepReport, streams: Mapping[str, TokenStream]) -> list[str]:
    """Hands everything out, by the ids of the requests; those that ended. A reader who is held leaves meanwhile."""
    ended = []
    for request_id, seconds in report.work:
        if stream := streams.get(request_id):
            stream.work_seconds += seconds
    items: list[RequestStarted | PromptScores | SampledEvent] = [*report.started, *report.scores, *report.events]
    for item in items:
        if stream := streams.get(item.request_id):
            stream.push(item.request_id, report.at, item)
            if isinstance(item, SampledEvent) and item.finish:
                ended.append(item.request_id)
    for failure in report.failed:
        if stream := streams.get(failure.request_id):
            error = InvalidRequest(failure.message) if failure.is_asked_for else EngineFailed(failure.message)
            stream.push(failure.request_id, report.at, error)
            ended.append(failure.request_id)
    return ended
