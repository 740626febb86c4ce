"""All states of the page, one walk for each width: no picture is blank or too wide, and axe finds no violation.

INKSTREAM_SCREENSHOTS names the folder of the pictures, which are for reviewers.
"""

import os
from pathlib import Path

import pytest
from axe_playwright_python import base as axe

from tests.support import ROOT
from tests.support.page.browser import (
    BROWSER,
    answer_with,
    drafts_of,
    generate,
    give,
    keep_answers_open,
    play,
    run_of,
    set_fields,
    start,
    wait_for,
)
from tests.support.page.token_view import WORDS, stream, token

FOLDER = Path(os.environ.get("INKSTREAM_SCREENSHOTS") or ROOT / "build/screenshots")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
STORY = (
    "The lighthouse had been dark for three winters when Mara came down the cliff path with her father's keys in her"
    " pocket. The iron door had swollen in its frame."
)
ENDS = (
    " She set her shoulder to it, once, twice, and at the third blow it gave way with a groan.",
    " Inside, the air smelled of paraffin and wet rope.",
    " On the last of the logbooks, folded in four, lay a letter with her name on it.",
)


def empty(page):
    page.locator("#document").fill("")


def fail(page):
    page.locator("#document").fill(STORY)
    answer_with(page, status=400, json={"error": {"message": "max_tokens must be between 0 and 2048, not 9999999."}})
    start(page)
    wait_for(page, "error")
    page.unroute("**/complete")


def write(page):
    page.locator("#document").fill(STORY)
    play(page, *run_of(ENDS[0]))
    generate(page)


def branch(page):
    for end in ENDS:
        page.locator("#undo").click()
        play(page, *run_of(end))
        generate(page)


def tree(page):
    page.keyboard.press("Control+b")
    page.locator("#tree [role=treeitem]").last.wait_for()


def compare_branches(page):
    page.locator("#tree [role=treeitem]", has_text="paraffin").click()
    page.keyboard.press("c")
    page.locator("#compare:not([hidden])").wait_for()


def stand_side_by_side(page):
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    page.locator("#document").fill(STORY)
    set_fields(page, n="3")
    play(page, *drafts_of(*ENDS))
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")


def choose_columns(page):
    page.keyboard.press("Escape")
    set_fields(page, n="1")
    page.get_by_role("button", name="Compare \u2026").click()
    page.locator("#comparison[open]").wait_for()


def compare_settings(page):
    play(page, *run_of(ENDS[1]))
    page.locator("#comparison").get_by_role("button", name="Compare 2").click()
    wait_for(page, "done")


def choose_the_place(page):
    page.keyboard.press("Escape")
    page.locator("#document").evaluate("(area) => { area.focus(); area.setSelectionRange(20, 20); }")
    page.keyboard.press("Control+Enter")
    page.locator("#caret-choice").wait_for()


def rewrite(page):
    page.keyboard.press("Escape")
    play(page, *drafts_of(*ENDS))
    page.locator("#document").evaluate("(area) => { area.focus(); area.setSelectionRange(127, area.value.length); }")
    page.keyboard.press("Control+Enter")
    page.locator("#columns .replaced").wait_for()
    wait_for(page, "done")


def inspect(page):
    page.keyboard.press("Escape")
    stream(page, [f" {word}" for word in WORDS], prompt=STORY)


def look_into(page):
    token(page, "sailed").click()
    page.get_by_role("dialog").wait_for()


def list_documents(page):
    page.keyboard.press("Escape")
    page.keyboard.press("Control+i")
    page.locator("#documents-button").click()
    page.get_by_role("button", name="New").click()
    page.locator("#documents").wait_for(state="hidden")
    page.locator("#document").fill(ENDS[1])
    page.locator("#documents-button").click()
    page.locator("#documents li").nth(1).wait_for()


def choose_the_appearance(page):
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Appearance").click()
    page.locator("#preferences").wait_for()


def show_keys(page):
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Help").click()
    page.locator("#help[open]").wait_for()


def numbers(page):
    page.keyboard.press("Escape")
    page.unroute("**/complete")
    for summary in page.locator("aside > * summary:visible").all():
        summary.click()
    page.locator("#bars .alternative").first.wait_for()


def receive(page):
    page.locator("#document").fill(STORY)
    keep_answers_open(page)
    start(page)
    give(page, *run_of(ENDS[0])[:-1])
    wait_for(page, "streaming")


def docs(page):
    page.keyboard.press("Escape")  # Firefox reports a stream that the test keeps open as an error of the page it leaves
    wait_for(page, "stopped")
    page.goto("/docs")
    page.locator("#schemas:not([hidden])").wait_for()
    # What is folded is not seen, and would cost axe seconds.
    page.locator("details:not([open]) > :not(summary)").evaluate_all("(all) => all.forEach((one) => one.remove())")


STATES = (
    empty, fail, write, branch, tree, compare_branches, stand_side_by_side, choose_columns, compare_settings,
    choose_the_place, rewrite, inspect, look_into, list_documents, choose_the_appearance, show_keys, numbers, receive,
    docs,
)  # fmt: skip


# Firefox keeps what would move inside a closed <details> for ever at its beginning.
SETTLED = """() => document.getAnimations().every(({ playState, effect }) => {
    const isEndless = effect.getComputedTiming().endTime === Infinity;
    return playState !== "running" || isEndless || !effect.target.checkVisibility();
})"""
FORCED = (write, numbers, inspect, docs)  # what has colors of its own where the system chooses the others
WHOLE = (numbers, docs)  # with what stands beside the text, too: in the others it is the same


def violations(page, rules=(), exclude=(), off=()):
    """What axe finds on the page by these rules, or by all but those that are `off`: [(rule, HTML), ...]."""
    if page.evaluate("() => !window.axe"):
        page.evaluate(axe.AXE_SCRIPT)
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    options["rules"] = {rule: {"enabled": False} for rule in off}
    context = {"exclude": [[selector] for selector in exclude]}
    found = page.evaluate("(options) => axe.run(...options)", [context, options])["violations"]
    return [(one["id"], node["html"]) for one in found for node in one["nodes"]]


def dress(page, look):
    """Gives the page a look, as the system's setting or, where a test cannot change that, the user's."""
    if BROWSER == "chromium":
        forced = "active" if look == "forced" else "none"
        page.emulate_media(color_scheme="dark" if look == "dark" else "light", forced_colors=forced)
    else:
        page.evaluate("(look) => (document.documentElement.dataset.theme = look)", look)
    page.wait_for_function(SETTLED)


def check(page, show, looks):
    """Brings the page into a state, and returns what axe finds there in each look."""
    show(page)
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo(0, 0)")
    width, found = page.viewport_size["width"], []
    for look in looks:
        dress(page, look)
        name = f"{show.__name__}-{look}-{width}"
        content = page.screenshot(caret="hide", path=FOLDER / f"{name}.png")
        assert len(content) > 20_000, f"{name} is blank"
        rules = () if look == "light" else ("color-contrast",)  # the other rules have nothing to do with colors
        off = ("color-contrast",) if width == NARROW["width"] else ()  # no color depends on the width
        found += [(name, *one) for one in violations(page, rules, () if show in WHOLE else ("aside",), off)]
    dress(page, "light")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{show.__name__} is too wide"
    return found


def looks_of(show, window):
    if window == NARROW:
        return ("light",)
    return ("light", "dark", "forced") if BROWSER == "chromium" and show in FORCED else ("light", "dark")


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_state_is_accessible_and_fits_its_window(page, window):
    """One walk for all looks of a window."""
    page.set_viewport_size(window)
    FOLDER.mkdir(parents=True, exist_ok=True)
    assert [one for show in STATES for one in check(page, show, looks_of(show, window))] == []


def test_axe_finds_a_picture_without_words_and_ink_on_ink(page):
    page.evaluate("""() => {
        document.querySelector("main").prepend(new Image());
        document.getElementById("status").style.color = "#eee";
    }""")
    assert {rule for rule, _ in violations(page, exclude=("aside",))} == {"image-alt", "color-contrast"}
