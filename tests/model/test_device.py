"""Row invariance of torch's matrix products on a CPU: the engine needs it, and not every library has it by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.device import use_row_invariant_products
from tests.support import ROOT

_PROGRAM = """
import sys, torch
import torch.nn.functional as F
from model.nn.layers import padded_rows
from model.device import use_row_invariant_products
use_row_invariant_products()
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for columns, rows in [(32, 32), (64, 300), (256, 256), (320, 960), (1024, 320), (2048, 768)]:
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        x = torch.randn(257, columns, generator=generator).to(dtype)
        alike = F.linear(x, weight)
        # The executor pads small products, for which MKL has other paths on some CPUs.
        padded = lambda n: padded_rows(n, dtype, columns * rows)
        for n in map(padded, (1, 2, 3, 5, 10, 13, 14, 33, 64, 100, 256)):
            for start in (0, 1):
                assert torch.equal(F.linear(x[start : start + n].clone(), weight), alike[start : start + n]), (
                    f"{n} rows of {dtype}, {columns} columns, differ from 257 rows"
                )
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(threads: int) -> None:
    """Runs in a new process, because the libraries read their settings once."""
    own = {"MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-c", _PROGRAM, str(threads)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("vendor", "own", "expected"),
    [
        ("GenuineIntel", None, "AUTO,STRICT"),
        ("GenuineIntel", "COMPATIBLE", "COMPATIBLE"),
        ("AuthenticAMD", None, None),
        ("", None, None),
    ],
)
def test_only_intel_cpus_get_settings_and_user_settings_stay(
    vendor: str, own: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"MKL_CBWR": own} if own else {})
    file = tmp_path / "cpuinfo"  # other systems have no such file
    if vendor:
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: x\n")
    use_row_invariant_products(file)
    assert os.environ.get("MKL_CBWR") == expected
