"""A node to run the page's JavaScript with: the one that playwright brings, whatever the machine has or lacks."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path


def find_node() -> str | None:
    """Its path; the machine's own where playwright is missing, and None where there is none."""
    playwright = find_spec("playwright")
    if playwright is None or playwright.origin is None:
        return shutil.which("node")
    return str(Path(playwright.origin).parent / "driver" / "node")


NODE = find_node()
