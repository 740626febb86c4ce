"""Joins the modules and style sheets of a page into one file each, so that a page takes few requests.

Browsers request a module only once the module that imports it has arrived. The sources stay plain ES modules; this
knows the forms in which they import and export, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, join, normpath

from app.http.static_content import StaticContent

_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]*)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) ([\w$]+)", re.MULTILINE)
_UNKNOWN = re.compile(r"^(?:export\b.*|import\b.*from [\"']\..*)", re.MULTILINE)
_COMMENT = re.compile(r"^ */\*\*(?:.|\n)*?\*/\n|^ *//.*\n", re.MULTILINE)  # of whole lines, a quarter of the size
_SHEET = re.compile(r'^ *<link rel="stylesheet" href="web/([^"]+)">\n', re.MULTILINE)
_SCRIPT = re.compile(r'(<script type="module" src=")web/([^"]+)(")')
_FONT = re.compile(r'(?<=["/(])[\w-]+\.woff2')


def join_modules(entry: str, read: Callable[[str], str]) -> str:
    """One script that does what the module `entry` does. Raises ValueError for an import or export that is unknown.

    Every module becomes a function that runs once, after those that it imports; the entry stands last and open, since
    it may await at its top.
    """
    done: dict[str, str] = {}

    def add(path: str, importers: tuple[str, ...]) -> None:
        if path in importers:
            raise ValueError(f"modules import each other: {' -> '.join((*importers, path))}")
        if path in done:
            return
        source = _COMMENT.sub("", read(path))
        for _, target in _IMPORT.findall(source):
            add(_resolve(path, target), (*importers, path))
        names = [name for _, name in _EXPORT.findall(source)]
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(lambda match: _binding(path, *match.groups()), source))
        if unknown := _UNKNOWN.search(text):
            raise ValueError(f"{path}: cannot join {unknown[0]!r}")
        body = (
            text
            if path == entry
            else f"const {_variable(path)} = (() => {{\n{text}return {{ {', '.join(names)} }};\n}})();\n"
        )
        done[path] = f"// {path}\n{body}"

    add(entry, ())
    return "".join(done.values())


def _resolve(path: str, target: str) -> str:
    return normpath(join(dirname(path), target))


def _variable(path: str) -> str:
    return "$" + re.sub(r"\W", "_", path.removesuffix(".js"))


def _binding(path: str, names: str | None, target: str) -> str:
    """The declaration that replaces an import."""
    if names is None:
        return ""
    return f"const {{{names.replace(' as ', ': ')}}} = {_variable(_resolve(path, target))};"


def bundle(folder: Path, page: str) -> dict[str, StaticContent]:
    """The files that the page `page`.html needs, by name, and its HTML, which names them with their versions."""
    html = (folder / f"{page}.html").read_text()
    fonts = {path.name: StaticContent(path.read_bytes(), "font/woff2") for path in folder.glob("*.woff2")}

    def with_font_versions(text: str) -> str:
        return _FONT.sub(lambda match: f"{match[0]}?v={fonts[match[0]].version}", text)

    sheets, scripts = _SHEET.findall(html), _SCRIPT.findall(html)
    css = with_font_versions("".join((folder / name).read_text() for name in sheets))
    js = "".join(join_modules(name, lambda path: (folder / path).read_text()) for _, name, _ in scripts)
    style, script = StaticContent(css.encode(), "text/css"), StaticContent(js.encode(), "text/javascript")
    links = iter([f'    <link rel="stylesheet" href="web/{page}.bundle.css?v={style.version}">\n'])
    html = _SHEET.sub(lambda _: next(links, ""), html)
    html = _SCRIPT.sub(rf"\1web/{page}.bundle.js?v={script.version}\3", html)
    document = StaticContent(with_font_versions(html).encode(), "text/html")
    return {**fonts, f"{page}.html": document, f"{page}.bundle.css": style, f"{page}.bundle.js": script}


class Bundles:
    """The bundles of some pages, which are made anew when a file has changed: one reloads the page to see an edit."""

    def __init__(self, folder: Path, *pages: str) -> None:
        self._folder = folder
        self._pages = pages
        self._stamps: dict[Path, int] = {}
        self._files: dict[str, StaticContent] = {}

    def find(self, name: str) -> StaticContent | None:
        """The file with this name, if it is one of a bundle."""
        stamps = {path: path.stat().st_mtime_ns for path in self._folder.rglob("*")}
        if stamps != self._stamps:
            self._files = {name: file for page in self._pages for name, file in bundle(self._folder, page).items()}
            self._stamps = stamps
        return self._files.get(name)
