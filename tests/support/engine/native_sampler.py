"""The native sampler for tests, compiled from the product's sources without the rest of the library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from collections.abc import Sequence as Items
from ctypes import CDLL
from functools import cache
from pathlib import Path

from torch import Tensor

from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.cpu_target import this_level
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampled_token import SampledToken
from tests.support import ROOT

Sample = Callable[[Tensor, Items[SamplingInput]], list[SampledToken]]

_SOURCE = ROOT / "app/engine/cpu/source"
_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
_WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# The sampler with entry points for tests.
_UNIT = """
#include "draw.h"
extern "C" {
void probe_exp(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += ink::kLanes)
        ink::store(y + i, ink::exp(ink::load(x + i)));
}
double probe_uniform(int64_t seed, int64_t choice, int64_t position) {
    return ink::uniform(seed, choice, position);
}
}
"""


def compile_sampler(folder: Path) -> CDLL:
    """Compiles the kernels of draw.h. INKSTREAM_TEST_FLAGS sets compiler flags: the processor, or -fsanitize=address.

    Raises UnsupportedCpu if the product has no kernels for this processor.
    """
    unit, library = folder / "draw.cpp", folder / "draw.so"
    unit.write_text(_UNIT)
    flags = os.environ.get("INKSTREAM_TEST_FLAGS", " ".join(this_level().flags)).split()
    subprocess.run(["g++", *_FLAGS, *_WARNINGS, *flags, f"-I{_SOURCE}", str(unit), "-o", str(library)], check=True)
    return CDLL(str(library))


def native_sample(library: CDLL) -> Sample:
    """The native sampler with the interface of its torch reference: tensors of any vocabulary size."""
    sampler = cache(lambda vocab: NativeSampler(library, vocab))
    return lambda logits_SV, rows: sampler(logits_SV.shape[1]).sample(logits_SV.float().numpy(), rows)
