"""Generating at the caret and rewriting a selection, in a real browser."""

from tests.support.page.browser import (
    draft_events,
    fake_completions,
    generate,
    hold_stream_open,
    override_model_info,
    run_events,
    send_events,
    set_fields,
    text,
    wait_for,
)

TEXT = "The door was old. She waited. It opened."


def write(page, words=TEXT, caret=None, end=None):
    page.locator("#document").fill(words)
    if caret is not None:
        select(page, caret, caret if end is None else end)


def select(page, start, end):
    page.locator("#document").evaluate("(area, [start, end]) => area.setSelectionRange(start, end)", [start, end])


def caret(page):
    return page.locator("#document").evaluate("(area) => [area.selectionStart, area.selectionEnd]")


def mirror_text(page):
    """The text of the mirror, with the model's parts in brackets."""
    return page.locator("#mirror").evaluate("""(mirror) => {
        const shown = ({ className, textContent }) => (className === "written" ? `[${textContent}]` : textContent);
        return [...mirror.children].map((line) => [...line.children].map(shown).join("")).join("\\n");
    }""")


def test_the_page_asks_once_whether_to_insert_at_the_caret_and_remembers_the_choice(page):
    bodies = fake_completions(page, *run_events(" and red"))
    write(page, caret=16)
    page.locator("#document").press("Control+Enter")
    assert page.evaluate("() => document.activeElement.textContent") == "Insert here"
    page.keyboard.press("Escape")
    assert (bodies, text(page)) == ([], TEXT)
    assert page.evaluate("() => document.activeElement.id") == "document"
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Enter")
    wait_for(page, "done")
    assert text(page) == "The door was old and red. She waited. It opened."
    assert mirror_text(page) == "The door was old[ and red]. She waited. It opened."
    assert (bodies[0]["prompt"], bodies[0].get("suffix")) == ("The door was old", None)
    assert caret(page) == [24, 24], "after the inserted text"
    page.keyboard.press("Control+z")
    assert text(page) == TEXT
    page.wait_for_timeout(600)  # until it is saved
    page.reload()
    assert page.locator("#at-caret").is_checked()
    page.locator("#at-end").check()
    select(page, 3, 3)
    page.locator("#generate-word", has_text="Generate").wait_for()
    generate(page)
    assert text(page) == f"{TEXT} and red"
    assert bodies[1]["prompt"] == TEXT


def test_text_after_the_caret_is_sent_as_the_suffix_to_an_infill_model(page):
    override_model_info(page, has_infill=True)
    page.locator("#at-caret:checked").wait_for()
    bodies = fake_completions(page, *run_events("ver", "y\nvery "))
    write(page, caret=13)
    page.locator("#generate-word", has_text="Insert here").wait_for()
    generate(page)
    assert text(page) == "The door was very\nvery old. She waited. It opened."
    assert (bodies[0]["prompt"], bodies[0]["suffix"]) == (TEXT[:13], TEXT[13:])
    page.get_by_role("button", name="Regenerate").click()
    wait_for(page, "done")
    assert (bodies[1]["prompt"], bodies[1]["suffix"]) == (TEXT[:13], TEXT[13:])
    select(page, 0, 0)
    page.locator("#document").press("End")
    page.locator("#document").press("Control+End")
    generate(page)
    assert "suffix" not in bodies[2]


def test_inserted_text_scrolls_into_view(page):
    page.locator("#at-caret").check()
    lines = "".join(f"Line {number} of a text that is longer than the window.\n" for number in range(120))
    write(page, lines, caret=6)
    page.locator("#paper").evaluate("(paper) => paper.scrollTo(0, 1e9)")
    hold_stream_open(page)
    page.keyboard.press("Control+Enter")
    send_events(page, *run_events(" and", " a half\nA")[:-1])
    page.locator("#mirror", has_text="Line 0 and a half").wait_for()
    assert mirror_text(page).startswith("Line 0[ and a half]\n[A] of a text"), "during the run"
    assert page.locator("#paper").evaluate("(paper) => paper.scrollTop") < 50
    page.keyboard.press("Escape")
    wait_for(page, "stopped")
    assert text(page) == lines[:6] + " and a half\nA" + lines[6:]
    assert mirror_text(page).startswith("Line 0[ and a half]\n[A] of a text"), "after the run"
    assert caret(page) == [19, 19]


def test_taking_an_alternative_rewrites_the_selection(page):
    bodies = fake_completions(page, *draft_events(" Nobody came. And", " She knocked.", " Rain fell."))
    set_fields(page, max_tokens=64)
    write(page, caret=18, end=29)
    page.locator("#generate-word", has_text="Rewrite").wait_for()
    page.locator("#document").press("Control+Enter")
    wait_for(page, "done")
    group = page.get_by_role("group", name="3 alternatives")
    assert group.locator(".tail").inner_text() == "The door was old. She waited."
    assert group.locator(".abreast-text").all_inner_texts() == ["Nobody came.", "She knocked.", "Rain fell."]
    assert (bodies[0]["prompt"], bodies[0]["n"], bodies[0]["max_tokens"]) == ("The door was old.", 3, 12)
    page.keyboard.press("1")
    assert text(page) == "The door was old. Nobody came. It opened."
    assert mirror_text(page) == "The door was old.[ Nobody came.] It opened."
    page.locator("#undo").click()
    assert text(page) == TEXT, "one undo step"
    page.locator("#redo").click()
    assert page.get_by_role("treeitem", name="She knocked").count() == 1, "the other alternatives remain branches"


def test_with_the_whole_text_selected_it_is_continued_rather_than_rewritten(page):
    bodies = fake_completions(page, *run_events(" again."))
    for start, end in [(0, 5), (1, 4)]:  # all of the text, and all of it once extended to whole words
        write(page, "Hello", start, end)
        page.locator("#document").press("Control+Enter")
        wait_for(page, "done")
        assert (bodies.pop()["prompt"], text(page)) == ("Hello", "Hello again.")


WORDS = [
    ("The door was old.", " She waited", ". It opened.", (20, 27)),
    ("\u6211\u559c\u6b22", "\u5317\u4eac", "\u3002\u597d", (4, 5)),  # Chinese
    ("\u05e9\u05dc\u05d5\u05dd", " \u05e2\u05d5\u05dc\u05dd", " \u05d8\u05d5\u05d1", (6, 7)),  # Hebrew
]


def test_a_rewritten_selection_is_extended_to_whole_words(page):
    bodies = fake_completions(page, *draft_events(" Yes", " Yes", " Yes"))
    for before, replaced, after, span in WORDS:
        words = before + replaced + after
        write(page, words, *span)
        page.locator("#document").press("Control+Enter")
        wait_for(page, "done")
        assert bodies.pop()["prompt"] == before
        assert page.locator("#columns .replaced").inner_text() == replaced.strip(), (
            "the replaced text is shown before an alternative is taken"
        )
        page.keyboard.press("1")
        written = text(page)
        assert written.startswith(before + " Yes") and written.endswith(after)
        page.keyboard.press("Control+z")
        assert text(page) == words, "one undo step"


def test_after_an_insertion_only_the_other_tokens_are_scored_again(page):
    page.locator("#at-caret").check()
    write(page, "One two three four", caret=7)
    set_fields(page, max_tokens=4)
    generate(page)
    inserted = text(page)[7 : -len(" three four")]
    scored = []
    page.on("request", lambda request: scored.append(request) if request.url.endswith("/score") else None)
    page.get_by_role("button", name="Inspect").click()
    page.wait_for_function("(words) => document.querySelector('#inspect .page').textContent === words", arg=text(page))
    page.wait_for_function("() => document.querySelectorAll('#inspect .token').length > 5")
    assert scored and inserted
    shown = page.locator("#inspect .token").all_inner_texts()
    assert "".join(shown) == text(page)
