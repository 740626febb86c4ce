"""The kernels of sampling as they are launched for a vocabulary of 128,256, compiled without a GPU."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.engine.kernels.sampling_table import TOP
from app.engine.kernels.sampling_words import COUNTED
from app.engine.kernels.triton_adjust import adjust
from app.engine.kernels.triton_draw import draw
from app.engine.kernels.triton_sampler import WARPS, Sizes
from app.engine.kernels.triton_scores import score

VOCAB = 128_256
INTEGERS = (
    "rows_ptr",
    "positions_ptr",
    "words_ptr",
    "counts_ptr",
    "best_id_ptr",
    "room_ptr",
    "tokens_ptr",
    "top_ids_ptr",
)
WIDE = ("numbers_ptr", "raw_sum_ptr", "sums_ptr")
SCALARS = ("stride", "V", "tiles")


def sampling(target: GPUTarget, number: str) -> dict[str, Any]:
    """Of logits in the format `number`."""
    sizes = Sizes.of(VOCAB)
    tiles = triton.next_power_of_2(triton.cdiv(VOCAB, sizes.tile))
    constants = {"B": sizes.tile, "G": sizes.groups, "C": sizes.room, "T": tiles, "K": TOP, "COUNTED": COUNTED}
    return {
        f"sampling {kernel.__name__}": _compiled(kernel, target, number, constants) for kernel in (adjust, draw, score)
    }


def _compiled(kernel: Any, target: GPUTarget, number: str, constants: dict[str, int]) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else _type(name, number) for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr") or name == "V"
    }
    source = ASTSource(kernel, signature, {name: constants[name] for name in names if name in constants}, attributes)
    return triton.compile(source, target=target, options={"num_warps": WARPS})


def _type(name: str, number: str) -> str:
    if name in SCALARS:
        return "i32"
    if name == "logits_ptr":
        return f"*{number}"
    return "*i32" if name in INTEGERS else "*fp64" if name in WIDE else "*fp32"
