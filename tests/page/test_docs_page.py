"""/docs in a real browser: it lists and calls every route, streams, and contacts no host but the service."""

import json
import re
import subprocess

import httpx
import pytest

from tests.support.completion_client import parse_events
from tests.support.model.tiny_models import VOCAB
from tests.support.page.browser import visit


@pytest.fixture(scope="module")
def page(browser, server):
    """The /docs page, shared by the tests of this module."""
    with visit(browser, server, "/docs") as page:
        page.locator("#schemas:not([hidden])").wait_for()
        yield page


def _open(page, operation):
    route = page.locator(f"#{operation}")
    if route.get_attribute("open") is None:
        route.locator("> summary").click()
    return route


def _send(route):
    route.get_by_role("button", name="Send").click()
    route.locator(".status", has_text=" ms").wait_for()
    return route.locator(".answer").inner_text()


def test_every_route_and_schema_is_listed_with_its_descriptions(page, server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    text = page.locator("body").text_content()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            for sentence in re.split(r"(?<=\.)\s", operation["description"]):
                assert sentence.replace("`", "") in text
    fields = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#schemas > details")].map(
        (one) => [one.id, [...one.querySelectorAll("dt > code:first-child")].map((name) => name.textContent)]))""")
    for name, schema in document["components"]["schemas"].items():
        assert {*fields[name]} == {*schema.get("properties", {})}, name
        for field_schema in schema.get("properties", {}).values():
            assert field_schema.get("description", "").replace("`", "") in text
    page.goto(f"{server.url}/docs#Timings")
    page.get_by_text("From the request to its first token.").wait_for(state="visible")


def test_form_precedes_fields_required_fields_come_first_and_defaults_are_shown(page, server):
    route = page.locator("#complete[open]")
    order = route.evaluate("e => [...e.querySelectorAll('form, h3')].map((one) => one.textContent.slice(0, 6))")
    assert order[0] == "Stream" and order[1:] == ["Fields", "Respon"]
    names = route.locator(".fields").first.locator("dt > code:first-child").all_inner_texts()
    assert names[0] == "prompt" and len(names) > 20
    defaults = dict(zip(names, route.locator(".fields").first.locator("dt").all_inner_texts(), strict=True))
    assert "required" in defaults["prompt"] and "default" not in defaults["prompt"]
    assert "default 128" in defaults["max_tokens"]
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    neutral = "default the model's, else 1"
    assert (neutral in defaults["temperature"]) == ("temperature" not in model["sampling_defaults"])
    page.evaluate("() => document.querySelectorAll('details').forEach((e) => { e.open = true })")
    for width in (320, 390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), width
        words = page.evaluate("() => [...document.querySelectorAll('.fields dd')].map((one) => one.clientWidth)")
        assert min(filter(None, words)) > min(0.6 * width, 400), "the fields squeeze their descriptions"


def test_an_example_fills_the_body_and_runs_unchanged(page):
    route = page.locator("#complete")
    button = route.get_by_role("button", name="Three continuations")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert len(json.loads(_send(route))["choices"]) == 3
    assert '"n": 3' in route.locator(".curl").inner_text()


def test_a_completion_streams_into_the_page(page):
    route = _open(page, "complete")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": 5, "seed": 3}')
    events = parse_events(_send(route))
    assert [event.name for event in events][:: len(events) - 1] == ["start", "done"]
    assert route.locator(".status").inner_text().startswith("200 OK, ")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": -5}')
    assert json.loads(_send(route))["error"]["param"] == "max_tokens"
    assert route.locator(".status").inner_text().startswith("400 ")


def test_other_routes_can_be_called(page):
    assert json.loads(_send(_open(page, "tokenize")))["count"] > 0
    assert json.loads(_send(_open(page, "detokenize")))["pieces"]
    assert "inkstream_requests_running 0.0" in _send(_open(page, "metrics"))
    model = _open(page, "model")
    assert json.loads(_send(model))["n_vocab"] == VOCAB
    cancel = _open(page, "cancel")
    cancel.locator("input[name=request_id]").fill("a b?")
    assert json.loads(_send(cancel))["error"]["code"] == "unknown_request"


def test_resuming_a_stream_returns_the_events_after_the_given_id(page):
    route = _open(page, "complete")
    route.locator("textarea").fill('{"prompt": "The moon", "max_tokens": 5, "seed": 3}')
    events = parse_events(_send(route))
    again = _open(page, "resume")
    assert again.locator("input[name=request_id]").input_value() == events[0].data["id"], "the run filled in its id"
    again.locator("input[name=last-event-id]").fill(events[1].id)
    assert parse_events(_send(again)) == events[2:]
    assert f"last-event-id: {events[1].id}" in again.locator(".curl").inner_text()


def test_the_curl_command_returns_the_same_response(page):
    route = _open(page, "tokenize")
    route.locator("textarea").fill('{"prompt": "it\'s \\"$HOME\\""}')
    command = route.locator(".curl").inner_text()
    result = subprocess.run(command + " -s", shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == json.loads(_send(route))


def test_the_key_is_sent_as_a_bearer_token(page):
    page.locator("#key").fill("secret")
    route = _open(page, "tokenizer_info")
    with page.expect_request("**/tokenizer_info") as request:
        _send(route)
    assert request.value.headers["authorization"] == "Bearer secret"
