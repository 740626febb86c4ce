"""What a decode step reads of its rows and leaves in them, by Triton: in torch it is twenty launches of a few bytes.

Shape legend: app/engine/gpu/kernels/interface.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import Places, RowState
from app.engine.gpu.kernels.launch_config import ALIGNED, ROW_LAUNCH, STATES


@triton.jit(do_not_specialize=["n_rows", "stride"])
def look_up_kernel(
    rows_ptr, table_ptr, length_ptr, token_ptr, out_ptr, n_rows, stride,
    NOBODY: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Some rows; token, position, slot and tile's row of each lie `stride` apart."""
    place_S = tl.program_id(0) * STATES + tl.arange(0, STATES)
    there_S = place_S < n_rows
    row_S = tl.load(rows_ptr + place_S, mask=there_S, other=NOBODY)
    position_S = tl.load(length_ptr + row_S)
    block_S = tl.load(table_ptr + row_S.to(tl.int64) * TABLE + position_S // BLOCK)
    tl.store(out_ptr + place_S, tl.load(token_ptr + row_S), mask=there_S)
    tl.store(out_ptr + stride + place_S, position_S, mask=there_S)
    tl.store(out_ptr + 2 * stride + place_S, block_S * BLOCK + position_S % BLOCK, mask=there_S)
    tl.store(out_ptr + 3 * stride + place_S, tl.where(row_S == NOBODY, -1, row_S), mask=there_S)


@triton.jit(do_not_specialize=["n_rows"])
def advance_kernel(
    rows_ptr, lengths_ptr, tokens_ptr, length_ptr, token_ptr, n_rows, NOBODY: tl.constexpr, STATES: tl.constexpr
):
    """Some rows; nobody's is not written to."""
    place_S = tl.program_id(0) * STATES + tl.arange(0, STATES)
    row_S = tl.load(rows_ptr + place_S, mask=place_S < n_rows, other=NOBODY)
    there_S = row_S != NOBODY
    token_S = tl.load(tokens_ptr + place_S, mask=there_S, other=0)
    tl.store(length_ptr + row_S, tl.load(lengths_ptr + place_S, mask=there_S, other=0), mask=there_S)
    tl.store(token_ptr + row_S, tl.maximum(token_S, 0), mask=there_S)


def look_up(rows_S: Tensor, state: RowState) -> Places:
    """See Kernels.look_up."""
    assert state.block_table_RB.is_contiguous()
    n_rows = len(rows_S)
    out_XS = rows_S.new_empty(len(Places._fields), -(-n_rows // ALIGNED) * ALIGNED)
    look_up_kernel[(triton.cdiv(n_rows, STATES),)](
        rows_S, state.block_table_RB, state.kv_length_R, state.last_token_R, out_XS, n_rows, out_XS.stride(0),
        NOBODY=len(state.kv_length_R) - 1, TABLE=state.block_table_RB.shape[1], BLOCK=state.block_size, STATES=STATES,
        **ROW_LAUNCH.options,
    )  # fmt: skip
    return Places(*out_XS[:, :n_rows].unbind())


def advance(rows_S: Tensor, lengths_S: Tensor, tokens_S: Tensor, state: RowState) -> None:
    """See Kernels.advance."""
    n_rows = len(rows_S)
    advance_kernel[(triton.cdiv(n_rows, STATES),)](
        rows_S, lengths_S, tokens_S, state.kv_length_R, state.last_token_R, n_rows,
        NOBODY=len(state.kv_length_R) - 1, STATES=STATES, **ROW_LAUNCH.options,
    )  # fmt: skip
