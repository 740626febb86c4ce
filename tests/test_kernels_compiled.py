"""Every kernel compiles for an H200 without one, and what the compiler makes of attention keeps the law of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu import needs_triton

ROOT = Path(__file__).parent.parent
SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on sm_90."""

pytestmark = needs_triton


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Facts of each kernel. In a process of its own: in this one they are interpreted."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "tests/compile_kernels.py")]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    facts: dict[str, Any] = json.loads(run.stdout)
    return facts


def test_every_kernel_compiles_and_fits(compiled: dict[str, Any]) -> None:
    assert len(compiled) > 10
    for name, facts in compiled.items():
        assert facts["binary"] and facts["shared"] <= SHARED_MEMORY, name


def test_prompts_and_single_tokens_go_through_the_same_matrix_instructions(compiled: dict[str, Any]) -> None:
    """Instructions of other shapes add in another order, and another layout sums rows in another one."""
    prefill, decode = compiled["attention prefill"], compiled["attention decode"]
    assert prefill["units"] and prefill["units"] == decode["units"]
    assert prefill["layouts"] == decode["layouts"] and prefill["threads"] == decode["threads"]


def test_nothing_is_fused_where_two_variants_of_a_kernel_must_agree(compiled: dict[str, Any]) -> None:
    names = [name for name in compiled if name.startswith(("attention", "merge")) and name != "attention float32"]
    assert names and not [name for name in names if compiled[name]["fused"]]
