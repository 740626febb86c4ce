"""A token's alternatives, and selecting one, in a real browser."""

from tests.support.page.browser import DONE, generate, play, status, text, wait_for
from tests.support.page.token_view import detail, piece, played, shows, stream, token


def test_the_popover_tells_the_place_and_goes_away_with_escape(page):
    stream(page, [" fine", " day"])
    token(page, "fine").click()
    popover = page.get_by_role("dialog")
    description = popover.inner_text().replace("\xa0", " ")
    # -0.5 log2 0.5 - 0.25 log2 0.25 - 2 (0.125 log2 0.125), the rest being 0.125
    for words in ("25 %", "rank\n2", "2.0 bits", "\u2265 1.8 bits", "id 1000"):
        assert words in description
    names = [button.get_attribute("aria-label") for button in popover.get_by_role("button").all()]
    assert names == ["'other', 50 %", "'fine', 25 %, chosen", "'third', 13 %"]
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == names[1]
    for key, name in [("ArrowDown", names[2]), ("ArrowDown", names[2]), ("Home", names[0]), ("End", names[2])]:
        page.keyboard.press(key)
        assert page.evaluate(focused) == name
    page.keyboard.press("Escape")
    assert popover.count() == 0
    assert page.evaluate(focused).startswith("token 'fine'")
    page.keyboard.press("Enter")
    assert popover.count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press(" ")
    assert popover.count() == 1


def test_a_token_beyond_those_that_were_told_is_shown_behind_them(page):
    stream(page, [" fine"])
    far = {**piece(" far", 5, 0.001), "top": detail(" x", 7)["top"]}
    play(page, ("start", {"seed": 1}), ("token", {"text": " far", "tokens": [far]}), DONE)
    generate(page)
    token(page, "far").click()
    assert "beyond 3" in page.get_by_role("dialog").inner_text()
    assert page.get_by_role("dialog").get_by_role("button").last.get_attribute("aria-label") == "'far', 0.1 %, chosen"


# Another way


def test_an_alternative_is_taken_in_its_place_and_the_text_goes_on(page):
    stream(page, [" a", " fine", " day"])
    token(page, "fine").click()
    play(page, ("start", {"seed": 2}), *played([" world"]), DONE)
    with page.expect_request("**/complete") as request:
        page.get_by_role("button", name="'third', 13 %").click()
    assert request.value.post_data_json["prompt"] == "It is a third"
    assert request.value.post_data_json["logprobs"] == 20
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


def test_a_character_of_several_tokens_is_one_place(page):
    parts = [detail(bytes([byte]), 50 + i) for i, byte in enumerate("\u2605".encode())]
    stream(page, [" a"])
    play(page, ("start", {"seed": 1}), ("token", {"text": "\u2605", "tokens": parts}), DONE)
    generate(page)
    token(page, "\u2605").click()
    assert "One character of 3 tokens" in page.get_by_role("dialog").inner_text()
    assert "1.6" in page.get_by_role("dialog").locator("strong").inner_text(), "0.25 to the third"


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
