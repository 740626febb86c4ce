"""Documents of the page: stored in the browser, searched, renamed, duplicated, deleted, exported and imported."""

import json

import pytest

from tests.support.page.browser import (
    PATIENCE_MS,
    capture_download,
    fake_completion,
    generate,
    record_defects,
    run_events,
    set_fields,
    setting,
    status,
    text,
)

pytestmark = pytest.mark.slow
DROP = """(files) => {
    const data = new DataTransfer();
    for (const [name, content] of files) data.items.add(new File([new Uint8Array(content)], name));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def write(page, words):
    page.locator("#document").fill(words)


def documents_dialog(page):
    if not page.locator("#documents").is_visible():
        page.locator("#documents-button").click()
        page.locator("#documents li").first.wait_for()
    return page.locator("#documents")


def titles(page):
    return [title.inner_text() for title in documents_dialog(page).locator("button.documents-title").all()]


def create(page, words):
    documents_dialog(page).get_by_role("button", name="New").click()
    page.locator("#documents").wait_for(state="hidden")
    write(page, words)


def open_document(page, title):
    documents_dialog(page).get_by_role("button", name=title, exact=True).click()
    page.locator("#documents").wait_for(state="hidden")


def choose_action(page, title, action):
    documents_dialog(page).get_by_role("button", name=f"More: {title}", exact=True).click()
    page.get_by_role("menuitem", name=action).click()


def wait_for_message(page, words):
    page.locator("#documents [role=status]").filter(has_text=words).wait_for()


def wait_for_text(page, words):
    page.wait_for_function("(words) => document.getElementById('document').value === words", arg=words)


def import_files(page, *files):
    with page.expect_file_chooser() as chooser:
        documents_dialog(page).get_by_role("button", name="Import").click()
    chooser.value.set_files([{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files])


def export(page, title, action):
    return capture_download(page, lambda: choose_action(page, title, action))


def test_five_documents_keep_text_settings_and_branches_across_a_reload(page):
    documents_dialog(page)
    assert titles(page) == [], "an untouched page creates no document"
    page.keyboard.press("Escape")
    fake_completion(page, *run_events(" there was"))
    generate(page)
    for name in ("Second", "Third", "Fourth"):
        create(page, name)
    assert page.locator("#branches").is_hidden() and page.locator("#undo").get_attribute("aria-disabled") == "false"
    create(page, "Fifth")
    set_fields(page, temperature="0.3")
    page.reload()
    assert text(page) == "Fifth" and page.title().startswith("Fifth")
    first = "Once upon a time there was"
    assert titles(page) == ["Fifth", "Fourth", "Third", "Second", first]
    open_document(page, first)
    assert text(page) == first and setting(page, "temperature").input_value() == ""
    page.locator("#undo").click()
    assert text(page) == "Once upon a time"
    open_document(page, "Fifth")
    assert setting(page, "temperature").input_value() == "0.3"
    assert len(titles(page)) == 5


def test_text_stored_by_an_earlier_version_becomes_a_document(page):
    page.evaluate("""() => {
        const node = { id: 0, parent: null, kind: "text", facts: {}, latest: null };
        const tree = { nodes: [{ ...node, start: 0, removed: 0, text: "From before", written: [] }], current: 0 };
        const state = { tree, settings: { temperature: "0.4" }, reach: { agreed: "From", always: true } };
        window.addEventListener("pagehide", () => { // after the page has stored its own
            sessionStorage.clear();
            localStorage.setItem("inkstream.notebook", JSON.stringify(state));
        });
    }""")
    page.reload()
    assert text(page) == "From before" and setting(page, "temperature").input_value() == "0.4"
    assert page.locator("#always").is_checked()
    assert titles(page) == ["From before"]


def test_documents_can_be_found_renamed_duplicated_and_deleted_by_keyboard(page):
    write(page, "The fox jumps\nover a lazy dog")
    create(page, "Something else")
    page.locator("#documents-button").press("Enter")
    page.locator("#documents li").first.wait_for()
    page.keyboard.type("LAZY fox")
    assert titles(page) == ["The fox jumps"]
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # Rename
    page.keyboard.type("Not this")
    page.keyboard.press("Escape")
    assert titles(page) == ["The fox jumps"], "Escape cancels the renaming and keeps the dialog open"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.type("Animals, lazy fox")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Animals, lazy fox", exact=True).wait_for()
    assert page.evaluate("() => document.activeElement.textContent") == "Animals, lazy fox", (
        "the focus stays in its row"
    )
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.press("Enter")  # Delete
    wait_for_message(page, "Deleted")
    assert titles(page) == [] and "No document has these words." in documents_dialog(page).inner_text()
    page.keyboard.press("Enter")  # Undo has the focus
    wait_for_message(page, "Restored")
    assert titles(page) == ["Animals, lazy fox"]
    choose_action(page, "Animals, lazy fox", "Duplicate")
    wait_for_message(page, "Made")
    open_document(page, "Animals, lazy fox (copy)")
    write(page, "Changed")
    open_document(page, "Animals, lazy fox")
    assert text(page) == "The fox jumps\nover a lazy dog"
    page.keyboard.press("Control+Enter")
    page.locator('#status[data-state="done"]').wait_for()


def test_deleting_the_open_document_opens_the_latest_and_undo_restores_it(page):
    write(page, "Kept")
    create(page, "Deleted")
    choose_action(page, "Deleted", "Delete")
    wait_for_message(page, "Deleted")
    assert titles(page) == ["Kept"] and text(page) == "Kept", "the latest document opens instead"
    page.locator("#documents").get_by_role("button", name="Undo").click()
    wait_for_text(page, "Deleted")
    for title in ("Kept", "Deleted"):
        choose_action(page, title, "Delete")
        wait_for_message(page, title)
    page.get_by_text("No documents yet.").wait_for()
    assert text(page) == ""
    page.reload()
    assert titles(page) == []
    page.locator("#documents").get_by_role("button", name="Undo").click()
    wait_for_message(page, "Restored")
    assert titles(page) == ["Deleted"]


def test_an_exported_document_can_be_imported_in_another_browser(page, browser, server):
    receipt = {"weights_version": "w", "seed": "7", "settings": {"top_k": 40}}
    *events, (name, done) = run_events(" there was")
    fake_completion(page, *events, (name, {**done, "receipt": receipt}))
    set_fields(page, top_k="40")
    generate(page)
    title = "Once upon a time there was"
    assert export(page, title, "Export as text") == (f"{title}.txt", title.encode())
    assert export(page, title, "Export as Markdown") == (f"{title}.md", f"{title}\n".encode())
    name, content = export(page, title, "Export everything")
    assert [node["facts"].get("receipt") for node in json.loads(content)["tree"]["nodes"]] == [None, receipt]
    other = browser.new_context(base_url=server.url).new_page()
    other.set_default_timeout(PATIENCE_MS)
    defects = record_defects(other)
    other.goto("/")
    import_files(other, (name, content))
    wait_for_text(other, title)
    assert setting(other, "top_k").input_value() == "40"
    other.locator("#undo").click()
    assert text(other) == "Once upon a time" and defects == []
    other.context.close()


def test_files_can_be_dropped_on_the_page_and_damaged_ones_are_skipped(page):
    write(page, "Here before")
    page.evaluate(DROP, [["story.txt", list(b"One\r\nTwo")]])
    wait_for_text(page, "One\nTwo")
    assert page.locator("#documents-button").inner_text() == "story"
    page.evaluate(DROP, [["a.md", list(b"A")], ["image.txt", [255, 216]], ["wrong.json", list(b"{}")], ["b.md", [66]]])
    wait_for_message(page, "Imported 2 of 4 files. image.txt is not text in UTF-8.")
    wait_for_message(page, "wrong.json is not a document of this page")
    assert sorted(titles(page)) == ["Here before", "a", "b", "story"] and text(page) == "One\nTwo"


def test_a_document_is_open_in_one_tab_only(page):
    write(page, "Shared")
    create(page, "Mine")
    open_document(page, "Shared")
    page.wait_for_timeout(500)  # until it is stored
    second = page.context.new_page()
    second.goto("/")
    second.wait_for_function("() => document.title.startsWith('Shared (copy)')")
    write(second, "Shared, and more")
    assert sorted(titles(second)) == ["Mine", "Shared", "Shared (copy)"]
    documents_dialog(second).get_by_role("button", name="Shared", exact=True).click()
    wait_for_message(second, "open in another tab")
    choose_action(second, "Shared", "Delete")
    wait_for_message(second, "Close it there first")
    assert text(second) == "Shared, and more" and text(page) == "Shared"
    open_document(page, "Mine")
    open_document(second, "Shared")
    assert text(second) == "Shared"


def test_another_document_opens_only_after_the_run_is_stopped(page):
    write(page, "A")
    create(page, "B")
    page.route("**/complete", lambda _: None)  # never answered
    page.locator("#generate").click()
    documents_dialog(page).get_by_role("button", name="A", exact=True).click()
    wait_for_message(page, "Stop the run first")
    page.keyboard.press("Escape")
    assert text(page) == "B"
    page.keyboard.press("Escape")
    page.locator('#status[data-state="stopped"]').wait_for()
    open_document(page, "A")


def test_without_indexeddb_documents_last_for_the_visit_and_the_page_says_so(page):
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new DOMException('refused'); } })")
    page.reload()
    write(page, "One")
    create(page, "Two")
    documents_dialog(page)
    wait_for_message(page, "keeps no documents beyond this visit")
    open_document(page, "One")
    assert text(page) == "One"


def test_a_history_too_large_for_local_storage_is_kept_in_indexeddb_and_full_storage_is_reported(page):
    page.add_init_script("""
        const setItem = Storage.prototype.setItem;
        Storage.prototype.setItem = function (key, value) {
            if (value.includes('"kind":"run"')) throw new DOMException("full", "QuotaExceededError");
            setItem.call(this, key, value);
        };""")
    page.reload()
    fake_completion(page, *run_events(" there was"))
    generate(page)
    page.wait_for_function("() => localStorage.getItem('inkstream.notebook').includes('there was')")
    page.reload()
    page.locator('#undo[aria-disabled="false"]').click()
    assert text(page) == "Once upon a time"
    page.evaluate("""() => {
        IDBObjectStore.prototype.put = function () { throw new DOMException("full", "QuotaExceededError"); };
    }""")
    write(page, "Text that does not fit")
    page.locator("#status").filter(has_text="The browser's storage is full").wait_for()
    assert text(page) == "Text that does not fit" and "Error" in status(page)
