"""Reference packages of a few tests, imported at first use.

Every test process imports all test files, and most processes run no test that needs transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") or attribute == "pytestmark":  # pytest asks each object of a test file for these
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


transformers: Any = _LazyModule("transformers")
