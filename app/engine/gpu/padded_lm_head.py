"""Product with the LM head, whose matrix is padded with zero rows to an aligned vocabulary size.

cuBLAS writes the rows of logits contiguously, and falls back to slow kernels where rows are not aligned to 16 bytes:
with 50,257 tokens, or 32,001. With padded rows it is fast, and the padding between two rows is ignored.

Shape legend: S rows that want logits, D width, V vocabulary, W the next whole number from V on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from model.nn.layers import product
from model.nn.transformer import Decoder

WHOLE = 64
"""Numbers: 128 bytes of bfloat16, which is what matrix units take best."""


def whole_head(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """decoder.head, logits [S, V] of hidden states [S, D], as a view whose rows are W apart.

    The matrix moves to where it has room for more rows: it is there once, also where it is the embedding, too.
    """
    vocab = decoder.config.vocab_size
    if decoder.head_product is not product or not vocab % WHOLE:
        return decoder.head
    matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
    matrix_WD = _whole(matrix)
    matrix.data = matrix_WD[:vocab]
    bias_W = None if decoder.head_bias is None else _whole(decoder.head_bias)
    return lambda hidden_SD: decoder.capped(F.linear(hidden_SD, matrix_WD, bias_W)[:, :vocab])


def _whole(rows: Tensor) -> Tensor:
    """With rows of zeros behind them."""
    whole = rows.new_zeros(-(-len(rows) // WHOLE) * WHOLE, *rows.shape[1:])
    whole[: len(rows)].copy_(rows.detach())
    return whole
