"""Tokens in a real browser: their tints, keys to walk them, alternatives to take, bars of the next one."""

import itertools
import re

import pytest

from tests.support.page.browser import (
    DONE,
    PROMPT,
    answer_with,
    body_of,
    generate,
    play,
    run_of,
    saved,
    set_fields,
    status,
    text,
    trickle,
    wait_for,
)
from tests.support.page.token_view import WORDS, inspect, piece, played, shows, stream, token

COLOUR = "(e, name) => getComputedStyle(e)[name].match(/\\d+/g).slice(0, 3).map(Number)"

# What is seen


def test_all_text_is_shown_and_every_token_of_it_measured(page):
    prompt = "Once upon a time\n\nthere were\nna\u00efve \u2605 stars \U0001f600."
    page.locator("#document").fill(prompt)
    with page.expect_response("**/score") as answer:
        inspect(page)
    ids = [one["id"] for one in answer.value.json()["scores"][0]["tokens"]]
    page.wait_for_function("() => document.querySelectorAll('.token.spaced, .token[class*=tint]').length > 3")
    assert page.locator(".tokens").text_content() == prompt
    assert ids == page.request.post("/tokenize", data={"prompt": prompt}).json()["tokens"]
    assert page.locator(".tokens > div").count() == 4
    assert "tint" not in page.locator(".token").first.get_attribute("class"), "nothing stands before the first"


def test_a_run_tells_its_tokens_only_to_those_who_look(page):
    play(page, *run_of("!"))
    for look, logprobs in [(lambda: None, 0), (lambda: inspect(page), 20)]:
        look()
        with page.expect_request("**/complete") as request:
            generate(page)
        assert body_of(request.value)["logprobs"] == logprobs


@pytest.mark.parametrize("width", [1280, 390])
def test_the_text_does_not_move_when_the_view_changes(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    paragraph = " ".join(WORDS * 3)
    page.locator("#document").fill(f"{paragraph}.\n\n  {paragraph}\n{'w' * 200}\n\n{paragraph}")
    page.locator("#paper").evaluate("paper => { paper.scrollTop = 200 }")
    before = positions(page, "#mirror")
    with page.expect_response("**/score"):
        inspect(page)
    page.locator(".token[class*=tint]").nth(100).wait_for()  # it was measured, and that is drawn
    two_frames(page)
    after = positions(page, ".tokens")
    assert len(before) == len(after) > 600
    assert max(abs(a - b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True)) < 0.6


def two_frames(page):
    """What was to be drawn has been drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def positions(page, selector):
    """Left and top of every character that is no blank."""
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


def test_a_long_paragraph_looks_the_same_streamed_or_whole_and_at_every_width(page):
    stream(page, [f" {WORDS[i % len(WORDS)]}" for i in range(900)])
    page.wait_for_function("() => document.querySelectorAll('.token').length > 900")
    assert page.locator(".fold").count() > 0
    folded = positions(page, ".tokens")
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_function("() => !document.querySelector('.fold')")
    page.set_viewport_size({"width": 1280, "height": 800})
    two_frames(page)
    assert page.locator(".tokens > div").count() == 1
    moved = [max(abs(a - c), abs(b - d)) for (a, b), (c, d) in zip(folded, positions(page, ".tokens"), strict=True)]
    assert max(moved) < 0.6


def test_tints_grow_steadily_apart_from_the_paper_and_let_the_ink_be_read(page):
    inspect(page)
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


def test_the_view_can_be_opened_in_the_middle_of_a_run(page):
    page.locator("#document").fill("It is")
    play(page, ("start", {"seed": 1}), *played([f" {WORDS[i % len(WORDS)]}" for i in range(60)]), DONE)
    trickle(page, 1, frames=10)  # ten seconds, until we have seen it
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


def test_tokens_that_look_like_markup_are_text(page):
    markup = '<img src=x onerror="window.pwned = 1">'
    stream(page, [markup, " end"])
    token(page, markup).click()
    assert markup in page.get_by_role("dialog").inner_text().replace("\u00b7", " ")
    assert page.locator(".tokens").text_content() == "It is" + markup + " end"
    assert page.evaluate("() => [window.pwned ?? null, document.images.length]") == [None, 0]


# By hand and by ear


def test_arrow_keys_walk_the_tokens_and_one_has_the_focus(page):
    stream(page, [" one", " two", "\n", " three", " four"], prompt="")
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


# Where it cannot know


def test_of_a_text_beyond_the_context_the_beginning_is_plain(page):
    context = page.request.get("/v1/models").json()["data"][0]["max_model_len"]
    page.locator("#document").fill("word and " * context)
    count = page.request.post("/tokenize", data={"prompt": "word and " * context}).json()["count"]
    inspect(page)
    note = f"The first {count - context:,} tokens are beyond what the model reads."
    page.get_by_text(note).wait_for()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("#view-write").click()
    inspect(page)
    page.get_by_text(note).wait_for()
    assert asked == [], "all that can be measured was measured"
    assert page.locator(".tokens").text_content() == "word and " * context
    assert page.locator(".token").count() == context
    page.locator(".token").first.click()
    assert "The first token that the model reads" in page.get_by_role("dialog").inner_text()


# Alternatives, and selecting one


def test_the_popover_tells_the_place_and_goes_away_with_escape(page):
    stream(page, [" fine", " day"])
    token(page, "fine").click()
    popover = page.get_by_role("dialog")
    description = popover.inner_text().replace("\xa0", " ")
    # -0.5 log2 0.5 - 0.25 log2 0.25 - 2 (0.125 log2 0.125), the rest being 0.125
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


def test_an_alternative_is_taken_in_its_place_and_the_text_goes_on(page):
    stream(page, [" a", " fine", " day"])
    token(page, "fine").click()
    play(page, ("start", {"seed": 2}), *played([" world"]), DONE)
    with page.expect_request("**/complete") as request:
        page.get_by_role("button", name="'third', 13 %").click()
    assert body_of(request.value)["prompt"] == "It is a third"
    assert body_of(request.value)["logprobs"] == 20
    wait_for(page, "done")
    shows(page, "It is a third world")
    assert text(page) == "It is a third world"
    assert page.locator(".selected").text_content() == " third"
    assert page.evaluate("() => document.activeElement.classList.contains('selected')")
    page.locator("#undo").click()
    shows(page, "It is a fine day")


def test_what_one_looks_at_stays_while_the_rest_is_measured(page):
    routes = []
    page.route("**/score", lambda route: routes.append(route))
    stream(page, [" fine", " day"], prompt="")
    page.locator("#view-write").click()
    page.locator("#document").press("End")
    page.locator("#document").press_sequentially("!")
    before = len(routes)
    page.locator("#view-inspect").click()
    while len(routes) == before:
        page.wait_for_timeout(10)
    token(page, "fine").click()
    with page.expect_response("**/score"):
        routes[-1].continue_()
    token(page, "!").wait_for()
    assert "id 1000" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.textContent") == " fine"


def test_what_ends_the_text_cuts_it_and_a_part_of_a_character_says_why_not(page):
    top = [piece(b"\xe2\x98", 1, 0.5), piece(b"", 0, 0.25), piece(" day", 2, 0.125)]
    events = [("token", {"text": " day", "tokens": [{**top[2], "top": top}]})]
    stream(page, [" fine"])
    play(page, ("start", {"seed": 1}), *events, *played([" today"]), DONE)
    generate(page)
    token(page, "day").click()
    part = page.get_by_role("button", name="part of a character, E2 98, 50 %, cannot be taken")
    assert part.get_attribute("aria-disabled") == "true"
    part.click(force=True)
    assert "no text can end in it" in page.get_by_role("dialog").get_by_role("status").inner_text()
    page.get_by_role("button", name="end of text, 25 %, ends the text here").click()
    assert text(page) == "It is fine"
    assert page.locator('#status[data-state="streaming"]').count() == 0


def test_during_a_run_nothing_is_taken(page):
    stream(page, [" fine", " day"])
    page.unroute("**/complete")
    page.route("**/complete", lambda _: None)  # no answer, until it is stopped
    page.locator("#generate").click()
    token(page, "fine").click()
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
    return [tuple(parts[-3:]) for parts in words]  # in a button, its name in words comes first


def next_token(page, shares, **others):
    letters = "abcdefghijklmnopqrst"
    top = [piece(letters[i], i, share) for i, share in enumerate(shares)]
    choice = {"index": 0, "text": "a", "finish_reason": "length", "tokens": [{**top[0], "top": top, **others}]}
    answer_with(page, json={"choices": [choice]})


def test_bars_follow_the_settings_at_once_and_ask_once(page):
    next_token(page, [0.5, 0.25, 0.125, 0.06])
    asked = []
    page.on("request", lambda request: asked.append(body_of(request)) if request.method == "POST" else None)
    open_bars(page)
    assert asked == [
        {"prompt": PROMPT, "max_tokens": 1, "logprobs": 20, "stream": False, "temperature": 0},
    ]
    set_fields(page, temperature="1", top_p="0.7")
    assert bars(page)[:2] == [("a", "50 %", "67 %"), ("b", "25 %", "33 %")]
    assert page.locator("#bars .out").count() == 3
    set_fields(page, temperature="0.5", top_p="1")
    assert "Estimated" in page.locator("#bars .note").inner_text()
    page.locator("#panel .slider").first.press("End")  # of the temperature
    assert float(bars(page)[0][2].removesuffix(" %")) < 50
    page.get_by_text("More settings").click()
    set_fields(page, repetition_penalty="1.2", min_p="much")
    note = page.locator("#bars .note").inner_text()
    assert "Not drawn: repetition_penalty." in note and "min_p is no number, and not drawn." in note
    assert len(asked) == 1


def test_the_next_token_is_asked_for_when_the_hand_rests_and_taken_by_a_click(page):
    next_token(page, [0.5, 0.25])
    open_bars(page)
    prompts = []
    page.on("request", lambda one: prompts.append(body_of(one)["prompt"]) if one.method == "POST" else None)
    page.locator("#document").press("End")
    with page.expect_request("**/complete"):
        page.locator("#document").press("!")
    page.locator("#bars[aria-busy=false] button").first.wait_for()
    play(page, *run_of("!"))
    page.get_by_role("button", name=re.compile("^'b', 25 %")).click()
    wait_for(page, "done")
    assert prompts[:2] == [PROMPT + "!", PROMPT + "!b"], "then what follows the new text, if the hand has rested by now"
    assert text(page) == PROMPT + "!b!"


def test_in_the_inspect_view_the_bars_are_those_of_the_selected_token(page):
    stream(page, [" fine", " day"])
    page.locator("#next summary").click()
    page.locator("#bars").get_by_text("Select a token").wait_for()  # what is folded out is drawn a task later
    token(page, "fine").click()
    page.keyboard.press("Escape")
    assert [row[0].replace("\u00b7", " ") for row in bars(page)[:3]] == [" other", " fine", " third"]
    assert page.locator("#bars [aria-current] .label").inner_text() == "\u00b7fine"
    play(page, ("start", {"seed": 1}), *played([" end"]), DONE)
    page.locator("#bars").get_by_role("button", name=re.compile("'third'")).click()
    wait_for(page, "done")
    assert text(page) == "It is third end"


def test_a_full_context_and_a_refusal_are_said_in_the_place_of_bars(page):
    answer_with(page, json={"choices": [{"index": 0, "text": "", "finish_reason": "length", "tokens": []}]})
    page.locator("#next summary").click()
    page.get_by_text("no token can follow").wait_for()
    page.unroute("**/complete")
    answer_with(page, status=400, json={"error": {"message": "Too long."}})
    page.locator("#document").press_sequentially("!")
    page.locator("#bars").get_by_text("Too long.").wait_for()


def test_marks_keep_the_ink_and_show_what_is_chosen_and_the_table_is_a_file(page):
    trickle(page, frames=1)
    stream(page, [f" {word}" for word in WORDS], prompt="It is")
    own, model = page.locator(".token").first, token(page, "sailed")
    assert own.evaluate(COLOUR, "color") != model.evaluate(COLOUR, "color")
    assert "tint-1" in model.get_attribute("class"), "a probability of 0.25"
    label = page.get_by_role("img", name="surprise: mean")
    assert "tokens/s" in label.get_attribute("aria-label") and label.locator("path[d]").count() == 2
    page.get_by_label("Marks show").select_option("rank")
    assert "tint-1" in token(page, "sailed").get_attribute("class"), "the second of three"
    page.get_by_label("Marks show").select_option("entropy")
    assert "tint-1" in token(page, "sailed").get_attribute("class"), "1.75 bits"
    page.locator(".legend", has_text="bits up to").wait_for()
    _, table = saved(page, page.get_by_role("button", name="Save tokens as CSV").click)
    lines = table.decode().splitlines()
    assert lines[0].startswith("start,end,author,id,token,probability")
    written = [line for line in lines if ",model," in line]
    assert len(written) == len(WORDS) and '""" sailed"""' in written[3]
    assert all(line.split(",")[-1] for line in written[1:]), "when each token came"
    token(page, "sailed").click()
    assert page.get_by_role("dialog").get_by_text("after").count() == 1
