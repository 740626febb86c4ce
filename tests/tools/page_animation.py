"""Records docs/page.png, the README's animation, from the real page: .venv/bin/python -m tests.tools.page_animation

An APNG: browsers play it, and what cannot shows its first picture. Chromium draws and compresses every frame; a frame
holds the rows of the page that have changed. Takes the default weights, and seconds.
"""

from __future__ import annotations

import base64
import shutil
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.service_process import ROOT, running, serve_command

TARGET = ROOT / "docs/page.png"
LARGEST = 1_500_000
"""Bytes, so that the README loads at once."""
WINDOW = {"width": 1280, "height": 800}
PROMPT = "The letter lay on the table, unopened."
SETTINGS = {"temperature": "0.7", "max-tokens": "110", "seed": "3"}
TOKEN = "looked"
TOKENS_A_FRAME = 3
# What a reader of the animation sees arrives a few tokens at a time; the service would be done before the first frame.
_SLOW = """() => {
  const fetch = window.fetch;
  window.fetch = async (...request) => {
    if (!String(request[0]).endsWith("complete")) return fetch(...request);
    const events = (await (await fetch(...request)).text()).split(/(?<=\\n\\n)/);
    const body = new ReadableStream({ start(controller) {
      window.arrive = (count) => {
        for (const event of events.splice(0, count)) controller.enqueue(new TextEncoder().encode(event));
        if (!events.length) controller.close();
        return events.length;
      };
    } });
    return new Response(body, { headers: { "content-type": "text/event-stream" } });
  };
}"""
# The rows in which two pictures differ, as areas that are cut to their columns. Areas with little between them are one.
_CHANGED = """async (pictures) => {
  const [a, b] = await Promise.all(pictures.map(async (picture) => {
    const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${picture}`)).blob());
    const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, bitmap.width, bitmap.height);
  }));
  const [before, after, areas] = [new Uint32Array(a.data.buffer), new Uint32Array(b.data.buffer), []];
  for (let y = 0; y < b.height; y += 1) {
    let [left, right] = [b.width, -1];
    for (let x = 0; x < b.width; x += 1) {
      if (before[y * b.width + x] !== after[y * b.width + x]) [left, right] = [Math.min(left, x), x];
    }
    if (right < 0) continue;
    const last = areas.at(-1);
    if (last && y - last.bottom < 16) {
      Object.assign(last, { bottom: y, left: Math.min(last.left, left), right: Math.max(last.right, right) });
    } else areas.push({ top: y, bottom: y, left, right });
  }
  return areas.map(({ top, bottom, left, right }) =>
    ({ x: left, y: top, width: right - left + 1, height: bottom - top + 1 }));
}"""


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += size + 12


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Animation:
    """Frames of an APNG, in order."""

    def __init__(self, first: bytes, milliseconds: int) -> None:
        self._format = self._header(first)[8:]
        self._chunks: list[tuple[bytes, bytes]] = []
        self._header_of_all = self._header(first)
        self.add(first, {"x": 0, "y": 0}, milliseconds)

    def add(self, png: bytes, area: dict[str, int], milliseconds: int) -> None:
        """A picture that covers an area of those before it."""
        header = self._header(png)
        assert header[8:] == self._format, "all frames have one format"
        width, height = struct.unpack_from(">II", header)
        control = struct.pack(">IIIIHHBB", width, height, area["x"], area["y"], milliseconds, 1000, 0, 0)
        packed = b"".join(data for kind, data in _chunks(png) if kind == b"IDAT")
        self._chunks.append((control, zlib.compress(zlib.decompress(packed), 9)))

    def file(self) -> bytes:
        """The animation, which repeats without end."""
        parts = [b"\x89PNG\r\n\x1a\n", _chunk(b"IHDR", self._header_of_all)]
        parts.append(_chunk(b"acTL", struct.pack(">II", len(self._chunks), 0)))
        number = 0
        for control, data in self._chunks:
            is_first = number == 0
            parts.append(_chunk(b"fcTL", struct.pack(">I", number) + control))
            parts.append(_chunk(b"IDAT", data) if is_first else _chunk(b"fdAT", struct.pack(">I", number + 1) + data))
            number += 1 if is_first else 2
        return b"".join((*parts, _chunk(b"IEND", b"")))

    @staticmethod
    def _header(png: bytes) -> bytes:
        return next(data for kind, data in _chunks(png) if kind == b"IHDR")


@contextmanager
def _visit(browser: Any, url: str) -> Iterator[Page]:
    context = browser.new_context(base_url=url, viewport=WINDOW, color_scheme="light", reduced_motion="reduce")
    page = context.new_page()
    page.goto("/")
    page.locator('#status[data-state="idle"]').wait_for()
    page.evaluate(_SLOW)
    page.evaluate("() => { document.getElementById('numbers').style.visibility = 'hidden' }")  # of a slow stream
    yield page
    context.close()


def scenes(page: Page) -> Iterator[int]:
    """Acts as a user; yields after each step how many milliseconds it is to be seen."""
    for name, value in SETTINGS.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#document").fill(PROMPT)
    yield 1200
    page.locator("#document").press("Control+Enter")
    page.wait_for_function("() => window.arrive")
    while page.evaluate(f"() => window.arrive({TOKENS_A_FRAME})"):
        page.wait_for_timeout(60)
        yield 90
    page.locator('#status[data-state="done"]').wait_for()
    yield 1200
    page.locator("#view-inspect").click()
    page.locator(".token").first.wait_for()
    page.wait_for_load_state("networkidle")
    yield 1500
    page.locator(".token").filter(has_text=TOKEN).first.click()
    page.get_by_role("dialog").wait_for()
    page.wait_for_timeout(1000)
    yield 3000


def record(browser: Any, url: str) -> bytes:
    """Plays the scenes twice: the last one comes first, for those who see nothing else."""
    options: dict[str, Any] = {"caret": "hide", "animations": "disabled"}
    with _visit(browser, url) as page:
        for _ in scenes(page):
            pass
        before = page.screenshot(**options)
    animation = Animation(before, 1500)
    tool = browser.new_page()
    with _visit(browser, url) as page:
        for milliseconds in scenes(page):
            page.mouse.move(0, 0)
            after = page.screenshot(**options)
            areas = tool.evaluate(_CHANGED, [base64.b64encode(picture).decode() for picture in (before, after)])
            for number, area in enumerate(areas, start=1):  # all but the last are followed by the next one at once
                is_last = number == len(areas)
                animation.add(page.screenshot(clip=area, **options), area, milliseconds if is_last else 0)
            before = after
    return animation.file()


def main(target: Path = TARGET) -> int:
    """Exit codes: 0 written, 1 too large, 2 no Chromium."""
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if not chromium:
        print("error: no Chromium (Debian: apt install chromium)", file=sys.stderr)
        return 2
    with running(serve_command("--weights", ROOT / "weights")) as service, sync_playwright() as playwright:
        service.wait_for_route("/health/ready")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        picture = record(browser, service.url)
        browser.close()
    if len(picture) > LARGEST:
        print(f"error: the animation has {len(picture):,} bytes, more than {LARGEST:,}", file=sys.stderr)
        return 1
    target.write_bytes(picture)
    print(f"written: {target.relative_to(ROOT)}, {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
