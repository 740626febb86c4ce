"""Pytest plug-in: browser fixtures, and helpers that act on the page as a user does.

Tests fake server behavior that is hard to provoke (a queue, a lost connection, text that looks like markup) by
fulfilling the page's requests in the browser. Without Chromium the tests are skipped: apt-get install chromium. If
chromium-headless-shell is installed too, the tests use it: a page then takes half the CPU time.
"""

import json
import os
import re
import shutil
import time
from collections import deque
from contextlib import contextmanager
from urllib.parse import unquote

import pytest

from tests.support.completion_client import fetch_completion

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARGS += ["--disable-sync", "--no-first-run"]
BROWSER = os.environ.get("BROWSER") or "chromium"
BROWSERS = {"chromium": ["chromium-headless-shell", "chromium"], "firefox": ["firefox", "firefox-esr"]}
CHROMIUM_ONLY = pytest.mark.skipif(
    BROWSER != "chromium", reason="WebDriver BiDi neither emulates media nor records traces"
)
PROMPT = "Once upon a time"
PATIENCE_MS = 120_000
"""Default timeout of a step: the first browser start on a machine may take half a minute."""


# WebDriver BiDi does not expose request bodies: in Firefox the page copies the body to a header, without long words.
REPEAT_BODIES = """{
    const send = window.fetch;
    window.fetch = (address, options = {}) => {
        const isOwn = new URL(address, location).origin === location.origin;
        if (typeof options.body !== "string" || !isOwn) return send(address, options);
        const body = encodeURIComponent(options.body.replace(/[^"]{1000,}/g, "..."));
        return send(address, { ...options, headers: { ...options.headers, "X-Body": body } });
    };
}"""
# Firefox does not let a test read the clipboard.
REMEMBER_COPIES = """if (navigator.clipboard) {
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => write(text).then(() => (window.copied = text));
}"""

# WebDriver BiDi cannot wait for a download either: this captures the next one.
HOLD_DOWNLOAD = """() => {
    const [make, click] = [URL.createObjectURL, HTMLAnchorElement.prototype.click];
    let content;
    URL.createObjectURL = (blob) => {
        content = blob.arrayBuffer();
        return make.call(URL, blob);
    };
    window.saved = new Promise((resolve) => {
        HTMLAnchorElement.prototype.click = async function () {
            [URL.createObjectURL, HTMLAnchorElement.prototype.click] = [make, click];
            resolve([this.download, [...new Uint8Array(await content)]]);
        };
    });
}"""


@pytest.fixture(scope="module")
def browser():
    with launch_browser() as browser:
        yield browser


@contextmanager
def launch_browser():
    """Runs a browser for the block. Meanwhile nothing else in this process can run an event loop."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make install brings playwright")
    path = next(filter(None, map(shutil.which, BROWSERS[BROWSER])), None)
    if not path:
        pytest.skip(f"no `{BROWSERS[BROWSER][-1]}` on PATH (Debian: apt-get install {BROWSERS[BROWSER][-1]})")
    # Firefox over WebDriver BiDi, with a mouse (fine pointer, hover), which headless Firefox lacks.
    mouse = {"ui.primaryPointerCapabilities": 6, "ui.allPointerCapabilities": 6}
    firefox = {"channel": "moz-firefox", "firefox_user_prefs": mouse}
    options = {"args": ARGS} if BROWSER == "chromium" else firefox
    with sync_api.sync_playwright() as playwright:
        launch = getattr(playwright, BROWSER).launch
        browser = launch(executable_path=path, timeout=PATIENCE_MS, **options)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page of a new user, after it has fetched the model and the schema: it has all settings, and is idle."""
    with visit(browser, server, "/") as page:
        wait_for_schema(page)
        yield page


def new_context(browser, server):
    """Browser context of a new user, without a page yet."""
    context = browser.new_context(base_url=server.url, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    # A route that matches nothing lets the browser intercept requests from the start. Chromium confirms a page's first
    # route before the page knows of it: a request at that moment was not intercepted.
    context.route("**/nothing", lambda route: route.continue_())
    if BROWSER == "firefox":
        context.add_init_script(REPEAT_BODIES)
    return context


@contextmanager
def visit(browser, server, path):
    """Opens this path as a new user.

    On exit, checks for console errors, CSP violations, failed assets and requests to other hosts.
    """
    context = new_context(browser, server)
    page = context.new_page()
    defects, urls = record_defects(page), []
    page.log = record_log(page)
    page.on("request", lambda request: urls.append(request.url))
    page.goto(path)
    yield page
    context.close()
    assert defects == []
    assert [url for url in urls if not url.startswith((server.url + "/", "data:", "blob:"))] == []
    assert len(urls) >= 4, "the listener recorded no requests"


@pytest.fixture(scope="module")
def long_seed(server):
    """A seed whose completion does not end before 200 tokens, for tests that interrupt a run."""
    for seed in range(50):
        response = complete_prompt(server, seed=seed, max_tokens=200)
        if response["usage"]["completion_tokens"] == 200:
            return seed
    raise AssertionError("the completions of all 50 seeds ended before 200 tokens")


def done_event(count):
    """The `done` event of a run with `count` continuations."""
    return ("done", {"choices": [{"index": i, "finish_reason": "length", "stop_reason": None} for i in range(count)]})


DONE = done_event(1)


def run_events(*pieces, seed=7):
    """The events of a run that generates these pieces of text."""
    return [("start", {"seed": seed}), *[("token", {"text": piece}) for piece in pieces], DONE]


def draft_events(*texts):
    """The events of a run with one continuation for each text."""
    tokens = [("token", {"index": i, "text": text, "tokens": None}) for i, text in enumerate(texts)]
    return [("start", {"seed": 7}), *tokens, done_event(len(texts))]


# To take a screenshot in Firefox, Playwright adds the style "body {}", which the page's policy blocks.
SCREENSHOT_STYLE = "sha256-YjaKGiklmzC6wjXA513HAMmzus8VE61XCOT+SmwNZWA="


def record_defects(page):
    """Returns a list to which uncaught exceptions, console errors and failed assets are appended."""
    defects = []
    page.on(
        "pageerror", lambda error: None if SCREENSHOT_STYLE in str(error) else defects.append(f"exception: {error}")
    )
    page.on("console", lambda message: defects.append(message.text) if _is_defect(message) else None)
    page.on(
        "response", lambda found: defects.append(f"{found.status} {found.url}") if _is_failed_asset(found) else None
    )
    return defects


LOG_LINES = 40
"""Lines of a page's log that are kept."""


def record_log(page):
    """Returns a queue to which the page's requests, console messages and exceptions are appended, with their times."""
    log, start = deque(maxlen=LOG_LINES), time.monotonic()

    def listen(event, describe):
        page.on(event, lambda subject: log.append(f"{time.monotonic() - start:7.3f} s {event}: {describe(subject)}"))

    listen("request", lambda request: f"{request.method} {request.url}")
    listen("response", lambda response: f"{response.status} {response.url}")
    listen("requestfailed", lambda request: f"{request.url}: {request.failure}")
    listen("console", lambda message: message.text)
    listen("pageerror", str)
    listen("crash", lambda _: "the page's process ended")
    return log


PAGE_STATE = """() => ({
    status: document.getElementById("status")?.outerHTML,
    focus: document.activeElement?.outerHTML.slice(0, 200),
    text: document.getElementById("document")?.value.slice(-200),
    dialogs: [...document.querySelectorAll(":popover-open, dialog[open]")].map(({ id }) => id),
})"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the state and the log of the page to the report of a failed test."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.failed and call.when == "call" and hasattr(page, "log"):
        report.sections.append(("page", describe_page(page)))
    return report


def describe_page(page):
    """The state and the log of a page, for the report of a failed test."""
    page.set_default_timeout(5000)
    try:
        state = page.evaluate(PAGE_STATE)
    except Exception as error:  # a report without the state is better than none
        state = {"state": f"unknown: {error}"}
    return "\n".join([*(f"{name}: {value}" for name, value in state.items()), *page.log])


def _is_defect(message):
    # Chromium also logs an error for each failed request; record_defects() checks assets by their status.
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def _is_failed_asset(response):
    return response.status >= 400 and response.request.method == "GET" and not response.url.endswith("/events")


def json_body(request):
    """The parsed JSON body of a request, or None."""
    body = raw_body(request)
    return json.loads(body) if body else None


def raw_body(request):
    return unquote(request.headers.get("x-body", "")) if BROWSER == "firefox" else request.post_data


def allow_clipboard(page):
    """Lets read_clipboard() return what the page copies."""
    if BROWSER == "firefox":
        page.context.add_init_script(REMEMBER_COPIES)
        page.evaluate(REMEMBER_COPIES)
    else:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])


def read_clipboard(page):
    return page.evaluate("() => window.copied" if BROWSER == "firefox" else "() => navigator.clipboard.readText()")


def capture_download(page, act):
    """Calls `act()`, and returns (name, content) of the file that the page then saves."""
    if BROWSER == "chromium":
        with page.expect_download() as download:
            act()
        return download.value.suggested_filename, download.value.path().read_bytes()
    page.evaluate(HOLD_DOWNLOAD)
    act()
    name, content = page.evaluate("() => window.saved")
    return name, bytes(content)


def allow_module_imports(page):
    """Reloads the page with a content security policy that lets a test import its modules."""

    def respond(route):
        response = route.fetch()
        headers = {name: value for name, value in response.headers.items() if name != "content-encoding"}
        headers["content-security-policy"] = headers["content-security-policy"].replace("-src 'sha", "-src 'self' 'sha")
        route.fulfill(response=response, headers=headers)

    page.route(page.url, respond, times=1)
    page.reload()


def override_model_info(page, **facts):
    """Adds `facts` to the model's entry in GET /v1/models, and reloads the page."""

    def respond(route):
        response = route.fetch()
        models = response.json()
        models["data"][0].update(facts)
        route.fulfill(response=response, json=models)

    page.route("**/v1/models", respond)
    page.reload()


def wait_for_schema(page):
    """Waits until the page has loaded /openapi.json and built the settings."""
    page.locator("#panel summary").wait_for()


def text(page):
    return page.locator("#document").input_value()


def status(page):
    return page.locator("#status").inner_text()


def used_seed(page):
    """The full seed of the last run, which the page shows abbreviated."""
    return page.locator("#used-seed").get_attribute("title").partition(":")[0]


def set_fields(page, **fields):
    for name, value in fields.items():
        field = setting(page, name)
        if name == "n":
            field.locator(f'[value="{value}"]').check()
        else:
            field.fill(str(value))


def setting(page, name):
    """The control of a request field, in the main settings or under More settings."""
    is_main = name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "n")
    return page.locator(f"#{'' if is_main else 'setting-'}{name.replace('_', '-')}")


def click_generate(page):
    page.locator("#generate").click()


def generate(page, ends="done"):
    click_generate(page)
    wait_for(page, ends)


def wait_for(page, state):
    page.locator(f'#status[data-state="{state}"]').wait_for()
    if state not in ("waiting", "streaming"):
        page.locator("#document:not([readonly])").wait_for(state="attached")  # hidden in the inspect view


def fake_completion(page, *events):
    """Fulfills each POST /complete of the page with these events, sent at once."""
    fake_response(page, content_type="text/event-stream", body=sse_stream(*events))


def fake_completions(page, *events):
    """Fulfills each POST /complete with these events; returns a list to which the request bodies are appended."""
    bodies = []

    def respond(route):
        bodies.append(json_body(route.request))
        route.fulfill(content_type="text/event-stream", body=sse_stream(*events))

    page.unroute("**/complete")
    page.route("**/complete", respond)
    return bodies


def sse_stream(*events):
    return "".join(f"id: r:{i}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for i, (name, data) in enumerate(events))


def record_status_messages(page):
    """Starts recording the texts of the status line; returns a handle to the growing list."""
    return page.evaluate_handle("""() => {
        const messages = [], status = document.getElementById("status");
        new MutationObserver(() => messages.push(status.textContent)).observe(status, { childList: true });
        return messages;
    }""")


def cut_stream(page, after):
    """Cuts the response to the next POST /complete after `after` events of the server; later ones are untouched."""
    page.evaluate(
        """(after) => {
        const fetch = window.fetch;
        window.fetch = async (...request) => {
            if (!String(request[0]).endsWith("complete")) return fetch(...request);
            window.fetch = fetch;
            const events = (await (await fetch(...request)).text()).split(/(?<=\\n\\n)/).slice(0, after);
            return new Response(events.join(""), { headers: { "Content-Type": "text/event-stream" } });
        };
    }""",
        after,
    )


def throttle_stream(page, count=1, frames=2, busy=0):
    """Delivers `count` events of each response every `frames` frames, or every frame once `window.hurries` is set.

    The defaults imitate a slow connection: text written in the first frame has been painted in the second. `busy` is
    the number of square roots to compute before each delivery.
    """
    page.evaluate(
        """([count, frames, busy]) => {
        const fetch = window.fetch;
        window.fetch = async (...request) => {
            const events = (await (await fetch(...request)).text()).split(/(?<=\\n\\n)/);
            const encoder = new TextEncoder(), signal = request[1]?.signal;
            const start = (controller) => {
                signal?.addEventListener("abort", () => controller.error(signal.reason));
            };
            const pull = async (controller) => {
                for (let i = 0; i < (window.hurries ? 1 : frames); i += 1) await new Promise(requestAnimationFrame);
                for (let i = 0; i < busy; i += 1) window.root = Math.sqrt(i);
                for (const event of events.splice(0, count)) controller.enqueue(encoder.encode(event));
                if (events.length === 0) controller.close();
            };
            return new Response(new ReadableStream({ start, pull }));
        };
    }""",
        [count, frames, busy],
    )


def hold_stream_open(page):
    """Answers POST /complete with a stream that stays open; send_events() writes to it."""
    page.evaluate("""() => {
        const fetch = window.fetch;
        window.fetch = async (path, { signal, ...others } = {}) => {
            if (!String(path).endsWith("complete")) return fetch(path, { signal, ...others });
            const body = new ReadableStream({ start(controller) {
                window.stream = controller;
                signal?.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
            } });
            return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
        };
    }""")


def send_events(page, *events):
    """Writes events to the stream that hold_stream_open() opened."""
    page.wait_for_function("() => window.stream")
    page.evaluate("(text) => window.stream.enqueue(new TextEncoder().encode(text))", sse_stream(*events))


def fake_response(page, **response):
    page.route("**/complete", lambda route: route.fulfill(**response))


def complete_prompt(server, **fields):
    """Requests a completion of PROMPT without the page."""
    return fetch_completion(server.url, prompt=PROMPT, **fields)


def completion_text(server, **fields):
    return complete_prompt(server, **fields)["choices"][0]["text"]


def normalize_line_ends(value):
    """The text as a textarea returns it: with LF as the only line end."""
    return re.sub("\r\n?", "\n", value)
