"""Static web pages, / and /docs, under a strict content security policy.

With keys configured, /docs needs one, because it describes the service; a browser cannot send a key with it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse

from app.http.auth import public
from app.http.errors import ApiError
from app.http.request_log import routine

_FOLDER = Path(__file__).parent.parent / "web"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
router = APIRouter(include_in_schema=False)


@router.get("/")
@router.head("/")
@public
@routine
async def page() -> FileResponse:
    """The completion notebook."""
    return _file("index.html")


@router.get("/docs")
@router.head("/docs")
@routine
async def docs() -> FileResponse:
    """The API reference, where requests can be tried."""
    return _file("docs.html")


@router.get("/web/{name}")
@router.head("/web/{name}")
@public
@routine
async def asset(name: str) -> FileResponse:
    """A script or style sheet."""
    return _file(name)


# One route per folder: a wildcard for folders would make every path that starts with "/web/../" public.
@router.get("/web/request/{name}")
@router.head("/web/request/{name}")
@router.get("/web/text/{name}")
@router.head("/web/text/{name}")
@router.get("/web/tokens/{name}")
@router.head("/web/tokens/{name}")
@public
@routine
async def asset_in_folder(request: Request, name: str) -> FileResponse:
    """A script or style sheet from a subfolder."""
    return _file(f"{request.scope['route'].path.split('/')[2]}/{name}")


def _file(name: str) -> FileResponse:
    # Look the name up in the folder's listing; never build a path from client input.
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
    path = next((path for path in files if path.relative_to(_FOLDER).as_posix() == name), None)
    if path is None:
        raise ApiError(404, "unknown file")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)
