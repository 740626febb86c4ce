"""Pictures of the page in its main states, for who looks at them: INKSTREAM_SCREENSHOTS names their folder.

A picture that is blank, or wider than its window, fails. Whether it is beautiful is for the eye to say.
"""

import base64
import os
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.page.browser import PATIENCE_MS, answer_with, generate, play, set_fields, start, wait_for
from tests.support.page.sample_story import BEGINNING, ENDS, MIDDLE, MODEL, placed, run, scored

FOLDER = Path(os.environ.get("INKSTREAM_SCREENSHOTS") or ROOT / "build/screenshots")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
FEWEST_COLOURS = 40  # text has some hundred, since its edges are smoothed


@pytest.fixture
def written(browser, server):
    """A beginning by hand, and a middle by a model that has a name."""
    context = browser.new_context(base_url=server.url, viewport=WIDE)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    facts = page.request.get("/v1/models").json()
    facts["data"][0] |= MODEL
    page.route("**/v1/models", lambda route: route.fulfill(json=facts))
    page.goto("/")
    page.locator("#document").fill(BEGINNING)
    set_fields(page, temperature="0.8", top_p="0.95")
    play(page, *run(MIDDLE))
    generate(page)
    yield page
    context.close()


def take(page, name):
    """Waits for what moves to have moved, and keeps a picture."""
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo(0, 0)")
    page.wait_for_function("() => document.getAnimations().every((a) => a.playState !== 'running')")
    picture = page.screenshot(caret="hide")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.png").write_bytes(picture)
    assert colours(page, picture) >= FEWEST_COLOURS, f"{name} is blank"
    width = page.viewport_size["width"]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width, f"{name} is too wide"


def colours(page, picture):
    """How many there are in it."""
    return page.evaluate(
        """async (data) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const picture = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
            const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
            pen.drawImage(picture, 0, 0);
            const points = pen.getImageData(0, 0, picture.width, picture.height).data;
            return new Set(new Uint32Array(points.buffer)).size;
        }""",
        base64.b64encode(picture).decode(),
    )


def continue_with(page, *texts, seed=20261123):
    play(page, *run(*texts, seed=seed))
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")


def test_a_blank_picture_has_one_colour(browser):
    """The control."""
    blank = browser.new_page()
    assert colours(blank, blank.screenshot()) == 1
    blank.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_writing(written, scheme):
    written.emulate_media(color_scheme=scheme)
    take(written, scheme)


def test_narrow(written):
    written.set_viewport_size(NARROW)
    take(written, "narrow")


def branch(page):
    for number, end in enumerate(ENDS):
        continue_with(page, end, seed=20261123 + number)
        if end is not ENDS[-1]:
            page.locator("#undo").click()
    continue_with(page, " So she went up, and did.", seed=7)
    page.locator("#undo").click()
    continue_with(page, "\n\nShe lit it before she had taken off her coat.", seed=8)
    page.get_by_role("treeitem", name=ENDS[0].split()[3]).first.click()


def test_branches(written):
    branch(written)
    take(written, "branches")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_continuations_side_by_side(written, scheme):
    written.emulate_media(color_scheme=scheme)
    set_fields(written, n="3")
    continue_with(written, *ENDS)
    take(written, f"columns-{scheme}")


def test_continuations_one_below_the_other(written):
    written.set_viewport_size(NARROW)
    set_fields(written, n="3")
    continue_with(written, *ENDS)
    take(written, "columns-narrow")


def look_into(page):
    """At the letter, and what else could have lain there."""
    page.route("**/tokenize", lambda route: route.fulfill(json=placed(BEGINNING + MIDDLE)))
    page.route("**/score", lambda route: route.fulfill(json=scored(BEGINNING + MIDDLE)))
    page.get_by_role("button", name="Inspect").click()
    page.locator("#inspect").get_by_text("letter", exact=True).click()
    page.get_by_role("dialog").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looking_into_the_tokens(written, scheme):
    written.emulate_media(color_scheme=scheme)
    written.locator("#next summary").click()
    look_into(written)
    take(written, f"inspect-{scheme}")


def test_looking_into_the_tokens_on_a_phone(written):
    written.set_viewport_size(NARROW)
    look_into(written)
    take(written, "inspect-narrow")


def test_an_error(written):
    message = "max_tokens must be between 0 and 2048, not 9999999. Ask for fewer tokens."
    answer_with(written, status=400, json={"error": {"message": message, "type": "invalid_request_error"}})
    start(written)
    wait_for(written, "error")
    take(written, "error")
