"""The tree view of branches in a real browser: by keyboard, on a phone, and with many nodes."""

import pytest

from tests.support.page.browser import (
    DONE,
    PROMPT,
    allow_module_imports,
    fake_completion,
    generate,
    run_events,
    text,
    wait_for,
)


def play_run(page, *words, logprob=-0.5):
    tokens = [{"id": n, "text": word, "bytes": list(word.encode()), "logprob": logprob} for n, word in enumerate(words)]
    sent = [("token", {"text": one["text"], "tokens": [one]}) for one in tokens]
    fake_completion(page, ("start", {"seed": 7}), *sent, DONE)
    generate(page)


@pytest.fixture
def branched(page):
    """PROMPT, " there was a", then either " king" and " and a queen", or " knight", which is current."""
    play_run(page, " there", " was", " a", " king")
    play_run(page, " and", " a", " queen")
    for _ in range(2):
        page.locator("#undo").click()
    play_run(page, " there", " was", " a", " knight", logprob=-2)
    page.keyboard.press("Control+b")
    return page


def rows(page):
    return page.locator("#tree [role=treeitem]")


def row(page, words):
    return page.locator("#tree [role=treeitem]", has=page.locator(".words", has_text=words))


def focused(page):
    return page.evaluate(
        "() => document.activeElement.querySelector('.words')?.textContent ?? document.activeElement.id"
    )


def test_the_aria_tree_shows_siblings_where_they_diverge_and_compares_two_word_by_word(branched):
    seen = rows(branched).evaluate_all("""(rows) => rows.map((row) => [
        row.querySelector(".words").textContent.trim(), row.ariaLevel, row.ariaPosInSet, row.ariaSetSize,
        row.ariaExpanded, row.ariaSelected, row.querySelector(".chance")?.lastChild.textContent ?? "",
    ])""")
    assert seen == [
        [PROMPT, "1", "1", "1", "true", "false", ""],
        ["there was a", "2", "1", "1", "true", "false", "0.61"],
        ["king", "3", "1", "2", "true", "false", "0.61"],
        ["and a queen", "4", "1", "1", None, "false", "0.61"],
        ["knight", "3", "2", "2", None, "true", "0.14"],
    ]
    tree = branched.get_by_role("tree", name="Branches.")
    assert tree.count() == 1
    assert tree.get_by_role("treeitem", name="Run 3: knight , mean probability 0.14").count() == 1
    assert branched.locator("#branches").is_hidden(), "the strip would show the same tree"
    branched.keyboard.press("ArrowUp")
    branched.keyboard.press("c")
    both = branched.get_by_role("group", name="Two branches compared")
    assert both.locator(".tail").inner_text() == f"{PROMPT} there was a"
    assert both.locator(".compared").all_inner_texts() == ["knight", "king and a queen"]
    assert both.locator("mark").all_inner_texts() == ["knight", "king and a queen"]
    branched.keyboard.press("Escape")
    assert (focused(branched).strip(), both.is_hidden()) == ("and a queen", True)
    branched.keyboard.press("c")
    branched.keyboard.press("2")
    assert (text(branched), focused(branched)) == (f"{PROMPT} there was a king and a queen", "document")


def test_keys_navigate_and_fold_the_tree_and_enter_continues_there(branched):
    page = branched
    assert focused(page) == "knight", "the view opens at the current text"
    for key, name in [
        ("ArrowUp", "and a queen"),
        ("ArrowLeft", "king"),
        ("ArrowLeft", "king"),
        ("ArrowDown", "knight"),
        ("ArrowUp", "king"),
        ("ArrowRight", "king"),
        ("ArrowRight", "and a queen"),
        ("Home", PROMPT),
        ("End", "knight"),
        ("ArrowLeft", "there was a"),
    ]:
        page.keyboard.press(key)
        assert focused(page).strip() == name, key
    assert [one.get_attribute("tabindex") for one in rows(page).all()].count("0") == 1
    page.keyboard.press("Enter")
    assert (text(page), focused(page)) == (f"{PROMPT} there was a", "document"), (
        "a node where branches diverge can be continued"
    )
    page.keyboard.press("Control+z")
    assert text(page) == PROMPT
    page.keyboard.press("Control+b")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent").startswith("Go on here")
    page.keyboard.press("Control+b")
    assert page.locator("#document").is_visible()
    page.keyboard.press("Control+b")
    fake_completion(page, *run_events(" rode"))
    page.keyboard.press("Control+Enter")
    wait_for(page, "done")
    assert (page.locator("#document").is_visible(), text(page)) == (True, f"{PROMPT} rode"), (
        "a run switches to the text"
    )


def test_undo_restores_deleted_branches_and_the_text(branched):
    page = branched
    row(page, "king").first.focus()
    page.keyboard.press("Delete")
    assert rows(page).count() == 2, "the remaining nodes form one line"
    assert text(page) == f"{PROMPT} there was a knight"
    assert "Deleted 2 branches." in page.locator(".tree-note").inner_text()
    page.keyboard.press("Control+z")
    assert rows(page).count() == 5
    page.keyboard.press("End")
    page.keyboard.press("Delete")
    assert text(page) == f"{PROMPT} there was a", "the text goes back to where the deleted branch diverged"
    page.locator(".tree-note button").click()
    assert text(page) == f"{PROMPT} there was a knight"
    assert focused(page).strip() == "knight"
    page.keyboard.press("Home")
    assert page.locator("#tree").get_by_role("button", name="Delete").get_attribute("aria-disabled") == "true"


def test_names_bookmarks_and_folds_are_kept(branched):
    page = branched
    row(page, "king").first.focus()
    page.keyboard.press("F2")
    page.keyboard.type("The king")
    page.keyboard.press("Enter")
    page.keyboard.press("b")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert rows(page).count() == 2
    page.wait_for_function("() => Object.values(localStorage).some((item) => item.includes('The king'))")
    page.reload()
    page.keyboard.press("Control+b")
    assert rows(page).count() == 2, "folds survive the reload"
    page.keyboard.press("n")
    assert focused(page) == "The king king"
    assert rows(page).count() == 4, "the ancestors of a bookmark are unfolded"
    page.keyboard.press("b")
    assert page.locator("#tree").get_by_role("button", name="Next bookmark").is_hidden()


def test_a_key_press_in_three_hundred_branches_changes_few_rows_and_the_tree_fits_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 800})
    allow_module_imports(page)
    page.evaluate("""async () => {
        const { Tree } = await import("/web/text/tree.js");
        const tree = new Tree({ text: "Once", units: [] });
        for (let id = 1; id < 300; id += 1) {
            tree.go(id % 5 ? id - 1 : Math.floor(id / 2));
            const { text } = tree.current.state;
            const facts = { typed: {}, at: text.length, count: 1, index: 0 };
            tree.commit("run", { text: `${text} ${id} is its number`, units: [] }, facts);
        }
        const tested = await import("/web/text/outline.js");
        const { TreeView } = await import("/web/text/tree-view.js");
        const root = document.getElementById("tree");
        root.replaceChildren();
        const view = new TreeView(root, { ongo() {}, oncompare() {}, announce() {} });
        view.notebook = { tree, running: false, text: tree.current.state.text };
        document.getElementById("write").hidden = true;
        root.hidden = false;
        view.show(tested.outline(tree));
        view.open({ withFocus: true });
        window.changes = 0;
        const count = (records) => (window.changes += records.length);
        new MutationObserver(count).observe(root.firstChild, { childList: true, subtree: true, attributes: true });
    }""")
    assert rows(page).count() == 300
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    for _ in range(4):
        page.keyboard.press("ArrowUp")
    assert 0 < page.evaluate("() => window.changes") <= 16, "a key press changes two rows"
    assert page.evaluate("""() => {
        const row = document.activeElement.getBoundingClientRect();
        const foot = document.querySelector(".tree-foot").getBoundingClientRect();
        return row.top >= 0 && row.bottom <= foot.top;
    }"""), "the footer does not cover the focused row"
