"""A caller's X-Request-Id is kept in responses, errors and the log; hostile ones are replaced."""

from __future__ import annotations

import json
import re
import time

import httpx
import pytest

from tests.support.completion_client import parse_events
from tests.support.keyed_server import raw_request, send_raw
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow
BODY = {"prompt": "once", "max_tokens": 3}
OWN = re.compile(r"req-[0-9a-f]{24}")


@pytest.fixture(scope="module")
def service(serve_module: Services) -> Server:
    return serve_module("--log-format", "json", fake_ms=1)


def _log_lines(server: Server, request_id: str) -> list[dict[str, object]]:
    """The log lines of a request; it writes the last one after its response."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if request_id in line]
        if found := [line for line in lines if line.get("request_id") == request_id]:
            return found
        time.sleep(0.05)
    return []


@pytest.mark.parametrize("path", ["/complete", "/v1/completions", "/score"])
def test_callers_id_is_in_the_response_and_the_log_and_names_no_completion(service: Server, path: str) -> None:
    given = f"caller{path.replace('/', '-')}_1"
    body = BODY if path == "/v1/completions" else {**BODY, "stream": False} if path == "/complete" else {"prompt": "x"}
    response = httpx.post(service.url + path, json=body, headers={"X-Request-Id": given}, timeout=60)
    assert response.status_code == 200
    assert response.headers.get_list("x-request-id") == [given]
    assert given not in response.text
    (line,) = _log_lines(service, given)
    assert OWN.fullmatch(str(line["completion_id"]))


def test_errors_carry_the_callers_id(service: Server) -> None:
    for path, body in (("/complete", {"prompt": 1}), ("/nothing", {})):
        response = httpx.post(service.url + path, json=body, headers={"X-Request-Id": "mine"}, timeout=60)
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert response.json()["error"]["request_id"] == "mine"


@pytest.mark.parametrize(
    "given",
    ["", "a" * 65, "a b", "a\tb", "a;b", '"a"', "{}", "é", "../../x", "a:b", "%0d%0aX: y", "<script>", "\x1b[1m"],
)
def test_malformed_ids_are_replaced(service: Server, given: str) -> None:
    answer = send_raw(service.url, raw_request("GET", "/v1/models", "Host: localhost", f"X-Request-Id: {given}"))
    head = answer.partition(b"\r\n\r\n")[0].decode().lower()
    (found,) = re.findall(r"x-request-id: (\S+)", head)
    assert OWN.fullmatch(found)


def test_several_ids_are_replaced(service: Server) -> None:
    head = raw_request("GET", "/v1/models", "Host: localhost", "X-Request-Id: one", "X-Request-Id: two")
    answer = send_raw(service.url, head).decode().lower()
    assert re.search(r"x-request-id: req-[0-9a-f]{24}\r\n", answer)
    assert "one" not in answer.partition("\r\n\r\n")[0]


def test_longest_id_is_kept(service: Server) -> None:
    given = "Az09_-" + "x" * 58
    assert httpx.get(f"{service.url}/nothing", headers={"X-Request-Id": given}).headers["x-request-id"] == given


def test_stream_resumes_by_the_callers_id_or_its_own(service: Server) -> None:
    headers = {"X-Request-Id": "resume-me"}
    with httpx.stream("POST", f"{service.url}/complete", json=BODY, headers=headers, timeout=60) as response:
        first = parse_events(response.read().decode())
    assert OWN.fullmatch(first[0].data["id"])
    for name in ("resume-me", first[0].data["id"]):
        again = httpx.get(f"{service.url}/complete/{name}/events", timeout=60)
        assert again.status_code == 200
        assert [event.data for event in parse_events(again.text)] == [event.data for event in first]
    last = httpx.get(f"{service.url}/complete/resume-me/events", headers={"Last-Event-ID": f"{first[0].data['id']}:0"})
    assert len(parse_events(last.text)) == len(first) - 1


def test_two_requests_with_one_id_are_two_completions(service: Server) -> None:
    found = [
        httpx.post(
            f"{service.url}/complete", json={**BODY, "stream": False}, headers={"X-Request-Id": "same"}, timeout=60
        )
        for _ in range(2)
    ]
    assert len({response.json()["id"] for response in found}) == 2
