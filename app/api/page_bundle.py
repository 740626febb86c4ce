"""Joins a page, its modules and its style sheets into one HTML document, so that a page arrives in one response.

Browsers request a module only once the module that imports it has arrived. The sources stay plain ES modules; this
knows the forms in which they import and export, and no others. The Content-Security-Policy names the script and the
style by their hashes, so no other inline script or style is allowed.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from posixpath import dirname, join, normpath

from app.http.static_content import StaticContent

_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"(\.[^"]*)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) ([\w$]+)", re.MULTILINE)
_UNKNOWN = re.compile(r"^(?:export\b.*|import\b.*from [\"']\..*)", re.MULTILINE)
_COMMENT = re.compile(r"^ */\*\*(?:.|\n)*?\*/\n|^ *//.*\n", re.MULTILINE)  # of whole lines, a quarter of the size
_CSS_NOISE = re.compile(r"/\*(?:.|\n)*?\*/|^\s+", re.MULTILINE)
_SHEET = re.compile(r'^ *<link rel="stylesheet" href="web/([^"]+)">\n', re.MULTILINE)
_SCRIPT = re.compile(r'<script type="module" src="web/([^"]+)"></script>')
_FONT = re.compile(r'(?<=["/(])[\w-]+\.woff2')
_ENDS_EARLY = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)


def join_modules(entry: str, read: Callable[[str], str]) -> str:
    """One script that does what the module `entry` does. Raises ValueError for an import or export that is unknown.

    Every module becomes a function that runs once, after its imports; the entry comes last and is not wrapped, because
    it may await at its top level.
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


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page with its style and script inside, or a font."""

    content: StaticContent
    policy: str = ""
    """Directives of the Content-Security-Policy that allow the page its own style and script, by their hashes."""


def bundle(folder: Path, page: str) -> dict[str, PageFile]:
    """The files that the page `page`.html needs, by name: its HTML and its fonts, at addresses with their versions."""
    html = (folder / f"{page}.html").read_text()
    fonts = {path.name: StaticContent(path.read_bytes(), "font/woff2") for path in folder.glob("*.woff2")}

    def with_versions(text: str) -> str:
        return _FONT.sub(lambda match: f"{match[0]}?v={fonts[match[0]].version}", text)

    sheets = [(folder / name).read_text() for name in _SHEET.findall(html)]
    style = with_versions(_CSS_NOISE.sub("", "".join(sheets)).replace('url("', 'url("web/'))  # the page lies above
    script = "".join(join_modules(name, lambda path: (folder / path).read_text()) for name in _SCRIPT.findall(html))
    if found := _ENDS_EARLY.search(style + script):
        raise ValueError(f"{page}: the HTML parser would not read past {found[0]!r} inside a script or style")
    styles = iter([f"    <style>{style}</style>\n"])
    html = _SHEET.sub(lambda _: next(styles, ""), with_versions(html))
    html = _SCRIPT.sub(lambda _: f'<script type="module">{script}</script>', html)
    policy = f"script-src {_source(script)}; style-src {_source(style)}"
    document = PageFile(StaticContent(html.encode(), "text/html"), policy)
    return {**{name: PageFile(font) for name, font in fonts.items()}, f"{page}.html": document}


def _source(text: str) -> str:
    """The Content-Security-Policy's name for an inline script or style."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
