"""Static web pages, / and /docs, under a strict content security policy, and the OpenAPI document.

The service reads and joins the files of a page once, in a thread, at the first request for one.

With keys configured, /docs needs one, because it describes the service; a browser cannot send a key with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from app.api.openapi import DescribedApp
from app.api.page_bundle import PageFile, bundle
from app.common.threaded_result import ThreadedResult
from app.http.auth import public
from app.http.errors import ApiError
from app.http.request_log import routine

_FOLDER = Path(__file__).parent.parent / "web"
_POLICY = (
    "default-src 'none'; img-src 'self' data:; font-src 'self'; "
    "connect-src {}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_METHODS = ["GET", "HEAD"]
_TYPES = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=_METHODS)
@public
@routine
async def page(request: Request) -> Response:
    """The completion notebook."""
    return await _file(request, "index.html")


@router.api_route("/docs", methods=_METHODS)
@routine
async def docs(request: Request) -> Response:
    """The API reference, where requests can be tried."""
    return await _file(request, "docs.html")


@router.api_route("/openapi.json", methods=_METHODS)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    app: DescribedApp = request.app
    return (await app.openapi_content.get()).respond(request, {})


@public
@routine
async def asset(request: Request, name: str) -> Response:
    """A script, style sheet or font."""
    folder = request.scope["route"].path.removeprefix("/web/").removesuffix("{name}")
    return await _file(request, f"{folder}{name}")


# One route per folder: a wildcard for folders would make every path that starts with "/web/../" public.
for _folder in ("", "documents/", "presets/", "request/", "text/", "tokens/"):
    router.add_api_route(f"/web/{_folder}{{name}}", asset, methods=_METHODS)


class Pages:
    """The files of both pages; the application's `state.pages`."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Pages may send requests to these origins, too."""
        policy = _POLICY.format(" ".join(("'self'", *origins)))
        self.headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
        self.bundles = ThreadedResult(_read_bundles)
        """By name: 150 ms of reading, joining and compressing."""
        self.names = ThreadedResult(_read_names)
        """Other files that are served, by name: a path is never built from what a client sent."""


def _read_bundles() -> dict[str, PageFile]:
    return bundle(_FOLDER, "index") | bundle(_FOLDER, "docs")


def _read_names() -> dict[str, Path]:
    return {path.relative_to(_FOLDER).as_posix(): path for path in _FOLDER.rglob("*") if path.suffix in _TYPES}


async def _file(request: Request, name: str) -> Response:
    pages: Pages = request.app.state.pages
    if file := (await pages.bundles.get()).get(name):
        policy = "; ".join(filter(None, (pages.headers["Content-Security-Policy"], file.policy)))
        return file.content.respond(request, {**pages.headers, "Content-Security-Policy": policy})
    path = (await pages.names.get()).get(name)
    if path is None:
        raise ApiError(404, "unknown file")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**pages.headers, "Cache-Control": "no-cache"})
