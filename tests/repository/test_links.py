"""Every link between files of the repository leads to a file, and its anchor to a heading of that page."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)|\b(?:href|src)=\"([^\"]+)\"|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


def _tracked(pattern: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


PAGES = _tracked("*.md")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page; the second of one name gets `-1`."""
    found, repeated = set[str](), Counter[str]()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(f"{slug}-{repeated[slug]}" if repeated[slug] else slug)
        repeated[slug] += 1
    return frozenset(found)


def dead_links(text: str, page: Path) -> list[str]:
    """Links of a page's text, outside of blocks of code, that lead nowhere. Addresses of the web are not followed."""
    dead = []
    for target in ("".join(groups) for groups in _LINK.findall(_FENCE.sub("", text))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (page.parent / path).resolve() if path else page
        is_page = found.suffix == ".md" and found.is_file()
        if not found.exists() or (anchor and is_page and anchor not in anchors(found)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    assert dead_links((ROOT / name).read_text(), ROOT / name) == []


def test_dead_links_and_anchors_are_found() -> None:
    text = "[a](nowhere.md) [b](api.md#nowhere) [c](#nowhere) ![d](nowhere.png)\n[e]: ../nowhere.py\n"
    good = "[a](index.md) [b](api.md#errors) [c](../README.md) <https://example.com> ```[no](link.md)```"
    assert len(dead_links(text, ROOT / "docs/keys.md")) == 5
    assert dead_links(good, ROOT / "docs/keys.md") == ["link.md"], "a block of code begins its line"


def test_pages_named_in_code_exist() -> None:
    """Comments and messages send readers to pages of the documentation, often to a section."""
    dead = []
    for name in (name for suffix in ("py", "h", "cpp", "js", "yml", "yaml") for name in _tracked(f"*.{suffix}")):
        text = (ROOT / name).read_text()
        for page, anchor in re.findall(r"(?<![\w/.-])(docs/[\w-]+\.md)(?:#([\w-]+))?", text):
            path = ROOT / page
            if not path.is_file() or (anchor and anchor not in anchors(path)):
                dead.append(f"{name}: {page}#{anchor}")
    assert dead == []
