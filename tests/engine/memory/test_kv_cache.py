"""Paged attention against plain attention: ragged lengths, query lengths 1, 5 and 64, every grouping, shared blocks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from app.common.types import Chunk, Request, Sequence
from app.engine.memory.kv_cache import KVCache, PagedAttend, group_chunks
from tests.support.model.tiny_models import tiny_config

HEADS = [(2, 2), (6, 2), (4, 1), (8, 1)]


def _plain(q_NHC: torch.Tensor, k_LKC: torch.Tensor, v_LKC: torch.Tensor) -> torch.Tensor:
    """The last N positions of a sequence of L, in float32."""
    n, length = len(q_NHC), len(k_LKC)
    mask = torch.arange(length) <= torch.arange(length - n, length)[:, None]
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q_NHC, k_LKC, v_LKC))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_paged_attention_equals_plain_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    rng, generator = random.Random(heads), torch.Generator().manual_seed(heads)
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, n_layers=1, context=1024)
    cache = KVCache(config, blocks=200, block_size=block_size, dtype=dtype, device=torch.device("cpu"))
    cache.data.fill_(7.0)  # what is stale must not matter
    free = list(range(200))
    rng.shuffle(free)
    shapes = [(1, 1), (1, 64), (1, 65), (1, 700), (5, 5), (5, 130), (64, 64), (64, 300)]
    chunks, wanted = [], {}
    for i, (n, length) in enumerate(shapes):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        request = Request(id=f"s{i}", prompt=(1,) * length, max_tokens=1)
        sequence = Sequence(request=request, tokens=[1] * length, arrival=0, blocks=blocks)
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length - n):
            cache.data[0, 0, blocks[position // block_size], :, position % block_size] = k[position]
            cache.data[0, 1, blocks[position // block_size], :, position % block_size] = v[position]
        chunks.append(Chunk(sequence, length - n, length))
        wanted[f"s{i}"] = (torch.randn(n, heads, head_dim, generator=generator).to(dtype), k, v)
    groups = group_chunks(chunks)
    ordered = [chunk for group in groups for chunk in group]
    positions = [(c.sequence.blocks[p // block_size], p % block_size) for c in ordered for p in range(c.start, c.stop)]
    slots = cache.slot_rows(torch.tensor([b for b, _ in positions]), torch.tensor([o for _, o in positions]))
    q, k, v = (torch.cat([wanted[c.sequence.request.id][x][-(c.stop - c.start) :] for c in ordered]) for x in range(3))
    out = PagedAttend(cache, groups, slots)(0, q, k, v)
    start = 0
    for chunk in ordered:
        stop = start + chunk.stop - chunk.start
        expected = _plain(*wanted[chunk.sequence.request.id])
        assert torch.allclose(out[start:stop].float(), expected, atol=2e-5 if dtype == torch.float32 else 3e-2)
        start = stop
