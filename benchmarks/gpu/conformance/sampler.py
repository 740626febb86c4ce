"""Sampling on the device, in plain torch and by Triton, against app/engine/sampling/sampler.py: the same tokens.

The oracle draws each case once for both: it takes rows one by one, most of the time of these comparisons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from app.engine.gpu.kernels.reference_operations import ReferenceKernels
from app.engine.sampling.sampler import sample
from benchmarks.gpu.conformance.compare import Row
from benchmarks.gpu.conformance.sampling_cases import Case, chance, edges
from benchmarks.gpu.conformance.sampling_proof import Sample, wrong
from benchmarks.gpu.conformance.subject import triton_kernels


def check_samplers(device: str, tiny: bool) -> Iterator[Row]:
    """Triton's only where there is a GPU, or its interpreter is asked for."""
    subjects: dict[str, Sample] = {"torch": ReferenceKernels().sample}
    if device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        subjects["triton"] = triton_kernels().sample
    for case in _cases(tiny):
        expected = sample(case.logits_SV.to(device), case.rows)
        for name, subject in subjects.items():
            lines = list(wrong(subject, case, device, expected=expected))
            what = f"{name}, {case.name}, {len(case.rows)} rows of {case.logits_SV.shape[1]:,}"
            yield {"what": what, "ok": not lines, "value": len(lines), "unit": "wrong", "note": "; ".join(lines)[:300]}


def _cases(tiny: bool) -> Iterator[Case]:
    vocabs, rows = ((50,), 15) if tiny else ((50_257, 128_256, 152_064), 256)
    for vocab in vocabs:
        for dtype in (torch.float32, torch.bfloat16):
            yield chance(f"chance in {str(dtype).removeprefix('torch.')}", vocab, rows, vocab, dtype=dtype)
    yield from edges(300 if tiny else 128_256, 1)
