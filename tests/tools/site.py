"""Builds the documentation site in build/site: make site, which runs mkdocs in its own environment.

Pages keep their paths in the repository, so that links work in both. A dead link or anchor is an error, and so is a
page that would load a font, a script or an image from another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/site"
PROJECT = ("CHANGELOG.md", "PERFORMANCE.md", "RELIABILITY.md", "SECURITY.md")
MODELS = ("weights/README.md", "weights-32m/README.md")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LIST_AFTER_TEXT = re.compile(r"^(?!- |\d+\. | |$)(.*)\n(?=(?:- |\d+\. ))", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^][`]|`[^`]*`|\[[^]]*\])*)\]\(([^()\s]+)\)")
_LOADED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
_LOADED_BY_STYLE = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')\s]+)")
_CONFIG = """\
site_name: inkstream
docs_dir: {pages}
site_dir: {site}
use_directory_urls: false
theme: {{name: mkdocs, color_mode: auto, user_color_mode_toggle: true, highlightjs: false, navigation_depth: 2}}
validation:
  nav: {{omitted_files: warn, not_found: warn}}
  links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}
markdown_extensions:
  - sane_lists
  - toc:
      permalink: true
      slugify: !!python/name:tests.tools.site.slugify
nav: {nav}
"""


class SiteError(Exception):
    """A broken page."""


def slugify(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading, so that links to it work on both."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def page_names() -> list[str]:
    """Paths of all pages in the repository."""
    docs = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return ["README.md", *docs, "CONTRIBUTING.md", *PROJECT, *MODELS]


def rendered(name: str, text: str, pages: set[str]) -> tuple[str, set[str]]:
    """A page for the site, and its images. Raises SiteError for a link to a file that does not exist.

    Links to other pages stay. A link to a source file becomes plain text, since the site has no such file.
    """
    pictures: set[str] = set()

    def link(match: re.Match[str]) -> str:
        is_picture, words, target = match.groups()
        path = target.partition("#")[0]
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        found = Path(os.path.normpath(Path(name).parent / path)).as_posix()
        if not (ROOT / found).exists():
            raise SiteError(f"{name}: dead link: {target}")
        if is_picture:
            pictures.add(found)
        return match[0] if is_picture or found in pages else words

    fences = [*_FENCE.findall(text), ""]
    prose = (_LINK.sub(link, part) for part in _FENCE.split(text))
    # GitHub starts a list without an empty line before it, Python's Markdown does not.
    spaced = (_LIST_AFTER_TEXT.sub(r"\1\n\n", part) for part in prose)
    return "".join(part + fence for part, fence in zip(spaced, fences, strict=True)), pictures


def navigation(index: str) -> list[dict[str, object]]:
    """The menu: the sections of docs/index.md, and the pages of the project."""
    sections: list[dict[str, object]] = [{"Start": "README.md"}]
    for section in index.split("\n## ")[1:]:
        found = re.findall(r"^- \[([^]]+)\]\(([^)#]+)\)", section, re.MULTILINE)
        entries = [{title: os.path.normpath(f"docs/{target}")} for title, target in found if target != "../README.md"]
        sections.append({section.partition("\n")[0]: entries})
    titles = {name: Path(name).stem.capitalize() for name in PROJECT}
    titles |= {name: f"Model card of {Path(name).parent}" for name in MODELS}
    project = [{"All pages": "docs/index.md"}, *({title: name} for name, title in titles.items())]
    return [*sections, {"Project": project}]


def foreign_resources(site: Path) -> list[str]:
    """Resources that pages of the site would load from other hosts."""
    found = []
    for path in sorted(site.rglob("*")):
        pattern = {".html": _LOADED, ".css": _LOADED_BY_STYLE}.get(path.suffix)
        text = path.read_text() if pattern else ""
        found += [f"{path.relative_to(site)}: {address}" for address in (pattern.findall(text) if pattern else ())]
    return found


def build(folder: Path) -> None:
    """Builds the site. Raises SiteError."""
    shutil.rmtree(folder, ignore_errors=True)
    pages, site = folder.with_name(f"{folder.name}-pages"), folder
    shutil.rmtree(pages, ignore_errors=True)
    names = page_names()
    for name in names:
        text, pictures = rendered(name, (ROOT / name).read_text(), set(names))
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(text)
        for picture in pictures:
            (pages / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / picture, pages / picture)
    nav = json.dumps(navigation((ROOT / "docs/index.md").read_text()))
    config = folder.with_name(f"{folder.name}.yml")
    config.write_text(_CONFIG.format(pages=json.dumps(str(pages)), site=json.dumps(str(site)), nav=nav))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode:  # --quiet would hide warnings from --strict too
        lines = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        raise SiteError("mkdocs: " + " ".join(lines))
    if found := foreign_resources(site):
        raise SiteError("loaded from other hosts: " + ", ".join(found))


def main() -> int:
    """Returns 0 if the site was built, 1 if a page is broken."""
    FOLDER.parent.mkdir(exist_ok=True)
    try:
        build(FOLDER)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"built: {FOLDER.relative_to(ROOT)}/index.html, {len(page_names())} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
