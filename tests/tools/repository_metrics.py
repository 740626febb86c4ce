"""Metrics of the product (app and model): imports between packages, and classes that share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

PRODUCT = ("app", "model")


def product_files(root: Path) -> list[Path]:
    """All Python files of the product, sorted."""
    return sorted(path for folder in PRODUCT for path in (root / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree, parsed once."""
    return ast.parse(path.read_text())


def module_of(root: Path, path: Path) -> str:
    """app/engine/__init__.py -> app.engine."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str, *, is_package: bool) -> str:
    """The package of a module; a package's __main__ starts it and counts as above it."""
    return module if is_package or module.endswith(".__main__") else module.rpartition(".")[0]


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Modules of the product that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
            found |= {full if full in known else module for full, module in names}
    return found & known


@cache
def package_edges(root: Path) -> dict[tuple[str, str], list[str]]:
    """(importing package, imported package) -> the imports of this edge, as text.

    A file's import from the __init__ of a package that contains it is not an edge: Python has already loaded it.
    """
    files = {module_of(root, path): path for path in product_files(root)}
    packages = {name: package_of(name, is_package=path.stem == "__init__") for name, path in files.items()}
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, path in files.items():
        for target in sorted(imported_modules(path, set(files))):
            is_above = files[target].stem == "__init__" and name.startswith(f"{target}.")
            if packages[name] != packages[target] and not is_above:
                edges[packages[name], packages[target]].append(f"{name} -> {target}")
    return edges


def colliding_classes(root: Path) -> dict[str, list[str]]:
    """Name of a public class -> the files that define it, if there are several."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in product_files(root):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(root)))
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}
