"""Program that compiles every kernel for sm_90 without a GPU and prints the results as JSON.

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

from app.engine.gpu.kernels.interface import (
    COLUMNS,
    HEADS,
    LOOKUP_ROWS,
    POSITIONS,
    ROW_LAUNCH,
    ROWS,
    attention_launch,
    norm_launch,
    padded_dim,
)
from app.engine.gpu.kernels.reference_operations import FP8_MAX
from app.engine.gpu.kernels.sampling_state import TOP
from app.engine.gpu.kernels.triton import quantized_products
from app.engine.gpu.kernels.triton.attention import attention_kernel, merge_kernel
from app.engine.gpu.kernels.triton.operations import (
    advance_kernel,
    gate_kernel,
    look_up_kernel,
    norm_kernel,
    split_heads_kernel,
)
from app.engine.gpu.kernels.triton.quantized_products import quantize_row_kernel, warps
from app.engine.gpu.kernels.triton.sampler import WARPS, SamplerTiling, adjust_kernel, logprobs_kernel, sample_kernel
from app.engine.sampling.parameters import COUNTED

TARGET = GPUTarget("cuda", 90, 32)
VOCAB = 128_256
TYPES = {
    **dict.fromkeys(("n_tokens", "n_rows", "x_stride", "stride", "V", "tiles"), "i32"),
    **dict.fromkeys(("eps", "q_factor", "scale", "soft_cap"), "fp32"),
    **dict.fromkeys(("table_ptr", "row_ptr", "start_ptr", "position_ptr", "length_ptr", "slot_ptr"), "*i32"),
    **dict.fromkeys(("values_ptr", "statistics_ptr", "rope_ptr", "scales_ptr"), "*fp32"),
    "value_offset": "i64",
}
SAMPLING_INTEGERS = ("rows", "positions", "words", "counts", "best_id", "scratch", "tokens", "top_ids")
SAMPLING_FLOATS = ("x", "w", "best", "raw_best", "groups", "raw_groups", "scratch_w", "logprob", "top_logprobs")
SAMPLING_TYPES = {
    **{f"{name}_ptr": "*i32" for name in SAMPLING_INTEGERS},
    **{f"{name}_ptr": "*fp32" for name in SAMPLING_FLOATS},
    **{f"{name}_ptr": "*fp64" for name in ("numbers", "raw_sum", "sums")},
}
# Every pointer that torch hands out is aligned, and so is a layer's half of the cache; sizes are those of usual models.
ALIGNED = ("value_offset", "n_rows", "x_stride", "V")


def compiled(
    kernel: Any, options: dict[str, Any], number: str, types: dict[str, str] | None = None, **sizes: Any
) -> Any:
    """The kernel for these sizes, with numbers of the format `number` behind all pointers that are in no table."""
    names, known = kernel.arg_names, TYPES | (types or {})
    signature = {name: "constexpr" if name in sizes else known.get(name, f"*{number}") for name in names}
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or name in ALIGNED]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    constants = {name: sizes[name] for name in names if name in sizes}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGET, options=options)


def attention(number: str, head_dim: int, *, parallel: bool, tile_tokens: int, **changes: Any) -> Any:
    """Kernel for 32 query and 8 kv heads."""
    constants = {
        "N_HEADS": 32, "N_KV_HEADS": 8, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "BLOCK": 64, "TABLE": 512,
        "TILE_TOKENS": tile_tokens, "HAS_CAP": False, "WINDOW": 0, "ROWS": ROWS, "SPLIT": 512, "POSITIONS": POSITIONS,
        "PARALLEL_SPLITS": parallel, **changes,
    }  # fmt: skip
    item_size = 4 if number == "fp32" else 2
    return compiled(attention_kernel, attention_launch(padded_dim(head_dim), item_size).options, number, **constants)


def heads(number: str, head_dim: int, *, half: int, norm: bool) -> Any:
    """Kernel for 32 query and 8 kv heads."""
    sizes = {"N_HEADS": 32, "N_KV_HEADS": 8, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "HALF": half}
    return compiled(
        split_heads_kernel, ROW_LAUNCH.options, number, HAS_Q_NORM=norm, HAS_K_NORM=norm, HEADS=HEADS, **sizes
    )


def merge(number: str, head_dim: int, window: int) -> Any:
    """Kernel for 32 heads."""
    sizes = {"N_HEADS": 32, "HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "TILE_TOKENS": 1, "SPLIT": 512}
    return compiled(merge_kernel, ROW_LAUNCH.options, number, WINDOW=window, HEADS=HEADS, **sizes)


def norm(number: str, kind: str, width: int, **has: bool) -> Any:
    """Over `width` numbers."""
    padded = triton.next_power_of_2(width)
    return compiled(norm_kernel, norm_launch(width).options, number, WIDTH=width, PADDED=padded, KIND=kind, **has)


def gate(number: str, kind: str, *, gated: bool) -> Any:
    """Over 14,336 numbers."""
    return compiled(gate_kernel, ROW_LAUNCH.options, number, WIDTH=14336, KIND=kind, GATED=gated, COLUMNS=COLUMNS)


def sampling(number: str) -> dict[str, Any]:
    """As they are launched for a large vocabulary, with logits in the format `number`."""
    cut = SamplerTiling.of(VOCAB)
    tiles = triton.next_power_of_2(triton.cdiv(VOCAB, cut.tile))
    sizes = {"B": cut.tile, "G": cut.groups, "C": cut.scratch, "T": tiles, "K": TOP, "COUNTED": COUNTED}
    options = {"num_warps": WARPS}
    return {
        f"sampling {kernel.__name__}": compiled(kernel, options, number, SAMPLING_TYPES, **sizes)
        for kernel in (adjust_kernel, sample_kernel, logprobs_kernel)
    }


def product(n_tokens: int, *, has_bias: bool) -> Any:
    """By int8, of 4,096 columns and steps of so many tokens."""
    block_t, stages = quantized_products.tile(n_tokens)
    sizes = {"BLOCK_T": block_t, "BLOCK_N": quantized_products.BLOCK_N, "BLOCK_K": quantized_products.BLOCK_K}
    options = {"num_warps": quantized_products.WARPS, "num_stages": stages, "enable_fp_fusion": False}
    types = {"numbers_ptr": "*i8"}
    return compiled(
        quantized_products.int8_product_kernel, options, "bf16", types, N_COLUMNS=4096, HAS_BIAS=has_bias, **sizes
    )


def rounding(width: int) -> Any:
    """Quantization to fp8, in rows of this width."""
    sizes = {"N_COLUMNS": width, "PADDED": triton.next_power_of_2(width), "FP8_MAX": FP8_MAX}
    return compiled(quantize_row_kernel, {"num_warps": warps(width)}, "bf16", {"numbers_ptr": "*fp8e4nv"}, **sizes)


def rows() -> dict[str, Any]:
    """Kernel for 256 sequences of up to 32,768 positions."""
    types = {f"{name}_ptr": "*i32" for name in ("rows", "lengths", "tokens", "token", "out")}
    look_up, advance = (
        compiled(kernel, ROW_LAUNCH.options, "i32", types, PADDING_ROW=256, LOOKUP_ROWS=LOOKUP_ROWS, **sizes)
        for kernel, sizes in ((look_up_kernel, {"TABLE": 512, "BLOCK": 64}), (advance_kernel, {}))
    )
    return {"rows looked up": look_up, "rows advanced": advance}


def every_kernel() -> dict[str, Any]:
    """A few variants of each, which between them take every branch."""
    every = {"HAS_DELTA": True, "HAS_WEIGHT": True, "HAS_BIAS": True}
    return {
        "attention prefill": attention("bf16", 128, parallel=False, tile_tokens=64),
        "attention decode": attention("bf16", 128, parallel=True, tile_tokens=1),
        "attention short": attention("bf16", 128, parallel=False, tile_tokens=1),
        "attention window": attention("fp16", 256, parallel=False, tile_tokens=64, HAS_CAP=True, WINDOW=4096, BLOCK=16),
        "attention float32": attention("fp32", 80, parallel=True, tile_tokens=16, BLOCK=32),
        "merge": merge("bf16", 128, 0),
        "merge window": merge("fp16", 80, 1000),
        "heads": heads("bf16", 128, half=64, norm=True),
        "heads plain": heads("fp16", 80, half=0, norm=False),
        "norm rms": norm("bf16", "rmsnorm", 4096, **every | {"HAS_BIAS": False}),
        "norm layer": norm("fp32", "layernorm", 5000, **every),
        "norm none": norm("bf16", "none", 64, HAS_DELTA=True, HAS_WEIGHT=False, HAS_BIAS=False),
        **{f"gate {kind}": gate("bf16", kind, gated=kind == "silu") for kind in ("relu", "gelu", "gelu_tanh", "silu")},
        **sampling("bf16"),
        **rows(),
        "int8 decode": product(1, has_bias=False),
        "int8 prefill": product(512, has_bias=True),
        "fp8 rows": rounding(4096),
    }


def facts(kernel: Any) -> dict[str, Any]:
    """Facts of one compiled kernel."""
    code, types = kernel.asm["ptx"], kernel.src.signature
    # Of these integers, Triton compiles 1, multiples of 16 and all others apart.
    apart = [p.name for p in kernel.src.fn.params if types[p.name] in ("i32", "i64") and not p.do_not_specialize]
    return {
        "apart": apart,
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "fused": len(re.findall(r"\bfma\.", code)),
        "units": sorted(set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", code))),
        "layouts": sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", kernel.asm["ttgir"]))),
        "copies": code.count("cp.async.c"),
        "waits": [int(most) for most in re.findall(r"async_wait.*?num = (\d+)", kernel.asm["ttgir"])],
        "rounding": sorted(set(re.findall(r"cvt\.\S*e4m3\S*|div\.\S+f32", code))),
        "binary": len(kernel.asm["cubin"]),
    }


if __name__ == "__main__":
    json.dump({name: facts(kernel) for name, kernel in every_kernel().items()}, sys.stdout, indent=1)
