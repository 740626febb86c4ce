"""2,000 tokens without a stutter: the work of the page in each frame while text streams."""

import pytest

from tests.support.page.browser import CHROMIUM_ONLY, DONE, PROMPT, generate, play, text, trickle
from tests.support.page.frame_times import measured
from tests.support.page.token_view import WORDS, inspect, played

pytestmark = CHROMIUM_ONLY
BUDGET_MS = 8  # about half of a frame at 60 Hz, for everything that the page does
TOKENS = 2000
A_FRAME = 8  # tokens that come with each: 480 tokens/s
SENTENCE = " The harbour lay quiet under a low sky, and the boats turned on their chains."
PARAGRAPH = 120  # tokens
BUSY = 4_000_000  # square roots: some 30 ms


def tokens():
    """As the page gets them, each with the five most probable ones."""
    words = [f" {word}" for word in SENTENCE.split()]
    for i in range(TOKENS):
        text = "\n\nThe" if i % PARAGRAPH == PARAGRAPH - 1 else words[i % len(words)]
        top = [{"id": k, "text": w, "bytes": list(w.encode()), "logprob": -0.5 - k} for k, w in enumerate(words[:5])]
        token = {"id": i, "text": text, "bytes": list(text.encode()), "logprob": -0.4, "top": top}
        yield "token", {"index": 0, "text": text, "tokens": [token]}


@pytest.mark.timed
def test_two_thousand_tokens_stream_into_the_sheet_within_half_a_frame_each(browser, page, promise):
    play(page, ("start", {"seed": 1}), *tokens(), DONE)

    def measure():
        page.reload()
        page.locator("#document").fill(PROMPT)
        trickle(page, A_FRAME, frames=1)
        with measured(browser, page) as frames:
            generate(page)
        return frames

    frames = promise.measured(measure, lambda found: found.median < BUDGET_MS)
    print(f"\nwriting: {frames}")
    assert len(text(page)) > len(PROMPT) + 3 * TOKENS
    assert len(frames.costs) >= TOKENS / A_FRAME, "they did not come all at once"
    assert frames.median < BUDGET_MS, str(frames)


@pytest.mark.timed
def test_two_thousand_tokens_of_one_paragraph_stream_into_the_inspect_view_within_half_a_frame_each(
    browser, page, promise
):
    """One paragraph is the worst: a browser lays it out as a whole."""
    play(page, ("start", {"seed": 1}), *played([f" {WORDS[i % len(WORDS)]}" for i in range(TOKENS)]), DONE)

    def measure():
        page.reload()
        page.locator("#document").fill(PROMPT)
        inspect(page)
        trickle(page, A_FRAME, frames=1)
        with measured(browser, page) as frames:
            generate(page)
            page.wait_for_function(f"() => document.querySelectorAll('.token').length > {TOKENS}")
        return frames

    frames = promise.measured(measure, lambda found: found.median < BUDGET_MS)
    print(f"\ninspecting: {frames}")
    assert len(frames.costs) >= TOKENS / A_FRAME, "they did not come all at once"
    assert frames.median < BUDGET_MS, str(frames)


def test_the_measurement_sees_a_page_that_stutters(browser, page):
    """The control: the same stream, shorter, with needless work in each frame."""
    play(page, ("start", {"seed": 1}), *list(tokens())[:200], DONE)
    trickle(page, A_FRAME, frames=1, busy=BUSY)
    with measured(browser, page) as frames:
        generate(page)
    print(f"\nwith {BUSY:,} square roots a frame: {frames}")
    assert frames.median > BUDGET_MS, str(frames)
