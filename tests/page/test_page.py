"""The page in a real browser, against the real app on a tiny random model: the text, errors, what a browser does."""

import re

import httpx

from tests.support.page.browser import (
    PROMPT,
    answer_with,
    as_textarea,
    body_of,
    cut_stream,
    generate,
    play,
    run_of,
    set_fields,
    setting,
    start,
    status,
    text,
    text_of,
    trickle,
    wait_for,
    watch,
    watch_status,
    whole_text,
)

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
    for selector, keys in [
        ("#document", "Control+Enter"),
        ("#document", "Meta+Enter"),
        ("#max-tokens", "Control+Enter"),
    ]:
        with page.expect_response("**/complete") as answer:
            page.locator(selector).press(keys)
        assert answer.value.ok
        wait_for(page, "done")


# Stop, seed, undo


def test_stop_keeps_the_text_tells_the_server_and_hands_the_pen_back(page, server, long_seed):
    set_fields(page, seed=long_seed, max_tokens=200)
    trickle(page, frames=4)  # thirteen seconds to interrupt 200 tokens
    start(page)
    wait_for(page, "streaming")
    assert not page.locator("#document").is_editable()
    with page.expect_request(lambda request: request.method == "DELETE") as told:
        page.locator("#stop").click()
    assert "/complete/req-" in told.value.url
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
    page.locator("#document").fill(PROMPT)
    start(page)
    wait_for(page, "streaming")
    with page.expect_request(lambda request: request.method == "DELETE"):
        page.keyboard.press("Escape")
    wait_for(page, "stopped")


def test_undo_and_redo_go_over_whole_generations_and_over_what_was_typed(page, long_seed):
    set_fields(page, seed=long_seed, max_tokens=20)
    generate(page)
    generated = text(page)
    page.locator("#document").press_sequentially(" The end.")
    typed = text(page)
    assert typed == generated + " The end."
    page.get_by_role("button", name="Undo").click()
    assert text(page) == generated
    page.locator("#document").press("Control+z")
    assert text(page) == PROMPT
    assert page.locator("#undo").get_attribute("aria-disabled") == "true"
    page.locator("#document").press("Control+Shift+z")
    page.get_by_role("button", name="Redo").click()
    assert text(page) == typed
    assert page.locator("#redo").get_attribute("aria-disabled") == "true"
    page.locator("#seed").press_sequentially("12")
    page.locator("#seed").press("Control+z")
    assert text(page) == typed, "undo in a field is the field's own"


def test_regenerate_begins_where_the_run_began_and_with_a_locked_seed_says_why_it_would_be_the_same(page):
    set_fields(page, seed=3, max_tokens=5)
    generate(page)
    after = text(page)
    page.get_by_role("button", name="Regenerate").click()
    assert "The seed is locked" in status(page)
    assert text(page) == after
    set_fields(page, seed=4)
    page.get_by_role("button", name="Regenerate").click()
    wait_for(page, "done")
    assert text(page).startswith(PROMPT) and not text(page).startswith(after)
    second = text(page)
    set_fields(page, seed="")
    page.locator("#document").press_sequentially(" typed behind it")
    page.locator("#document").press("Control+Shift+Enter")
    wait_for(page, "done")
    assert text(page).startswith(PROMPT) and not text(page).startswith(second)


def test_the_models_words_have_another_ink_and_what_is_typed_among_them_has_not(page):
    inks = "() => [...document.querySelectorAll('#mirror span:not(.tail)')].map((e) => [e.className, e.textContent])"
    play(page, *run_of(", there", " was"))
    generate(page)
    assert page.evaluate(inks) == [["own", PROMPT], ["written", ", there was"]]
    page.locator("#document").evaluate("(e, at) => (e.focus(), e.setSelectionRange(at, at))", len(PROMPT) + 2)
    page.keyboard.type("and ")
    assert page.evaluate(inks) == [["own", PROMPT], ["written", ", "], ["own", "and "], ["written", "there was"]]
    assert text(page) == f"{PROMPT}, and there was"
    colour = "(e) => getComputedStyle(e).color"
    assert page.locator("#mirror .written").first.evaluate(colour) != page.locator("#mirror .own").first.evaluate(
        colour
    )
    page.reload()
    assert page.evaluate(inks) == [["own", PROMPT], ["written", ", "], ["own", "and "], ["written", "there was"]]


def test_the_mirror_lies_on_the_text_glyph_on_glyph(page):
    """Both wrap alike at every width: the same height, whatever the text."""
    words = "A long word: " + "x" * 200 + " and   spaces\tand\n\nempty lines, caf\u00e9 \u4e2d\u6587 \U0001f600 "
    page.locator("#document").fill(words * 12 + "\n")
    heights = "() => { const e = document.getElementById('document'); e.style.height = '0'; const own = e.scrollHeight;"
    heights += " e.style.height = ''; return [own, document.getElementById('mirror').scrollHeight] }"
    for width in (320, 390, 777, 1280, 1900):
        page.set_viewport_size({"width": width, "height": 800})
        own, mirror = page.evaluate(heights)
        assert own == mirror, width


# Errors never lose text


def test_a_refusal_shows_the_servers_own_sentence_and_keeps_the_text(page, server):
    for typed, sent in [("-1", -1), ("many", "many")]:
        set_fields(page, max_tokens=typed)
        generate(page, ends="error")
        refusal = httpx.post(f"{server.url}/complete", json={"prompt": PROMPT, "stream": True, "max_tokens": sent})
        assert refusal.status_code == 400
        assert page.locator("#status").text_content() == "Error: " + refusal.json()["error"]["message"]
        assert text(page) == PROMPT


def test_a_countdown_can_be_stopped(page):
    busy = {"error": {"message": "The queue is full"}}
    answer_with(page, status=503, headers={"Retry-After": "60"}, json=busy)
    start(page)
    page.get_by_text(re.compile(r"Trying again in \d+ s")).wait_for()
    page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert text(page) == PROMPT


def test_a_text_longer_than_the_context_is_cut_only_when_asked(page, server):
    page.locator("#document").fill("word and " * 1000)
    set_fields(page, max_tokens=4)
    generate(page, ends="error")
    for way in (page.get_by_role("button", name="Go on from the end of it"), page.locator("#generate")):
        with page.expect_request("**/complete") as request:
            way.click()
        wait_for(page, "done")
        assert "the model read the end of the text only" in status(page)
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    assert body_of(request.value)["truncate_prompt_tokens"] == context - 4
    assert text(page).startswith("word and " * 1000)
    assert page.locator("#remedy").is_hidden()
    assert page.locator("#context").inner_text().endswith(f" of {context}")


def test_a_stream_survives_a_connection_that_breaks(page, server, long_seed):
    """The server's own stream, cut after some events; the rest comes by GET /complete/{id}/events."""
    set_fields(page, seed=long_seed, max_tokens=60)
    cut_stream(page, after=12)
    said = watch_status(page)
    with page.expect_response("**/events") as resumed:
        start(page)
    assert resumed.value.ok
    wait_for(page, "done")
    assert any("connection was lost" in sentence for sentence in said.json_value())
    assert text(page) == as_textarea(PROMPT + whole_text(server, seed=long_seed, max_tokens=60))


def test_a_place_in_the_queue_is_shown(page):
    said = watch_status(page)
    trickle(page)
    play(page, ("queue", {"position": 3, "eta_ms": 1500}), *run_of("!"))
    generate(page)
    assert said.json_value() == [
        "Waiting for the first token",
        "Waiting in queue, position 3, about 2 s",
        "Waiting for the first token",
        "Streaming",
        "Done (length)",
    ]


# What the browser does with it


def test_an_inline_script_does_not_run(browser, server):
    page = browser.new_page()  # not the fixture, which takes the violation that is provoked here for a defect
    page.goto(server.url)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
    }""")
    assert page.evaluate("() => window.ran ?? null") is None
    page.context.close()


def test_it_works_behind_a_proxy_that_puts_it_under_a_path(page):
    page = page.context.new_page()  # the first one may still be asking for what it shows
    trouble, outside = watch(page), []
    page.on("request", lambda request: outside.append(request.url) if "/tools/ink/" not in request.url else None)

    def forward(route):
        url = route.request.url.replace("/tools/ink/", "/")
        answer = route.fetch(url=url, post_data=text_of(route.request))
        headers = {name: value for name, value in answer.headers.items() if name != "content-encoding"}
        route.fulfill(response=answer, headers=headers)

    page.route("**/tools/ink/**", forward)
    page.goto("/tools/ink/")
    set_fields(page, max_tokens=5)
    generate(page)
    assert page.locator("#model").inner_text() != ""
    assert [url for url in outside if not url.startswith("data:")] == []
    assert trouble == []


def test_no_width_has_a_horizontal_scroll(page):
    numbers = {"seed": -(2**63), "model": "a-rather-long-name-of-a-model/with-a-tail", "weights_version": "f" * 64}
    play(page, ("start", numbers), ("token", {"text": "w" * 300}), ("error", {"error": {"message": "w" * 300}}))
    generate(page, ends="error")
    page.locator("#panel summary").click()
    page.locator("#run > summary").click()
    set_fields(page, seed="-9223372036854775808", temperature="99", stop="a" * 300, grammar="x " * 200)
    for width in (320, 390, 2000):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), width
        buttons = [page.locator(f"#{name}") for name in ("undo", "redo", "regenerate", "generate")]
        for control in (*buttons, setting(page, "seed"), setting(page, "stop")):
            box = control.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert page.locator("#paper").evaluate("e => e.scrollWidth - e.clientWidth") == 0


def test_a_reload_keeps_settings_and_an_emptied_text(page):
    assert text(page) == PROMPT, "what a first visit begins with"
    set_fields(page, temperature="0.7", seed="5", max_tokens="12")
    page.locator("#document").fill("")
    page.reload()
    kept = [page.locator(f"#{name}").input_value() for name in ("temperature", "top-p", "max-tokens", "seed")]
    assert kept == ["0.7", "", "12", "5"]
    assert text(page) == "", "an emptied text is no first visit"


def test_each_tab_keeps_its_own_text_and_a_new_one_begins_with_the_last(page):
    page.locator("#document").fill("The first tab")
    page.wait_for_timeout(600)  # it is saved, before the other
    other = page.context.new_page()
    other.goto("/")
    other.locator("#document").fill("The second tab")
    other.reload()  # it is saved
    page.reload()
    assert text(page) == "The first tab"
    new = page.context.new_page()
    new.goto("/")
    assert text(new) == "The second tab"


def test_without_storage_the_page_works_and_says_that_it_forgets(page):
    refuse = "{ get() { throw new DOMException('no', 'SecurityError') } }"
    for storage in ("localStorage", "indexedDB"):
        page.add_init_script(f"Object.defineProperty(window, '{storage}', {refuse})")
    page.reload()
    set_fields(page, max_tokens=5)
    page.get_by_text("copy the text before you close the page").wait_for()
    generate(page)
    assert text(page).startswith(PROMPT)
    page.wait_for_timeout(600)  # it has tried to store the text by now
    assert status(page).startswith("Done ("), "it was shown once"


def test_where_the_storage_has_room_for_the_text_alone_that_is_kept_and_told(page):
    page.add_init_script("""{
        const set = Storage.prototype.setItem;
        Storage.prototype.setItem = function (key, value) {
            if (value.length > 3000) throw new DOMException('full', 'QuotaExceededError');
            set.call(this, key, value);
        };
        Object.defineProperty(window, "indexedDB", { value: undefined });
    }""")
    page.reload()
    page.locator("#document").fill("a" * 1500)
    page.wait_for_function("() => localStorage.length > 0")
    assert "storage is full" not in status(page)
    play(page, *run_of("c"))
    generate(page)
    page.locator("#document").fill("b" * 1500)
    page.get_by_text("it keeps the text, not its history").wait_for()
    page.reload()
    assert text(page) == "b" * 1500
    assert page.locator("#undo").get_attribute("aria-disabled") == "true"


def test_a_burst_of_tokens_is_a_few_writes(page):
    page.evaluate("""() => {
        const write = HTMLTextAreaElement.prototype.setRangeText;
        window.writes = 0;
        HTMLTextAreaElement.prototype.setRangeText = function (...args) { window.writes += 1; write.apply(this, args) };
    }""")
    play(page, *run_of(*[f" {i}" for i in range(2000)]))
    generate(page)
    assert text(page) == PROMPT + "".join(f" {i}" for i in range(2000))
    assert 1 <= page.evaluate("() => window.writes") <= 30


def test_the_view_follows_at_the_bottom_and_stays_anywhere_else(page):
    """Also when the tree strip comes under it and the sheet gets lower."""
    top, area = "e => e.scrollTop", page.locator("#paper")
    page.locator("#document").fill("line\n" * 100)
    play(page, *run_of("more\n" * 100))
    area.evaluate("e => { e.scrollTop = 40 }")
    generate(page)
    assert area.evaluate(top) == 40
    area.evaluate("e => { e.scrollTop = e.scrollHeight }")
    generate(page)
    assert area.evaluate(top) > 1000
    at_bottom = "e => e.scrollHeight - e.clientHeight - e.scrollTop <= 1"
    page.wait_for_function(at_bottom, arg=area.element_handle())


def test_the_keyboard_reaches_text_actions_and_settings_in_this_order(page):
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    reached = [page.evaluate("() => document.activeElement.id")]
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    assert reached[:5] == ["document", "undo", "redo", "regenerate", "generate"]
    assert "temperature" in reached[5:], "after the presets and the head of the settings"
