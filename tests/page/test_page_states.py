"""All states of the page at two widths: no screenshot is blank or too wide, and axe finds no violation.

INKSTREAM_SCREENSHOTS is the folder for the screenshots, which reviewers can look at.
"""

import os
from pathlib import Path

import pytest
from axe_playwright_python import base as axe

from tests.support import ROOT
from tests.support.page.browser import (
    BROWSER,
    click_generate,
    draft_events,
    fake_completion,
    fake_response,
    generate,
    hold_stream_open,
    run_events,
    send_events,
    set_fields,
    wait_for,
)
from tests.support.page.token_view import WORDS, find_token, stream_into_inspect_view

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
    fake_response(page, status=400, json={"error": {"message": "max_tokens must be between 0 and 2048, not 9999999."}})
    click_generate(page)
    wait_for(page, "error")
    page.unroute("**/complete")


def write(page):
    page.locator("#document").fill(STORY)
    fake_completion(page, *run_events(ENDS[0]))
    generate(page)


def branch(page):
    for end in ENDS:
        page.locator("#undo").click()
        fake_completion(page, *run_events(end))
        generate(page)


def tree(page):
    page.keyboard.press("Control+b")
    page.locator("#tree [role=treeitem]").last.wait_for()


def compare_branches(page):
    page.locator("#tree [role=treeitem]", has_text="paraffin").click()
    page.keyboard.press("c")
    page.locator("#compare:not([hidden])").wait_for()


def show_side_by_side(page):
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    page.locator("#document").fill(STORY)
    set_fields(page, n="3")
    fake_completion(page, *draft_events(*ENDS))
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")


def choose_columns(page):
    page.keyboard.press("Escape")
    set_fields(page, n="1")
    page.get_by_role("button", name="Compare \u2026").click()
    page.locator("#comparison[open]").wait_for()


def compare_settings(page):
    fake_completion(page, *run_events(ENDS[1]))
    page.locator("#comparison").get_by_role("button", name="Compare 2").click()
    wait_for(page, "done")


def choose_insertion_point(page):
    page.keyboard.press("Escape")
    page.locator("#document").evaluate("(area) => { area.focus(); area.setSelectionRange(20, 20); }")
    page.keyboard.press("Control+Enter")
    page.locator("#caret-choice").wait_for()


def rewrite(page):
    page.keyboard.press("Escape")
    fake_completion(page, *draft_events(*ENDS))
    page.locator("#document").evaluate("(area) => { area.focus(); area.setSelectionRange(127, area.value.length); }")
    page.keyboard.press("Control+Enter")
    page.locator("#columns .replaced").wait_for()
    wait_for(page, "done")


def inspect(page):
    page.keyboard.press("Escape")
    stream_into_inspect_view(page, [f" {word}" for word in WORDS], prompt=STORY)


def inspect_token(page):
    find_token(page, "sailed").click()
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


def choose_appearance(page):
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Appearance").click()
    page.locator("#preferences").wait_for()


def show_keys(page):
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Help").click()
    page.locator("#help[open]").wait_for()


def show_details(page):
    page.keyboard.press("Escape")
    page.unroute("**/complete")
    for summary in page.locator("aside > * summary:visible").all():
        summary.click()
    page.locator("#bars .alternative").first.wait_for()


def receive(page):
    page.locator("#document").fill(STORY)
    hold_stream_open(page)
    click_generate(page)
    send_events(page, *run_events(ENDS[0])[:-1])
    wait_for(page, "streaming")


def docs(page):
    page.keyboard.press("Escape")  # or Firefox reports the open stream as an error when the page is left
    wait_for(page, "stopped")
    page.goto("/docs")
    page.locator("#schemas:not([hidden])").wait_for()
    # Hidden content would cost axe seconds.
    page.locator("details:not([open]) > :not(summary)").evaluate_all("(all) => all.forEach((one) => one.remove())")


STATES = (
    empty, fail, write, branch, tree, compare_branches, show_side_by_side, choose_columns, compare_settings,
    choose_insertion_point, rewrite, inspect, inspect_token, list_documents, choose_appearance, show_keys,
    show_details, receive, docs,
)  # fmt: skip


# Firefox never advances animations inside a closed <details>.
SETTLED = """() => document.getAnimations().every(({ playState, effect }) => {
    const isEndless = effect.getComputedTiming().endTime === Infinity;
    return playState !== "running" || isEndless || !effect.target.checkVisibility();
})"""
FORCED = (write, show_details, inspect, docs)  # states that keep some of their own colors under forced colors
WHOLE = (show_details, docs)  # checked with the sidebar, which is the same in the other states


def violations(page, rules=(), exclude=(), off=()):
    """Violations that axe finds, as (rule, HTML): of these rules, or of all except those that are `off`."""
    if page.evaluate("() => !window.axe"):
        page.evaluate(axe.AXE_SCRIPT)
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    options["rules"] = {rule: {"enabled": False} for rule in off}
    context = {"exclude": [[selector] for selector in exclude]}
    found = page.evaluate("(options) => axe.run(...options)", [context, options])["violations"]
    return [(one["id"], node["html"]) for one in found for node in one["nodes"]]


def set_look(page, look):
    """Sets the color scheme, as a system setting or, in Firefox, as the user's preference."""
    if BROWSER == "chromium":
        forced = "active" if look == "forced" else "none"
        page.emulate_media(color_scheme="dark" if look == "dark" else "light", forced_colors=forced)
    else:
        page.evaluate("(look) => (document.documentElement.dataset.theme = look)", look)
    page.wait_for_function(SETTLED)


def check(page, show, looks):
    """Brings the page into a state, and returns the violations of each look."""
    show(page)
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo(0, 0)")
    width, found = page.viewport_size["width"], []
    for look in looks:
        set_look(page, look)
        name = f"{show.__name__}-{look}-{width}"
        content = page.screenshot(caret="hide", path=FOLDER / f"{name}.png")
        assert len(content) > 20_000, f"{name} is blank"
        rules = () if look == "light" else ("color-contrast",)  # the other rules do not depend on colors
        off = ("color-contrast",) if width == NARROW["width"] else ()  # colors do not depend on the width
        found += [(name, *one) for one in violations(page, rules, () if show in WHOLE else ("aside",), off)]
    set_look(page, "light")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{show.__name__} is too wide"
    return found


def looks_of(show, window):
    if window == NARROW:
        return ("light",)
    return ("light", "dark", "forced") if BROWSER == "chromium" and show in FORCED else ("light", "dark")


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_state_is_accessible_and_fits_its_window(page, window):
    """One walk through the states covers all looks: states depend on the ones before."""
    page.set_viewport_size(window)
    FOLDER.mkdir(parents=True, exist_ok=True)
    assert [one for show in STATES for one in check(page, show, looks_of(show, window))] == []


def test_axe_finds_an_image_without_alt_text_and_low_contrast(page):
    page.evaluate("""() => {
        document.querySelector("main").prepend(new Image());
        document.getElementById("status").style.color = "#eee";
    }""")
    assert {rule for rule, _ in violations(page, exclude=("aside",))} == {"image-alt", "color-contrast"}
