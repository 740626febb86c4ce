"""Static web pages, / and /docs, under a strict content security policy, and the OpenAPI document.

The service reads and joins the files of a page once, at the first request for one.

With keys configured, /docs needs one, because it describes the service; a browser cannot send a key with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from app.api.openapi import DescribedApp
from app.api.page_bundle import PageFile, bundle
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
    return _file(request, "index.html")


@router.api_route("/docs", methods=_METHODS)
@routine
async def docs(request: Request) -> Response:
    """The API reference, where requests can be tried."""
    return _file(request, "docs.html")


@router.api_route("/openapi.json", methods=_METHODS)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    app: DescribedApp = request.app
    return app.openapi_content.respond(request, {})


@public
@routine
async def asset(request: Request, name: str) -> Response:
    """A script, style sheet or font."""
    folder = request.scope["route"].path.removeprefix("/web/").removesuffix("{name}")
    return _file(request, f"{folder}{name}")


# One route per folder: a wildcard for folders would make every path that starts with "/web/../" public.
for _folder in ("", "documents/", "presets/", "request/", "text/", "tokens/"):
    router.add_api_route(f"/web/{_folder}{{name}}", asset, methods=_METHODS)


@cache
def _bundles() -> dict[str, PageFile]:
    """The files of both pages by name."""
    return bundle(_FOLDER, "index") | bundle(_FOLDER, "docs")


def page_headers(origins: Iterable[str]) -> dict[str, str]:
    """The value of the application's `state.page_headers`; pages may send requests to these origins, too."""
    policy = _POLICY.format(" ".join(("'self'", *origins)))
    return {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}


def _file(request: Request, name: str) -> Response:
    headers: dict[str, str] = request.app.state.page_headers
    if file := _bundles().get(name):
        policy = "; ".join(filter(None, (headers["Content-Security-Policy"], file.policy)))
        return file.content.respond(request, {**headers, "Content-Security-Policy": policy})
    # Look the name up in the folder's listing; never build a path from client input.
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
    path = next((path for path in files if path.relative_to(_FOLDER).as_posix() == name), None)
    if path is None:
        raise ApiError(404, "unknown file")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**headers, "Cache-Control": "no-cache"})
