"""Writing on the page in a real browser: long texts, caret, undo, other scripts, printing, phones."""

import base64

import httpx

from tests.support.page.browser import (
    CHROMIUM_ONLY,
    DONE,
    PROMPT,
    click_generate,
    done_event,
    draft_events,
    fake_completion,
    generate,
    json_body,
    override_model_info,
    run_events,
    set_fields,
    setting,
    status,
    text,
    wait_for,
)

LINES = "".join(f"Line {number} of a text that is longer than the window.\n" for number in range(120))


def fake_run(page, words="", *, prompt_tokens=5, completion_tokens=1):
    tokens = [("token", {"text": words})] if words else []
    done = (DONE[0], {**DONE[1], "usage": {"completion_tokens": completion_tokens}})
    fake_completion(page, ("start", {"seed": 7, "prompt_tokens": prompt_tokens}), *tokens, done)
    generate(page)


def context_of(server):
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]


def body_sent_by(page, act):
    with page.expect_request("**/complete") as request:
        act()
    return json_body(request.value)


def fill(page, words):
    page.locator("#document").fill(words)


def is_in_view(page, script):
    """Whether the rectangle that the script returns is inside the visible part of the sheet."""
    return page.evaluate(f"""() => {{
        const paper = document.getElementById("paper").getBoundingClientRect();
        const box = ({script})();
        return box.top >= paper.top && box.bottom <= paper.bottom;
    }}""")


LAST_LINE = "() => document.getElementById('mirror').lastElementChild.getBoundingClientRect()"
FIRST_LINE = "() => document.getElementById('mirror').firstElementChild.getBoundingClientRect()"


# Texts as long as the context


def test_a_text_that_fills_the_context_can_be_continued_from_its_end_also_after_a_reload(page, server):
    context = context_of(server)
    fake_run(page, prompt_tokens=context, completion_tokens=0)
    remedy = page.get_by_role("button", name="Go on from the end")
    assert remedy.is_visible(), status(page)
    assert "truncate_prompt_tokens" in body_sent_by(page, remedy.click)
    wait_for(page, "done")
    assert remedy.is_hidden(), "the user has agreed"
    page.reload()
    page.locator("#status", has_text="Ready").wait_for()
    assert "truncate_prompt_tokens" in body_sent_by(page, lambda: click_generate(page))


def test_truncation_is_offered_only_for_a_text_that_fills_the_context(page, server):
    context = context_of(server)
    remedy = page.get_by_role("button", name="Go on from the end")
    fake_run(page, " more", prompt_tokens=context - 2, completion_tokens=1)
    assert remedy.is_hidden()
    fake_run(page, " more", prompt_tokens=context - 1, completion_tokens=1)
    assert remedy.is_visible()
    page.locator("#undo").click()
    assert remedy.is_hidden()


def test_always_truncates_every_text_until_it_is_unchecked(page, server):
    fake_run(page, prompt_tokens=context_of(server), completion_tokens=0)
    page.get_by_label("Always go on from the end").check()
    fill(page, "Another text")
    assert "truncate_prompt_tokens" in body_sent_by(page, lambda: generate(page))
    page.get_by_label("Always go on from the end").uncheck()
    assert "truncate_prompt_tokens" not in body_sent_by(page, lambda: generate(page))


def test_the_context_use_is_that_of_the_longest_continuation(page):
    tokens = [("token", {"index": index, "text": " a"}) for index in (0, 0, 0, 1, 2)]
    name, end = done_event(3)
    fake_completion(
        page, ("start", {"seed": 7, "prompt_tokens": 4}), *tokens, (name, {**end, "usage": {"completion_tokens": 5}})
    )
    set_fields(page, n=3)
    generate(page)
    assert page.locator("#context").inner_text().startswith("7 of ")


# Scrolling to changes


def test_new_text_scrolls_into_view_when_the_caret_is_elsewhere(page):
    page.locator("#at-end").check()
    fill(page, LINES)
    page.locator("#document").evaluate("(area) => area.setSelectionRange(10, 10)")
    page.locator("#paper").evaluate("(paper) => paper.scrollTo(0, 0)")
    assert not is_in_view(page, LAST_LINE), "the text is longer than the view"
    fake_completion(page, *run_events("the end"))
    page.keyboard.press("Control+Enter")
    wait_for(page, "done")
    assert is_in_view(page, LAST_LINE)


def test_undo_and_redo_scroll_to_the_change(page):
    fill(page, LINES)
    page.locator("#document").evaluate("(area) => { area.setSelectionRange(0, 0); area.focus(); }")
    page.keyboard.insert_text("New. ")
    for button, position in (("#undo", 1e9), ("#redo", 1e9)):
        page.locator("#paper").evaluate("(paper, position) => paper.scrollTo(0, position)", position)
        assert not is_in_view(page, FIRST_LINE)
        page.locator(button).click()
        assert is_in_view(page, FIRST_LINE), button


DARKEST = """async (picture) => {
    const image = new Image();
    image.src = `data:image/png;base64,${picture}`;
    await image.decode();
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, image.width, image.height);
    let darkest = 255;
    for (let i = 0; i < data.length; i += 4) darkest = Math.min(darkest, (data[i] + data[i + 1] + data[i + 2]) / 3);
    return darkest;
}"""


def test_selected_text_is_readable(page):
    fill(page, "It rained.")
    page.locator("#document").press("Control+a")
    picture = page.locator("#mirror > div").screenshot(caret="hide")
    assert page.evaluate(DARKEST, base64.b64encode(picture).decode()) < 100, "the selection color hides the text"


def test_typing_replaces_the_sample_text_and_a_run_continues_the_selected_sample(page):
    page.keyboard.type("It rained.")
    assert text(page) == "It rained."
    while page.locator("#undo").get_attribute("aria-disabled") == "false":
        page.locator("#undo").click()
    assert text(page) == PROMPT
    page.reload()
    page.locator("#document").press("Control+a")
    fake_run(page, ", it rained")
    assert text(page) == f"{PROMPT}, it rained"
    page.locator("#document").press_sequentially("!")
    assert text(page) == f"{PROMPT}, it rained!", "the caret is at the end, and nothing is selected"


# Undo steps


def test_pasting_cutting_and_sentence_ends_start_undo_steps(page):
    fill(page, "One")
    page.locator("#document").press("End")
    page.keyboard.type(" two")
    page.evaluate("""() => {
        const area = document.getElementById("document");
        area.setRangeText(" three", area.value.length, area.value.length, "end");
        area.dispatchEvent(new InputEvent("input", { inputType: "insertFromPaste" }));
    }""")
    page.keyboard.type(" four. Five")
    page.keyboard.press("Control+a")
    page.keyboard.press("Control+x")
    page.keyboard.type("Six")
    seen = []
    for _ in range(6):
        seen.append(text(page))
        page.locator("#undo").click()
    whole = "One two three four. Five"
    assert seen == ["Six", "", whole, whole.removesuffix("Five"), "One two three", "One two"]


# Settings


def test_the_next_token_panel_covers_neither_focused_controls_nor_menus(page):
    page.set_viewport_size({"width": 1280, "height": 600})
    page.locator("#next > summary").click()
    page.locator("#bars button").first.wait_for()
    page.locator("#panel summary").click()
    count, covered = page.evaluate("""() => {
        const controls = [...document.querySelectorAll("#panel :is(input, select, textarea)")];
        const shown = controls.filter((one) => one.checkVisibility() && one.getBoundingClientRect().width);
        const isCovered = (one) => {
            one.focus();
            const { left, top, width, height } = one.getBoundingClientRect();
            const hit = document.elementFromPoint(left + width / 2, top + height / 2);
            return !one.contains(hit) && !hit?.contains(one);
        };
        return [shown.length, shown.filter(isCovered).map(({ id }) => id)];
    }""")
    assert count > 20 and covered == []
    page.get_by_role("button", name="Copy as").click()
    for item in page.get_by_role("menuitem").all():
        item.click(trial=True, timeout=5000)


def test_a_model_with_an_encoder_shows_and_focuses_the_source_field(page):
    override_model_info(page, has_encoder=True)
    setting(page, "source").wait_for(state="visible")
    page.wait_for_function("() => document.activeElement.id === 'setting-source'")


def test_a_failed_request_for_the_model_is_reported(page):
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    page.locator("#status", has_text="Error: The server cannot be reached.").wait_for()


def test_bars_fit_their_tracks_and_only_changed_penalties_are_noted_as_not_drawn(page):
    top = [{"id": n, "text": f" {n}", "bytes": [32, 48 + n], "logprob": -3.0 - n} for n in range(3)]
    body = {"choices": [{"tokens": [{**top[0], "top": top}]}]}
    page.route("**/complete", lambda route: route.fulfill(json=body))
    override_model_info(page, sampling_defaults={"repetition_penalty": 1.2})
    page.locator("#next > summary").click()
    widths = (
        "() => [...document.querySelectorAll('#bars .outline, #bars .fill')].map((bar) => parseFloat(bar.style.width))"
    )
    page.wait_for_function(f"() => ({widths})().length")
    assert max(page.evaluate(widths)) <= 100
    assert "0 to 100 %" in page.locator("#bars").inner_text(), "the scale includes the bar of all other tokens"
    assert "Not drawn" not in page.locator("#bars").inner_text()
    page.locator("#panel summary").click()
    set_fields(page, presence_penalty=0.5)
    page.get_by_text("Not drawn: presence_penalty.").wait_for()


# Other scripts, printing, phones


def test_each_line_starts_on_the_side_of_its_script(page):
    fill(page, "Hello\n\u05e9\u05dc\u05d5\u05dd")
    sides = page.evaluate("""() => [...document.querySelectorAll("#mirror > div")].map((line) => {
        const [box, words] = [line.getBoundingClientRect(), line.firstChild.getBoundingClientRect()];
        return words.left - box.left < 1 ? "left" : box.right - words.right < 1 ? "right" : "";
    })""")
    assert sides == ["left", "right"]
    assert page.locator("#document").evaluate("(area) => getComputedStyle(area).unicodeBidi") == "plaintext"


@CHROMIUM_ONLY
def test_only_the_whole_text_is_printed(page):
    fill(page, LINES)
    page.emulate_media(media="print")
    assert page.evaluate(f"() => ({LAST_LINE})().bottom <= document.documentElement.scrollHeight")
    assert page.locator("#paper").evaluate("(paper) => paper.scrollHeight <= paper.clientHeight + 1")
    for hidden in ("aside", ".actions", ".masthead", "#document"):
        assert page.locator(hidden).is_hidden(), hidden


def test_on_a_phone_continuations_are_stacked_without_their_own_scroll_area(page):
    page.set_viewport_size({"width": 390, "height": 780})
    fake_completion(page, *draft_events(*[" word" * 60] * 3))
    set_fields(page, n=3)
    generate(page)
    assert page.locator("#columns").evaluate("(one) => one.scrollHeight <= one.clientHeight + 1")
    page.get_by_role("button", name="Take this 3").click()
    assert text(page).endswith(" word")
