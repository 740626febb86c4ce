"""Draws on a GPU: three Triton kernels for a step, whatever the rows ask for. Nothing waits for the device.

What is drawn is what ../static_sampler.py draws; docs/sampling.md is the law of both. Where rounding decides they may
part: weights are exact to 2 units in the last place of float32, and a GPU adds in another order. Bits of a row depend
on that row alone.

Shape legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from app.engine.gpu.kernels import sampling_layout as layout
from app.engine.gpu.kernels.sampling_state import TOP, SampleOut, SamplingTable
from app.engine.gpu.kernels.triton.draw import draw
from app.engine.gpu.kernels.triton.logprobs import score
from app.engine.gpu.kernels.triton.penalties import adjust

WARPS = 8
"""Of each program."""


@dataclass(frozen=True, slots=True)
class SamplerTiling:
    """How a row is cut. All are powers of two; a search's results do not depend on them."""

    tile: int = 2048
    """Tokens that a program has in its registers at once."""
    groups: int = 16
    """Of a tile: so many of its logits are compared to begin with."""
    room: int = 2048
    """Tokens that a search finishes without passing over the row again; 64 at least."""

    @classmethod
    def of(cls, vocab: int) -> SamplerTiling:
        """For rows of so many logits."""
        tile = min(2048, max(64, triton.next_power_of_2(vocab)))
        return cls(tile, room=tile)


def sample(
    logits_SV: Tensor,
    rows_S: Tensor,
    positions_S: Tensor,
    table: SamplingTable,
    out: SampleOut,
    sizes: SamplerTiling | None = None,
) -> None:
    """See sampling_twin.sample(). Logits of one row lie side by side."""
    n_rows, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1 and vocab == table.vocab_size
    if not n_rows:
        return
    sizes = sizes or SamplerTiling.of(vocab)
    tiles = triton.cdiv(vocab, sizes.tile)
    room = _Room(n_rows, tiles, sizes, logits_SV.device)
    words, numbers = table.words_RW, table.words_RW.view(torch.float64)
    counts = words if table.counts_RV is None else table.counts_RV
    shape = {"B": sizes.tile, "G": sizes.groups}
    counted = {"COUNTED": 0 if table.counts_RV is None else layout.COUNTED}
    whole = {"T": triton.next_power_of_2(tiles), "C": sizes.room}
    adjust[(n_rows, tiles)](
        *(logits_SV, logits_SV.stride(0), rows_S, positions_S, words, numbers, counts),
        *(room.x, room.best, room.best_id, room.raw_best, room.raw_sum, room.groups, room.raw_groups, vocab, tiles),
        **counted,
        **shape,
        num_warps=WARPS,
    )
    draw[(n_rows,)](
        *(rows_S, positions_S, words, numbers, counts, room.x, room.weights, room.best, room.best_id),
        *(room.groups, room.sums, room.taken, room.taken_weights, out.tokens_S, vocab, tiles),
        **counted,
        **shape,
        **whole,
        num_warps=WARPS,
    )
    score[(n_rows,)](
        *(logits_SV, logits_SV.stride(0), rows_S, words, out.tokens_S, room.raw_best, room.raw_sum, room.raw_groups),
        *(room.taken, room.taken_weights, out.logprob_S, out.top_ids_SN, out.top_logprobs_SN, vocab, tiles),
        K=TOP,
        **shape,
        **whole,
        num_warps=WARPS,
    )


class _Room:
    """Memory for a step, of sizes that follow from shapes alone; a captured graph keeps it."""

    def __init__(self, rows: int, tiles: int, sizes: SamplerTiling, device: torch.device) -> None:
        def room(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self.x, self.weights = room(tiles * sizes.tile), room(tiles * sizes.tile)
        self.best, self.best_id, self.raw_best = room(tiles), room(tiles, torch.int32), room(tiles)
        self.raw_sum, self.sums = room(tiles, torch.float64), room(tiles, torch.float64)
        self.groups, self.raw_groups = room(tiles * sizes.groups), room(tiles * sizes.groups)
        # What a search takes in, and behind it what top_k leaves.
        self.taken, self.taken_weights = room(2 * sizes.room, torch.int32), room(2 * sizes.room)
