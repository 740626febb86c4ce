"""What a browser's main thread does for each frame that it draws, in milliseconds of CPU.

Taken from Chromium's own trace, and counted by the thread's clock: it stands still while others have the core, so that
a busy machine measures much what a quiet one does. A frame is everything since the frame before: reading the stream,
scripts, style, layout, and recording what is to be painted.
"""

import json
import statistics
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field

CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline"]
DRAWN = "FireAnimationFrame"  # of each frame that has work the page asked for


@dataclass
class Frames:
    """`costs` in ms, one for each frame, in the order of time; filled when the measurement ends."""

    costs: list[float] = field(default_factory=list)

    @property
    def median(self):
        return statistics.median(self.costs)

    def __str__(self):
        p95 = statistics.quantiles(self.costs, n=20)[-1]
        return f"{len(self.costs)} frames, median {self.median:.1f} ms, 95th percentile {p95:.1f} ms of CPU"


@contextmanager
def measured(browser, page):
    """The frames that `page` draws inside the block."""
    frames = Frames()
    browser.start_tracing(page=page, categories=CATEGORIES)
    try:
        yield frames
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
        frames.costs = costs(events)


def costs(events):
    """Complete events ("ph": "X") have a beginning and a length in us: "ts" and "dur" of the wall, "tdur" of CPU."""
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
    return found[1:]  # what was before the first one is no frame's


def _thread(event):
    return event["pid"], event["tid"]
