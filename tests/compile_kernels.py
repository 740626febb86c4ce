"""Compiles every kernel for sm_90 without a GPU, and prints what became of it as JSON: a program of its own.

In a process with TRITON_INTERPRET=1 nothing is compiled, so the tests start this one without it.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from compile_sampling import sampling
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.engine.kernels.tiling import (
    COLUMNS,
    HEADS,
    POSITIONS,
    ROW_LAUNCH,
    ROWS,
    Launch,
    attention_launch,
    norm_launch,
    padded_dim,
)
from app.engine.kernels.triton_attention import attention_kernel
from app.engine.kernels.triton_gate import gate_kernel
from app.engine.kernels.triton_heads import heads_kernel
from app.engine.kernels.triton_merge import merge_kernel
from app.engine.kernels.triton_norm import norm_kernel

TARGET = GPUTarget("cuda", 90, 32)
INTEGERS = {"n_tokens": "i32", "value_offset": "i64"}
FLOATS = {"eps": "fp32", "q_factor": "fp32", "scale": "fp32", "soft_cap": "fp32"}
POINTERS = {
    **dict.fromkeys(("table_ptr", "row_ptr", "start_ptr", "position_ptr", "length_ptr", "slot_ptr"), "*i32"),
    **dict.fromkeys(("values_ptr", "statistics_ptr", "rope_ptr"), "*fp32"),
}


def compiled(kernel: Any, launch: Launch, number: str, **constants: Any) -> Any:
    """The kernel for these constants, with numbers of the format `number` behind all other pointers."""
    others = [name for name in kernel.arg_names if name not in constants]
    types = INTEGERS | FLOATS | POINTERS
    signature = {name: types.get(name, f"*{number}") for name in others} | dict.fromkeys(constants, "constexpr")
    # Every pointer that torch hands out is aligned, and so is a layer's half of the cache.
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or name == "value_offset"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGET, options=dict(launch.options))


def attention(number: str, head_dim: int, *, beside: bool, tile_tokens: int, **changes: Any) -> Any:
    """Of 32 query and 8 kv heads."""
    constants = {
        "N_HEADS": 32, "N_KV_HEADS": 8, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "BLOCK": 64, "TABLE": 512,
        "TILE_TOKENS": tile_tokens, "HAS_CAP": False, "WINDOW": 0, "ROWS": ROWS, "SPLIT": 512, "POSITIONS": POSITIONS,
        "BESIDE": beside, **changes,
    }  # fmt: skip
    item_size = 4 if number == "fp32" else 2
    return compiled(attention_kernel, attention_launch(padded_dim(head_dim), item_size), number, **constants)


def heads(number: str, head_dim: int, *, half: int, norm: bool) -> Any:
    """Of 32 query and 8 kv heads."""
    sizes = {"N_HEADS": 32, "N_KV_HEADS": 8, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "HALF": half}
    return compiled(heads_kernel, ROW_LAUNCH, number, HAS_Q_NORM=norm, HAS_K_NORM=norm, HEADS=HEADS, **sizes)


def merge(number: str, head_dim: int, window: int) -> Any:
    """Of 32 heads."""
    sizes = {"N_HEADS": 32, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "TILE_TOKENS": 1, "SPLIT": 512}
    return compiled(merge_kernel, ROW_LAUNCH, number, WINDOW=window, HEADS=HEADS, **sizes)


def norm(number: str, kind: str, width: int, **has: bool) -> Any:
    """Over `width` numbers."""
    padded = triton.next_power_of_2(width)
    return compiled(norm_kernel, norm_launch(width), number, WIDTH=width, PADDED=padded, KIND=kind, **has)


def gate(number: str, kind: str, *, gated: bool) -> Any:
    """Over 14,336 numbers."""
    return compiled(gate_kernel, ROW_LAUNCH, number, WIDTH=14336, KIND=kind, GATED=gated, COLUMNS=COLUMNS)


def every_kernel() -> dict[str, Any]:
    """A few variants of each, which between them take every branch."""
    every = {"HAS_DELTA": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return {
        "attention prefill": attention("bf16", 128, beside=False, tile_tokens=64),
        "attention decode": attention("bf16", 128, beside=True, tile_tokens=1),
        "attention window": attention("fp16", 256, beside=False, tile_tokens=64, HAS_CAP=True, WINDOW=4096, BLOCK=16),
        "attention float32": attention("fp32", 80, beside=True, tile_tokens=16, BLOCK=32),
        "merge": merge("bf16", 128, 0),
        "merge window": merge("fp16", 80, 1000),
        "heads": heads("bf16", 128, half=64, norm=True),
        "heads plain": heads("fp16", 80, half=0, norm=False),
        "norm rms": norm("bf16", "rmsnorm", 4096, **every | {"HAS_BIAS": False}),
        "norm layer": norm("fp32", "layernorm", 5000, **every),
        "norm none": norm("bf16", "none", 64, HAS_DELTA=True, HAS_WEIGHT=False, HAS_BIAS=False),
        **{f"gate {kind}": gate("bf16", kind, gated=kind == "silu") for kind in ("relu", "gelu", "gelu_tanh", "silu")},
        **sampling(TARGET, "bf16"),
    }


def facts(kernel: Any) -> dict[str, Any]:
    """Of one compiled kernel."""
    return {
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "fused": len(re.findall(r"\bfma\.", kernel.asm["ptx"])),
        "units": sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", kernel.asm["ptx"]))),
        "layouts": sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", kernel.asm["ttgir"]))),
        "binary": len(kernel.asm["cubin"]),
    }


if __name__ == "__main__":
    json.dump({name: facts(kernel) for name, kernel in every_kernel().items()}, sys.stdout, indent=1)
