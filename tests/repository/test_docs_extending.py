"""docs/extending.md: its examples run in the order of the page and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from tests.support import ROOT
from tests.support.docs_commands import fences

PAGE = (ROOT / "docs/extending.md").read_text()


def test_examples_print_what_the_page_says() -> None:
    blocks, namespace = [(fence.language, fence.text) for fence in fences(PAGE)], dict[str, Any]()
    programs = [(text, blocks[i + 1]) for i, (language, text) in enumerate(blocks) if language == "python"]
    assert len(programs) > 3
    for program, (language, expected) in programs:
        assert language == "text", f"no output follows:\n{program}"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, "docs/extending.md", "exec"), namespace)
        assert printed.getvalue().strip() == expected.strip(), program


def test_the_family_of_the_page_is_as_short_as_it_says() -> None:
    program = next(fence.text for fence in fences(PAGE) if "FamilySpec" in fence.text)
    read = re.search(r"^def _read.*?(?=^\n\n|\Z)", program, re.M | re.S)
    assert read and len(read[0].splitlines()) <= 40


def test_every_extension_point_of_the_table_has_a_section() -> None:
    linked = re.findall(r"^\| \[[^]]+\]\(#([a-z-]+)\)", PAGE, re.M)
    titles = [title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", PAGE, re.M)]
    assert linked == titles and len(linked) > 4
