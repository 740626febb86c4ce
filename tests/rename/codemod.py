"""Applies renames.toml to the working tree: files move, and imports, identifiers, strings and mentions follow.

    .venv/bin/python tests/rename/codemod.py        (in a clean checkout)

Prints what has to be done by hand: `import a.b` statements, and new names that a file uses already. Afterwards fix the
depth of Path(__file__).parents in moved files, then `ruff check --fix --select I . && ruff format .`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = Path(__file__).with_name("renames.toml")
_CODE = ("app", "model", "benchmarks", "tests", "deploy")
_TEXTS = {".md", ".toml", ".yml", ".yaml", ".cpp", ".h", ".js", ".mjs", ".html", ".css", ".conf", ".sh", ""}
_DOTTED = re.compile(r"(?<![\w./])((?:app|model)(?:\.\w+)+)")
_PATH = re.compile(r"(?<![\w.-])((?:app|model)/[\w/]*\w)(\.py)?")
_BARE = re.compile(r"(?<![\w./*{}\"'-])((?:\w+/)?\w+)\.py\b(?!\")")
_WIDTH = 118

Edit = tuple[int, int, str]
"""Replaces text[start:end]."""


def git(*arguments: str) -> list[str]:
    """The lines that git prints."""
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def module_of(path: str) -> str:
    """app/engine/__init__.py -> app.engine."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Renames:
    """What renames.toml says."""

    modules: dict[str, str]
    folders: dict[str, str]
    names: dict[str, dict[str, str]]
    """Module -> old name -> new name."""
    known: frozenset[str]
    """All modules that there are before the change."""
    helpers: frozenset[str]
    """Names of files of tests and benchmarks."""

    @classmethod
    def read(cls, path: Path = MAP) -> Renames:
        """Checks nothing; tests/test_rename.py does."""
        raw = tomllib.loads(path.read_text())
        names: dict[str, dict[str, str]] = defaultdict(dict)
        for key, new in raw["names"].items():
            module, _, name = key.partition(":")
            names[module][name] = new
        known = frozenset(module_of(f) for f in git("ls-files", *_CODE) if f.endswith(".py"))
        helpers = frozenset(Path(f).stem for f in git("ls-files", "tests", "benchmarks"))
        return cls(raw["modules"], raw["folders"], dict(names), known, helpers)

    def dotted(self, text: str) -> str:
        """app.alarm.Alarm.set -> app.common.lazy_timer.LazyTimer.set."""
        parts = text.split(".")
        for n in range(len(parts), 0, -1):
            head, rest = ".".join(parts[:n]), parts[n:]
            if head in self.known:
                rest[:1] = [self.names.get(head, {}).get(name, name) for name in rest[:1]]
                return ".".join([self.modules.get(head, head), *rest])
        return text

    def path(self, text: str, *, is_file: bool) -> str:
        """app/alarm -> app/common/lazy_timer, with or without .py behind it; folders as [folders] has them."""
        if (new := self.modules.get(text.replace("/", "."))) and (is_file or not (ROOT / text).is_dir()):
            return new.replace(".", "/")
        for folder, new in sorted(self.folders.items(), reverse=True):
            if text == folder or text.startswith(f"{folder}/"):
                return new + text.removeprefix(folder)
        return text

    def bare(self, text: str, package: str) -> str:
        """door, mentioned in app.engine -> app/engine/guided/grammar_compile_queue; unclear ones stay as they are."""
        name = text.replace("/", ".")
        beside = f"{package}.{name}"
        found = [beside] if beside in self.known else [m for m in self.modules if m.endswith(f".{name}")]
        if "/" not in text and not package and name in self.helpers:
            return text
        if len(found) > 1:
            print(f"unclear: {text}.py in {package} may be {found}", file=sys.stderr)
        return self.modules.get(found[0], text).replace(".", "/") if len(found) == 1 else text

    def mentions(self, text: str, package: str = "") -> Iterator[Edit]:
        """Dotted names and paths in prose, strings and configuration."""
        for found in _BARE.finditer(text):
            if not found[1].startswith(("app/", "model/", "tests/", "benchmarks/")):
                new = self.bare(found[1], package)
                if new != found[1]:
                    yield *found.span(1), new
        for found in _DOTTED.finditer(text):
            # Hugging Face names tensors like this.
            if not found[1].startswith("model.layers") and (new := self.dotted(found[1])) != found[1]:
                yield *found.span(1), new
        for found in _PATH.finditer(text):
            if (new := self.path(found[1], is_file=bool(found[2]))) != found[1]:
                yield *found.span(1), new


class SourceFile:
    """One Python file and the edits that it needs."""

    def __init__(self, path: Path, renames: Renames) -> None:
        self._path, self._renames = path, renames
        self._module = module_of(str(path.relative_to(ROOT)))
        self._text = path.read_text()
        self._lines = self._text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[Edit] = []
        self._local = dict(renames.names.get(self._module, {}))
        """Names of this file that change."""
        self._aliases: dict[str, str] = {}
        """Names of this file that are modules -> their old dotted names."""

    def renamed(self) -> str:
        """The new text."""
        tree = ast.parse(self._text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self._import_from(node)
            elif isinstance(node, ast.Import) and any(alias.name in self._renames.modules for alias in node.names):
                print(f"{self._path}:{node.lineno}: rename this import by hand", file=sys.stderr)
        self._names(tree)
        self._strings_and_comments()
        text = self._text
        bound = len(text) + 1
        for start, end, new in sorted(set(self._edits), reverse=True):
            if end <= bound:
                text, bound = text[:start] + new + text[end:], start
        return text

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno and node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _import_from(self, node: ast.ImportFrom) -> None:
        assert node.module
        renames, groups = self._renames, defaultdict[str, list[tuple[str, str | None]]](list)
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in renames.known:
                target, _, new = renames.modules.get(full, full).rpartition(".")
                self._aliases[alias.asname or alias.name] = full
            else:
                target = renames.modules.get(node.module, node.module)
                new = renames.names.get(node.module, {}).get(alias.name, alias.name)
            if alias.asname is None and new != alias.name:
                self._local[alias.name] = new
            groups[target].append((new, None if alias.asname == new else alias.asname))
        if list(groups) == [node.module] and groups[node.module] == [(a.name, a.asname) for a in node.names]:
            return
        indent = " " * node.col_offset
        lines = [_import_line(target, names, indent) for target, names in groups.items()]
        self._edits.append((*self._span(node), f"\n{indent}".join(lines)))

    def _names(self, tree: ast.Module) -> None:
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for old, new in self._local.items():
            if old != new and new in used - set(self._local):
                print(f"{self._path}: {old} -> {new}, which the file uses already", file=sys.stderr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in self._local:
                self._edits.append((*self._span(node), self._local[node.id]))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = self._aliases.get(node.value.id, "")
                if new := self._renames.names.get(module, {}).get(node.attr):
                    _, end = self._span(node)
                    self._edits.append((end - len(node.attr), end, new))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in self._local:
                found = re.compile(rf"\b(?:class|def)\s+({node.name})\b").search(
                    self._text, self._starts[node.lineno - 1]
                )
                assert found
                self._edits.append((*found.span(1), self._local[node.name]))

    def _strings_and_comments(self) -> None:
        words = [old for old in self._local if re.search(r"[a-z][A-Z]", old)]  # no words of English
        pattern = re.compile(rf"(?<![\w.])({'|'.join(words)})\b") if words else None
        for token in tokenize.generate_tokens(io.StringIO(self._text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                start = self._starts[token.start[0] - 1] + token.start[1]
                edits = list(self._renames.mentions(token.string, self._module.rpartition(".")[0]))
                if pattern:
                    edits += [(*found.span(1), self._local[found[1]]) for found in pattern.finditer(token.string)]
                self._edits += [(start + first, start + end, new) for first, end, new in edits]


def _import_line(target: str, names: list[tuple[str, str | None]], indent: str) -> str:
    written = [name if asname is None else f"{name} as {asname}" for name, asname in sorted(names)]
    line = f"from {target} import {', '.join(written)}"
    if len(indent + line) <= _WIDTH:
        return line
    return f"from {target} import (\n" + "".join(f"{indent}    {name},\n" for name in written) + f"{indent})"


def main() -> None:
    """Rewrites every file that git tracks, then moves what has to move."""
    renames = Renames.read()
    for name in git("ls-files"):
        path = ROOT / name
        if path.is_symlink() or name.startswith(("weights/", "tests/rename/")) or path.name == "results.json":
            continue
        if path.suffix == ".py":
            path.write_text(SourceFile(path, renames).renamed())
        elif path.suffix in _TEXTS:
            text = path.read_text()
            for start, end, new in sorted(set(renames.mentions(text)), reverse=True):
                text = text[:start] + new + text[end:]
            path.write_text(text)
    for old, new in renames.modules.items():
        _move(f"{old.replace('.', '/')}.py", f"{new.replace('.', '/')}.py")
    for old, new in renames.folders.items():
        for name in git("ls-files", old):
            _move(name, new + name.removeprefix(old))


def _move(old: str, new: str) -> None:
    if (ROOT / new).exists():  # a package's docstring, where the new folder has one
        git("rm", "-qf", old)
        return
    (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
    git("mv", old, new)


if __name__ == "__main__":
    main()
