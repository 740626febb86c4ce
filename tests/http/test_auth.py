"""Authentication: every request needs a key, except those that the router would dispatch to a public route."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.api_keys import ApiKeys
from app.access.tenant import ANONYMOUS
from app.http.auth import (
    AuthMiddleware,
    has_known_key,
    is_authenticated,
    owner_of,
    public,
    public_routes,
    tenant_of,
)
from app.http.best_effort import BestEffortTurns
from app.http.request_log import RequestLogMiddleware, record_of
from tests.support.async_test import async_test
from tests.support.keyed_server import Keyring

router = APIRouter()


@router.api_route("/page", methods=["GET", "HEAD"])
@public
async def _page(request: Request) -> dict[str, Any]:
    return {"authenticated": is_authenticated(request.scope)}


@router.get("/metrics")
@router.post("/page")
async def _private(request: Request) -> dict[str, Any]:
    return {"tenant": tenant_of(request).name, "key": record_of(request).key, "owner": owner_of(request)}


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring.of(tmp_path / "keys.json", "alice", "bob")


def _application(keys: ApiKeys | None, turns: BestEffortTurns | None = None) -> ASGIApp:
    app = FastAPI()
    app.include_router(router)
    return RequestLogMiddleware(AuthMiddleware(app, keys, public_routes([router]), turns))


async def _response(
    app: ASGIApp, method: str, path: str, *authorization: str, **scope: Any
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body. A request without a key that is refused must not be read."""
    messages: list[Message] = []
    asked: Scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1),
        "headers": [(b"authorization", value.encode("latin-1")) for value in authorization], **scope,
    }  # fmt: skip

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        assert is_authenticated(asked), "the body of a request without a valid key was read"
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(asked, receive, send)
    head = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], head, b"".join(message.get("body", b"") for message in messages[1:])


@async_test
async def test_a_valid_key_names_the_tenant_and_its_log_line(ring: Keyring) -> None:
    app = _application(ApiKeys(ring.file))
    for scheme in ("Bearer ", "bearer ", "BEARER  ", "Bearer \t"):
        status, _, body = await _response(app, "GET", "/metrics", f"{scheme}{ring.keys['alice']} ")
        assert status == 200 and b'"tenant":"alice","key":"alice"' in body


@pytest.mark.parametrize(
    ("authorization", "code", "challenge"),
    [
        ([], "missing_api_key", ""),
        (["Bearer"], "missing_api_key", ""),
        (["Bearer \t "], "missing_api_key", ""),
        (["Basic KEY"], "missing_api_key", ""),
        (["KEY"], "missing_api_key", ""),
        (["Bearer KEYx"], "invalid_api_key", "invalid_token"),
        (["Bearer \xe9"], "invalid_api_key", "invalid_token"),
        (["Bearer KEY", "Bearer KEY"], "invalid_api_key", "invalid_request"),
        (["Bearer KEY", ""], "invalid_api_key", "invalid_request"),
    ],
)
@async_test
async def test_a_wrong_header_is_refused_with_a_challenge(
    ring: Keyring, authorization: Sequence[str], code: str, challenge: str
) -> None:
    values = [value.replace("KEY", ring.keys["alice"]) for value in authorization]
    status, headers, body = await _response(_application(ApiKeys(ring.file)), "POST", "/page", *values)
    assert status == 401 and f'"code":"{code}"'.encode() in body and headers["x-request-id"].startswith("req-")
    error = f', error="{challenge}"' if challenge else ""
    assert headers["www-authenticate"] == f'Bearer realm="inkstream"{error}'
    assert not any(key.encode() in body for key in ring.keys.values())


@async_test
async def test_only_the_method_and_path_of_a_public_route_need_no_key(ring: Keyring) -> None:
    app = _application(ApiKeys(ring.file))
    assert (await _response(app, "GET", "/page"))[0] == 200
    assert (await _response(app, "HEAD", "/page"))[0] == 200
    paths = ["/metrics", "/nowhere", "/page/", "//page", "/PAGE", "/%70age", "/page/.", "/x/../page", ""]
    refused = [("POST", "/page"), ("PUT", "/page"), ("OPTIONS", "/page"), ("get", "/page"), ("HEAD", "/metrics")]
    for method, path in [*refused, *(("GET", path) for path in paths)]:
        assert (await _response(app, method, path))[0] == 401, (method, path)
    key = f"Bearer {ring.keys['bob']}"
    found = [(await _response(app, method, path, key))[0] for method, path in refused]
    assert found == [200, 405, 405, 405, 405], "with a key the router decides"


@async_test
async def test_a_public_route_needs_no_key_but_knows_a_valid_one(ring: Keyring) -> None:
    app = _application(ApiKeys(ring.file))
    responses = [
        await _response(app, "GET", "/page", *each) for each in ([], ["Bearer x"], ring.headers("bob").values())
    ]
    assert [body for _, _, body in responses] == [
        b'{"authenticated":false}', b'{"authenticated":false}', b'{"authenticated":true}',
    ]  # fmt: skip


def test_marked_endpoints_alone_are_public() -> None:
    assert [(route.path, route.methods) for route in public_routes([router]) if isinstance(route, Route)] == [
        ("/page", {"GET", "HEAD"})
    ]
    mounted = APIRouter(routes=[Mount("/files", app=_application(None))])
    assert public_routes([mounted]) == ()


@async_test
async def test_without_keys_all_clients_are_one_tenant_but_own_different_streams() -> None:
    app = _application(None)
    bodies = [await _response(app, "GET", "/metrics", *each) for each in ([], ["Bearer a"], ["Bearer b"], ["Bearer a"])]
    assert all(status == 200 and b'"tenant":"","key":null' in body for status, _, body in bodies)
    assert bodies[1] == bodies[3] or bodies[1][2] == bodies[3][2]
    assert len({body for _, _, body in bodies}) == 3


def test_the_owner_of_a_stream_is_the_tenant_not_the_header(ring: Keyring) -> None:
    keys = ApiKeys(ring.file)
    alice, bob = (keys.tenant_of(ring.keys[name].encode()) for name in ("alice", "bob"))
    assert alice and bob

    def owner(tenant: object, authorization: bytes) -> str:
        headers = [(b"authorization", authorization)]
        return owner_of(Request({"type": "http", "headers": headers, "inkstream_tenant": tenant}))

    assert owner(alice, b"Bearer x") == owner(alice, b"bearer  x") != owner(bob, b"Bearer x")
    assert owner(alice, b"") == alice.cache_namespace != alice.name
    assert owner(ANONYMOUS, b"Bearer x") != owner(ANONYMOUS, b"Bearer y")
    assert "secret" not in owner(ANONYMOUS, b"Bearer secret")


def test_a_revoked_name_that_is_used_again_does_not_own_the_streams_of_before(ring: Keyring) -> None:
    before = ApiKeys(ring.file).tenant_of(ring.keys["alice"].encode())
    ring.revoke("alice")
    again = ring.add("alice")
    after = ApiKeys(ring.file).tenant_of(again.encode())
    assert before and after and before.name == after.name and before.cache_namespace != after.cache_namespace


@pytest.mark.parametrize("type_", ["websocket", "unknown"])
@async_test
async def test_other_protocols_are_refused(ring: Keyring, type_: str) -> None:
    async def unreachable(*_: object) -> None:
        pytest.fail("the application was called")

    with pytest.raises(RuntimeError, match="only HTTP"):
        await AuthMiddleware(unreachable, ApiKeys(ring.file), ())({"type": type_}, unreachable, unreachable)  # type: ignore[arg-type]


@async_test
async def test_lifespan_events_pass(ring: Keyring) -> None:
    passed: list[Any] = []

    async def inner(scope: Scope, *_: object) -> None:
        passed.append(scope["type"])

    await AuthMiddleware(inner, ApiKeys(ring.file), ())({"type": "lifespan"}, inner, inner)  # type: ignore[arg-type]
    assert passed == ["lifespan"]


class _Turns(BestEffortTurns):
    """Records who waits for a turn and who pays."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    async def turn_for(self, scope: Scope) -> None:
        self.waited.append(f"{scope['method']} {scope['path']}")


@async_test
async def test_requests_that_no_key_pays_for_wait_for_a_turn(ring: Keyring) -> None:
    turns = _Turns()
    app = _application(ApiKeys(ring.file), turns)
    key = f"Bearer {ring.keys['alice']}"
    await _response(app, "GET", "/metrics", key)
    assert turns.waited == [], "a key pays for it"
    await _response(app, "GET", "/page", key)
    await _response(app, "GET", "/page")
    await _response(app, "POST", "/page")
    assert turns.waited == ["GET /page", "GET /page", "POST /page"]


@async_test
async def test_only_requests_of_tenants_limit_the_share_of_others(ring: Keyring) -> None:
    turns, limited = BestEffortTurns(), list[bool]()

    async def inner(_scope: Scope, _receive: Receive, send: Send) -> None:
        turns.charge(1.0)
        limited.append(turns.is_exhausted)
        await send({"type": "http.response.start", "status": 204, "headers": []})

    app = RequestLogMiddleware(AuthMiddleware(inner, ApiKeys(ring.file), (Route("/page", _page),), turns))
    await _response(app, "GET", "/metrics", f"Bearer {ring.keys['bob']}")
    await _response(app, "GET", "/page")
    assert limited == [True, False], "a public request does not run for a tenant"


@pytest.mark.parametrize(
    ("head", "known"),
    [
        ("GET / HTTP/1.1\r\nAuthorization: Bearer KEY\r\n\r\n", True),
        ("GET / HTTP/1.1\r\nhost: a\r\nAUTHORIZATION:\tbearer KEY \r\nx: y\r\n", True),
        ("GET / HTTP/1.1\r\nAuthorization: Bearer KEY", True),  # as far as it came
        ("GET / HTTP/1.1\r\nAuthorization: Bearer KEYx\r\n\r\n", False),
        ("GET / HTTP/1.1\r\nAuthorization: Bearer KEY\r\nAuthorization: Bearer KEY\r\n\r\n", False),
        ("GET /?\r\n", False),
        ("GET / HTTP/1.1\r\n\r\nAuthorization: Bearer KEY\r\n\r\n", False),  # in the body
        ("GET / HTTP/1.1\r\nX-Authorization: Bearer KEY\r\n\r\n", False),
        ("", False),
    ],
)
def test_a_key_in_the_bytes_of_a_head_is_found(ring: Keyring, head: str, known: bool) -> None:
    data, keys = head.replace("KEY", ring.keys["alice"]).encode(), ApiKeys(ring.file)
    assert has_known_key(data, keys) is known
    assert has_known_key(data, None)
