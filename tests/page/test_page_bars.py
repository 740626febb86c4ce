"""The bars of the next token, in a real browser."""

import re

from tests.support.page.browser import DONE, PROMPT, answer_with, play, set_fields, text, wait_for
from tests.support.page.token_view import piece, played, stream, token


def open_bars(page):
    page.locator("#next summary").click()
    page.locator("#bars[aria-busy=false] button").first.wait_for()


def bars(page):
    """[(token, model, sampled)]"""
    rows = page.locator("#bars li .alternative").all()
    return [tuple(row.inner_text().replace("\xa0", " ").split("\n")) for row in rows]


def next_token(page, shares, **others):
    letters = "abcdefghijklmnopqrst"
    top = [piece(letters[i], i, share) for i, share in enumerate(shares)]
    choice = {"index": 0, "text": "a", "finish_reason": "length", "tokens": [{**top[0], "top": top, **others}]}
    answer_with(page, json={"choices": [choice]})


def test_bars_follow_the_settings_at_once_and_ask_once(page):
    next_token(page, [0.5, 0.25, 0.125, 0.06])
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    open_bars(page)
    assert asked == [
        {"prompt": PROMPT, "max_tokens": 1, "logprobs": 20, "stream": False, "temperature": 0},
    ]
    set_fields(page, temperature="1", top_p="1")
    assert bars(page)[:2] == [("a", "50 %", "50 %"), ("b", "25 %", "25 %")]
    assert bars(page)[-1][1:] == ("6.5 %", "6.5 %")
    set_fields(page, top_p="0.7")
    assert [row[2] for row in bars(page)] == ["67 %", "33 %", "out", "out", "out"]
    assert page.locator("#bars .out").count() == 3
    assert page.locator("#bars .note").inner_text() == ""
    set_fields(page, temperature="0.5", top_p="1")
    assert "Estimated" in page.locator("#bars .note").inner_text()
    set_fields(page, temperature="0")
    assert [row[2] for row in bars(page)] == ["100 %", "out", "out", "out", "out"]
    width = page.locator("#bars button").first.locator(".outline").evaluate("e => e.style.width")
    assert width == "50%"
    page.locator("#panel .slider").first.press("End")  # of the temperature
    assert float(bars(page)[0][2].removesuffix(" %")) < 50
    page.get_by_text("More settings").click()
    set_fields(page, repetition_penalty="1.2", min_p="much")
    note = page.locator("#bars .note").inner_text()
    assert "Not drawn: repetition_penalty." in note
    assert "min_p is no number, and not drawn." in note
    assert len(asked) == 1


def test_the_next_token_is_asked_for_when_the_hand_rests_and_taken_by_a_click(page):
    next_token(page, [0.5, 0.25])
    open_bars(page)
    prompts = []
    page.on("request", lambda one: prompts.append(one.post_data_json["prompt"]) if one.method == "POST" else None)
    busy = page.evaluate_handle("""() => {
        const seen = [], bars = document.getElementById("bars");
        new MutationObserver(() => seen.push(bars.ariaBusy)).observe(bars, { attributeFilter: ["aria-busy"] });
        return seen;
    }""")
    # Key after key, and in one go: a busy machine would let the hand rest between two of them.
    page.locator("#document").focus()
    page.evaluate("() => { for (const key of ' there') document.execCommand('insertText', false, key); }")
    page.wait_for_function("seen => seen.length > 1", arg=busy)
    page.locator("#bars[aria-busy=false]").wait_for()
    assert busy.evaluate("seen => seen.shift()") == "true"
    assert prompts == [PROMPT + " there"]
    play(page, ("start", {"seed": 1}), ("token", {"text": "!"}), DONE)
    page.get_by_role("button", name=re.compile("^'b', 25 %")).click()
    wait_for(page, "done")
    assert prompts[1] == PROMPT + " thereb"
    assert text(page) == PROMPT + " thereb!"


def test_in_the_inspect_view_the_bars_are_those_of_the_selected_token(page):
    stream(page, [" fine", " day"])
    page.locator("#next summary").click()
    page.locator("#bars").get_by_text("Select a token").wait_for()  # what is folded out is drawn a task later
    token(page, "fine").click()
    page.keyboard.press("Escape")
    assert [row[0].replace("\u00b7", " ") for row in bars(page)[:3]] == [" other", " fine", " third"]
    assert page.locator("#bars [aria-current]").inner_text().startswith("\u00b7fine")
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
