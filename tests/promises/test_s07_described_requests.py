"""No request made from the service's own description, fitting or not, is answered with a 5xx.

The generator belongs to `make redteam`; `make clients ONLY=schemathesis` tests the same document more
thoroughly. A deadline of a millisecond correctly gets 504.
"""

from __future__ import annotations

import collections
import http.client
from random import Random
from urllib.parse import urlsplit

import httpx

from tests.redteam.json_bodies import Request, RequestGenerator
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services


def _send(connection: http.client.HTTPConnection, request: Request) -> tuple[int, bytes, str]:
    headers = {} if request.body is None else {"Content-Type": "application/json"}
    connection.request(request.method, request.path, request.body, headers)
    response = connection.getresponse()
    return response.status, response.read(), response.headers.get("Content-Type", "")


def _defects(server: Server, count: int) -> tuple[list[str], collections.Counter[int]]:
    """Defects in the responses to `count` requests, and the counts of statuses."""
    generator = RequestGenerator(Random(7), httpx.get(f"{server.url}/openapi.json").json())
    found, statuses = [], collections.Counter[int]()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    for _ in range(count):
        request = generator.next()
        try:
            status, content, kind = _send(connection, request)
        except (http.client.HTTPException, OSError) as error:
            status, content, kind = 0, repr(error).encode(), ""
            connection.close()
        statuses[status] += 1
        has_shape = status < 400 or b'"error"' in content
        broke_off = "event-stream" in kind and b"event: error" in content and b"timeout_error" not in content
        if status == 0 or (status >= 500 and status != 504) or broke_off or not has_shape:
            found.append(f"{request} {status} {content[:300]!r}"[:1000])
    connection.close()
    return found, statuses


def test_requests_generated_from_openapi_get_no_5xx(server: Server, promise: Promise) -> None:
    n = promise.size(250, 2000)
    defects, statuses = _defects(server, n)
    print(*defects, statuses, sep="\n")
    promise.at_most("requests with a 5xx, no response, or an error of another form", len(defects), target=0, n=n)
    assert statuses[200] > n / 5 and statuses[400] > n / 10, statuses
    assert is_clean(server, 30.0)


def test_failing_route_is_detected(serve: Services) -> None:
    sabotage = "import app.serving.service as s; s.Service.require_ready = lambda self: 1 / 0"
    server = serve(wait=False, sabotage=sabotage, is_killed=True)
    assert _defects(server, 40)[0]
