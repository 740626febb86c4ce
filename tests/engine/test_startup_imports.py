"""Modules and resources that an engine's start does not touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow

PROGRAM = """
import pathlib, sys, torch
from tests.support.model.tiny_models import tiny_engine
from model.checkpoint.checkpoint import load
for directory in sys.argv[1:]:
    decoder = load(pathlib.Path(directory), device=torch.device("cpu"), dtype=torch.float32).decoder
    tiny_engine(decoder).runner.warm_up(8)
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


def test_loading_and_the_first_steps_do_not_make_torch_import_its_compiler(tmp_path: Path) -> None:
    """To compute on the meta device would: 820 modules, a second of CPU, 70 MiB."""
    kinds = ("rotary", "sinusoidal", "learned")
    directories = [str(tiny_weights(tmp_path / kind, positions=kind)) for kind in kinds]
    command = [sys.executable, "-c", PROGRAM, *directories]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
