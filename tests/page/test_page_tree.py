"""The tree of branches as a view of its own, in a real browser: by keyboard alone, on a phone, and with many nodes."""

import pytest

from tests.support.page.browser import DONE, PROMPT, allow_modules, generate, play, run_of, text, wait_for


def play_run(page, *words, logprob=-0.5):
    tokens = [{"id": n, "text": word, "bytes": list(word.encode()), "logprob": logprob} for n, word in enumerate(words)]
    sent = [("token", {"text": one["text"], "tokens": [one]}) for one in tokens]
    play(page, ("start", {"seed": 7}), *sent, DONE)
    generate(page)


@pytest.fixture
def grown(page):
    """PROMPT - " there was a" - " king", with " and a queen" behind it, and " knight", the current one."""
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


def test_siblings_stand_where_they_part_for_a_screen_reader_too_and_two_are_compared_word_by_word(grown):
    seen = rows(grown).evaluate_all("""(rows) => rows.map((row) => [
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
    tree = grown.get_by_role("tree", name="Branches.")
    assert tree.count() == 1
    assert tree.get_by_role("treeitem", name="Run 3: knight , mean probability 0.14").count() == 1
    assert grown.locator("#branches").is_hidden(), "the strip shows the same tree"
    grown.keyboard.press("ArrowUp")
    grown.keyboard.press("c")
    both = grown.get_by_role("group", name="Two branches compared")
    assert both.locator(".tail").inner_text() == f"{PROMPT} there was a"
    assert both.locator(".compared").all_inner_texts() == ["knight", "king and a queen"]
    assert both.locator("mark").all_inner_texts() == ["knight", "king and a queen"]
    grown.keyboard.press("Escape")
    assert (focused(grown).strip(), both.is_hidden()) == ("and a queen", True)
    grown.keyboard.press("c")
    grown.keyboard.press("2")
    assert (text(grown), focused(grown)) == (f"{PROMPT} there was a king and a queen", "document")


def test_the_keys_of_a_tree_walk_fold_and_go_on_writing_there(grown):
    page = grown
    assert focused(page) == "knight", "the view opens at the text as it is"
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
    assert (text(page), focused(page)) == (f"{PROMPT} there was a", "document"), "where they part is a place to write"
    page.keyboard.press("Control+z")
    assert text(page) == PROMPT
    page.keyboard.press("Control+b")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent").startswith("Go on here")
    page.keyboard.press("Control+b")
    assert page.locator("#document").is_visible()
    page.keyboard.press("Control+b")
    play(page, *run_of(" rode"))
    page.keyboard.press("Control+Enter")
    wait_for(page, "done")
    assert (page.locator("#document").is_visible(), text(page)) == (True, f"{PROMPT} rode"), "a run shows the text"


def test_what_is_deleted_comes_back_and_with_it_the_text(grown):
    page = grown
    row(page, "king").first.focus()
    page.keyboard.press("Delete")
    assert rows(page).count() == 2, "what is left is one line"
    assert text(page) == f"{PROMPT} there was a knight"
    assert "Deleted 2 branches." in page.locator(".tree-note").inner_text()
    page.keyboard.press("Control+z")
    assert rows(page).count() == 5
    page.keyboard.press("End")
    page.keyboard.press("Delete")
    assert text(page) == f"{PROMPT} there was a", "the text goes back to where it parted"
    page.locator(".tree-note button").click()
    assert text(page) == f"{PROMPT} there was a knight"
    assert focused(page).strip() == "knight"
    page.keyboard.press("Home")
    assert page.locator("#tree").get_by_role("button", name="Delete").get_attribute("aria-disabled") == "true"


def test_names_bookmarks_and_folds_are_kept(grown):
    page = grown
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
    assert rows(page).count() == 2, "the fold"
    page.keyboard.press("n")
    assert focused(page) == "The king king"
    assert rows(page).count() == 4, "what stands above a bookmark is unfolded"
    page.keyboard.press("b")
    assert page.locator("#tree").get_by_role("button", name="Next bookmark").is_hidden()


def test_three_hundred_branches_stay_fluent_and_fit_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 800})
    allow_modules(page)
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
    assert 0 < page.evaluate("() => window.changes") <= 16, "a step touches two rows"
    assert page.evaluate("""() => {
        const row = document.activeElement.getBoundingClientRect();
        const foot = document.querySelector(".tree-foot").getBoundingClientRect();
        return row.top >= 0 && row.bottom <= foot.top;
    }"""), "the foot covers no row that has the focus"
