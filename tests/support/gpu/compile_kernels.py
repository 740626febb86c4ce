"""Program that compiles every kernel for sm_90 without a GPU, as it is launched, and prints the results as JSON.

In a process with TRITON_INTERPRET=1 nothing is compiled, so the tests start this one without it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from app.engine.gpu.kernels.interface import AttentionBatch, HeadsSpec, NormSpec, RowState
from app.engine.gpu.kernels.sampling_state import SampleOut, SamplingTable
from app.engine.gpu.kernels.triton.operations import TritonKernels
from app.engine.gpu.kernels.triton.quantized_products import int8_product, quantize_fp8_rows
from app.engine.quantization.int8_weights import Quantized
from model.config import Activation
from tests.support.gpu.launch_kernels import Driver

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
KERNELS = TritonKernels()


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Kernels are compiled for the shape and the format of a tensor; there are no numbers."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """Integers of the kernels."""
    return empty(*shape, dtype=INT32)


def attention(dtype: torch.dtype, head_dim: int, *, splits: int, tile: int, block: int = 64, window: int = 0) -> None:
    """Of 32 query and 8 kv heads; with more than one split, also the merge."""
    batch = AttentionBatch(
        block_table_RB=ints(9, 512),
        **{f"tile_{name}_X": ints(8) for name in ("row", "start", "position", "length")},
        tile_tokens=tile,
        max_splits=splits,
    )
    cache = empty(2, 9, block, 8, head_dim, dtype=dtype)
    batch = KERNELS.divide_attention(batch, 32, 8, head_dim, window)
    KERNELS.attention(empty(8 * tile, 32, head_dim, dtype=dtype), cache, batch, window)


def heads(dtype: torch.dtype, head_dim: int, *, rotated: int, norm: Tensor | None) -> None:
    """Of 32 query and 8 kv heads."""
    spec = HeadsSpec(n_heads=32, n_kv_heads=8, head_dim=head_dim, turned_dim=rotated, q_norm=norm, k_norm=norm)
    rope_PC = empty(99, rotated, dtype=FP32) if rotated else None
    cache = empty(2, 9, 64, 8, head_dim, dtype=dtype)
    KERNELS.split_heads(empty(8, 48 * head_dim, dtype=dtype), spec, ints(8), rope_PC, cache, ints(8))


def norm(dtype: torch.dtype, kind: Any, width: int, *, has_bias: bool = False) -> None:
    """Of x + delta."""
    x_TD, weight_D = empty(8, width, dtype=dtype), empty(width, dtype=dtype)
    weights = {} if kind == "none" else {"weight": weight_D, "bias": weight_D if has_bias else None}
    KERNELS.add_norm(x_TD, x_TD, NormSpec(kind=kind, **weights))


def gate(kind: Activation) -> None:
    """Over 14,336 numbers."""
    is_gated = kind == "silu"
    KERNELS.gate(empty(8, 14_336 * (1 + is_gated)), kind, is_gated)


def sampling() -> None:
    """For a large vocabulary."""
    table = SamplingTable(9, 128_256, "meta")
    KERNELS.sample(empty(8, 128_256), ints(8), ints(8), table, SampleOut.empty(8, "meta"))


def rows() -> None:
    """Of 256 sequences of up to 32,768 positions."""
    state = RowState(ints(257, 512), ints(257), 64)
    KERNELS.look_up(ints(8), ints(8), None, state)
    KERNELS.look_up(ints(8), ints(8), ints(8), state)


def product(n_tokens: int, bias_N: Tensor | None) -> None:
    """By int8, of 4,096 columns and rows."""
    weight = Quantized(empty(4096, 4096, dtype=torch.int8), empty(4096, dtype=FP32))
    int8_product(empty(n_tokens, 4096), weight, bias_N)


LAUNCHES: dict[str, Callable[[], object]] = {
    "prefill": lambda: attention(BF16, 128, splits=1, tile=64),
    "decode": lambda: attention(BF16, 128, splits=64, tile=1),
    "short": lambda: attention(BF16, 128, splits=1, tile=1),
    "window": lambda: attention(FP16, 256, splits=1, tile=64, block=16, window=4096),
    "split window": lambda: attention(FP16, 80, splits=64, tile=1, window=1000),
    "float32": lambda: attention(FP32, 80, splits=64, tile=16, block=32),
    "heads": lambda: heads(BF16, 128, rotated=128, norm=empty(128)),
    "plain heads": lambda: heads(FP16, 80, rotated=0, norm=None),
    "rms": lambda: norm(BF16, "rmsnorm", 4096),
    "layer": lambda: norm(FP32, "layernorm", 5000, has_bias=True),
    "none": lambda: norm(BF16, "none", 64),
    "relu": lambda: gate("relu"),
    "gelu": lambda: gate("gelu"),
    "gelu_tanh": lambda: gate("gelu_tanh"),
    "silu": lambda: gate("silu"),
    "sampling": sampling,
    "rows": rows,
    "int8 decode": lambda: product(1, None),
    "int8 prefill": lambda: product(512, empty(4096)),
    "fp8": lambda: quantize_fp8_rows(empty(8, 4096)),
}
"""A few variants of each kernel, which between them take every branch; sizes are those of usual models."""


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


def main() -> dict[str, Any]:
    """Facts of each kernel, by the name of its launch and its own."""
    found: dict[str, Any] = {}
    run = JITFunction.run
    triton.runtime.driver.set_active(Driver())
    for name, launch in LAUNCHES.items():

        def compile_alone(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
            del warmup
            found[f"{name} {kernel.__name__}"] = facts(run(kernel, *args, warmup=True, **options))  # noqa: B023

        JITFunction.run = compile_alone
        launch()
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=1)
