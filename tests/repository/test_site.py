"""tests/tools/site.py: what it changes in pages, and what it refuses. `make site` builds all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.tools.site import SiteError, foreign_resources, navigation, page_names, rendered, slugify

PAGES = set(page_names())


def page(text: str) -> str:
    return rendered("docs/keys.md", text, PAGES)[0]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_no_page_has_a_dead_link(name: str) -> None:
    rendered(name, (ROOT / name).read_text(), PAGES)


def test_links_to_pages_stay_and_links_to_source_files_become_text() -> None:
    stay = "[a](api.md#errors), [b](../README.md), [c](https://example.com), [d](#names)\n"
    assert page(stay) == stay
    assert page("[`serve`](../app/server.py), [tests](../tests/promises)\n") == "`serve`, tests\n"
    assert page("```sh\necho [a](nowhere.md)\n```\n") == "```sh\necho [a](nowhere.md)\n```\n"


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a\nb](../app/nowhere.py)", "![a](nowhere.png)"])
def test_a_dead_link_is_refused(link: str) -> None:
    with pytest.raises(SiteError, match=r"docs/keys\.md: dead link: .*nowhere"):
        page(link)


def test_pictures_are_copied() -> None:
    assert rendered("README.md", "![a](docs/page.png)\n", PAGES) == ("![a](docs/page.png)\n", {"docs/page.png"})


def test_lists_start_where_github_starts_them() -> None:
    assert page("Words:\n- one\n- two\n  more\n- three\n") == "Words:\n\n- one\n- two\n  more\n- three\n"


def test_anchors_equal_those_of_github() -> None:
    assert slugify("`--deterministic`, or not: 2 ways", "-") == "--deterministic-or-not-2-ways"


def test_every_page_is_in_the_menu() -> None:
    found: list[str] = []
    for section in navigation((ROOT / "docs/index.md").read_text()):
        for entry in section.values():
            found += [name for item in entry for name in item.values()] if isinstance(entry, list) else [str(entry)]
    assert sorted(found) == sorted(PAGES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script async src="https://cdn.example/a.js"></script>'),
        ("a.html", '<link rel="stylesheet"\n href=//fonts.example/css>'),
        ("a.css", "@font-face { src: url(https://fonts.example/a.woff2) }"),
    ],
)
def test_resources_from_other_hosts_are_detected(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"{text} <a href='https://example.com'>a link is no resource</a> url(img/grid.png)")
    assert len(foreign_resources(tmp_path)) == 1
