"""Page elements around the text: model facts, seed, Stop, help, preferences; and no layout shifts."""

import httpx
import pytest

from tests.support.page.browser import (
    BROWSER,
    DONE,
    allow_clipboard,
    click_generate,
    fake_completion,
    generate,
    hold_stream_open,
    read_clipboard,
    run_events,
    send_events,
    status,
    throttle_stream,
    used_seed,
    wait_for,
)
from tests.support.page.token_view import WORDS

# All shifts: the browser's own score excuses those within half a second of a key press.
SHIFTS = """window.shifts = []; new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) shifts.push(entry.value);
}).observe({ type: "layout-shift", buffered: true });"""
SHIFTED = "() => shifts.reduce((sum, value) => sum + value, 0)"


@pytest.mark.skipif(BROWSER == "firefox", reason="Firefox reports no layout shifts")
@pytest.mark.parametrize("width", [1280, 390])
def test_loading_and_two_runs_cause_no_layout_shift_and_few_requests(page, width):
    requests = []
    page.on("request", lambda request: requests.append(request))
    page.add_init_script(SHIFTS)
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    page.locator('#status[data-state="idle"]').wait_for()
    page.locator("#panel summary").wait_for()
    assert 4 <= len(requests) <= 5, [request.url for request in requests]
    # Whole words: a word of several tokens may wrap while it grows, as it does when a user types it.
    words = [("token", {"text": f" {word}"}) for word in WORDS * 4]
    fake_completion(page, ("start", {"seed": 1234567890123456, "prompt_tokens": 4}), *words, DONE)
    throttle_stream(page, count=2, frames=1)
    heights = page.locator(".report").evaluate_handle("""(report) => {
        const heights = [];
        new ResizeObserver(() => heights.push(report.offsetHeight)).observe(report);
        return heights;
    }""")
    page.locator("#document").press("End")
    for _ in range(2):
        page.locator("#document").press("Control+Enter")
        wait_for(page, "done")
        page.wait_for_timeout(600)
    assert len(heights.json_value()) == 1, "the report has the same height while waiting, streaming and done"
    assert page.evaluate(SHIFTED) < 0.01
    page.locator("#document").press("Control+a")
    page.evaluate("() => document.querySelector('main').style.paddingTop = '100px'")
    page.wait_for_timeout(600)
    assert page.evaluate(SHIFTED) > 0.01, "control: a shift right after a key press is measured"


def test_stop_takes_the_place_and_the_focus_of_the_primary_button(page):
    hold_stream_open(page)
    primary = page.locator("#generate").bounding_box()
    page.locator("#generate").focus()
    click_generate(page)
    send_events(page, ("start", {"seed": 1}), ("token", {"text": " there"}))
    wait_for(page, "streaming")
    assert page.locator("#generate").is_hidden()
    assert page.evaluate("() => document.activeElement.id") == "stop"
    stop = page.locator("#stop").bounding_box()
    assert stop["x"] + stop["width"] == pytest.approx(primary["x"] + primary["width"]) and stop["y"] == primary["y"]
    caret = "() => getComputedStyle(document.querySelector('#mirror > :last-child'), '::after').content"
    assert page.evaluate(caret) == '""'
    page.keyboard.press("Enter")
    wait_for(page, "stopped")
    assert page.evaluate("() => document.activeElement.id") == "generate"
    assert page.evaluate(caret) == "none"


def test_the_seed_is_abbreviated_and_a_click_copies_all_of_it(page):
    allow_clipboard(page)
    fake_completion(page, *run_events(".", seed=1234567890123456))
    generate(page)
    assert page.locator("#used-seed").inner_text() == "123456\u2026"
    page.locator("#used-seed").click()
    page.locator("#used-seed", has_text="copied").wait_for()
    assert read_clipboard(page) == "1234567890123456" == used_seed(page)
    page.locator("#used-seed", has_text="123456\u2026").wait_for()
    assert status(page) == "Done (length)"


def test_model_size_and_context_are_those_of_the_weights_in_use(page, server):
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    facts = page.locator("#weights").inner_text()
    assert facts.endswith(f", context {model['max_model_len']}") and "M parameters" in facts
    assert page.locator("#weights").get_attribute("title") == model["weights_version"]
    other = {**model, "id": "other", "weights_version": "f" * 64, "n_params": 2_500_000_000, "max_model_len": 4096}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [other]}))
    started = {"seed": 1, "model": "other", "weights_version": "f" * 64}
    fake_completion(page, ("start", started), ("token", {"text": "."}), DONE)
    generate(page)
    page.locator("#weights", has_text="2.5\u00a0B parameters, context 4,096").wait_for()
    assert page.locator("#weights").get_attribute("title") == "f" * 64
    assert page.locator("#model").inner_text() == "other"


def test_a_shortcut_lists_the_keys_and_closing_restores_the_focus(page):
    page.locator("#document").press("?")
    assert page.locator("#help").is_hidden(), "in the text, ? is a character"
    page.locator("#document").press("Control+/")
    page.get_by_role("dialog", name="Keys").wait_for()
    assert page.locator("#help a").get_attribute("href") == "docs"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.id") == "document"
    page.locator("#regenerate").focus()
    page.keyboard.press("?")
    page.get_by_role("button", name="Close").press("Enter")
    assert page.locator("#help").is_hidden()


def test_preferences_apply_to_every_tab_and_both_pages_and_survive_a_reload(page):
    style = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    background, font = ["body", "backgroundColor"], ["#document", "fontFamily"]
    light, book = page.evaluate(style, background), page.evaluate(style, font)
    other = page.context.new_page()
    other.goto("/docs")
    page.bring_to_front()
    page.locator("#show-preferences").press("Enter")
    for choice in ("dark", "mono", "wide", "on"):
        page.get_by_role("radio", name=choice, exact=True).check(force=True)
    dark, mono = page.evaluate(style, background), page.evaluate(style, font)
    assert dark != light and mono != book
    other.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert other.evaluate(style, background) == dark
    page.reload()
    page.locator("html[data-theme=dark][data-font=mono][data-lines=wide]").wait_for(state="attached")
    assert page.evaluate("() => document.querySelector('#document').spellcheck") is True
    page.locator("#show-preferences").press("Enter")
    page.get_by_role("radio", name="dark", exact=True).press("ArrowLeft")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.locator("#mirror").wait_for(state="attached")
    widths = "() => ['#document', '#mirror'].map((one) => getComputedStyle(document.querySelector(one)).paddingLeft)"
    own, mirror = page.evaluate(widths)
    assert own == mirror, "the mirror covers the text exactly"
