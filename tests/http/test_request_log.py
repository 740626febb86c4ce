"""Levels of the request log: routine requests are logged at debug."""

from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response

from app.common.errors import NotReady, Starting
from app.common.logs import REQUEST
from app.http import request_log
from app.http.errors import ApiError
from app.http.request_log import RequestLogMiddleware, routine
from tests.support.async_test import async_test


def _app() -> FastAPI:
    app = FastAPI()
    app.add_middleware(RequestLogMiddleware)
    request_log.install(app)

    @app.get("/probe/{status}")
    @routine
    async def probe(status: int) -> Response:
        return Response(status_code=status)

    @app.get("/file/{name}")
    @routine
    async def file(name: str) -> Response:
        raise ApiError(404, f"no file {name}")

    @app.get("/completion/{phase}")
    async def completion(phase: str) -> Response:
        if phase == "ready":
            return Response()
        raise (Starting if phase == "starting" else NotReady)("the model is not ready yet", 1)

    return app


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/probe/200", 200, logging.DEBUG),
        ("/probe/304", 304, logging.DEBUG),
        ("/probe/503", 503, logging.DEBUG),  # not ready: the service has logged the reason
        ("/probe/500", 500, logging.INFO),
        ("/file/x", 404, logging.INFO),
        ("/completion/ready", 200, logging.INFO),
        ("/completion/starting", 503, logging.DEBUG),
        ("/completion/restarting", 503, logging.INFO),
        ("/nothing", 404, logging.INFO),
    ],
)
@async_test
async def test_routine_requests_and_those_before_the_first_model_are_logged_at_debug(
    caplog: pytest.LogCaptureFixture, path: str, status: int, level: int
) -> None:
    caplog.set_level(logging.DEBUG, REQUEST)
    transport = httpx.ASGITransport(app=_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get(path)).status_code == status
    (record,) = [record for record in caplog.records if record.name == REQUEST]
    assert (record.levelno, vars(record)["fields"]["status"]) == (level, status)
