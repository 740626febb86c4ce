"""Pictures of the page in its main states, for reviewers: INKSTREAM_SCREENSHOTS names their folder.

A picture that is blank, or wider than its window, fails.
"""

import os
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.page.browser import DONE, answer_with, generate, play, set_fields, start, wait_for
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


def write(page):
    page.locator("#document").fill(STORY)
    play(page, ("start", {"seed": 1}), ("token", {"text": ENDS[0]}), DONE)
    generate(page)


def branch(page):
    write(page)
    for end in ENDS:
        page.locator("#undo").click()
        play(page, ("start", {"seed": 1}), ("token", {"text": end}), DONE)
        generate(page)


def stand_side_by_side(page):
    page.locator("#document").fill(STORY)
    set_fields(page, n="3")
    ends = [{"index": i, "finish_reason": "length"} for i in range(3)]
    tokens = [("token", {"index": i, "text": end, "tokens": None}) for i, end in enumerate(ENDS)]
    play(page, ("start", {"seed": 1}), *tokens, ("done", {"choices": ends}))
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")


def look_into(page):
    stream(page, [f" {word}" for word in WORDS], prompt=STORY)
    token(page, "sailed").click()
    page.get_by_role("dialog").wait_for()


def list_documents(page):
    for words in (STORY, ENDS[0], ENDS[1]):
        page.locator("#document").fill(words)
        page.locator("#documents-button").click()
        page.get_by_role("button", name="New").click()
        page.locator("#documents").wait_for(state="hidden")
    page.locator("#documents-button").click()
    page.locator("#documents li").first.wait_for()


def fail(page):
    answer_with(page, status=400, json={"error": {"message": "max_tokens must be between 0 and 2048, not 9999999."}})
    start(page)
    wait_for(page, "error")


@pytest.mark.parametrize(("scheme", "window"), [("light", WIDE), ("dark", WIDE), ("light", NARROW)])
@pytest.mark.parametrize("show", [write, branch, stand_side_by_side, look_into, list_documents, fail])
def test_a_picture_is_neither_blank_nor_too_wide(page, show, scheme, window):
    page.set_viewport_size(window)
    page.emulate_media(color_scheme=scheme)
    show(page)
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo(0, 0)")
    page.wait_for_function("() => document.getAnimations().every((a) => a.playState !== 'running')")
    picture = page.screenshot(caret="hide")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{show.__name__}-{scheme}-{window['width']}.png").write_bytes(picture)
    assert len(picture) > 4 * len(page.context.new_page().screenshot()), "blank"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= window["width"]
