"""The page in a real browser, against the real app with a tiny random model: text, errors, browser behavior."""

import re

import httpx

from tests.support.page.browser import (
    PROMPT,
    click_generate,
    completion_text,
    cut_stream,
    fake_completion,
    fake_response,
    generate,
    json_body,
    normalize_line_ends,
    raw_body,
    record_defects,
    record_status_messages,
    run_events,
    set_fields,
    setting,
    status,
    text,
    throttle_stream,
    wait_for,
)

# Generating text


def test_streamed_text_follows_the_prompt_and_equals_an_unstreamed_completion(page, server, long_seed):
    set_fields(page, seed=long_seed, max_tokens=60)
    generate(page)
    assert text(page) == normalize_line_ends(PROMPT + completion_text(server, seed=long_seed, max_tokens=60))
    assert status(page).startswith("Done (")
    assert re.fullmatch(r"\d+ ms", page.locator("#first-token").inner_text())
    assert float(page.locator("#rate").inner_text()) > 0
    assert 0 < int(page.locator("#count").inner_text()) <= 60


def test_ctrl_or_cmd_enter_generates_from_the_text_and_from_any_field(page):
    page.locator("#max-tokens").fill("4")
    for selector, keys in [
        ("#document", "Control+Enter"),
        ("#document", "Meta+Enter"),
        ("#max-tokens", "Control+Enter"),
    ]:
        with page.expect_response("**/complete") as response:
            page.locator(selector).press(keys)
        assert response.value.ok
        wait_for(page, "done")


# Stop, seed, undo


def test_stop_keeps_the_text_cancels_the_request_and_makes_the_text_editable(page, server, long_seed):
    set_fields(page, seed=long_seed, max_tokens=200)
    throttle_stream(page, frames=4)  # the 200 tokens take 13 seconds: time to stop them
    click_generate(page)
    wait_for(page, "streaming")
    assert not page.locator("#document").is_editable()
    with page.expect_request(lambda request: request.method == "DELETE") as cancellation:
        page.locator("#stop").click()
    assert "/complete/req-" in cancellation.value.url
    wait_for(page, "stopped")
    assert status(page) == "Stopped"
    kept = text(page)
    page.wait_for_timeout(200)
    assert text(page) == kept, "text arrived after Stop"
    whole = normalize_line_ends(PROMPT + completion_text(server, seed=long_seed, max_tokens=200))
    assert len(PROMPT) < len(kept) < len(whole)
    # A CR that was not followed by its LF in time has become a line end.
    assert whole.startswith((kept, kept.removesuffix("\n")))
    page.locator("#document").press_sequentially("!")
    assert text(page) == kept + "!", "the caret is after the new text, as it was after the prompt"
    page.locator("#document").fill(PROMPT)
    click_generate(page)
    wait_for(page, "streaming")
    with page.expect_request(lambda request: request.method == "DELETE"):
        page.keyboard.press("Escape")
    wait_for(page, "stopped")


def test_undo_and_redo_step_over_runs_and_typed_text(page, long_seed):
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
    assert text(page) == typed, "undo in a field is the browser's own"


def test_regenerate_restarts_the_last_run_and_is_refused_with_a_locked_seed(page):
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


def test_model_text_has_its_own_color_and_text_typed_inside_it_does_not(page):
    inks = "() => [...document.querySelectorAll('#mirror span:not(.tail)')].map((e) => [e.className, e.textContent])"
    fake_completion(page, *run_events(", there", " was"))
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


def test_mirror_and_text_area_wrap_alike(page):
    """Their heights are equal at every width."""
    words = "A long word: " + "x" * 200 + " and   spaces\tand\n\nempty lines, caf\u00e9 \u4e2d\u6587 \U0001f600 "
    page.locator("#document").fill(words * 12 + "\n")
    heights = "() => { const e = document.getElementById('document'); e.style.height = '0'; const own = e.scrollHeight;"
    heights += " e.style.height = ''; return [own, document.getElementById('mirror').scrollHeight] }"
    for width in (320, 390, 777, 1280, 1900):
        page.set_viewport_size({"width": width, "height": 800})
        own, mirror = page.evaluate(heights)
        assert own == mirror, width


# Errors never lose text


def test_an_error_shows_the_servers_message_and_keeps_the_text(page, server):
    for typed, sent in [("-1", -1), ("many", "many")]:
        set_fields(page, max_tokens=typed)
        generate(page, ends="error")
        response = httpx.post(f"{server.url}/complete", json={"prompt": PROMPT, "stream": True, "max_tokens": sent})
        assert response.status_code == 400
        assert page.locator("#status").text_content() == "Error: " + response.json()["error"]["message"]
        assert text(page) == PROMPT


def test_stop_ends_the_retry_countdown(page):
    busy = {"error": {"message": "The queue is full"}}
    fake_response(page, status=503, headers={"Retry-After": "60"}, json=busy)
    click_generate(page)
    page.get_by_text(re.compile(r"Trying again in \d+ s")).wait_for()
    page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert text(page) == PROMPT


def test_a_text_longer_than_the_context_is_truncated_only_on_request(page, server):
    page.locator("#document").fill("word and " * 1000)
    set_fields(page, max_tokens=4)
    generate(page, ends="error")
    for button in (page.get_by_role("button", name="Go on from the end of it"), page.locator("#generate")):
        with page.expect_request("**/complete") as request:
            button.click()
        wait_for(page, "done")
        assert "the model read the end of the text only" in status(page)
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    assert json_body(request.value)["truncate_prompt_tokens"] == context - 4
    assert text(page).startswith("word and " * 1000)
    assert page.locator("#remedy").is_hidden()
    assert page.locator("#context").inner_text().endswith(f" of {context}")


def test_a_stream_survives_a_lost_connection(page, server, long_seed):
    """The page fetches the rest from GET /complete/{id}/events."""
    set_fields(page, seed=long_seed, max_tokens=60)
    cut_stream(page, after=12)
    messages = record_status_messages(page)
    with page.expect_response("**/events") as resumed:
        click_generate(page)
    assert resumed.value.ok
    wait_for(page, "done")
    assert any("connection was lost" in sentence for sentence in messages.json_value())
    assert text(page) == normalize_line_ends(PROMPT + completion_text(server, seed=long_seed, max_tokens=60))


def test_the_queue_position_is_shown(page):
    messages = record_status_messages(page)
    throttle_stream(page)
    fake_completion(page, ("queue", {"position": 3, "eta_ms": 1500}), *run_events("!"))
    generate(page)
    assert messages.json_value() == [
        "Waiting for the first token",
        "Waiting in queue, position 3, about 2 s",
        "Waiting for the first token",
        "Streaming",
        "Done (length)",
    ]


# Browser behavior


def test_an_inline_script_does_not_run(browser, server):
    page = browser.new_page()  # not the fixture, which would report this violation as a defect
    page.goto(server.url)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
    }""")
    assert page.evaluate("() => window.ran ?? null") is None
    page.context.close()


def test_the_page_works_behind_a_proxy_under_a_path_prefix(page):
    page = page.context.new_page()  # requests of the first page may still be in flight
    defects, outside = record_defects(page), []
    page.on("request", lambda request: outside.append(request.url) if "/tools/ink/" not in request.url else None)

    def forward(route):
        url = route.request.url.replace("/tools/ink/", "/")
        response = route.fetch(url=url, post_data=raw_body(route.request))
        headers = {name: value for name, value in response.headers.items() if name != "content-encoding"}
        route.fulfill(response=response, headers=headers)

    page.route("**/tools/ink/**", forward)
    page.goto("/tools/ink/")
    set_fields(page, max_tokens=5)
    generate(page)
    assert page.locator("#model").inner_text() != ""
    assert [url for url in outside if not url.startswith("data:")] == []
    assert defects == []


def test_no_window_width_needs_horizontal_scrolling(page):
    numbers = {"seed": -(2**63), "model": "a-rather-long-name-of-a-model/with-a-tail", "weights_version": "f" * 64}
    fake_completion(
        page, ("start", numbers), ("token", {"text": "w" * 300}), ("error", {"error": {"message": "w" * 300}})
    )
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
    assert text(page) == PROMPT, "the sample text of a first visit"
    set_fields(page, temperature="0.7", seed="5", max_tokens="12")
    page.locator("#document").fill("")
    page.reload()
    kept = [page.locator(f"#{name}").input_value() for name in ("temperature", "top-p", "max-tokens", "seed")]
    assert kept == ["0.7", "", "12", "5"]
    assert text(page) == "", "an empty text is not a first visit"


def test_each_tab_keeps_its_own_text_and_a_new_tab_opens_the_latest(page):
    page.locator("#document").fill("The first tab")
    page.wait_for_timeout(600)  # until it is saved, before the other tab's
    other = page.context.new_page()
    other.goto("/")
    other.locator("#document").fill("The second tab")
    other.reload()  # saves it
    page.reload()
    assert text(page) == "The first tab"
    new = page.context.new_page()
    new.goto("/")
    assert text(new) == "The second tab"


def test_without_storage_the_page_works_and_warns_once_that_text_is_not_kept(page):
    refuse = "{ get() { throw new DOMException('no', 'SecurityError') } }"
    for storage in ("localStorage", "indexedDB"):
        page.add_init_script(f"Object.defineProperty(window, '{storage}', {refuse})")
    page.reload()
    set_fields(page, max_tokens=5)
    page.get_by_text("copy the text before you close the page").wait_for()
    generate(page)
    assert text(page).startswith(PROMPT)
    page.wait_for_timeout(600)  # by now it has tried to store the text
    assert status(page).startswith("Done ("), "the warning is shown once"


def test_when_storage_fits_only_the_text_the_page_keeps_it_and_reports_the_lost_history(page):
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
    fake_completion(page, *run_events("c"))
    generate(page)
    page.locator("#document").fill("b" * 1500)
    page.get_by_text("it keeps the text, not its history").wait_for()
    page.reload()
    assert text(page) == "b" * 1500
    assert page.locator("#undo").get_attribute("aria-disabled") == "true"


def test_a_burst_of_tokens_takes_few_writes_to_the_text_area(page):
    page.evaluate("""() => {
        const write = HTMLTextAreaElement.prototype.setRangeText;
        window.writes = 0;
        HTMLTextAreaElement.prototype.setRangeText = function (...args) { window.writes += 1; write.apply(this, args) };
    }""")
    fake_completion(page, *run_events(*[f" {i}" for i in range(2000)]))
    generate(page)
    assert text(page) == PROMPT + "".join(f" {i}" for i in range(2000))
    assert 1 <= page.evaluate("() => window.writes") <= 30


def test_the_view_follows_new_text_only_from_the_bottom(page):
    """Also when the tree strip appears below and shrinks the sheet."""
    top, area = "e => e.scrollTop", page.locator("#paper")
    page.locator("#document").fill("line\n" * 100)
    fake_completion(page, *run_events("more\n" * 100))
    area.evaluate("e => { e.scrollTop = 40 }")
    generate(page)
    assert area.evaluate(top) == 40
    area.evaluate("e => { e.scrollTop = e.scrollHeight }")
    generate(page)
    assert area.evaluate(top) > 1000
    at_bottom = "e => e.scrollHeight - e.clientHeight - e.scrollTop <= 1"
    page.wait_for_function(at_bottom, arg=area.element_handle())


def test_tab_reaches_the_text_then_actions_then_settings(page):
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    reached = [page.evaluate("() => document.activeElement.id")]
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    assert reached[:5] == ["document", "undo", "redo", "regenerate", "generate"]
    assert "temperature" in reached[5:], "after the presets and the heading of the settings"
