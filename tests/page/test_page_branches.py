"""The tree of runs, side-by-side continuations, and announcements, in a real browser."""

import pytest

from tests.support.page.browser import (
    PROMPT,
    allow_module_imports,
    click_generate,
    fake_completion,
    generate,
    hold_stream_open,
    run_events,
    send_events,
    set_fields,
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
    fake_completion(page, *run_events(words))
    generate(page)


def regenerate(page, words):
    fake_completion(page, *run_events(words, seed=8))
    page.get_by_role("button", name="Regenerate").click()
    wait_for(page, "done")


def dots(page):
    return page.get_by_role("treeitem")


def dot(page, words):
    return page.get_by_role("treeitem", name=words)


@pytest.fixture
def branched(page):
    """A tree of runs: "one", below it "two" and its sibling "three", which is current."""
    play_run(page, " one")
    assert page.locator("#branches").is_hidden(), "one run needs no tree: undo and redo reach it"
    play_run(page, " two")
    regenerate(page, " three")
    assert dots(page).count() == 4
    return page


# The tree strip


def test_every_run_is_a_dot_and_a_click_restores_its_text(branched):
    assert text(branched) == f"{PROMPT} one three"
    dot(branched, "two").click()
    assert text(branched) == f"{PROMPT} one two"
    assert dot(branched, "two").get_attribute("aria-selected") == "true"
    dot(branched, "Beginning").click()
    assert text(branched) == PROMPT
    dot(branched, "three").click()
    assert text(branched) == f"{PROMPT} one three"
    assert dots(branched).count() == 4, "navigation adds no branches"


def test_the_strip_describes_the_hovered_else_the_focused_else_the_current_run(branched):
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
    assert words.inner_text().startswith("Run 1"), "the focus has not moved"


def test_the_strip_is_an_aria_tree_with_one_tab_stop_and_arrow_keys(branched):
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
    assert text(page) == f"{PROMPT} one three", "moving the focus does not change the text"
    page.keyboard.press("Enter")
    assert text(page) == f"{PROMPT} one two"
    assert "two" in page.evaluate("() => document.activeElement.getAttribute('aria-label')"), "the focus stays"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert "two" in page.evaluate("() => document.activeElement.getAttribute('aria-label')")


def test_a_strip_of_two_hundred_runs_scrolls_to_the_current_one(page):
    page.set_viewport_size({"width": 390, "height": 800})
    allow_module_imports(page)
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


# Side-by-side continuations


@pytest.fixture
def two_continuations(page):
    """The page with two finished continuations."""
    fake_completion(page, *TWO, ("done", {"choices": CHOICES}))
    set_fields(page, n="2")
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")
    return page


def continuations(page):
    return page.get_by_role("group", name="2 continuations")


def test_continuations_are_shown_side_by_side_below_the_end_of_the_text(two_continuations):
    group = continuations(two_continuations)
    assert group.locator(".tail").inner_text() == PROMPT
    assert group.get_by_role("group", name="Continuation 1").inner_text() == "there was a king"
    assert group.get_by_role("group", name="Continuation 2").inner_text() == "a girl."
    assert group.locator(".facts").all_inner_texts() == ["length \u00b7 mean probability 0.55", "stop"]
    boxes = [group.get_by_role("group", name=f"Continuation {i}").bounding_box() for i in (1, 2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    two_continuations.set_viewport_size({"width": 390, "height": 800})
    boxes = [group.get_by_role("group", name=f"Continuation {i}").bounding_box() for i in (1, 2)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert two_continuations.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    reached = []
    for _ in range(6):
        two_continuations.keyboard.press("Tab")
        reached.append(
            two_continuations.evaluate("() => document.activeElement.ariaLabel ?? document.activeElement.textContent")
        )
    expected = [f"{name} {i}" for i in (1, 2) for name in ("Continuation", "Take this")]
    assert reached == [PROMPT, *expected, "Take none"], "the end of the text can be scrolled"


def test_taking_a_continuation_keeps_the_other_as_a_branch(two_continuations):
    two_continuations.keyboard.press("2")
    assert text(two_continuations) == f"{PROMPT} a girl."
    assert continuations(two_continuations).is_hidden()
    assert two_continuations.evaluate("() => document.activeElement.id") == "document"
    assert dots(two_continuations).count() == 3
    dot(two_continuations, "there was a king").click()
    assert text(two_continuations) == f"{PROMPT} there was a king"


def test_escape_takes_no_continuation_and_keeps_both_as_branches(two_continuations):
    two_continuations.locator("#seed").press("2")
    assert continuations(two_continuations).is_visible(), "a digit typed into a field takes no continuation"
    two_continuations.locator("#document").focus()
    two_continuations.keyboard.press("Escape")
    assert continuations(two_continuations).is_hidden()
    assert text(two_continuations) == PROMPT
    assert dots(two_continuations).count() == 3
    two_continuations.keyboard.press("2")
    assert text(two_continuations) == PROMPT + "2", "digits are text again, and the sheet has the focus"


def test_during_a_run_escape_stops_it_and_no_continuation_can_be_taken(page):
    set_fields(page, n="2")
    hold_stream_open(page)
    page.locator("#document").press("Control+Enter")
    send_events(page, *TWO)
    page.get_by_text("there was a king").wait_for()
    page.keyboard.press("1")
    assert continuations(page).is_visible(), "no continuation can be taken during the run"
    assert page.get_by_role("button", name="Take none").is_hidden()
    page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert continuations(page).locator(".facts").all_inner_texts()[1] == "stopped"
    page.keyboard.press("1")
    assert text(page) == f"{PROMPT} there was a king"


# Announcements


def announcements(page):
    return page.evaluate("() => window.announcements")


def record_announcements(page):
    page.evaluate("""() => {
        window.announcements = [];
        const region = document.getElementById("announcer");
        new MutationObserver(() => window.announcements.push(region.textContent)).observe(region, { childList: true });
    }""")


def test_sentences_are_announced_when_complete_except_in_the_inspect_view(page):
    page.get_by_role("button", name="Inspect").click()
    record_announcements(page)
    fake_completion(page, *run_events(" It rained. Then"))
    generate(page)
    page.get_by_role("button", name="Write").click()
    hold_stream_open(page)
    click_generate(page)
    *tokens, done = run_events(" Mr", ".", " Darcy", " bowed", ".", " She")
    send_events(page, *tokens)
    page.wait_for_function("() => window.announcements.length")
    assert announcements(page) == ["Mr. Darcy bowed."], "announced during the run; the run in the inspect view was not"
    send_events(page, ("token", {"text": " smiled"}), done)
    wait_for(page, "done")
    page.wait_for_function("() => window.announcements.length === 2")
    assert announcements(page)[1] == "She smiled"
