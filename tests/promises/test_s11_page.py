"""The page runs nothing but its own files, and shows whatever a model writes as text."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.keyed_server import Keyring
from tests.support.promise_figures import Promise
from tests.support.servers import Server

WEB = ROOT / "app/web"
WRITES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|DOMParser|createContextualFragment|srcdoc"
    r"|\beval\b|new Function|setTimeout\(\s*[\"'`]|setInterval\(\s*[\"'`]|javascript:"
    r"|\.setAttribute\(\s*[\"'`]on|import\(\s*[^\"'`]"
)
POLICY = {
    "default-src 'none'", "img-src 'self' data:", "font-src 'self'",
    "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}  # fmt: skip
HOSTILE = [
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    "</textarea><svg onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'>",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "]]><!--</style><script>window.pwned=1</script>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1>",
    "<link rel=stylesheet href=//evil.example><base href=//evil.example>",
    "\u202e<a href='//evil.example' autofocus onfocus=window.pwned=1>",
]


def test_page_scripts_write_no_markup(promise: Promise) -> None:
    scripts = sorted(WEB.rglob("*.js"))
    clean = [path for path in scripts if not WRITES_MARKUP.search(path.read_text())]
    promise.all_of("scripts of the page that write text only", len(clean), len(scripts))
    assert len(scripts) > 5
    for page in WEB.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"\son[a-z]+\s*=|<script(?![^>]*\ssrc=\")|\sstyle=|https?://(?!www\.w3\.org/)", text), page
    for sheet in WEB.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//|expression\(", sheet.read_text()), sheet


@pytest.mark.parametrize(
    "line",
    ["e.innerHTML = text", "document.write(x)", "new Function(x)", "setTimeout('x')", "e.setAttribute('onclick', x)"],
)
def test_scripts_that_write_markup_are_detected(line: str) -> None:
    """Control."""
    assert WRITES_MARKUP.search(line)


def test_every_page_file_has_the_content_security_policy(keyed_server: tuple[Server, Keyring]) -> None:
    server, ring = keyed_server
    files = (path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.suffix in (".js", ".css"))
    for path in ("/", "/docs", "/web/literata.woff2", *(f"/web/{file}" for file in files)):
        answer = httpx.get(f"{server.url}{path}", headers=ring.headers("alice"))
        headers = answer.headers
        own = [f"{kind}-src {digest}" for kind in ("script", "style") for digest in inline_hashes(answer.text, kind)]
        assert len(own) == (2 if path in ("/", "/docs") else 0), path
        assert set(headers["content-security-policy"].split("; ")) == POLICY | set(own), path
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    # Browsers must not take other responses for a page either.
    refused = httpx.get(f"{server.url}/<script>", headers=ring.headers("alice"))
    assert (
        refused.headers["content-type"] == "application/json" and refused.headers["x-content-type-options"] == "nosniff"
    )


def inline_hashes(html: str, kind: str) -> list[str]:
    """Policy sources that allow the inline elements of this kind, hashed as a browser does."""
    texts = re.findall(rf"<{kind}\b[^>]*>(.*?)</{kind}>", html, re.DOTALL) if html.startswith("<!doctype") else []
    return [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]


@pytest.fixture
def context(browser: Any, keyed_server: tuple[Server, Keyring]) -> Iterator[Any]:
    """A browser context, whose pages share storage like tabs."""
    context = browser.new_context(base_url=keyed_server[0].url)
    context.set_default_timeout(30_000)
    yield context
    context.close()


def test_hostile_output_is_shown_as_text(context: Any, keyed_server: tuple[Server, Keyring], promise: Promise) -> None:
    """Markup as generated text, model name, error message, and stored state after a reload."""
    context.add_init_script(f"sessionStorage.setItem('inkstream.key', {keyed_server[1].keys['alice']!r})")
    page, requested = context.new_page(), list[str]()
    page.goto("/")
    bodies: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.route("**/complete", lambda route: route.fulfill(content_type="text/event-stream", body=bodies[-1]))
    harmless = 0
    for text in HOSTILE:
        start = {"seed": 1, "model": text, "weights_version": text, "settings": {"temperature": text}}
        events = [("start", start), ("token", {"text": text}), ("error", {"error": {"message": text}})]
        events_text = (f"id: r:{i}\nevent: {n}\ndata: {json.dumps(d)}\n\n" for i, (n, d) in enumerate(events))
        bodies.append("".join(events_text))
        page.locator("#document").fill("")
        page.locator("#generate").click()
        page.locator("#document:not([readonly])").wait_for()
        assert page.locator("#document").input_value() == text
        assert page.locator("#status").text_content() == f"Error: {text}"
        page.reload()
        assert page.locator("#document").input_value() == text
        scripts = "document.scripts.length === 1 && document.images.length === 0"
        harmless += page.evaluate(f"() => window.pwned === undefined && {scripts}")
    promise.all_of("hostile outputs shown as text", harmless, len(HOSTILE))
    assert not [url for url in requested if "evil.example" in url]


def test_page_sends_the_key_and_never_shows_it(context: Any, keyed_server: tuple[Server, Keyring]) -> None:
    _, ring = keyed_server
    page, requested = context.new_page(), []
    page.on("request", lambda request: requested.append(request))
    page.goto("/")
    page.locator("#key-form").wait_for(state="visible")
    page.locator("#key").fill("ink-wrong")
    page.get_by_role("button", name="Use this key").click()
    page.locator("#key-form").wait_for(state="visible")
    page.locator("#key").fill("no k\u00e9y")
    page.get_by_role("button", name="Use this key").click()
    assert "A key is one word" in page.locator("#status").text_content()
    page.locator("#key").fill(f" {ring.keys['alice']}\n")
    page.get_by_role("button", name="Use this key").click()
    page.locator("#model", has_text="tiny").wait_for()
    page.locator("#max-tokens").fill("4")
    page.locator("#generate").click()
    page.locator('#status[data-state="done"]').wait_for()
    assert page.locator("#key-form").is_hidden()
    assert requested[-1].headers["authorization"] == f"Bearer {ring.keys['alice']}"
    assert not [request.url for request in requested if "ink-" in request.url]
    assert ring.keys["alice"] not in page.content() + json.dumps(page.evaluate("() => ({...localStorage})"))
    page.reload()
    page.locator("#model", has_text="tiny").wait_for()
    other = context.new_page()  # another tab does not have the key
    other.goto("/")
    other.locator("#key-form").wait_for(state="visible")
