"""CPU time per frame while the page streams 2,000 tokens.

The cost of a frame is the main thread's work since the previous frame: reading the stream, scripts, style, layout and
recording paint commands. Chromium's trace gives it as the thread's CPU time, so that other load on the machine hardly
changes it.
"""

import json
import statistics
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.support.page.browser import CHROMIUM_ONLY, DONE, PROMPT, fake_completion, generate, text, throttle_stream
from tests.support.page.token_view import WORDS, open_inspect_view, token_events

pytestmark = CHROMIUM_ONLY
BUDGET_MS = 8  # about half a frame at 60 Hz, for all work of the page
TOKENS = 2000
TOKENS_PER_FRAME = 8  # 480 tokens/s
SENTENCE = " The harbour lay quiet under a low sky, and the boats turned on their chains."
PARAGRAPH = 120  # tokens
BUSY = 4_000_000  # square roots: about 30 ms
CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline"]
DRAWN = "FireAnimationFrame"  # traced for each frame in which the page runs a callback


@dataclass
class Frames:
    """`costs` in ms of CPU, one per frame in order of time; filled when the measurement ends."""

    costs: list[float] = field(default_factory=list)

    @property
    def median(self):
        return statistics.median(self.costs)

    def __str__(self):
        p95 = statistics.quantiles(self.costs, n=20)[-1]
        return f"{len(self.costs)} frames, median {self.median:.1f} ms, 95th percentile {p95:.1f} ms of CPU"


@contextmanager
def measured_frames(browser, page):
    """Measures the frames that `page` draws inside the block."""
    frames = Frames()
    browser.start_tracing(page=page, categories=CATEGORIES)
    try:
        yield frames
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
        frames.costs = frame_costs(events)


def frame_costs(events):
    """CPU ms of each frame. Complete events (ph X) have microseconds: start ts, wall time dur, CPU time tdur."""
    drawn = [event for event in events if event["name"] == DRAWN]
    main = _thread(max(drawn, key=lambda event: event["ts"]))
    starts = sorted(event["ts"] for event in drawn if _thread(event) == main)
    tasks = [e for e in events if e["name"] == "RunTask" and e["ph"] == "X" and _thread(e) == main]
    found, cost = [], 0.0
    for task in sorted(tasks, key=lambda task: task["ts"]):
        cost += task.get("tdur", task["dur"]) / 1000  # some tasks have no CPU time
        if bisect_left(starts, task["ts"]) < bisect_right(starts, task["ts"] + task["dur"]):
            found.append(cost)
            cost = 0.0
    return found[1:]  # the first cost includes work before any frame


def _thread(event):
    return event["pid"], event["tid"]


def tokens():
    """Token events as the server sends them, each with the five most probable tokens."""
    words = [f" {word}" for word in SENTENCE.split()]
    for i in range(TOKENS):
        text = "\n\nThe" if i % PARAGRAPH == PARAGRAPH - 1 else words[i % len(words)]
        top = [{"id": k, "text": w, "bytes": list(w.encode()), "logprob": -0.5 - k} for k, w in enumerate(words[:5])]
        token = {"id": i, "text": text, "bytes": list(text.encode()), "logprob": -0.4, "top": top}
        yield "token", {"index": 0, "text": text, "tokens": [token]}


@pytest.mark.timed
@pytest.mark.parametrize("view", ["sheet", "inspect view"])
def test_streaming_two_thousand_tokens_takes_less_than_half_of_each_frame(browser, page, promise, view):
    """The inspect view gets one paragraph, its worst case: the browser lays it out as a whole."""
    paragraph = token_events([f" {WORDS[i % len(WORDS)]}" for i in range(TOKENS)])
    fake_completion(page, ("start", {"seed": 1}), *(tokens() if view == "sheet" else paragraph), DONE)

    def measure():
        page.reload()
        page.locator("#document").fill(PROMPT)
        if view == "inspect view":
            open_inspect_view(page)
        throttle_stream(page, TOKENS_PER_FRAME, frames=1)
        with measured_frames(browser, page) as frames:
            generate(page)
            if view == "inspect view":
                page.wait_for_function(f"() => document.querySelectorAll('.token').length > {TOKENS}")
        return frames

    frames = promise.measured(measure, lambda found: found.median < BUDGET_MS)
    print(f"\n{view}: {frames}")
    assert view != "sheet" or len(text(page)) > len(PROMPT) + 3 * TOKENS
    assert len(frames.costs) >= TOKENS / TOKENS_PER_FRAME, "the tokens arrived in too few frames"
    assert frames.median < BUDGET_MS, str(frames)


def test_the_measurement_detects_a_page_that_stutters(browser, page):
    """Control: a shorter stream of the same tokens, with needless work in each frame."""
    fake_completion(page, ("start", {"seed": 1}), *list(tokens())[:200], DONE)
    throttle_stream(page, TOKENS_PER_FRAME, frames=1, busy=BUSY)
    with measured_frames(browser, page) as frames:
        generate(page)
    print(f"\nwith {BUSY:,} square roots a frame: {frames}")
    assert frames.median > BUDGET_MS, str(frames)
