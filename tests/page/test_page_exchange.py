"""Import and export of the page, in a real browser: programs, links, receipts and their replay."""

import json
import re
import subprocess

import pytest

from tests.support.page.browser import (
    PROMPT,
    allow_clipboard,
    body_of,
    clipboard,
    described,
    generate,
    play,
    run_of,
    set_fields,
    setting,
    start,
    status,
    text,
    text_of,
    used_seed,
    wait_for,
)

RECEIPT = {
    "weights_version": "w",
    "seed": 9007199254740993,
    "settings": {
        "temperature": 0.25,
        "top_k": 7,
        "stop": ["\n"],
        "max_tokens": 3,
        "n": 1,
        "regex": None,
        "logit_bias": {},
    },
    "prompt_sha256": "f" * 64,
    "numerics": "native-int8",
    "version": "9.9",
}


LASTING = """(() => {
    const later = window.setTimeout;
    window.setTimeout = (work, ms, ...more) => (ms === 2500 ? 0 : later(work, ms, ...more));
})()"""


def run_with_receipt(*pieces):
    """The events of a run that writes these pieces, and has RECEIPT."""
    *events, (name, done) = run_of(*pieces, seed=RECEIPT["seed"])
    return [*events, (name, {**done, "receipt": RECEIPT})]


@pytest.fixture(autouse=True)
def _described(page):
    """Each test begins when the server has described itself, and may read the clipboard.

    "Copied" stays: the page takes it away after 2.5 s, in which a busy machine may not have looked at it.
    """
    allow_clipboard(page)
    page.context.add_init_script(LASTING)
    page.evaluate(LASTING)
    described(page)


def status_of(page, part="#exits"):
    return page.locator(f"{part} [role=status]")


def unfold_run(page):
    page.locator("#run > summary").click()


# Programs


def test_a_program_is_copied_by_keyboard_and_sends_what_the_page_sends(page, server):
    page.locator("#document").fill('It\'s "on" $HOME\n\U0001f600')
    set_fields(page, temperature="0", max_tokens="3", seed="9007199254740993")
    button = page.get_by_role("button", name="Copy as")
    button.focus()
    page.keyboard.press("ArrowDown")
    assert button.get_attribute("aria-expanded") == "true"
    assert page.evaluate("document.activeElement.textContent") == "curl"
    page.keyboard.press("Enter")
    status_of(page).filter(has_text="Copied the request as curl.").wait_for()
    assert button.get_attribute("aria-expanded") == "false"
    assert page.evaluate("document.activeElement.textContent") == "Copy as", "the focus is back"
    program = clipboard(page)
    assert f"'{server.url}/complete'" in program and "INKSTREAM_KEY" not in program
    shown = subprocess.run(["bash"], input=program, capture_output=True, text=True, timeout=60, check=True).stdout
    written = "".join(json.loads(line[6:]).get("text", "") for line in shown.splitlines() if line.startswith("data: "))
    before = text(page)
    generate(page)
    assert text(page) == before + re.sub("\r\n?", "\n", written)


def test_a_key_is_never_a_part_of_a_program_or_a_link(page):
    page.evaluate("sessionStorage.setItem('inkstream.key', 'ink-secret')")
    page.reload()
    described(page)
    for language in ("curl", "Python", "JavaScript"):
        page.get_by_role("button", name="Copy as").click()
        page.get_by_role("menuitem", name=language).click()
        status_of(page).filter(has_text=f"as {language}.").wait_for()
        assert "INKSTREAM_KEY" in clipboard(page) and "ink-secret" not in clipboard(page)
    page.get_by_role("button", name="Copy link").click()
    status_of(page).filter(has_text="Copied the link").wait_for()
    assert "ink-secret" not in clipboard(page)


def test_where_the_browser_keeps_its_clipboard_from_the_page_the_old_way_is_taken(page):
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.reload()
    described(page)
    page.get_by_role("button", name="Copy as").click()
    page.get_by_role("menuitem", name="Python").click()
    status_of(page).filter(has_text="Copied the request as Python.").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Copy as"
    page.locator("#document").fill("")
    page.keyboard.press("Control+V")
    assert "import httpx" in text(page)
    page.evaluate("document.execCommand = () => false")
    page.get_by_role("button", name="Copy link").click()
    status_of(page).filter(has_text="This browser does not let the page copy.").wait_for()


# Links


def test_a_link_opens_the_text_and_its_settings_and_takes_nothing_away(page, server):
    page.locator("#document").fill("A shared text \U0001f600\nwith 100% of it, & more #1")
    page.locator("#panel summary").click()
    set_fields(page, temperature="0.25", stop="\\n", seed="9007199254740993", n=2)
    page.get_by_role("button", name="Copy link").click()
    status_of(page).filter(has_text="Copied the link").wait_for()
    link = clipboard(page)
    assert link.startswith(f"{server.url}/#a.")
    page.locator("#document").fill("my own text")
    set_fields(page, temperature="0.9", top_p="0.5")
    page.reload()  # the hand's text is saved
    page.goto(link)
    status_of(page).filter(has_text="Opened from a link").wait_for()
    assert text(page) == "A shared text \U0001f600\nwith 100% of it, & more #1"
    shown = {name: setting(page, name).input_value() for name in ("temperature", "top_p", "stop", "seed")}
    assert shown == {"temperature": "0.25", "top_p": "", "stop": "\\n", "seed": "9007199254740993"}
    assert page.url == f"{server.url}/", "the fragment has left the address bar"
    page.locator("#undo").click()
    assert text(page) == "my own text"
    page.locator("#redo").click()
    assert text(page).startswith("A shared text")
    fresh = page.context.new_page()
    fresh.goto(link)
    status_of(fresh).filter(has_text="Opened from a link").wait_for()
    assert text(fresh) == text(page)
    fresh.close()


def test_a_broken_link_is_told_and_loses_nothing(page, server):
    page.locator("#document").fill("my own text")
    for broken in ("#a.AAAA", "#a.", "#b.AAAA"):
        page.goto(f"{server.url}/{broken}")
        page.locator('#status[data-state="error"]').wait_for()
        assert "This link" in status(page)
        assert text(page) == "my own text"
        page.wait_for_url(f"{server.url}/")
    page.goto(f"{server.url}/#somewhere-else")
    assert page.url.endswith("#somewhere-else") and text(page) == "my own text"


# Receipts


def test_a_receipt_is_shown_copied_and_replayed_to_the_letter(page):
    unfold_run(page)
    assert "No receipt yet" in page.locator("#receipt").inner_text()
    set_fields(page, max_tokens=8)
    generate(page)
    after, seed = text(page), used_seed(page)
    rows = dict(row.split("\n") for row in page.locator("#receipt dl div").all_inner_texts())
    assert rows["seed"] == seed and rows["max_tokens"] == "8" and rows["temperature"] == "1"
    page.get_by_role("button", name="Copy receipt").click()
    status_of(page, "#receipt").filter(has_text="Copied the receipt.").wait_for()
    receipt = json.loads(clipboard(page))
    assert receipt["seed"] == int(seed) and len(receipt["prompt_sha256"]) == 64
    with page.expect_request("**/complete") as request:
        page.get_by_role("button", name="Replay").click()
    status_of(page, "#receipt").filter(has_text="The same text, to the letter").wait_for()
    body = body_of(request.value)
    assert body["prompt"] == PROMPT and body["seed"] == int(seed) and body["min_p"] == 0
    assert text(page) == after, "the document is left alone"
    page.locator("#undo").click()
    assert "No receipt yet" in page.locator("#receipt").inner_text()


def test_a_replay_can_be_stopped(page):
    unfold_run(page)
    play(page, *run_with_receipt(" there was"))
    generate(page)
    page.route("**/complete", lambda _: None)
    page.get_by_role("button", name="Replay").click()
    status_of(page, "#receipt").filter(has_text="Replaying").wait_for()
    page.locator("#receipt").get_by_role("button", name="Stop").click()
    status_of(page, "#receipt").filter(has_text="The replay was stopped.").wait_for()
    assert page.get_by_role("button", name="Replay").is_visible()


def test_a_receipt_that_one_was_sent_gives_its_settings_and_seed(page):
    unfold_run(page)
    page.get_by_text("Use another receipt").click()
    set_fields(page, top_p="0.5")
    use = page.get_by_role("button", name="Use its settings")
    for wrong, words in [("{oops", "This is no JSON."), ('{"seed": 1}', "no weights_version and no settings")]:
        page.locator("#pasted-receipt").fill(wrong)
        use.click()
        status_of(page, "#receipt").filter(has_text=words).wait_for()
        assert setting(page, "top_p").input_value() == "0.5"
    page.locator("#pasted-receipt").fill(json.dumps(RECEIPT))
    use.click()
    status_of(page, "#receipt").filter(has_text="The settings and the seed are those of the receipt.").wait_for()
    said = status_of(page, "#receipt form").inner_text()
    assert "another text than this one" in said and "weights here are others" in said and "native-int8" in said
    play(page, *run_with_receipt())
    with page.expect_request("**/complete") as request:
        start(page)
    wait_for(page, "done")
    expected = {"temperature": 0.25, "top_k": 7, "stop": ["\n"], "max_tokens": 3, "seed": 9007199254740993}
    assert body_of(request.value) == {"prompt": PROMPT, "stream": True, "logprobs": 0, **expected}
    assert '"seed":9007199254740993' in text_of(request.value)
