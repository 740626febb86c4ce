"""The page in a real browser, against the real app on a tiny random model (fixture `server`, tests/conftest.py).

What a server cannot be made to do at will (a queue, a lost connection, text that looks like markup) is played to the
page by answering its request in the browser. Skipped where there is no Chromium: apt-get install chromium.
"""

import json
import re
import shutil

import httpx
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="the page tests need playwright: make install brings it")

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    print("tests/test_page.py skipped: no `chromium` on PATH (Debian: apt-get install chromium)")
    pytest.skip("no `chromium` on PATH (Debian: apt-get install chromium)", allow_module_level=True)

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PROMPT = "Once upon a time"
MARKUP = '<img src=x onerror="window.pwned = 1"><script>window.pwned = 2</script>'


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A new visitor in front of the page. At the end: no console error, no CSP violation, no asset that failed."""
    context = browser.new_context(base_url=server.url, viewport={"width": 1000, "height": 700})
    context.set_default_timeout(10_000)
    page = context.new_page()
    trouble = watch(page)
    page.goto("/")
    yield page
    context.close()
    assert trouble == []


@pytest.fixture(scope="module")
def long_seed(server):
    """A seed with which the model does not stop early: tests that interrupt a run need one to interrupt."""
    for seed in range(50):
        answer = complete(server, seed=seed, max_tokens=200)
        if answer["usage"]["completion_tokens"] >= 60:
            return seed
    raise AssertionError("50 seeds, and every text ended before 60 tokens")


# Text in, text out


def test_text_streams_in_behind_the_prompt_and_is_what_one_plain_answer_has(page, server, long_seed):
    set_fields(page, seed=long_seed, max_tokens=60)
    generate(page)
    assert text(page) == as_textarea(PROMPT + whole_text(server, seed=long_seed, max_tokens=60))
    assert status(page).startswith("Done (")
    assert re.fullmatch(r"\d+ ms", page.locator("#first-token").inner_text())
    assert float(page.locator("#rate").inner_text()) > 0
    assert 0 < int(page.locator("#count").inner_text()) <= 60


def test_the_keys_generate_from_the_text_and_from_any_field(page):
    page.locator("#max-tokens").fill("4")
    for place, keys in [("#document", "Control+Enter"), ("#document", "Meta+Enter"), ("#max-tokens", "Control+Enter")]:
        with page.expect_response("**/complete") as answer:
            page.locator(place).press(keys)
        assert answer.value.ok
        wait_for(page, "done")


def test_generating_again_continues_from_the_whole_text(page):
    set_fields(page, max_tokens=10)
    generate(page)
    first = text(page)
    with page.expect_request("**/complete") as request:
        generate(page)
    assert request.value.post_data_json["prompt"] == first
    assert text(page).startswith(first)


def test_an_empty_field_is_left_to_the_model_and_a_filled_one_is_sent_as_a_number(page):
    set_fields(page, temperature="", top_p="0.5", max_tokens="5")
    with page.expect_request("**/complete") as request:
        generate(page)
    assert request.value.post_data_json == {"prompt": PROMPT, "stream": True, "top_p": 0.5, "max_tokens": 5}


def test_a_source_is_asked_for_only_by_models_that_read_one(page):
    assert page.locator("#source-field").is_hidden()
    facts = page.request.get("/v1/models").json()
    facts["data"][0]["has_encoder"] = True
    page.route("**/v1/models", lambda route: route.fulfill(json=facts))
    page.reload()
    page.locator("#source").fill(" 12 ")
    page.route("**/complete", lambda route: route.fulfill(status=400, json={"error": {"message": "seen"}}))
    with page.expect_request("**/complete") as request:
        page.locator("#generate").click()
    assert request.value.post_data_json["source"] == "12", "text, although it looks like a number"
    page.unroute("**/complete")
    page.unroute("**/v1/models")


# Stop, seed, undo


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_the_text_that_has_come_and_hands_the_pen_back(page, server, long_seed, how):
    set_fields(page, seed=long_seed, max_tokens=200)
    slow_down(page)
    start(page)
    wait_for(page, "streaming")
    assert not page.locator("#document").is_editable()
    page.locator("#stop").click() if how == "button" else page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert status(page) == "Stopped"
    kept = text(page)
    page.wait_for_timeout(200)
    assert text(page) == kept, "text came after Stop"
    whole = as_textarea(PROMPT + whole_text(server, seed=long_seed, max_tokens=200))
    assert len(PROMPT) < len(kept) < len(whole)
    # A CR whose LF never came has become a line end of its own.
    assert whole.startswith((kept, kept.removesuffix("\n")))
    page.locator("#document").press_sequentially("!")
    assert text(page) == kept + "!", "the caret stands behind the new text, as it stood behind the prompt"


def test_the_seed_that_was_used_is_shown_and_gives_the_same_text_again(page):
    set_fields(page, seed="", max_tokens=40)
    generate(page)
    first, seed = text(page), page.locator("#used-seed").inner_text()
    page.get_by_role("button", name="Keep this seed").click()
    assert page.locator("#seed").input_value() == seed
    page.locator("#document").fill(PROMPT)
    generate(page)
    assert text(page) == first
    assert page.locator("#used-seed").inner_text() == seed
    assert page.locator("#keep-seed").is_hidden()


def test_a_seed_above_53_bits_keeps_every_digit(page):
    set_fields(page, seed="9007199254740993", max_tokens=2)
    with page.expect_request("**/complete") as request:
        generate(page)
    assert '"seed":9007199254740993' in request.value.post_data
    assert page.locator("#used-seed").inner_text() == "9007199254740993"


def test_undo_restores_the_text_before_the_run_and_redo_the_text_after(page, long_seed):
    set_fields(page, seed=long_seed, max_tokens=20)
    generate(page)
    after = text(page)
    page.get_by_role("button", name="Undo").click()
    assert text(page) == PROMPT
    page.get_by_role("button", name="Redo").click()
    assert text(page) == after


def test_a_run_that_fails_leaves_the_last_undo_alone(page, long_seed):
    set_fields(page, seed=long_seed, max_tokens=20)
    generate(page)
    set_fields(page, max_tokens=-1)
    generate(page, ends="error")
    page.get_by_role("button", name="Undo").click()
    assert text(page) == PROMPT


# Errors never lose text


def test_a_refusal_shows_the_servers_own_sentence_and_keeps_the_text(page, server):
    for prompt, typed, sent in [(PROMPT, "-1", -1), (PROMPT, "many", "many"), ("word and " * 1000, "5", 5)]:
        page.locator("#document").fill(prompt)
        set_fields(page, max_tokens=typed)
        generate(page, ends="error")
        refusal = httpx.post(f"{server.url}/complete", json={"prompt": prompt, "stream": True, "max_tokens": sent})
        assert refusal.status_code == 400
        assert page.locator("#status").text_content() == "Error: " + refusal.json()["error"]["message"]
        assert text(page) == prompt


def test_an_answer_without_a_stream_is_told_in_words_and_keeps_the_text(page):
    full = {"error": {"message": "The queue is full", "type": "unavailable_error"}}
    answers = {
        "Error: The queue is full. Try again in 7 s.": {"status": 503, "headers": {"Retry-After": "7"}, "json": full},
        "Error: The server answered 502 Bad Gateway.": {"status": 502, "content_type": "text/html", "body": "<p>No"},
    }
    for sentence, answer in answers.items():
        answer_with(page, **answer)
        generate(page, ends="error")
        assert status(page) == sentence
    page.route("**/complete", lambda route: route.abort("connectionrefused"))
    generate(page, ends="error")
    assert "cannot be reached" in status(page)
    assert text(page) == PROMPT


def test_a_stream_that_ends_badly_keeps_what_had_come(page):
    begun = [("start", {"seed": 1}), ("token", {"text": " there"})]
    play(page, *begun)
    generate(page, ends="error")
    assert "connection was lost" in status(page)
    assert text(page) == PROMPT + " there"
    assert page.locator("#used-seed").inner_text() == "1"
    play(page, *begun, ("error", {"error": {"message": "It broke."}}))
    generate(page, ends="error")
    assert status(page) == "Error: It broke."
    assert text(page) == PROMPT + " there there"


def test_a_place_in_the_queue_is_shown(page):
    said = page.evaluate_handle("""() => {
        const said = [], status = document.getElementById("status");
        new MutationObserver(() => said.push(status.textContent)).observe(status, { childList: true });
        return said;
    }""")
    drip(page)
    play(page, ("queue", {"position": 3, "eta_ms": 1500}), ("start", {"seed": 1}), ("token", {"text": "!"}), DONE)
    generate(page)
    assert said.json_value() == [
        "Waiting for the first token",
        "Waiting in queue, position 3, about 2 s",
        "Waiting for the first token",
        "Streaming",
        "Done (length)",
    ]


# What the browser does with it


def test_text_that_looks_like_markup_is_text(page):
    name = {"model": MARKUP, "weights_version": MARKUP, "seed": 1, "settings": {"temperature": MARKUP}}
    play(page, ("start", name), ("token", {"text": MARKUP}), ("error", {"error": {"message": MARKUP}}))
    page.locator("#document").fill(MARKUP)
    generate(page, ends="error")
    assert text(page) == MARKUP + MARKUP
    assert status(page) == "Error: " + MARKUP
    page.reload()
    assert text(page) == MARKUP + MARKUP
    assert page.evaluate("() => window.pwned ?? null") is None
    assert page.evaluate("() => [document.images.length, document.scripts.length]") == [0, 1]


def test_the_policy_is_sent_and_an_inline_script_does_not_run(browser, server):
    sent = httpx.get(server.url).headers["content-security-policy"]
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} <= set(sent.split("; "))
    page = browser.new_page()  # not the fixture, which takes the violation that is provoked here for a defect
    page.goto(server.url)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
    }""")
    assert page.evaluate("() => window.ran ?? null") is None
    page.context.close()


def test_nothing_is_fetched_from_elsewhere(page, server):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    set_fields(page, max_tokens=2)
    generate(page)
    assert {"/", "/web/main.js", "/web/sse.js", "/web/style.css", "/v1/models", "/complete"} <= {
        url.removeprefix(server.url) for url in asked
    }
    assert [url for url in asked if not url.startswith((server.url + "/", "data:"))] == []


def test_it_works_behind_a_proxy_that_puts_it_under_a_path(page):
    outside = []
    page.on("request", lambda request: outside.append(request.url) if "/tools/ink/" not in request.url else None)
    page.route("**/tools/ink/**", lambda route: route.continue_(url=route.request.url.replace("/tools/ink/", "/")))
    page.goto("/tools/ink/")
    set_fields(page, max_tokens=5)
    generate(page)
    assert page.locator("#model").inner_text() != ""
    assert [url for url in outside if not url.startswith("data:")] == []


def test_no_width_has_a_horizontal_scroll(page):
    numbers = {"seed": -(2**63), "model": "a-rather-long-name-of-a-model/with-a-tail", "weights_version": "f" * 64}
    play(page, ("start", numbers), ("token", {"text": "w" * 300}), ("error", {"error": {"message": "w" * 300}}))
    generate(page, ends="error")
    for width in (320, 390, 2000):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        assert page.locator("#document").evaluate("e => e.scrollWidth - e.clientWidth") == 0
        for name in ("Undo", "Stop", "Generate"):
            box = page.get_by_role("button", name=name).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_a_reload_keeps_text_and_settings(page):
    assert text(page) == PROMPT, "what a first visit begins with"
    set_fields(page, temperature="0.7", seed="5", max_tokens="12")
    page.locator("#document").fill("It was a dark")
    generate(page)
    written = text(page)
    page.reload()
    assert text(page) == written
    kept = [page.locator(f"#{name}").input_value() for name in ("temperature", "top-p", "max-tokens", "seed")]
    assert kept == ["0.7", "", "12", "5"]
    page.locator("#document").fill("")
    page.reload()
    assert text(page) == "", "an emptied text is no first visit"


def test_without_storage_the_page_works_and_forgets(page):
    refuse = "{ get() { throw new DOMException('no', 'SecurityError') } }"
    page.add_init_script(f"Object.defineProperty(window, 'localStorage', {refuse})")
    page.reload()
    set_fields(page, max_tokens=5)
    generate(page)
    assert text(page).startswith(PROMPT)


def test_a_burst_of_tokens_is_a_few_writes(page):
    page.evaluate("""() => {
        const write = HTMLTextAreaElement.prototype.setRangeText;
        window.writes = 0;
        HTMLTextAreaElement.prototype.setRangeText = function (...args) { window.writes += 1; write.apply(this, args) };
    }""")
    play(page, ("start", {"seed": 1}), *[("token", {"text": f" {i}"}) for i in range(2000)], DONE)
    generate(page)
    assert text(page) == PROMPT + "".join(f" {i}" for i in range(2000))
    assert 1 <= page.evaluate("() => window.writes") <= 30


def test_the_view_follows_at_the_bottom_and_stays_anywhere_else(page):
    top, bottom = "e => e.scrollTop", "e => Math.round(e.scrollHeight - e.clientHeight - e.scrollTop)"
    area = page.locator("#document")
    area.fill("line\n" * 100)
    play(page, ("start", {"seed": 1}), ("token", {"text": "more\n" * 100}), DONE)
    area.evaluate("e => { e.scrollTop = 40 }")
    generate(page)
    assert area.evaluate(top) == 40
    area.evaluate("e => { e.scrollTop = e.scrollHeight }")
    generate(page)
    assert area.evaluate(top) > 1000
    assert area.evaluate(bottom) <= 1


def test_a_line_end_cut_between_two_tokens_is_one_line_end(page):
    drip(page)
    play(page, ("start", {"seed": 1}), *[("token", {"text": part}) for part in ("a\r", "\nb\r", "c\r")], DONE)
    generate(page)
    assert text(page) == PROMPT + "a\nb\nc\n"


def test_everything_can_be_reached_and_named_without_a_mouse(page, server):
    served = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert page.locator("#model").inner_text() == served["id"]
    assert page.locator("#weights").get_attribute("title") == served["weights_version"]
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    names = ["Document", "Temperature", "Top p", "Max tokens", "Seed"]
    shown = "[...document.querySelectorAll('textarea, input')].filter((e) => e.checkVisibility())"
    labels = f"() => {shown}.map((e) => e.labels[0].textContent)"
    assert page.evaluate(labels) == names
    reached = [page.evaluate("() => document.activeElement.id")]
    for _ in range(7):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    assert reached == ["document", "temperature", "top-p", "max-tokens", "seed", "undo", "stop", "generate"]


# sse.js alone


@pytest.fixture(scope="module")
def module_page(browser, server):
    """Any page of the server's: a pure module leaves nothing behind that a second test could stumble over."""
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.context.close()


STREAM = (
    "\ufeffid: a:1\n: hello\nevent: start\ndata: {\"seed\": 1}\n\n"  # a byte order mark, a comment, a plain event
    "event: token\r\ndata: \u00e9\u4e2d\U0001f600\r\n\r\n"  # CR LF; code points of two, three and four bytes
    "event:token\rdata:no space\rdata:  two spaces\rdata\r\r"  # CR; data of three lines, the last one empty
    ": ping\ndata: unnamed\nretry: 10\nid: b\0c\nunknown: x\n\n"  # no type; ids with NUL and unknown fields are ignored
    "event: lost\n\nid: a:2\ndata: a: b\u2028c\n\n"  # no data, no event; U+2028 is no line end here
    "data: never finished\n"
)  # fmt: skip
EVENTS = [
    {"type": "start", "data": '{"seed": 1}', "id": "a:1"},
    {"type": "token", "data": "\u00e9\u4e2d\U0001f600", "id": "a:1"},
    {"type": "token", "data": "no space\n two spaces\n", "id": "a:1"},
    {"type": "message", "data": "unnamed", "id": "a:1"},
    {"type": "message", "data": "a: b\u2028c", "id": "a:2"},
]


def test_a_stream_gives_the_same_events_however_it_is_cut(module_page):
    cuts = """async (bytes) => {
        const { SseParser } = await import("/web/sse.js");
        const all = new Uint8Array(bytes), wrong = [];
        const parse = (...chunks) => {
            const parser = new SseParser();
            return JSON.stringify(chunks.flatMap((chunk) => parser.feed(chunk)));
        };
        const whole = parse(all);
        for (let i = 0; i <= all.length; i++)
            for (let j = i; j <= Math.min(i + 8, all.length); j++)
                if (parse(all.slice(0, i), all.slice(i, j), all.slice(j)) !== whole) wrong.push([i, j]);
        if (parse(...Array.from(all, (b) => Uint8Array.of(b))) !== whole) wrong.push("byte by byte");
        return [JSON.parse(whole), wrong];
    }"""
    events, wrong = module_page.evaluate(cuts, list(STREAM.encode()))
    assert events == EVENTS
    assert wrong == []


def test_an_event_is_given_out_with_its_last_line_end_and_not_a_byte_later(module_page):
    for end in ("\n", "\r", "\r\n"):
        block = f"data: x{end}{end}"
        # A CR ends a line by itself, so behind CR LF CR the block is already complete.
        first = len(block) - (end == "\r\n")
        counts = module_page.evaluate(
            """async (bytes) => {
                const { SseParser } = await import("/web/sse.js");
                const parser = new SseParser();
                return bytes.map((byte) => parser.feed(Uint8Array.of(byte)).length);
            }""",
            list(block.encode()),
        )
        assert [i + 1 for i, count in enumerate(counts) if count] == [first]


# The hand on the page

DONE = ("done", {"choices": [{"index": 0, "finish_reason": "length", "stop_reason": None}]})


def watch(page):
    trouble = []
    page.on("pageerror", lambda error: trouble.append(f"exception: {error}"))
    page.on("console", lambda message: trouble.append(message.text) if _is_defect(message) else None)
    page.on("response", lambda answer: trouble.append(f"{answer.status} {answer.url}") if _is_missing(answer) else None)
    return trouble


def _is_defect(message):
    # Chromium reports a refused request as an error of its own; the assets are checked by their status.
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


def _is_missing(answer):
    return answer.status >= 400 and answer.request.method == "GET"


def text(page):
    return page.locator("#document").input_value()


def status(page):
    return page.locator("#status").inner_text()


def set_fields(page, **fields):
    for name, value in fields.items():
        page.locator("#" + name.replace("_", "-")).fill(str(value))


def start(page):
    page.get_by_role("button", name="Generate").click()


def generate(page, ends="done"):
    start(page)
    wait_for(page, ends)


def wait_for(page, state):
    page.locator(f'#status[data-state="{state}"]').wait_for()
    if state not in ("waiting", "streaming"):
        page.locator("#document:not([readonly])").wait_for()


def slow_down(page):
    """A line of 4 kB/s, so that there is time to interrupt."""
    conditions = {"offline": False, "latency": 0, "downloadThroughput": 4000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", conditions)


def play(page, *events):
    """Answer the page's POST /complete with these events, all at once, and then close the connection."""
    body = "".join(f"id: r:{i}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for i, (name, data) in enumerate(events))
    answer_with(page, content_type="text/event-stream", body=body)


def drip(page):
    """From now on every event of an answer comes in a frame of its own, as over a slow line."""
    page.evaluate("""() => {
        const fetch = window.fetch;
        window.fetch = async (...request) => {
            const events = (await (await fetch(...request)).text()).split(/(?<=\\n\\n)/);
            const pull = async (controller) => {
                // Two frames: what is written in the first has been drawn in the second.
                for (const _ of "12") await new Promise(requestAnimationFrame);
                if (events.length) controller.enqueue(new TextEncoder().encode(events.shift()));
                else controller.close();
            };
            return new Response(new ReadableStream({ pull }));
        };
    }""")


def answer_with(page, **answer):
    page.route("**/complete", lambda route: route.fulfill(**answer))


def complete(server, **fields):
    answer = httpx.post(f"{server.url}/complete", json={"prompt": PROMPT, "stream": False, **fields}, timeout=30)
    return answer.raise_for_status().json()


def whole_text(server, **fields):
    return complete(server, **fields)["choices"][0]["text"]


def as_textarea(value):
    """A textarea knows one line end: LF."""
    return re.sub("\r\n?", "\n", value)
