"""A writing session by keyboard alone, in Chromium, or in Firefox with BROWSER=firefox."""

import pytest

from tests.support.page.browser import capture_download, draft_events, sse_stream, text, wait_for

pytestmark = pytest.mark.slow
TITLES = ("Ash", "Birch", "Cedar", "Elm")


def fake_next_completions(page, *drafts):
    """Fulfills each completion with the next of these lists of continuations."""
    remaining = list(drafts)
    fulfill = {"content_type": "text/event-stream"}
    page.route("**/complete", lambda route: route.fulfill(**fulfill, body=sse_stream(*draft_events(*remaining.pop(0)))))


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def list_documents(page):
    press(page, "Control+k")
    assert page.evaluate("() => document.activeElement.type") == "search", "the search field has the focus"


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
def test_documents_branches_comparison_rewriting_and_export_work_by_keyboard(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    fake_next_completions(page, [" It fell."], [" It stood."], [" She slept.", " She slept1.", " She slept2."])
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
    name, content = capture_download(
        page, lambda: press(page, "Tab", "Tab", "Enter", "ArrowDown", "ArrowDown", "Enter")
    )
    page.locator("#documents [role=status]", has_text=f"Exported {name}").wait_for()
    assert (name[:11], content.decode()) == ("She slept1.", text(page))
    press(page, "Escape")
    list_documents(page)
    page.keyboard.type("cedar")
    page.locator("#documents li", has_text="Cedar").wait_for()
    press(page, "Enter")
    page.wait_for_function("() => document.getElementById('document').value === 'Cedar'")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
