"""The tree of runs, continuations side by side, and what is announced, in a real browser."""

import pytest

from tests.support.page.browser import (
    PROMPT,
    allow_modules,
    generate,
    give,
    keep_answers_open,
    play,
    run_of,
    set_fields,
    start,
    text,
    wait_for,
)  # fmt: skip

ARIA = ("level", "posinset", "setsize", "selected")
CHOICES = [{"index": 0, "finish_reason": "length"}, {"index": 1, "finish_reason": "stop"}]
TWO = [
    ("start", {"seed": 7}),
    ("token", {"index": 0, "text": " there was", "tokens": [{"id": 1, "text": " there was", "logprob": -1.0}]}),
    ("token", {"index": 1, "text": " a girl.", "tokens": None}),
    ("token", {"index": 0, "text": " a king", "tokens": [{"id": 2, "text": " a king", "logprob": -0.2}]}),
]


def play_run(page, words):
    play(page, *run_of(words))
    generate(page)


def regenerate(page, words):
    play(page, *run_of(words, seed=8))
    page.get_by_role("button", name="Regenerate").click()
    wait_for(page, "done")


def dots(page):
    return page.get_by_role("treeitem")


def dot(page, words):
    return page.get_by_role("treeitem", name=words)


@pytest.fixture
def branched(page):
    """Beginning - "one" - "two", and next to "two" its sibling "three", the current branch."""
    play_run(page, " one")
    assert page.locator("#branches").is_hidden(), "one run is undone and redone: there is nowhere else to go"
    play_run(page, " two")
    regenerate(page, " three")
    assert dots(page).count() == 4
    return page


# The tree strip


def test_every_run_is_a_dot_and_one_click_goes_back_to_it(branched):
    assert text(branched) == f"{PROMPT} one three"
    dot(branched, "two").click()
    assert text(branched) == f"{PROMPT} one two"
    assert dot(branched, "two").get_attribute("aria-selected") == "true"
    dot(branched, "Beginning").click()
    assert text(branched) == PROMPT
    dot(branched, "three").click()
    assert text(branched) == f"{PROMPT} one three"
    assert dots(branched).count() == 4, "going about makes no branches"


def test_the_strip_tells_of_the_dot_under_the_pointer_or_the_focus_and_else_of_where_one_is(branched):
    words = branched.locator(".branch-words")
    assert words.inner_text() == "Run 3 \u00b7 three \u00b7 ended by length \u00b7 seed 8"
    dot(branched, "two").hover()
    assert words.inner_text() == "Run 2 \u00b7 two \u00b7 ended by length \u00b7 seed 7"
    branched.mouse.move(0, 0)
    assert words.inner_text().startswith("Run 3")
    dot(branched, "one").focus()
    assert words.inner_text().startswith("Run 1")
    dot(branched, "two").hover()
    branched.mouse.move(0, 0)
    assert words.inner_text().startswith("Run 1"), "the focus is still there"


def test_the_tree_is_one_for_a_screen_reader_and_one_stop_for_the_keyboard_whose_arrows_go_along_the_lines(branched):
    page = branched
    seen = [[d.get_attribute(f"aria-{name}") for name in ARIA] for d in dots(page).all()]
    assert seen == [
        ["1", "1", "1", "false"],
        ["2", "1", "1", "false"],
        ["3", "1", "2", "false"],
        ["3", "2", "2", "true"],
    ]
    assert page.get_by_role("tree", name="Runs").count() == 1
    assert [d.get_attribute("tabindex") for d in dots(page).all()].count("0") == 1
    dot(page, "three").focus()
    for key, name in [
        ("ArrowUp", "two"),
        ("ArrowLeft", "one"),
        ("ArrowRight", "three"),
        ("Home", "Beginning"),
        ("End", "three"),
    ]:
        page.keyboard.press(key)
        assert name in page.evaluate("() => document.activeElement.getAttribute('aria-label')"), key
    page.keyboard.press("ArrowUp")
    assert text(page) == f"{PROMPT} one three", "the focus alone goes nowhere"
    page.keyboard.press("Enter")
    assert text(page) == f"{PROMPT} one two"
    assert "two" in page.evaluate("() => document.activeElement.getAttribute('aria-label')"), "the focus stays"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert "two" in page.evaluate("() => document.activeElement.getAttribute('aria-label')")


def test_two_hundred_runs_are_a_strip_that_scrolls_to_where_one_is(page):
    page.set_viewport_size({"width": 390, "height": 800})
    allow_modules(page)
    page.evaluate("""async () => {
        const { Branches } = await import("/web/text/branches.js");
        const root = document.getElementById("branches");
        root.replaceChildren();
        const runs = Array.from({ length: 200 }, (_, id) => ({
            key: String(id), parent: id ? String(id % 5 ? id - 1 : id - 5) : null, next: null, facts: {},
            words: `words of ${id}`, current: id === 199, here: false,
        }));
        const branches = new Branches(root, { onselect() {} });
        branches.show(runs);
        window.before = root.querySelector("[data-id='199']");
        branches.show(runs);
    }""")
    page.wait_for_function("""() => {
        const strip = document.getElementById("branches").firstChild.getBoundingClientRect();
        const box = window.before.getBoundingClientRect();
        const isVisible = box.left >= strip.left && box.right <= strip.right;
        return window.before.isConnected && isVisible && box.top >= strip.top && box.bottom <= strip.bottom;
    }""")
    assert dots(page).count() == 200
    assert page.locator("#branches > :first-child").bounding_box()["height"] <= 130
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


# Continuations side by side


@pytest.fixture
def abreast(page):
    """Two continuations that have come to their ends."""
    play(page, *TWO, ("done", {"choices": CHOICES}))
    set_fields(page, n="2")
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")
    return page


def continuations(page):
    return page.get_by_role("group", name="2 continuations")


def test_two_continuations_stand_beside_each_other_with_the_end_of_the_text_above(abreast):
    group = continuations(abreast)
    assert group.locator(".tail").inner_text() == PROMPT
    assert group.get_by_role("group", name="Continuation 1").inner_text() == "there was a king"
    assert group.get_by_role("group", name="Continuation 2").inner_text() == "a girl."
    assert group.locator(".facts").all_inner_texts() == ["length \u00b7 mean probability 0.55", "stop"]
    boxes = [group.get_by_role("group", name=f"Continuation {i}").bounding_box() for i in (1, 2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    abreast.set_viewport_size({"width": 390, "height": 800})
    boxes = [group.get_by_role("group", name=f"Continuation {i}").bounding_box() for i in (1, 2)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert abreast.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    reached = []
    for _ in range(6):
        abreast.keyboard.press("Tab")
        reached.append(abreast.evaluate("() => document.activeElement.ariaLabel ?? document.activeElement.textContent"))
    ways = [f"{what} {i}" for i in (1, 2) for what in ("Continuation", "Take this")]
    assert reached == [PROMPT, *ways, "Take none"], "the end of the text above can be scrolled"


def test_one_is_taken_and_the_other_stays_a_branch(abreast):
    abreast.keyboard.press("2")
    assert text(abreast) == f"{PROMPT} a girl."
    assert continuations(abreast).is_hidden()
    assert abreast.evaluate("() => document.activeElement.id") == "document"
    assert dots(abreast).count() == 3
    dot(abreast, "there was a king").click()
    assert text(abreast) == f"{PROMPT} there was a king"


def test_escape_takes_none_and_both_stay_branches(abreast):
    abreast.locator("#seed").press("2")
    assert continuations(abreast).is_visible(), "a number typed into a field takes nothing"
    abreast.locator("#document").focus()
    abreast.keyboard.press("Escape")
    assert continuations(abreast).is_hidden()
    assert text(abreast) == PROMPT
    assert dots(abreast).count() == 3
    abreast.keyboard.press("2")
    assert text(abreast) == PROMPT + "2", "the keys are letters again, and the sheet has the focus"


def test_during_the_run_escape_stops_it_and_nothing_can_be_taken_yet(page):
    set_fields(page, n="2")
    keep_answers_open(page)
    page.locator("#document").press("Control+Enter")
    give(page, *TWO)
    page.get_by_text("there was a king").wait_for()
    page.keyboard.press("1")
    assert continuations(page).is_visible(), "not while it is written"
    assert page.get_by_role("button", name="Take none").is_hidden()
    page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert continuations(page).locator(".facts").all_inner_texts()[1] == "stopped"
    page.keyboard.press("1")
    assert text(page) == f"{PROMPT} there was a king"


# What is announced


def announcements(page):
    return page.evaluate("() => window.announcements")


def listen(page):
    page.evaluate("""() => {
        window.announcements = [];
        const region = document.getElementById("announcer");
        new MutationObserver(() => window.announcements.push(region.textContent)).observe(region, { childList: true });
    }""")


def test_whole_sentences_are_announced_and_the_rest_at_the_end_but_not_in_the_inspect_view(page):
    page.get_by_role("button", name="Inspect").click()
    listen(page)
    play(page, *run_of(" It rained. Then"))
    generate(page)
    page.get_by_role("button", name="Write").click()
    keep_answers_open(page)
    start(page)
    *tokens, done = run_of(" Mr", ".", " Darcy", " bowed", ".", " She")
    give(page, *tokens)
    page.wait_for_function("() => window.announcements.length")
    assert announcements(page) == ["Mr. Darcy bowed."], "while it is written, and nothing of the first run"
    give(page, ("token", {"text": " smiled"}), done)
    wait_for(page, "done")
    page.wait_for_function("() => window.announcements.length === 2")
    assert announcements(page)[1] == "She smiled"
