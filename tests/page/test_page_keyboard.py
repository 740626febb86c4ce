"""A writer's day by keyboard alone, without a manual: in Chromium, and in Firefox with BROWSER=firefox."""

import pytest

from tests.support.page.browser import drafts_of, saved, stream_of, text, wait_for

pytestmark = pytest.mark.slow
TITLES = ("Ash", "Birch", "Cedar", "Elm")


def answers(page, *answers):
    """Each completion from now on is answered with the next of these."""
    ahead = list(answers)
    fulfill = {"content_type": "text/event-stream"}
    page.route("**/complete", lambda route: route.fulfill(**fulfill, body=stream_of(*drafts_of(*ahead.pop(0)))))


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def list_documents(page):
    press(page, "Control+k")
    assert page.evaluate("() => document.activeElement.type") == "search", "what is typed now is searched for"


def create(page, words):
    list_documents(page)
    while page.evaluate("() => document.activeElement.textContent") != "New":
        press(page, "Shift+Tab")
    press(page, "Enter")
    page.locator("#documents").wait_for(state="hidden")
    page.keyboard.type(words)


def run(page, state="done"):
    press(page, "Control+Enter")
    wait_for(page, state)


@pytest.mark.parametrize("width", [1280, 390])
def test_five_documents_a_branch_a_comparison_a_rewritten_sentence_and_an_export(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    answers(page, [" It fell."], [" It stood."], [" She slept.", " She slept1.", " She slept2."])
    for title in TITLES:
        create(page, title)
    create(page, "It rained. The tree shook.")
    for again in (False, True):
        if again:
            press(page, "Control+z")
        run(page)
    assert text(page) == "It rained. The tree shook. It stood.", text(page)
    press(page, "Control+b")
    page.locator("#tree [role=treeitem]").nth(2).wait_for()
    press(page, "ArrowUp", "c")
    page.locator("#compare:not([hidden])").wait_for()
    assert "fell." in page.locator("#compare").inner_text()
    press(page, "Escape", "Control+b", "Control+Home", *["Shift+ArrowRight"] * len("It rained."))
    page.locator("#generate-word", has_text="Rewrite").wait_for()
    press(page, "Control+Enter")
    page.get_by_role("group", name="3 alternatives").locator('.take[aria-disabled="false"]').nth(2).wait_for()
    press(page, "2")
    assert text(page) == "She slept1. The tree shook. It stood.", text(page)
    list_documents(page)
    page.locator("#documents li").nth(4).wait_for()
    page.keyboard.type("slept")
    name, content = saved(page, lambda: press(page, "Tab", "Tab", "Enter", "ArrowDown", "ArrowDown", "Enter"))
    page.locator("#documents [role=status]", has_text=f"Exported {name}").wait_for()
    assert (name[:11], content.decode()) == ("She slept1.", text(page))
    press(page, "Escape")
    list_documents(page)
    page.keyboard.type("cedar")
    page.locator("#documents li", has_text="Cedar").wait_for()
    press(page, "Enter")
    page.wait_for_function("() => document.getElementById('document').value === 'Cedar'")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
