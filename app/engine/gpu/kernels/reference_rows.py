"""What a decode step reads of its rows and leaves in them, in plain torch. Shape legend: interface.py."""

from __future__ import annotations

from torch import Tensor

from app.engine.gpu.kernels.interface import Places, RowState


def look_up(rows_S: Tensor, state: RowState) -> Places:
    """See Kernels.look_up."""
    index_S, nobody = rows_S.long(), len(state.kv_length_R) - 1
    positions_S = state.kv_length_R[index_S]
    slots_S = slots(rows_S, positions_S, state)
    return Places(state.last_token_R[index_S], positions_S, slots_S, rows_S.where(rows_S != nobody, -1))


def slots(rows_T: Tensor, positions_T: Tensor, state: RowState) -> Tensor:
    """[T] where in the cache the keys and values of a token go, at any position of a row: no kernel does this alone."""
    blocks_T = state.block_table_RB[rows_T.long(), (positions_T // state.block_size).long()]
    return blocks_T * state.block_size + positions_T % state.block_size


def advance(rows_S: Tensor, lengths_S: Tensor, tokens_S: Tensor, state: RowState) -> None:
    """See Kernels.advance."""
    index_S, is_somebody_S = rows_S.long(), rows_S != len(state.kv_length_R) - 1
    state.kv_length_R.index_copy_(0, index_S, lengths_S.where(is_somebody_S, 0))
    state.last_token_R.index_copy_(0, index_S, tokens_S.clamp(min=0).where(is_somebody_S, 0))
