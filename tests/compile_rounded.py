"""Compiles the kernels of int8 and fp8 for sm_90 without a GPU, and prints what became of it as JSON: a program.

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

from app.engine.kernels.fp8 import LARGEST
from app.engine.kernels.triton_fp8 import round_row, warps
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


def compiled_rows(n_columns: int) -> Any:
    """The kernel that rounds rows of so many numbers."""
    constants = {"N_COLUMNS": n_columns, "PADDED": triton.next_power_of_2(n_columns), "LARGEST": LARGEST}
    signature = {"x_ptr": "*bf16", "numbers_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_stride": "i32"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(
        round_row, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps(n_columns)})


def facts(kernel: Any) -> dict[str, Any]:
    """Of one compiled kernel."""
    return {
        "shared": kernel.metadata.shared,
        "units": sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", kernel.asm["ptx"]))),
        "copies": kernel.asm["ptx"].count("cp.async.c"),
        "rounding": sorted(set(re.findall(r"cvt\.\S*e4m3\S*|div\.\S+f32|st\.global\S*", kernel.asm["ptx"]))),
        "binary": len(kernel.asm["cubin"]),
    }


if __name__ == "__main__":
    variants = {
        "decode": compiled(1, 4096, has_bias=False),
        "prefill": compiled(512, 4096, has_bias=True),
        "rows": compiled_rows(4096),
    }
    found: dict[str, Any] = {name: facts(kernel) for name, kernel in variants.items()}
    # Of integers, Triton compiles 1, multiples of 16 and all others apart.
    found["compiled apart"] = [p.name for p in multiply.params if p.name in INTEGERS and not p.do_not_specialize]
    json.dump(found, sys.stdout, indent=1)
