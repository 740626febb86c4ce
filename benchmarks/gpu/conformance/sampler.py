"""Sampling on the device, in plain torch and by Triton, against app/engine/sampler.py: the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module

import torch

from app.engine.kernels.sampling_twin import sample as sample_by_torch
from benchmarks.gpu.conformance._sampling_cases import Case, chance, edges
from benchmarks.gpu.conformance._sampling_proof import Sample, wrong
from benchmarks.gpu.finding import Unsupported


def sampler(kind: str, device: str) -> Sample:
    """torch or triton. Raises Unsupported where the device has no such thing."""
    if kind == "torch":
        return sample_by_torch
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported("on a CPU Triton only runs in its interpreter: TRITON_INTERPRET=1")
    try:
        found: Sample = import_module("app.engine.kernels.triton_sampler").sample
    except ModuleNotFoundError as error:
        raise Unsupported(str(error)) from error
    return found


def check_torch(device: str, tiny: bool) -> Iterator[Mapping[str, object]]:
    """The twin."""
    yield from _outcomes("torch", device, tiny)


def check_triton(device: str, tiny: bool) -> Iterator[Mapping[str, object]]:
    """The kernels."""
    yield from _outcomes("triton", device, tiny)


def _outcomes(kind: str, device: str, tiny: bool) -> Iterator[Mapping[str, object]]:
    subject = sampler(kind, device)
    for case in _cases(tiny):
        lines = list(wrong(subject, case, device))
        note = "; ".join(lines)[:300]
        rows = f"{len(case.rows)} rows of {case.logits_SV.shape[1]:,}"
        yield {"what": f"{case.name}, {rows}", "ok": not lines, "value": len(lines), "unit": "wrong", "note": note}


def _cases(tiny: bool) -> Iterator[Case]:
    vocabs, rows = ((50,), 15) if tiny else ((50_257, 128_256, 152_064), 256)
    for vocab in vocabs:
        for dtype in (torch.float32, torch.bfloat16):
            yield chance(f"chance in {str(dtype).removeprefix('torch.')}", vocab, rows, vocab, dtype=dtype)
    yield from edges(300 if tiny else 128_256, 1)
