"""Tokens in a real browser: tints, keyboard navigation, alternatives, and the bars of the next token."""

import itertools
import re

import pytest

from tests.support.page.browser import (
    DONE,
    PROMPT,
    capture_download,
    fake_completion,
    fake_response,
    generate,
    json_body,
    run_events,
    set_fields,
    status,
    text,
    throttle_stream,
    wait_for,
)
from tests.support.page.token_view import (
    WORDS,
    find_token,
    make_token,
    open_inspect_view,
    stream_into_inspect_view,
    token_events,
    wait_for_inspected_text,
)

COLOUR = "(e, name) => getComputedStyle(e)[name].match(/\\d+/g).slice(0, 3).map(Number)"

# The inspect view


def test_all_text_is_shown_and_every_token_is_scored(page):
    prompt = "Once upon a time\n\nthere were\nna\u00efve \u2605 stars \U0001f600."
    page.locator("#document").fill(prompt)
    with page.expect_response("**/score") as response:
        open_inspect_view(page)
    ids = [one["id"] for one in response.value.json()["scores"][0]["tokens"]]
    page.wait_for_function("() => document.querySelectorAll('.token.spaced, .token[class*=tint]').length > 3")
    assert page.locator(".tokens").text_content() == prompt
    assert ids == page.request.post("/tokenize", data={"prompt": prompt}).json()["tokens"]
    assert page.locator(".tokens > div").count() == 4
    assert "tint" not in page.locator(".token").first.get_attribute("class"), "the first token has no probability"


def test_runs_request_logprobs_only_in_the_inspect_view(page):
    fake_completion(page, *run_events("!"))
    for look, logprobs in [(lambda: None, 0), (lambda: open_inspect_view(page), 20)]:
        look()
        with page.expect_request("**/complete") as request:
            generate(page)
        assert json_body(request.value)["logprobs"] == logprobs


@pytest.mark.parametrize("width", [1280, 390])
def test_switching_views_does_not_move_the_text(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    paragraph = " ".join(WORDS * 3)
    page.locator("#document").fill(f"{paragraph}.\n\n  {paragraph}\n{'w' * 200}\n\n{paragraph}")
    page.locator("#paper").evaluate("paper => { paper.scrollTop = 200 }")
    before = positions(page, "#mirror")
    with page.expect_response("**/score"):
        open_inspect_view(page)
    page.locator(".token[class*=tint]").nth(100).wait_for()  # scored and painted
    wait_two_frames(page)
    after = positions(page, ".tokens")
    assert len(before) == len(after) > 600
    assert max(abs(a - b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True)) < 0.6


def test_only_new_text_scrolls_the_inspect_view(page):
    stream_into_inspect_view(page, [f" {word}" for word in WORDS * 40])
    wait_two_frames(page)
    top = "paper => paper.scrollTop"
    before = page.locator("#paper").evaluate(top)
    assert before > 400, "the view did not follow the text"
    page.set_viewport_size({"width": 1280, "height": 700})
    wait_two_frames(page)
    assert page.locator("#paper").evaluate(top) == before
    page.locator("#view-write").click()
    wait_two_frames(page)
    assert page.locator("#paper").evaluate(top) == before


def wait_two_frames(page):
    """Waits two frames, after which pending changes are painted."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def positions(page, selector):
    """[left, top] of every letter, digit and period."""
    return page.evaluate(
        """(selector) => {
        const walker = document.createTreeWalker(document.querySelector(selector), NodeFilter.SHOW_TEXT);
        const positions = [], range = document.createRange();
        while (walker.nextNode()) {
            const text = walker.currentNode.data;
            for (let at = 0; at < text.length; at++) {
                if (!/[\\w.]/.test(text[at])) continue;
                range.setStart(walker.currentNode, at);
                range.setEnd(walker.currentNode, at + 1);
                const { left, top } = range.getBoundingClientRect();
                positions.push([left, top]);
            }
        }
        return positions;
    }""",
        selector,
    )


def test_a_long_paragraph_has_the_same_layout_streamed_in_parts_or_rendered_whole(page):
    stream_into_inspect_view(page, [f" {WORDS[i % len(WORDS)]}" for i in range(900)])
    page.wait_for_function("() => document.querySelectorAll('.token').length > 900")
    assert page.locator(".fold").count() > 0
    folded = positions(page, ".tokens")
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_function("() => !document.querySelector('.fold')")
    page.set_viewport_size({"width": 1280, "height": 800})
    wait_two_frames(page)
    assert page.locator(".tokens > div").count() == 1
    moved = [max(abs(a - c), abs(b - d)) for (a, b), (c, d) in zip(folded, positions(page, ".tokens"), strict=True)]
    assert max(moved) < 0.6


def test_tints_increase_in_contrast_and_keep_text_readable(page):
    open_inspect_view(page)
    grounds = set()
    for scheme in ("light", "dark"):
        page.evaluate("(scheme) => (document.documentElement.dataset.theme = scheme)", scheme)
        page.wait_for_function("() => document.getAnimations().every(({ playState }) => playState !== 'running')")
        ground, ink = page.locator("#paper").evaluate(COLOUR, "backgroundColor"), page.locator(".page").first
        grounds.add(tuple(ground))
        steps = [page.locator(f".legend .tint-{step}").evaluate(COLOUR, "backgroundColor") for step in range(6)]
        contrasts = [contrast(step, ground) for step in steps]
        assert contrasts == sorted(contrasts), scheme
        assert min(b / a for a, b in itertools.pairwise(contrasts[1:])) > 1.1, scheme
        assert min(contrast(step, ink.evaluate(COLOUR, "color")) for step in steps) >= 4.5, scheme
    assert len(grounds) == 2


def contrast(one, other):
    dark, light = sorted(luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_inspect_view_can_be_opened_during_a_run(page):
    page.locator("#document").fill("It is")
    fake_completion(page, ("start", {"seed": 1}), *token_events([f" {WORDS[i % len(WORDS)]}" for i in range(60)]), DONE)
    throttle_stream(page, 1, frames=10)  # 10 s, unless hurried below
    page.locator("#document").press("Control+Enter")
    page.locator('#status[data-state="streaming"]').wait_for()
    page.keyboard.press("Control+i")
    page.locator(".token").nth(5).wait_for()
    page.evaluate("() => { window.hurries = true; }")
    wait_for(page, "done")
    page.locator(".token").nth(60).wait_for()
    assert page.locator(".tokens").text_content() == text(page)
    page.keyboard.press("Control+i")
    assert page.evaluate("() => document.activeElement.id") == "document"


def test_tokens_that_look_like_markup_are_shown_as_text(page):
    markup = '<img src=x onerror="window.pwned = 1">'
    stream_into_inspect_view(page, [markup, " end"])
    find_token(page, markup).click()
    assert markup in page.get_by_role("dialog").inner_text().replace("\u00b7", " ")
    assert page.locator(".tokens").text_content() == "It is" + markup + " end"
    assert page.evaluate("() => [window.pwned ?? null, document.images.length]") == [None, 0]


# Keyboard and screen reader


def test_arrow_keys_move_the_focus_from_token_to_token(page):
    stream_into_inspect_view(page, [" one", " two", "\n", " three", " four"], prompt="")
    page.locator("#show-help").press("Tab")
    for key, where in [
        ("ArrowRight", " two"),
        ("ArrowDown", " four"),
        ("ArrowUp", " two"),
        ("End", "\n"),
        ("ArrowRight", " three"),
        ("ArrowLeft", "\n"),
        ("Home", " one"),
        ("ArrowLeft", " one"),
        ("Control+End", " four"),
        ("Control+Home", " one"),
    ]:
        page.keyboard.press(key)
        assert page.locator(".selected").first.text_content() == where, key
        assert page.locator(".tokens [tabindex='0']").count() == 1
        assert page.evaluate("() => document.activeElement.classList.contains('selected')")
    assert page.locator(".selected").get_attribute("aria-label") == "token 'one', 25 %, rank 2, 2.0 bits"
    assert page.locator(".selected").get_attribute("data-before") == "\u00b7"
    page.keyboard.press("End")
    assert page.locator(".selected").get_attribute("data-after") == "\u21b5"
    assert page.locator(".selected").get_attribute("aria-label") == "token line end, 25 %, rank 2, 2.0 bits"


# Texts longer than the context


def test_tokens_before_the_context_window_are_shown_plain(page):
    context = page.request.get("/v1/models").json()["data"][0]["max_model_len"]
    page.locator("#document").fill("word and " * context)
    count = page.request.post("/tokenize", data={"prompt": "word and " * context}).json()["count"]
    open_inspect_view(page)
    note = f"The first {count - context:,} tokens are beyond what the model reads."
    page.get_by_text(note).wait_for()
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    page.locator("#view-write").click()
    open_inspect_view(page)
    page.get_by_text(note).wait_for()
    assert urls == [], "every token that can be scored has been scored"
    assert page.locator(".tokens").text_content() == "word and " * context
    assert page.locator(".token").count() == context
    page.locator(".token").first.click()
    assert "The first token that the model reads" in page.get_by_role("dialog").inner_text()


# Alternatives, and selecting one


def test_the_popover_describes_the_token_and_closes_with_escape(page):
    stream_into_inspect_view(page, [" fine", " day"])
    find_token(page, "fine").click()
    popover = page.get_by_role("dialog")
    description = popover.inner_text().replace("\xa0", " ")
    # entropy: -0.5 log2 0.5 - 0.25 log2 0.25 - 2 (0.125 log2 0.125), where the other tokens have 0.125
    for words in ("25 %", "rank\n2", "2.0 bits", "\u2265 1.8 bits", "id 1000"):
        assert words in description
    names = popover.locator("button .unseen").all_text_contents()
    assert names == ["'other', 50 %", "'fine', 25 %, chosen", "'third', 13 %"]
    focused = "() => document.activeElement.querySelector('.unseen').textContent"
    assert page.evaluate(focused) == names[1]
    for key, name in [("ArrowDown", names[2]), ("ArrowDown", names[2]), ("Home", names[0]), ("End", names[2])]:
        page.keyboard.press(key)
        assert page.evaluate(focused) == name
    page.keyboard.press("Escape")
    assert popover.count() == 0
    assert page.evaluate("() => document.activeElement.ariaLabel").startswith("token 'fine'")
    page.keyboard.press("Enter")
    assert popover.count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press(" ")
    assert popover.count() == 1


def test_taking_an_alternative_replaces_the_token_and_continues_the_text(page):
    stream_into_inspect_view(page, [" a", " fine", " day"])
    find_token(page, "fine").click()
    fake_completion(page, ("start", {"seed": 2}), *token_events([" world"]), DONE)
    with page.expect_request("**/complete") as request:
        page.get_by_role("button", name="'third', 13 %").click()
    assert json_body(request.value)["prompt"] == "It is a third"
    assert json_body(request.value)["logprobs"] == 20
    wait_for(page, "done")
    wait_for_inspected_text(page, "It is a third world")
    assert text(page) == "It is a third world"
    assert page.locator(".selected").text_content() == " third"
    assert page.evaluate("() => document.activeElement.classList.contains('selected')")
    page.locator("#undo").click()
    wait_for_inspected_text(page, "It is a fine day")


def test_the_popover_stays_open_while_other_tokens_are_scored(page):
    routes = []
    page.route("**/score", lambda route: routes.append(route))
    stream_into_inspect_view(page, [" fine", " day"], prompt="")
    page.locator("#view-write").click()
    page.locator("#document").press("End")
    page.locator("#document").press_sequentially("!")
    before = len(routes)
    page.locator("#view-inspect").click()
    while len(routes) == before:
        page.wait_for_timeout(10)
    find_token(page, "fine").click()
    with page.expect_response("**/score"):
        routes[-1].continue_()
    find_token(page, "!").wait_for()
    assert "id 1000" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.textContent") == " fine"


def test_taking_end_of_text_truncates_and_part_of_a_character_cannot_be_taken(page):
    top = [make_token(b"\xe2\x98", 1, 0.5), make_token(b"", 0, 0.25), make_token(" day", 2, 0.125)]
    events = [("token", {"text": " day", "tokens": [{**top[2], "top": top}]})]
    stream_into_inspect_view(page, [" fine"])
    fake_completion(page, ("start", {"seed": 1}), *events, *token_events([" today"]), DONE)
    generate(page)
    find_token(page, "day").click()
    part = page.get_by_role("button", name="part of a character, E2 98, 50 %, cannot be taken")
    assert part.get_attribute("aria-disabled") == "true"
    part.click(force=True)
    assert "no text can end in it" in page.get_by_role("dialog").get_by_role("status").inner_text()
    page.get_by_role("button", name="end of text, 25 %, ends the text here").click()
    assert text(page) == "It is fine"
    assert page.locator('#status[data-state="streaming"]').count() == 0


def test_alternatives_cannot_be_taken_during_a_run(page):
    stream_into_inspect_view(page, [" fine", " day"])
    page.unroute("**/complete")
    page.route("**/complete", lambda _: None)  # never answered: the run lasts until Stop
    page.locator("#generate").click()
    find_token(page, "fine").click()
    page.get_by_role("button", name="'third', 13 %").click()
    assert "Stop the run first" in status(page)
    page.locator("#stop").click()
    page.locator('#status[data-state="stopped"]').wait_for()
    assert text(page) == "It is fine day"


# The bars of the next token


def open_bars(page):
    page.locator("#next summary").click()
    page.locator("#bars[aria-busy=false] button").first.wait_for()


def bars(page):
    """[(token, model, sampled)]"""
    rows = page.locator("#bars li .alternative").all()
    words = [row.inner_text().replace("\xa0", " ").split("\n") for row in rows]
    return [tuple(parts[-3:]) for parts in words]  # a button's accessible name comes first


def fake_next_token(page, probabilities, **others):
    letters = "abcdefghijklmnopqrst"
    top = [make_token(letters[i], i, probability) for i, probability in enumerate(probabilities)]
    choice = {"index": 0, "text": "a", "finish_reason": "length", "tokens": [{**top[0], "top": top, **others}]}
    fake_response(page, json={"choices": [choice]})


def test_bars_follow_the_settings_without_another_request(page):
    fake_next_token(page, [0.5, 0.25, 0.125, 0.06])
    bodies = []
    page.on("request", lambda request: bodies.append(json_body(request)) if request.method == "POST" else None)
    open_bars(page)
    assert bodies == [
        {"prompt": PROMPT, "max_tokens": 1, "logprobs": 20, "stream": False, "temperature": 0},
    ]
    set_fields(page, temperature="1", top_p="0.7")
    assert bars(page)[:2] == [("a", "50 %", "67 %"), ("b", "25 %", "33 %")]
    assert page.locator("#bars .out").count() == 3
    set_fields(page, temperature="0.5", top_p="1")
    assert "Estimated" in page.locator("#bars .note").inner_text()
    page.locator("#panel .slider").first.press("End")  # temperature
    assert float(bars(page)[0][2].removesuffix(" %")) < 50
    page.get_by_text("More settings").click()
    set_fields(page, repetition_penalty="1.2", min_p="much")
    note = page.locator("#bars .note").inner_text()
    assert "Not drawn: repetition_penalty." in note and "min_p is no number, and not drawn." in note
    assert len(bodies) == 1


def test_the_next_token_is_requested_after_a_typing_pause_and_taken_by_a_click(page):
    fake_next_token(page, [0.5, 0.25])
    open_bars(page)
    prompts = []
    page.on("request", lambda one: prompts.append(json_body(one)["prompt"]) if one.method == "POST" else None)
    page.locator("#document").press("End")
    with page.expect_request("**/complete"):
        page.locator("#document").press("!")
    page.locator("#bars[aria-busy=false] button").first.wait_for()
    fake_completion(page, *run_events("!"))
    page.get_by_role("button", name=re.compile("^'b', 25 %")).click()
    wait_for(page, "done")
    assert prompts[:2] == [PROMPT + "!", PROMPT + "!b"], "a request for the token after the new text may follow"
    assert text(page) == PROMPT + "!b!"


def test_in_the_inspect_view_the_bars_show_the_selected_token(page):
    stream_into_inspect_view(page, [" fine", " day"])
    page.locator("#next summary").click()
    page.locator("#bars").get_by_text("Select a token").wait_for()  # <details> renders a task after it opens
    find_token(page, "fine").click()
    page.keyboard.press("Escape")
    assert [row[0].replace("\u00b7", " ") for row in bars(page)[:3]] == [" other", " fine", " third"]
    assert page.locator("#bars [aria-current] .label").inner_text() == "\u00b7fine"
    fake_completion(page, ("start", {"seed": 1}), *token_events([" end"]), DONE)
    page.locator("#bars").get_by_role("button", name=re.compile("'third'")).click()
    wait_for(page, "done")
    assert text(page) == "It is third end"


def test_a_full_context_or_an_error_is_shown_instead_of_bars(page):
    fake_response(page, json={"choices": [{"index": 0, "text": "", "finish_reason": "length", "tokens": []}]})
    page.locator("#next summary").click()
    page.get_by_text("no token can follow").wait_for()
    page.unroute("**/complete")
    fake_response(page, status=400, json={"error": {"message": "Too long."}})
    page.locator("#document").press_sequentially("!")
    page.locator("#bars").get_by_text("Too long.").wait_for()


def test_marks_show_the_chosen_measure_and_tokens_can_be_saved_as_csv(page):
    throttle_stream(page, frames=1)
    stream_into_inspect_view(page, [f" {word}" for word in WORDS], prompt="It is")
    own, model = page.locator(".token").first, find_token(page, "sailed")
    assert own.evaluate(COLOUR, "color") != model.evaluate(COLOUR, "color")
    assert "tint-1" in model.get_attribute("class"), "a probability of 0.25"
    label = page.get_by_role("img", name="surprise: mean")
    assert "tokens/s" in label.get_attribute("aria-label") and label.locator("path[d]").count() == 2
    page.get_by_label("Marks show").select_option("rank")
    assert "tint-1" in find_token(page, "sailed").get_attribute("class"), "the second of three"
    page.get_by_label("Marks show").select_option("entropy")
    assert "tint-1" in find_token(page, "sailed").get_attribute("class"), "1.75 bits"
    page.locator(".legend", has_text="bits up to").wait_for()
    _, table = capture_download(page, page.get_by_role("button", name="Save tokens as CSV").click)
    lines = table.decode().splitlines()
    assert lines[0].startswith("start,end,author,id,token,probability")
    written = [line for line in lines if ",model," in line]
    assert len(written) == len(WORDS) and '""" sailed"""' in written[3]
    assert all(line.split(",")[-1] for line in written[1:]), "the arrival time of each token"
    find_token(page, "sailed").click()
    assert page.get_by_role("dialog").get_by_text("after").count() == 1
