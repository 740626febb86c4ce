"""What frames the text: the model's facts, the seed, Stop, help, preferences, and that nothing moves by itself."""

import httpx
import pytest

from tests.support.page.browser import (
    BROWSER,
    DONE,
    allow_clipboard,
    clipboard,
    generate,
    give,
    keep_answers_open,
    play,
    run_of,
    start,
    status,
    trickle,
    used_seed,
    wait_for,
)
from tests.support.page.token_view import WORDS

# All of them: what moves within half a second of a key is excused by the browser's own score, and still moves.
SHIFTS = """window.shifts = []; new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) shifts.push(entry.value);
}).observe({ type: "layout-shift", buffered: true });"""
SHIFTED = "() => shifts.reduce((sum, value) => sum + value, 0)"


@pytest.mark.skipif(BROWSER == "firefox", reason="Firefox reports no layout shifts")
@pytest.mark.parametrize("width", [1280, 390])
def test_loading_and_two_runs_move_nothing_and_take_few_requests(page, width):
    asked = []
    page.on("request", lambda request: asked.append(request))
    page.add_init_script(SHIFTS)
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    page.locator('#status[data-state="idle"]').wait_for()
    page.locator("#panel summary").wait_for()
    assert 4 <= len(asked) <= 5, [request.url for request in asked]
    # Whole words: one of several tokens may leave its line while it grows, as it does where a user types it.
    words = [("token", {"text": f" {word}"}) for word in WORDS * 4]
    play(page, ("start", {"seed": 1234567890123456, "prompt_tokens": 4}), *words, DONE)
    trickle(page, count=2, frames=1)
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
    assert len(heights.json_value()) == 1, "waiting, streaming and done take the same lines"
    assert page.evaluate(SHIFTED) < 0.01
    page.locator("#document").press("Control+a")
    page.evaluate("() => document.querySelector('main').style.paddingTop = '100px'")
    page.wait_for_timeout(600)
    assert page.evaluate(SHIFTED) > 0.01, "the control, right after a key"


def test_stop_stands_in_the_place_of_the_primary_button_and_has_its_focus(page):
    keep_answers_open(page)
    place = page.locator("#generate").bounding_box()
    page.locator("#generate").focus()
    start(page)
    give(page, ("start", {"seed": 1}), ("token", {"text": " there"}))
    wait_for(page, "streaming")
    assert page.locator("#generate").is_hidden()
    assert page.evaluate("() => document.activeElement.id") == "stop"
    stop = page.locator("#stop").bounding_box()
    assert stop["x"] + stop["width"] == pytest.approx(place["x"] + place["width"]) and stop["y"] == place["y"]
    caret = "() => getComputedStyle(document.querySelector('#mirror > :last-child'), '::after').content"
    assert page.evaluate(caret) == '""'
    page.keyboard.press("Enter")
    wait_for(page, "stopped")
    assert page.evaluate("() => document.activeElement.id") == "generate"
    assert page.evaluate(caret) == "none"


def test_the_seed_is_short_and_a_click_copies_all_of_it(page):
    allow_clipboard(page)
    play(page, *run_of(".", seed=1234567890123456))
    generate(page)
    assert page.locator("#used-seed").inner_text() == "123456\u2026"
    page.locator("#used-seed").click()
    page.locator("#used-seed", has_text="copied").wait_for()
    assert clipboard(page) == "1234567890123456" == used_seed(page)
    page.locator("#used-seed", has_text="123456\u2026").wait_for()
    assert status(page) == "Done (length)"


def test_the_models_size_and_context_are_those_of_the_weights_that_answer(page, server):
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    facts = page.locator("#weights").inner_text()
    assert facts.endswith(f", context {model['max_model_len']}") and "M parameters" in facts
    assert page.locator("#weights").get_attribute("title") == model["weights_version"]
    other = {**model, "id": "other", "weights_version": "f" * 64, "n_params": 2_500_000_000, "max_model_len": 4096}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [other]}))
    begun = {"seed": 1, "model": "other", "weights_version": "f" * 64}
    play(page, ("start", begun), ("token", {"text": "."}), DONE)
    generate(page)
    page.locator("#weights", has_text="2.5\u00a0B parameters, context 4,096").wait_for()
    assert page.locator("#weights").get_attribute("title") == "f" * 64
    assert page.locator("#model").inner_text() == "other"


def test_the_keys_are_listed_by_a_key_and_the_focus_comes_back(page):
    page.locator("#document").press("?")
    assert page.locator("#help").is_hidden(), "in the text it is a letter"
    page.locator("#document").press("Control+/")
    page.get_by_role("dialog", name="Keys").wait_for()
    assert page.locator("#help a").get_attribute("href") == "docs"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.id") == "document"
    page.locator("#regenerate").focus()
    page.keyboard.press("?")
    page.get_by_role("button", name="Close").press("Enter")
    assert page.locator("#help").is_hidden()


def test_preferences_hold_in_every_tab_on_both_pages_and_after_a_reload(page):
    style = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    ground, face = ["body", "backgroundColor"], ["#document", "fontFamily"]
    light, book = page.evaluate(style, ground), page.evaluate(style, face)
    other = page.context.new_page()
    other.goto("/docs")
    page.bring_to_front()
    page.locator("#show-preferences").press("Enter")
    for choice in ("dark", "mono", "wide", "on"):
        page.get_by_role("radio", name=choice, exact=True).check(force=True)
    dark, mono = page.evaluate(style, ground), page.evaluate(style, face)
    assert dark != light and mono != book
    other.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert other.evaluate(style, ground) == dark
    page.reload()
    page.locator("html[data-theme=dark][data-font=mono][data-lines=wide]").wait_for(state="attached")
    assert page.evaluate("() => document.querySelector('#document').spellcheck") is True
    page.locator("#show-preferences").press("Enter")
    page.get_by_role("radio", name="dark", exact=True).press("ArrowLeft")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.locator("#mirror").wait_for(state="attached")
    widths = "() => ['#document', '#mirror'].map((one) => getComputedStyle(document.querySelector(one)).paddingLeft)"
    own, mirror = page.evaluate(widths)
    assert own == mirror, "the mirror lies on the text"
