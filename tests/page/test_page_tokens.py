"""The token view: every token tinted by its probability, with keyboard navigation, in a real browser."""

import itertools

import pytest

from tests.support.page.browser import DONE, PROMPT, generate, play, text, trickle, wait_for
from tests.support.page.token_view import WORDS, inspect, played, shows, stream, token

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


def test_what_a_run_told_is_not_asked_again(page):
    asked = []
    page.on("request", lambda one: asked.append(one.url.rsplit("/", 1)[-1]) if one.method == "POST" else None)
    stream(page, [" a", " fine", " day"])
    assert asked == ["tokenize", "score", "complete"]
    page.locator("#view-write").click()
    page.locator("#view-inspect").click()
    shows(page, "It is a fine day")
    page.locator("#view-write").click()
    page.locator("#document").press("End")
    page.locator("#document").press_sequentially("s")
    with page.expect_response("**/score"):
        page.locator("#view-inspect").click()
    assert asked[3:] == ["tokenize", "score"], "no response has included the typed text"


def test_a_run_tells_its_tokens_only_to_those_who_look(page):
    play(page, ("start", {"seed": 1}), ("token", {"text": "!"}), DONE)
    for look, logprobs in [(lambda: None, None), (lambda: inspect(page), 20)]:
        look()
        with page.expect_request("**/complete") as request:
            generate(page)
        assert request.value.post_data_json.get("logprobs") == logprobs


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


def test_the_sheet_stays_in_its_place_when_the_service_tells_what_it_serves(page):
    page.set_viewport_size({"width": 390, "height": 800})
    routes = []
    page.route("**/v1/models", lambda route: routes.append(route))
    page.reload()
    page.wait_for_function("() => document.fonts.status === 'loaded'")
    before = page.locator("#paper").bounding_box()
    assert page.locator("#model").text_content() == ""
    routes[0].continue_()
    page.locator("#weights", has_text="weights").wait_for()
    assert page.locator("#paper").bounding_box() == before


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tints_grow_steadily_apart_from_the_paper_and_let_the_ink_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    inspect(page)
    ground, ink = page.locator("#paper").evaluate(COLOUR, "backgroundColor"), page.locator(".page").first
    steps = [page.locator(f".legend .tint-{step}").evaluate(COLOUR, "backgroundColor") for step in range(6)]
    contrasts = [contrast(step, ground) for step in steps]
    assert contrasts == sorted(contrasts)
    assert min(b / a for a, b in itertools.pairwise(contrasts[1:])) > 1.1
    assert min(contrast(step, ink.evaluate(COLOUR, "color")) for step in steps) >= 4.5


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
    page.locator("#view-inspect").press("Tab")
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


def test_who_comes_by_keys_before_the_tokens_do_stands_on_the_first_one(page):
    page.route("**/score", lambda route: (page.wait_for_timeout(200), route.continue_()))
    page.locator("#document").focus()
    page.keyboard.press("Control+i")
    page.locator(".token.selected:focus").wait_for()
    first = page.locator(".token.selected").text_content()
    assert PROMPT.startswith(first)
    page.keyboard.press("ArrowRight")
    assert PROMPT.startswith(first + page.locator(".token.selected:focus").text_content())


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


def test_what_the_server_refuses_is_said_and_the_text_is_there(page):
    page.route("**/score", lambda route: route.fulfill(status=429, json={"error": {"message": "Enough for today."}}))
    page.locator("#view-inspect").click()
    page.get_by_text("Not measured: Enough for today.").wait_for()
    assert page.locator(".tokens").text_content() == PROMPT
