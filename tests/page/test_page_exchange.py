"""Generated programs, links, receipts and replays, in a real browser."""

import json
import re
import subprocess

import pytest

from tests.support.page.browser import (
    PROMPT,
    allow_clipboard,
    click_generate,
    fake_completion,
    generate,
    json_body,
    raw_body,
    read_clipboard,
    run_events,
    set_fields,
    setting,
    status,
    text,
    used_seed,
    wait_for,
    wait_for_schema,
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


KEEP_COPIED_MESSAGE = """(() => {
    const later = window.setTimeout;
    window.setTimeout = (work, ms, ...more) => (ms === 2500 ? 0 : later(work, ms, ...more));
})()"""


def run_with_receipt(*pieces):
    """The events of a run that generates these pieces and ends with RECEIPT."""
    *events, (name, done) = run_events(*pieces, seed=RECEIPT["seed"])
    return [*events, (name, {**done, "receipt": RECEIPT})]


@pytest.fixture(autouse=True)
def _clipboard_allowed(page):
    """Allows clipboard access before each test.

    The "Copied" message stays: on a busy machine a test might miss it in the 2.5 s that the page shows it.
    """
    allow_clipboard(page)
    page.context.add_init_script(KEEP_COPIED_MESSAGE)
    page.evaluate(KEEP_COPIED_MESSAGE)


def status_of(page, part="#exits"):
    return page.locator(f"{part} [role=status]")


def unfold_run(page):
    page.locator("#run > summary").click()


# Programs


def test_a_program_copied_by_keyboard_sends_the_pages_request(page, server):
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
    assert page.evaluate("document.activeElement.textContent") == "Copy as", "the focus returns to the button"
    program = read_clipboard(page)
    assert f"'{server.url}/complete'" in program and "INKSTREAM_KEY" not in program
    shown = subprocess.run(["bash"], input=program, capture_output=True, text=True, timeout=60, check=True).stdout
    written = "".join(json.loads(line[6:]).get("text", "") for line in shown.splitlines() if line.startswith("data: "))
    before = text(page)
    generate(page)
    assert text(page) == before + re.sub("\r\n?", "\n", written)


def test_programs_and_links_never_contain_the_key(page):
    page.evaluate("sessionStorage.setItem('inkstream.key', 'ink-secret')")
    page.reload()
    wait_for_schema(page)
    for language in ("curl", "Python", "JavaScript"):
        page.get_by_role("button", name="Copy as").click()
        page.get_by_role("menuitem", name=language).click()
        status_of(page).filter(has_text=f"as {language}.").wait_for()
        assert "INKSTREAM_KEY" in read_clipboard(page) and "ink-secret" not in read_clipboard(page)
    page.get_by_role("button", name="Copy link").click()
    status_of(page).filter(has_text="Copied the link").wait_for()
    assert "ink-secret" not in read_clipboard(page)


def test_without_the_clipboard_api_the_page_copies_by_exec_command(page):
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.reload()
    wait_for_schema(page)
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


def test_a_link_opens_the_text_with_its_settings_and_undo_restores_the_users_text(page, server):
    page.locator("#document").fill("A shared text \U0001f600\nwith 100% of it, & more #1")
    page.locator("#panel summary").click()
    set_fields(page, temperature="0.25", stop="\\n", seed="9007199254740993", n=2)
    page.get_by_role("button", name="Copy link").click()
    status_of(page).filter(has_text="Copied the link").wait_for()
    link = read_clipboard(page)
    assert link.startswith(f"{server.url}/#a.")
    page.locator("#document").fill("my own text")
    set_fields(page, temperature="0.9", top_p="0.5")
    page.reload()  # saves the text
    page.goto(link)
    status_of(page).filter(has_text="Opened from a link").wait_for()
    assert text(page) == "A shared text \U0001f600\nwith 100% of it, & more #1"
    shown = {name: setting(page, name).input_value() for name in ("temperature", "top_p", "stop", "seed")}
    assert shown == {"temperature": "0.25", "top_p": "", "stop": "\\n", "seed": "9007199254740993"}
    assert page.url == f"{server.url}/", "the page removes the fragment from the address bar"
    page.locator("#undo").click()
    assert text(page) == "my own text"
    page.locator("#redo").click()
    assert text(page).startswith("A shared text")
    fresh = page.context.new_page()
    fresh.goto(link)
    status_of(fresh).filter(has_text="Opened from a link").wait_for()
    assert text(fresh) == text(page)
    fresh.close()


def test_a_broken_link_is_reported_and_keeps_the_text(page, server):
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


def test_a_receipt_can_be_copied_and_replayed_exactly(page):
    unfold_run(page)
    assert "No receipt yet" in page.locator("#receipt").inner_text()
    set_fields(page, max_tokens=8)
    generate(page)
    after, seed = text(page), used_seed(page)
    rows = dict(row.split("\n") for row in page.locator("#receipt dl div").all_inner_texts())
    assert rows["seed"] == seed and rows["max_tokens"] == "8" and rows["temperature"] == "1"
    page.get_by_role("button", name="Copy receipt").click()
    status_of(page, "#receipt").filter(has_text="Copied the receipt.").wait_for()
    receipt = json.loads(read_clipboard(page))
    assert receipt["seed"] == int(seed) and len(receipt["prompt_sha256"]) == 64
    with page.expect_request("**/complete") as request:
        page.get_by_role("button", name="Replay").click()
    status_of(page, "#receipt").filter(has_text="The same text, to the letter").wait_for()
    body = json_body(request.value)
    assert body["prompt"] == PROMPT and body["seed"] == int(seed) and body["min_p"] == 0
    assert text(page) == after, "a replay does not change the document"
    page.locator("#undo").click()
    assert "No receipt yet" in page.locator("#receipt").inner_text()


def test_a_replay_can_be_stopped(page):
    unfold_run(page)
    fake_completion(page, *run_with_receipt(" there was"))
    generate(page)
    page.route("**/complete", lambda _: None)
    page.get_by_role("button", name="Replay").click()
    status_of(page, "#receipt").filter(has_text="Replaying").wait_for()
    page.locator("#receipt").get_by_role("button", name="Stop").click()
    status_of(page, "#receipt").filter(has_text="The replay was stopped.").wait_for()
    assert page.get_by_role("button", name="Replay").is_visible()


def test_a_pasted_receipt_sets_its_settings_and_seed(page):
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
    status_of(page, "#receipt").filter(has_text="The settings and the seed come from the receipt.").wait_for()
    notes = status_of(page, "#receipt form").inner_text()
    assert "another text than this one" in notes and "weights here are others" in notes and "native-int8" in notes
    fake_completion(page, *run_with_receipt())
    with page.expect_request("**/complete") as request:
        click_generate(page)
    wait_for(page, "done")
    expected = {"temperature": 0.25, "top_k": 7, "stop": ["\n"], "max_tokens": 3, "seed": 9007199254740993}
    assert json_body(request.value) == {"prompt": PROMPT, "stream": True, "logprobs": 0, **expected}
    assert '"seed":9007199254740993' in raw_body(request.value)
