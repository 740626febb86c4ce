"""Runs the JavaScript tests of the page's pure modules in Node.js, without browser and server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.nodejs import NODE

TESTS = sorted(Path(__file__).parent.glob("*.test.mjs"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name.removesuffix(".test.mjs"))
def test_javascript_tests_pass(path: Path) -> None:
    node = NODE or pytest.skip("no Node.js: make install brings playwright's")
    run = subprocess.run([node, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"tests [1-9]", run.stdout), "the file has no tests"
