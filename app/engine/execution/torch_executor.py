"""Executor of steps in torch, with a paged KV cache: the reference, and the only one for models with an encoder.

Shape legend: T tokens of the step, D width, V vocabulary, H query heads, K kv heads, G = H / K, C head_dim, B sequences
of a row group, N query tokens of each, R = G * N rows of one kv head, L kv positions of a group (whole tiles of 64), S
those of a span, X flattened.

Batch invariance (docs/numbers.md): the bits of a row depend on its own tokens only. Its requirements, measured on torch
2.13 with AVX512-BF16: one formula for prefill and decode; L in whole tiles with masked scores; float32 rows in fours,
bfloat16 rows in pairs (single rows differ if 1,536 or more numbers are summed); no product so small that torch uses
another formula for it; the product with v in pieces of fixed length, added in order, since its bits depend on the
length of the sum (float32 from 256 keys on, bfloat16 from 576 on); and softmax over spans of 512 positions, which begin
at position 0 and are merged in order: a span of masked keys changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.memory.cache_groups import CacheGroup, block_counts, cache_dtype, cache_groups, cache_places
from app.engine.memory.memory_plan import TILE
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, non_finite_chunks
from model.cache_formats import KvCache
from model.nn.attention import CrossAttend, masked_positions
from model.nn.int8_cache import decode, encode
from model.nn.interpreter import Interpreter
from model.nn.layers import SMALL_PRODUCT, cache_attributes, padded_rows, row_invariant
from model.nn.transformer import Decoder

_SPAN = 512
"""Positions whose softmax is computed together. Memory for scores does not depend on the length."""
_PIECE = {torch.float32: 128, torch.bfloat16: 512}
_ATTENTION_ROWS = {torch.float32: 4, torch.bfloat16: 1}


def groups_of(decoder: Decoder, kv_cache: KvCache = "auto") -> tuple[CacheGroup, ...]:
    """The cache groups of a decoder; auto: with the number format of its embedding."""
    return cache_groups(decoder.config, cache_dtype(str(decoder.embedding.dtype).removeprefix("torch."), kv_cache))


class KVCache:
    """Blocks of a cache group, [layer of the group, 2, block, kv_head, slot, head_dim]; the reserved ones come last.

    kv_head comes before slot, so that a gather of blocks is directly the operand of the matrix product: 2.7 times
    faster at 32 rows of 256 positions than slot first (which copies again), 1.4 times at one row.
    """

    def __init__(self, decoder: Decoder, group: CacheGroup, *, blocks: int, block_size: int) -> None:
        """Allocates the cache on the device of the decoder's embedding."""
        self.config = config = decoder.config
        self.window = group.window
        self.block_size = block_size
        self.padding_block = blocks
        shape = (len(group.layers), 2, blocks + group.n_reserved_blocks, config.n_kv_heads, block_size, config.head_dim)
        self.data = torch.zeros(shape, dtype=getattr(torch, group.format.dtype), device=decoder.embedding.device)

    def write(self, layer: int, k_TKC: Tensor, v_TKC: Tensor, slots_X: Tensor) -> None:
        """Stores keys and values at slots [T * K] (see slot_rows)."""
        for kind, x_TKC in enumerate((k_TKC, v_TKC)):
            rows = self.data[layer, kind].view(-1, self.config.head_dim)
            rows.index_copy_(0, slots_X, x_TKC.reshape(-1, self.config.head_dim))

    def gather(self, layer: int, kind: int, rows_X: Tensor, batch: int) -> Tensor:
        """[batch * K, L, C]: the blocks of rows_X (see block_rows), concatenated."""
        table = self.data[layer, kind].flatten(0, 1).flatten(1)
        return table.index_select(0, rows_X).view(batch * self.config.n_kv_heads, -1, self.config.head_dim)

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks: a non-finite value would reach later owners even with weight 0."""
        self.data[:, :, blocks] = 0

    def copy(self, pairs: Items[tuple[int, int]]) -> None:
        """Copies blocks: (from, to). No target may also be a source."""
        sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
        self.data[:, :, targets] = self.data[:, :, sources]

    def slot_rows(self, blocks_T: Tensor, offsets_T: Tensor) -> Tensor:
        """[T * K] rows for write(), of tokens at `offsets` in `blocks`."""
        heads_K = torch.arange(self.config.n_kv_heads, device=blocks_T.device)
        return ((blocks_T[:, None] * self.config.n_kv_heads + heads_K) * self.block_size + offsets_T[:, None]).flatten()

    def block_rows(self, blocks_BX: Tensor) -> Tensor:
        """[B * K * blocks] rows for gather()."""
        heads_K1 = torch.arange(self.config.n_kv_heads, device=blocks_BX.device)[:, None]
        return (blocks_BX[:, None] * self.config.n_kv_heads + heads_K1).flatten()


class Int8KVCache(KVCache):
    """A cache of codes, beside the scale of each: [layer of the group, 2, block, kv_head, slot]."""

    def __init__(self, decoder: Decoder, group: CacheGroup, *, blocks: int, block_size: int) -> None:
        """See KVCache."""
        super().__init__(decoder, group, blocks=blocks, block_size=block_size)
        self.dtype = decoder.embedding.dtype
        """Of the numbers that gather() returns."""
        self.scales = torch.zeros(self.data.shape[:-1], dtype=torch.bfloat16, device=self.data.device)

    def write(self, layer: int, k_TKC: Tensor, v_TKC: Tensor, slots_X: Tensor) -> None:
        """See KVCache. Numbers are rounded to the format of the step first, as a cache of numbers does."""
        (k_TKC, *scales_of_k), (v_TKC, *scales_of_v) = (encode(x_TKC.to(self.dtype)) for x_TKC in (k_TKC, v_TKC))
        super().write(layer, k_TKC, v_TKC, slots_X)
        for kind, scales_TK in enumerate((*scales_of_k, *scales_of_v)):
            self.scales[layer, kind].view(-1).index_copy_(0, slots_X, scales_TK.reshape(-1))

    def gather(self, layer: int, kind: int, rows_X: Tensor, batch: int) -> Tensor:
        """See KVCache."""
        codes_XLC = super().gather(layer, kind, rows_X, batch)
        scales_XS = self.scales[layer, kind].flatten(0, 1).index_select(0, rows_X)
        return decode(codes_XLC, scales_XS.view(codes_XLC.shape[:-1]), self.dtype)

    def clear(self, blocks: list[int]) -> None:
        """See KVCache."""
        super().clear(blocks)
        self.scales[:, :, blocks] = 0

    def copy(self, pairs: Items[tuple[int, int]]) -> None:
        """See KVCache."""
        super().copy(pairs)
        sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
        self.scales[:, :, targets] = self.scales[:, :, sources]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Chunks of equal query length whose attention is one product; they are adjacent in the step."""

    batch: int
    length: int
    block_rows_X: Tensor
    hidden_B1NL: Tensor
    """0 where a query token may attend, -inf where it may not; N may be 1 if all attend alike."""


class _GroupStep(NamedTuple):
    """What attention in the layers of one cache group needs in a step."""

    cache: KVCache
    slots_X: Tensor
    """Where the step's keys and values go (KVCache.slot_rows)."""
    row_groups: list[RowGroup]


class _PagedAttend:
    """Attention for one step (an `Attend` of model.nn.attention): writes the step's k and v, attends over the blocks.

    The chunks must be in the order of _group_chunks(); rows after the last chunk are padding and result in zeros.
    """

    def __init__(self, places: Items[tuple[int, int]], steps: Items[_GroupStep]) -> None:
        """places: see cache_places()."""
        self._places = places
        self._steps = steps
        self.finite_T: Tensor
        """Whether the keys and values of each row are finite, after the last layer."""

    def __call__(
        self, layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        group, place = self._places[layer]
        if layer == len(self._places) - 1:  # a row attends to itself, so it hands on what is not finite
            self.finite_T = (k_TKC.isfinite() & v_TKC.isfinite()).flatten(1).all(1)
        cache, slots_X, row_groups = self._steps[group]
        cache.write(place, k_TKC, v_TKC, slots_X)
        return attend_groups(cache, place, row_groups, q_THC, sinks_H)


def attend_groups(
    cache: KVCache, layer: int, groups: Items[RowGroup], q_THC: Tensor, sinks_H: Tensor | None = None
) -> Tensor:
    """[T, H, C]: softmax(q k^T / sqrt(C)) v of each group's tokens over its blocks; zeros after the last group."""
    q_TKGC = (q_THC * q_THC.shape[-1] ** -0.5).unflatten(1, (cache.config.n_kv_heads, -1))
    parts, start = [], 0
    for group in groups:
        stop = start + group.batch * group.length
        parts.append(_attend(cache, layer, group, q_TKGC[start:stop], sinks_H))
        start = stop
    if start < len(q_THC):
        parts.append(q_THC.new_zeros(len(q_THC) - start, *q_THC.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def as_addend(hidden: Tensor) -> Tensor:
    """Attention bias: 0, or -inf where `hidden`."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _group_chunks(chunks: Items[Chunk]) -> list[list[Chunk]]:
    """Groups chunks that share a product: decodes by kv tiles, rounded up to a power of two; others alone."""
    decodes: dict[int, list[Chunk]] = {}
    singles = []
    for chunk in chunks:
        if chunk.stop - chunk.start == 1:
            decodes.setdefault((_tiles(chunk.stop) - 1).bit_length(), []).append(chunk)
        else:
            singles.append([chunk])
    return [*decodes.values(), *singles]


class _Partial(NamedTuple):
    """Attention over some positions."""

    best_XR1: Tensor
    """Largest score in float32; -inf where all are masked."""
    total_XR1: Tensor
    """Sum of exp(score - best); 0 where all are masked."""
    out_XRC: Tensor
    """softmax(scores) v in float32; zeros where all are masked."""


def _attend(cache: KVCache, layer: int, group: RowGroup, q_TKGC: Tensor, sinks_H: Tensor | None) -> Tensor:
    """[batch * length, H, C]."""
    batch, length = group.batch, group.length
    n_kv, n_group, head_dim = q_TKGC.shape[1:]
    q_XRC = q_TKGC.unflatten(0, (batch, length)).transpose(1, 2).reshape(batch * n_kv, length * n_group, head_dim)
    n_rows = _rows(q_XRC.shape[1], _ATTENTION_ROWS[q_XRC.dtype], SMALL_PRODUCT[q_XRC.dtype] // (TILE * head_dim) + 1)
    padded_XRC = F.pad(q_XRC, (0, 0, 0, n_rows - q_XRC.shape[1]))
    n_positions = group.hidden_B1NL.shape[-1]
    if n_positions <= _SPAN and sinks_H is None:
        out_XRC, _, _ = _attend_to_span(cache, layer, group, padded_XRC, 0, n_positions)
    else:
        sinks = None if sinks_H is None else _sinks(sinks_H, q_XRC, n_kv, length)
        out_XRC = _attend_to_spans(cache, layer, group, padded_XRC, sinks).to(q_XRC.dtype)
    out_BNHC = out_XRC.reshape(batch, n_kv, length, n_group, head_dim).transpose(1, 2)
    return out_BNHC.reshape(-1, n_kv * n_group, head_dim)


def _sinks(sinks_H: Tensor, q_XRC: Tensor, n_kv: int, length: int) -> _Partial:
    """Attention over sinks alone: scores of heads, before all positions and without values."""
    batch, n_group = len(q_XRC) // n_kv, len(sinks_H) // n_kv
    best_XR1 = sinks_H.float().view(n_kv, n_group).repeat(batch, length)[..., None]
    return _Partial(best_XR1, torch.ones_like(best_XR1), best_XR1.new_zeros(*best_XR1.shape[:2], q_XRC.shape[2]))


def _attend_to_spans(cache: KVCache, layer: int, group: RowGroup, q_XRC: Tensor, sinks: _Partial | None) -> Tensor:
    """[X, R, C] in float32, without the padding rows of q."""
    merged = sinks
    for start in range(0, n_positions := group.hidden_B1NL.shape[-1], _SPAN):
        stop = min(start + _SPAN, n_positions)
        out_XRC, scores_XRS, weights_XRS = _attend_to_span(cache, layer, group, q_XRC, start, stop)
        best_XR1 = scores_XRS.amax(-1, keepdim=True)
        is_masked_XR1 = best_XR1 == float("-inf")
        out_XRC = out_XRC.float().masked_fill(is_masked_XR1, 0.0)
        # The largest weight is exp(0) / total. A sum of exp() itself would depend on the number of positions.
        total_XR1 = (1 / weights_XRS.amax(-1, keepdim=True)).masked_fill(is_masked_XR1, 0.0)
        partial = _Partial(best_XR1, total_XR1, out_XRC)
        merged = partial if merged is None else _merged(merged, partial)
    assert merged
    return merged.out_XRC


def _attend_to_span(
    cache: KVCache, layer: int, group: RowGroup, q_XRC: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scores) v [X, R, C], scores and softmax(scores) [X, R, S] in float32, without the padding rows of q.

    NaN where all positions of the span are masked.
    """
    batch, n_kv, n_group = group.batch, cache.config.n_kv_heads, cache.config.n_heads // cache.config.n_kv_heads
    n_rows = group.length * n_group
    blocks_XB = group.block_rows_X.view(batch * n_kv, -1)[:, start // cache.block_size : stop // cache.block_size]
    k_XSC = cache.gather(layer, 0, blocks_XB.flatten(), batch)
    scores_XRS = torch.bmm(q_XRC, k_XSC.transpose(1, 2))[:, :n_rows]
    if (cap := cache.config.attention_soft_cap) is not None:
        scores_XRS = _capped(scores_XRS, cap)
    scores_BKNGS = scores_XRS.view(batch, n_kv, group.length, n_group, -1) + group.hidden_B1NL[
        ..., start:stop
    ].unsqueeze(3)
    scores_XRS = scores_BKNGS.view(batch * n_kv, n_rows, -1)
    weights_XRS = scores_XRS.softmax(-1)
    padded_XRS = F.pad(weights_XRS.to(q_XRC.dtype), (0, 0, 0, q_XRC.shape[1] - n_rows))
    v_XSC = cache.gather(layer, 1, blocks_XB.flatten(), batch)
    return _product_in_pieces(padded_XRS, v_XSC)[:, :n_rows], scores_XRS, weights_XRS


def _merged(a: _Partial, b: _Partial) -> _Partial:
    """Attention over the positions of both. A span of masked positions leaves the other as it is, bit for bit."""
    best_XR1 = torch.maximum(a.best_XR1, b.best_XR1)
    finite_XR1 = best_XR1.clamp(min=torch.finfo(torch.float32).min)
    old_XR1, new_XR1 = (
        row_invariant(torch.exp, (each.best_XR1 - finite_XR1).flatten(1)).unsqueeze(2) * each.total_XR1
        for each in (a, b)
    )
    total_XR1 = old_XR1 + new_XR1
    divisor_XR1 = total_XR1.masked_fill(total_XR1 == 0, 1.0)
    out_XRC = a.out_XRC * (old_XR1 / divisor_XR1) + b.out_XRC * (new_XR1 / divisor_XR1)
    return _Partial(best_XR1, total_XR1, out_XRC)


def _capped(scores_XRL: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap) in float32, with the same bits in any batch."""
    scaled_XL = (scores_XRL.float() / cap).flatten(0, 1)
    return (row_invariant(torch.tanh, scaled_XL) * cap).view(scores_XRL.shape)


def _row_group(cache: KVCache, index: int, chunks: Items[Chunk]) -> RowGroup:
    """The chunks' blocks in the cache of the group `index`, from the first span on that a row attends to.

    Those that a window has passed are null blocks, since a weight of 0 hides only finite values.
    """
    device, length = cache.data.device, chunks[0].stop - chunks[0].start
    kv_length = max(_tiles(chunk.stop) for chunk in chunks) * TILE
    oldest = min(chunk.start for chunk in chunks) - cache.window + 1 if cache.window else 0
    first = max(oldest, 0) // _SPAN * _SPAN
    passed, per_row = first // cache.block_size, kv_length // cache.block_size
    tables = [chunk.sequence.blocks for chunk in chunks]
    rows = [_padded(table[index] if table else array("i"), per_row, cache.padding_block)[passed:] for table in tables]
    starts_B11 = torch.tensor([chunk.start for chunk in chunks], device=device)[:, None, None]
    positions_BN1 = starts_B11 + torch.arange(length, device=device)[None, :, None]
    hidden_BNL = masked_positions(positions_BN1 - first, kv_length - first, cache.window)
    return RowGroup(
        batch=len(chunks),
        length=length,
        block_rows_X=cache.block_rows(torch.tensor(rows, device=device)),
        hidden_B1NL=as_addend(hidden_BNL.unsqueeze(1)),
    )


def _product_in_pieces(weights_XRL: Tensor, v_XLC: Tensor) -> Tensor:
    piece = _PIECE[weights_XRL.dtype]
    out_XRC = torch.bmm(weights_XRL[:, :, :piece], v_XLC[:, :piece])
    for start in range(piece, v_XLC.shape[1], piece):
        keys = slice(start, start + piece)
        out_XRC = torch.baddbmm(out_XRC, weights_XRL[:, :, keys], v_XLC[:, keys])
    return out_XRC


def _rows(count: int, multiple: int, min_count: int) -> int:
    return -(-max(count, min_count) // multiple) * multiple


def _padded(blocks: array[int], length: int, padding: int) -> list[int]:
    # Blocks allocated in advance may reach beyond the tiles of this step.
    return blocks[:length].tolist() + [padding] * (length - len(blocks))


def _tiles(length: int) -> int:
    return -(-length // TILE)


class TorchExecutor:
    """The decoder in torch, operation by operation; on any device, for any decoder."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        blocks: int | Items[int],
        block_size: int,
        kv_cache: KvCache = "auto",
        attend_sources: Callable[[Items[Items[Chunk]]], CrossAttend] | None = None,
    ) -> None:
        """blocks: see block_counts(). kv_cache: format of the cache.

        attend_sources: for a model with an encoder, EncoderCache.attend() of encoder_cache.py.
        """
        cache_attributes(decoder)
        self.config = decoder.config
        self._decoder, self._interpret = decoder, Interpreter(decoder)
        groups = groups_of(decoder, kv_cache)
        self._places = cache_places(groups)
        make = Int8KVCache if groups[0].format.has_codes else KVCache
        counts = zip(block_counts(blocks, groups), groups, strict=True)
        self._caches = [make(decoder, group, blocks=count, block_size=block_size) for count, group in counts]
        self._attend_sources = attend_sources
        self._hidden_TD = torch.empty(0)
        self.not_finite: Items[Chunk] = ()
        others = ("bias", "router.weight")  # a router's product has padding of its own
        matrices = [x for name, x in decoder.named_parameters() if x.ndim == 2 and not name.endswith(others)]
        self._smallest = min(matrix.numel() for matrix in matrices)

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Computes one step: decodes of similar length together, every other chunk separately."""
        self._prepare(plan)
        groups = _group_chunks(plan.chunks)
        chunks = [chunk for group in groups for chunk in group]
        tokens_T, positions_T, *blocks_GT = self._inputs(chunks)
        steps = []
        for index, (cache, blocks_T) in enumerate(zip(self._caches, blocks_GT, strict=True)):
            slots_X = cache.slot_rows(blocks_T, positions_T % cache.block_size)
            steps.append(_GroupStep(cache, slots_X, [_row_group(cache, index, group) for group in groups]))
        cross = self._attend_sources(groups) if self._attend_sources else None
        attend = _PagedAttend(self._places, steps)
        n_rows = sum(chunk.stop - chunk.start for chunk in chunks)
        self._hidden_TD = self._interpret(tokens_T, positions_T, attend, cross, n_rows=n_rows)
        has_prompts = any(chunk.stop - chunk.start > 1 or not chunk.samples for chunk in chunks)
        self.not_finite = non_finite_chunks(attend.finite_T.tolist(), chunks) if has_prompts else []
        return chunks

    @torch.inference_mode()
    def logits(self, rows: Items[int]) -> Tensor:
        """Logits in the decoder's dtype."""
        padded = [*rows, *[rows[-1]] * (self._padded(len(rows)) - len(rows))]  # for batch invariance
        return self._decoder.head(self._hidden_TD[torch.tensor(padded, device=self._hidden_TD.device)])[: len(rows)]

    def _prepare(self, plan: BatchPlan) -> None:
        """Clears and copies blocks."""
        for index, cache in enumerate(self._caches):
            if clear := [block for group, block in plan.clear if group == index]:
                cache.clear(clear)
            if pairs := [(source, target) for group, source, target in plan.copies if group == index]:
                cache.copy(pairs)

    def _inputs(self, chunks: Items[Chunk]) -> Tensor:
        """[2 + groups, T]: tokens, positions, blocks of each cache group; padded as batch invariance requires."""
        size, paddings = self._caches[0].block_size, [cache.padding_block for cache in self._caches]
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[list[int]] = [[] for _ in self._caches]
        for chunk in chunks:
            chunk_positions = range(chunk.start, chunk.stop)
            tokens += chunk.tokens
            positions += chunk_positions
            table = chunk.sequence.blocks
            for index, of_group in enumerate(blocks):
                of_group += (
                    [table[index][i // size] for i in chunk_positions]
                    if table
                    else [paddings[index]] * len(chunk_positions)
                )
        extra = self._padded(len(tokens)) - len(tokens)
        padded = (of_group + [padding] * extra for of_group, padding in zip(blocks, paddings, strict=True))
        filled = (tokens + [0] * extra, positions + [0] * extra, *padded)
        return torch.tensor(filled, device=self._caches[0].data.device)

    def _padded(self, count: int) -> int:
        """Number of rows to which `count` rows must be padded, so that the matrix products are batch-invariant."""
        return padded_rows(count, self._decoder.embedding.dtype, self._smallest)
