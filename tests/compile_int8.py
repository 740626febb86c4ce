"""Compiles the int8 kernel for sm_90 without a GPU, and prints what became of it as JSON: a program of its own.

In a process with TRITON_INTERPRET=1 nothing is compiled, so the tests start this one without it.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.engine.kernels.triton_int8 import BLOCK_K, BLOCK_N, WARPS, multiply, tile

POINTERS = {"x_ptr": "*bf16", "numbers_ptr": "*i8", "scales_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
INTEGERS = {"n_tokens": "i32", "n_rows": "i32", "x_stride": "i32"}


def compiled(n_tokens: int, n_columns: int, *, has_bias: bool) -> Any:
    """The kernel for steps of so many tokens."""
    block_t, stages = tile(n_tokens)
    constants = {"N_COLUMNS": n_columns, "HAS_BIAS": has_bias, "BLOCK_T": block_t, "BLOCK_N": BLOCK_N}
    constants["BLOCK_K"] = BLOCK_K
    signature = POINTERS | INTEGERS | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in multiply.arg_names if name in POINTERS or name in ("n_rows", "x_stride")]
    attributes = {(multiply.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(multiply, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": WARPS, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(kernel: Any) -> dict[str, Any]:
    """Of one compiled kernel."""
    return {
        "shared": kernel.metadata.shared,
        "units": sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", kernel.asm["ptx"]))),
        "copies": kernel.asm["ptx"].count("cp.async.c"),
        "binary": len(kernel.asm["cubin"]),
    }


if __name__ == "__main__":
    variants = {
        "decode": compiled(1, 4096, has_bias=False),
        "prefill": compiled(512, 4096, has_bias=True),
        "odd": compiled(512, 4104, has_bias=False),
    }
    json.dump({name: facts(kernel) for name, kernel in variants.items()}, sys.stdout, indent=1)
