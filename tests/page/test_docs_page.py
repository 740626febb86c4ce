"""/docs in a real browser: it lists every route, tries them, streams, and contacts no host but the service."""

import json
import subprocess

import httpx
import pytest

from tests.support.completion_client import parse_events
from tests.support.model.tiny_models import VOCAB
from tests.support.page.browser import visit


@pytest.fixture
def page(browser, server):
    """A reader of /docs."""
    with visit(browser, server, "/docs") as page:
        page.locator("#schemas:not([hidden])").wait_for()
        yield page


def _open(page, operation):
    page.locator(f"#{operation} > summary").click()
    return page.locator(f"#{operation}")


def _sent(route):
    route.get_by_role("button", name="Send").click()
    route.locator(".status", has_text=" ms").wait_for()
    return route.locator(".answer").inner_text()


def test_every_route_and_object_stands_there_with_its_words(page, server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    text = page.locator("body").text_content()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            assert operation["description"].replace("`", "") in text
    for name, schema in document["components"]["schemas"].items():
        for field, field_schema in schema.get("properties", {}).items():
            assert page.locator(f"[id='{name}']").get_by_text(field, exact=True).count(), f"{name}.{field}"
            assert field_schema.get("description", "").replace("`", "") in text
    page.goto(f"{server.url}/docs#Timings")
    page.get_by_text("From the request to its first token.").wait_for(state="visible")


def test_a_completion_streams_into_the_page(page):
    route = _open(page, "complete")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": 5, "seed": 3}')
    events = parse_events(_sent(route))
    assert [event.name for event in events][:: len(events) - 1] == ["start", "done"]
    assert route.locator(".status").inner_text().startswith("200 OK, ")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": -5}')
    assert json.loads(_sent(route))["error"]["param"] == "max_tokens"
    assert route.locator(".status").inner_text().startswith("400 ")


def test_requests_are_ready_to_be_sent(page):
    assert json.loads(_sent(_open(page, "tokenize")))["count"] > 0
    assert json.loads(_sent(_open(page, "detokenize")))["pieces"]
    assert "inkstream_requests_running 0.0" in _sent(_open(page, "metrics"))
    model = _open(page, "model")
    model.locator("input[name=model_id]").fill("tiny")
    assert json.loads(_sent(model))["n_vocab"] == VOCAB
    cancel = _open(page, "cancel")
    cancel.locator("input[name=request_id]").fill("a b?")
    assert json.loads(_sent(cancel))["error"]["code"] == "unknown_request"


def test_a_stream_is_resumed_behind_the_event_that_was_named(page):
    route = _open(page, "complete")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": 5, "seed": 3}')
    events = parse_events(_sent(route))
    again = _open(page, "resume")
    again.locator("input[name=request_id]").fill(events[0].data["id"])
    again.locator("input[name=last-event-id]").fill(events[1].id)
    assert parse_events(_sent(again)) == events[2:]
    assert f"last-event-id: {events[1].id}" in again.locator(".curl").inner_text()


def test_a_key_is_sent_as_one(page):
    page.locator("#key").fill("secret")
    route = _open(page, "tokenizer_info")
    with page.expect_request("**/tokenizer_info") as request:
        _sent(route)
    assert request.value.headers["authorization"] == "Bearer secret"


def test_the_command_for_the_shell_does_the_same(page):
    route = _open(page, "tokenize")
    route.locator("textarea").fill('{"prompt": "it\'s \\"$HOME\\""}')
    command = route.locator(".curl").inner_text()
    result = subprocess.run(command + " -s", shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == json.loads(_sent(route))
