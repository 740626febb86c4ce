"""Node.js for the page's JavaScript: playwright's, else the machine's."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path


def find_node() -> str | None:
    """Path of playwright's Node.js, else of the machine's; None if there is neither."""
    playwright = find_spec("playwright")
    if playwright is None or playwright.origin is None:
        return shutil.which("node")
    return str(Path(playwright.origin).parent / "driver" / "node")


NODE = find_node()
