"""Static web pages, / and /docs, under a strict content security policy, and the OpenAPI document.

With keys configured, /docs needs one, because it describes the service; a browser cannot send a key with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from app.api.openapi import DescribedApp
from app.api.page_bundle import Bundles
from app.http.auth import public
from app.http.errors import ApiError
from app.http.request_log import routine

_FOLDER = Path(__file__).parent.parent / "web"
_POLICY = (
    "default-src 'none'; img-src 'self' data:; font-src 'self'; "
    "connect-src {}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
router = APIRouter(include_in_schema=False)


@router.get("/")
@router.head("/")
@public
@routine
async def page(request: Request) -> Response:
    """The completion notebook."""
    return _file(request, "index.html")


@router.get("/docs")
@router.head("/docs")
@routine
async def docs(request: Request) -> Response:
    """The API reference, where requests can be tried."""
    return _file(request, "docs.html")


@router.get("/openapi.json")
@router.head("/openapi.json")
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    app: DescribedApp = request.app
    return app.openapi_content.respond(request, {})


@router.get("/web/{name}")
@router.head("/web/{name}")
@public
@routine
async def asset(request: Request, name: str) -> Response:
    """A script, style sheet or font."""
    return _file(request, name)


# One route per folder: a wildcard for folders would make every path that starts with "/web/../" public.
@router.get("/web/documents/{name}")
@router.head("/web/documents/{name}")
@router.get("/web/presets/{name}")
@router.head("/web/presets/{name}")
@router.get("/web/request/{name}")
@router.head("/web/request/{name}")
@router.get("/web/text/{name}")
@router.head("/web/text/{name}")
@router.get("/web/tokens/{name}")
@router.head("/web/tokens/{name}")
@public
@routine
async def asset_in_folder(request: Request, name: str) -> Response:
    """A script or style sheet from a subfolder."""
    return _file(request, f"{request.scope['route'].path.split('/')[2]}/{name}")


def new_bundles() -> Bundles:
    """What the application keeps as `state.bundles`."""
    return Bundles(_FOLDER, "index", "docs")


def page_headers(origins: Iterable[str]) -> dict[str, str]:
    """What the application keeps as `state.page_headers`; pages may send requests to these origins, too."""
    policy = _POLICY.format(" ".join(("'self'", *origins)))
    return {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}


def _file(request: Request, name: str) -> Response:
    bundles: Bundles = request.app.state.bundles
    headers: dict[str, str] = request.app.state.page_headers
    if file := bundles.find(name):
        policy = "; ".join(filter(None, (headers["Content-Security-Policy"], file.policy)))
        return file.content.respond(request, {**headers, "Content-Security-Policy": policy})
    # Look the name up in the folder's listing; never build a path from client input.
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
    path = next((path for path in files if path.relative_to(_FOLDER).as_posix() == name), None)
    if path is None:
        raise ApiError(404, "unknown file")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**headers, "Cache-Control": "no-cache"})
