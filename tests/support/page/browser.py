"""Pytest plug-in with fixtures of a real browser and a user's actions on the page.

What a server cannot be made to do at will (a queue, a lost connection, text that looks like markup) is played to the
page by answering its request in the browser. Skipped where there is no Chromium: apt-get install chromium. Its
headless shell costs half the CPU time for a page; the tests use it where it is installed too (chromium-headless-shell).
"""

import json
import os
import re
import shutil
from contextlib import contextmanager
from urllib.parse import unquote

import httpx
import pytest

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARGS += ["--disable-sync", "--no-first-run"]
BROWSER = os.environ.get("BROWSER") or "chromium"
BROWSERS = {"chromium": ["chromium-headless-shell", "chromium"], "firefox": ["firefox", "firefox-esr"]}
CHROMIUM_ONLY = pytest.mark.skipif(BROWSER != "chromium", reason="WebDriver BiDi emulates no media and takes no traces")
PROMPT = "Once upon a time"
PATIENCE_MS = 120_000
"""Timeout of steps without a deadline: the first start of a browser on a machine may take half a minute."""


# WebDriver BiDi keeps the body of a request to itself: in Firefox the page repeats it in a header, long words left out.
REPEAT_BODIES = """{
    const send = window.fetch;
    window.fetch = (address, options = {}) => {
        const isOwn = new URL(address, location).origin === location.origin;
        if (typeof options.body !== "string" || !isOwn) return send(address, options);
        const body = encodeURIComponent(options.body.replace(/[^"]{1000,}/g, "..."));
        return send(address, { ...options, headers: { ...options.headers, "X-Body": body } });
    };
}"""
# Firefox lets no test read the clipboard.
REMEMBER_COPIES = """if (navigator.clipboard) {
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => write(text).then(() => (window.copied = text));
}"""

# Nor has WebDriver BiDi a test wait for a download: the next one ends here.
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
    with launched() as browser:
        yield browser


@contextmanager
def launched():
    """A browser. While it runs, nothing in this process can run an event loop of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make install brings playwright")
    path = next(filter(None, map(shutil.which, BROWSERS[BROWSER])), None)
    if not path:
        pytest.skip(f"no `{BROWSERS[BROWSER][-1]}` on PATH (Debian: apt-get install {BROWSERS[BROWSER][-1]})")
    # Firefox over WebDriver BiDi, and with a mouse (fine, hovers), which a headless one has not.
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
    """A new user with the page open, which has asked the service for its model: the status line changes no more."""
    with visit(browser, server, "/") as page:
        page.locator("#status").filter(has_not_text="Connecting").wait_for()
        yield page


def new_context(browser, server):
    """A new user, without a page yet."""
    context = browser.new_context(base_url=server.url, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    if BROWSER == "firefox":
        context.add_init_script(REPEAT_BODIES)
    return context


@contextmanager
def visit(browser, server, path):
    """A new user at this path.

    At the end: no console error, no CSP violation, no asset that failed, no request to another host.
    """
    context = new_context(browser, server)
    page = context.new_page()
    trouble, asked = watch(page), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path)
    yield page
    context.close()
    assert trouble == []
    assert [url for url in asked if not url.startswith((server.url + "/", "data:", "blob:"))] == []
    assert len(asked) >= 4, "the listener receives requests"


@pytest.fixture(scope="module")
def long_seed(server):
    """A seed with which the model does not stop early: tests that interrupt a run need one to interrupt."""
    for seed in range(50):
        answer = complete(server, seed=seed, max_tokens=200)
        if answer["usage"]["completion_tokens"] == 200:
            return seed
    raise AssertionError("50 seeds, and every text ended before 200 tokens")


def end_of(count):
    """The last event of a run with so many continuations."""
    return ("done", {"choices": [{"index": i, "finish_reason": "length", "stop_reason": None} for i in range(count)]})


DONE = end_of(1)


def run_of(*pieces, seed=7):
    """The events of a run that writes these pieces."""
    return [("start", {"seed": seed}), *[("token", {"text": piece}) for piece in pieces], DONE]


def drafts_of(*texts):
    """The events of a run with these continuations."""
    tokens = [("token", {"index": i, "text": text, "tokens": None}) for i, text in enumerate(texts)]
    return [("start", {"seed": 7}), *tokens, end_of(len(texts))]


# For a picture of a page in Firefox, Playwright adds the style "body {}" to it, which the page's policy blocks.
PICTURE_STYLE = "sha256-YjaKGiklmzC6wjXA513HAMmzus8VE61XCOT+SmwNZWA="


def watch(page):
    trouble = []
    page.on("pageerror", lambda error: None if PICTURE_STYLE in str(error) else trouble.append(f"exception: {error}"))
    page.on("console", lambda message: trouble.append(message.text) if _is_defect(message) else None)
    page.on("response", lambda answer: trouble.append(f"{answer.status} {answer.url}") if _is_missing(answer) else None)
    return trouble


def _is_defect(message):
    # Chromium reports a refused request as an error of its own; the assets are checked by their status.
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def _is_missing(answer):
    return answer.status >= 400 and answer.request.method == "GET" and not answer.url.endswith("/events")


def body_of(request):
    """The JSON of a request's body, or None."""
    body = text_of(request)
    return json.loads(body) if body else None


def text_of(request):
    return unquote(request.headers.get("x-body", "")) if BROWSER == "firefox" else request.post_data


def allow_clipboard(page):
    """From now on, clipboard() tells what the page copied."""
    if BROWSER == "firefox":
        page.context.add_init_script(REMEMBER_COPIES)
        page.evaluate(REMEMBER_COPIES)
    else:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])


def clipboard(page):
    return page.evaluate("() => window.copied" if BROWSER == "firefox" else "() => navigator.clipboard.readText()")


def saved(page, act):
    """(name, content) of the file that the page saves when `act()` is called."""
    if BROWSER == "chromium":
        with page.expect_download() as download:
            act()
        return download.value.suggested_filename, download.value.path().read_bytes()
    page.evaluate(HOLD_DOWNLOAD)
    act()
    name, content = page.evaluate("() => window.saved")
    return name, bytes(content)


def allow_modules(page):
    """Reloads the page with a policy under which a test may import its modules."""

    def respond(route):
        answer = route.fetch()
        headers = {name: value for name, value in answer.headers.items() if name != "content-encoding"}
        headers["content-security-policy"] = headers["content-security-policy"].replace("-src 'sha", "-src 'self' 'sha")
        route.fulfill(response=answer, headers=headers)

    page.route(page.url, respond, times=1)
    page.reload()


def describe_the_model(page, **facts):
    """Adds these to the model's entry in GET /v1/models, and loads the page again."""

    def described(route):
        answer = route.fetch()
        models = answer.json()
        models["data"][0].update(facts)
        route.fulfill(response=answer, json=models)

    page.route("**/v1/models", described)
    page.reload()


def described(page):
    """Waits until the page has the service's description of itself."""
    page.locator("#panel summary").wait_for()


def text(page):
    return page.locator("#document").input_value()


def status(page):
    return page.locator("#status").inner_text()


def used_seed(page):
    """The whole seed of the last run: the page shows a part of it."""
    return page.locator("#used-seed").get_attribute("title").partition(":")[0]


def set_fields(page, **fields):
    for name, value in fields.items():
        field = setting(page, name)
        if name == "n":
            field.locator(f'[value="{value}"]').check()
        else:
            field.fill(str(value))


def setting(page, name):
    """The control of a request field: one of the main settings, or one of those that are folded away."""
    known = name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "n")
    return page.locator(f"#{'' if known else 'setting-'}{name.replace('_', '-')}")


def start(page):
    page.locator("#generate").click()


def generate(page, ends="done"):
    start(page)
    wait_for(page, ends)


def wait_for(page, state):
    page.locator(f'#status[data-state="{state}"]').wait_for()
    if state not in ("waiting", "streaming"):
        page.locator("#document:not([readonly])").wait_for(state="attached")  # it is hidden in the inspect view


def play(page, *events):
    """Answer the page's POST /complete with these events, all at once, and then close the connection."""
    answer_with(page, content_type="text/event-stream", body=stream_of(*events))


def answer_each(page, *events):
    """The bodies of the page's POST /complete from now on, each answered with these events."""
    bodies = []

    def answer(route):
        bodies.append(body_of(route.request))
        route.fulfill(content_type="text/event-stream", body=stream_of(*events))

    page.unroute("**/complete")
    page.route("**/complete", answer)
    return bodies


def stream_of(*events):
    return "".join(f"id: r:{i}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for i, (name, data) in enumerate(events))


def watch_status(page):
    """What the status line says from now on, as a handle to a list that grows."""
    return page.evaluate_handle("""() => {
        const said = [], status = document.getElementById("status");
        new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true });
        return said;
    }""")


def cut_stream(page, after):
    """The page's next POST /complete ends after so many events of the server's own; what follows goes its way."""
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


def trickle(page, count=1, frames=2, busy=0):
    """From now on so many events of an answer come with each so many frames; with each one when `window.hurries`.

    By default as over a slow line: what is written in the first frame has been drawn in the second. `busy`: so many
    square roots are drawn before.
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


def keep_answers_open(page):
    """The next answer to POST /complete stays open: give() sends events of it."""
    page.evaluate("""() => {
        const fetch = window.fetch;
        window.fetch = async (path, { signal, ...others } = {}) => {
            if (!String(path).endsWith("complete")) return fetch(path, { signal, ...others });
            const body = new ReadableStream({ start(controller) {
                window.answer = controller;
                signal?.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
            } });
            return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
        };
    }""")


def give(page, *events):
    page.wait_for_function("() => window.answer")
    page.evaluate("(text) => window.answer.enqueue(new TextEncoder().encode(text))", stream_of(*events))


def answer_with(page, **answer):
    page.route("**/complete", lambda route: route.fulfill(**answer))


def complete(server, **fields):
    answer = httpx.post(f"{server.url}/complete", json={"prompt": PROMPT, "stream": False, **fields}, timeout=60)
    return answer.raise_for_status().json()


def whole_text(server, **fields):
    return complete(server, **fields)["choices"][0]["text"]


def as_textarea(value):
    """A textarea knows one line end: LF."""
    return re.sub("\r\n?", "\n", value)
