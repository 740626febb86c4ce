"""Sampling on the device, in plain torch and by Triton, against app/engine/sampling/sampler.py: the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from app.engine.gpu.kernels.reference_operations import ReferenceKernels
from benchmarks.gpu.conformance.compare import Row
from benchmarks.gpu.conformance.sampling_cases import Case, chance, edges
from benchmarks.gpu.conformance.sampling_proof import Sample, wrong
from benchmarks.gpu.conformance.subject import triton_kernels
from benchmarks.gpu.finding import Unsupported


def check_torch(device: str, tiny: bool) -> Iterator[Row]:
    """The twin."""
    yield from _outcomes(ReferenceKernels().sample, device, tiny)


def check_triton(device: str, tiny: bool) -> Iterator[Row]:
    """The kernels, where there is a GPU or Triton's interpreter is asked for."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported("on a CPU Triton only runs with TRITON_INTERPRET=1")
    yield from _outcomes(triton_kernels().sample, device, tiny)


def _outcomes(subject: Sample, device: str, tiny: bool) -> Iterator[Row]:
    for case in _cases(tiny):
        lines = list(wrong(subject, case, device))
        what = f"{case.name}, {len(case.rows)} rows of {case.logits_SV.shape[1]:,}"
        yield {"what": what, "ok": not lines, "value": len(lines), "unit": "wrong", "note": "; ".join(lines)[:300]}


def _cases(tiny: bool) -> Iterator[Case]:
    vocabs, rows = ((50,), 15) if tiny else ((50_257, 128_256, 152_064), 256)
    for vocab in vocabs:
        for dtype in (torch.float32, torch.bfloat16):
            yield chance(f"chance in {str(dtype).removeprefix('torch.')}", vocab, rows, vocab, dtype=dtype)
    yield from edges(300 if tiny else 128_256, 1)
