"""LM head whose matrix is padded with zero rows to an aligned vocabulary size.

cuBLAS writes the rows of logits contiguously, and falls back to slow kernels if rows are not aligned to 16 bytes, as
with 50,257 or 32,001 tokens. With padded rows it is fast, and the padding between two rows is ignored.

Shape legend: S rows that want logits, D width, V vocabulary, W the vocabulary with its padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from model.nn.layers import product
from model.nn.transformer import Decoder

VOCAB_MULTIPLE = 64
"""The padded vocabulary size is a multiple of it: 128 bytes of bfloat16, the best alignment for tensor cores."""


def padded_lm_head(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """decoder.head with a padded matrix: logits [S, V] of hidden states [S, D], as a view with row stride W.

    The matrix moves into a larger allocation; a tied embedding moves with it, so that there is only one copy.
    """
    vocab = decoder.config.vocab_size
    if decoder.head_product is not product or not vocab % VOCAB_MULTIPLE:
        return decoder.head
    matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
    matrix_WD = _pad_rows(matrix)
    matrix.data = matrix_WD[:vocab]
    bias_W = None if decoder.head_bias is None else _pad_rows(decoder.head_bias)
    return lambda hidden_SD: decoder.cap_logits(F.linear(hidden_SD, matrix_WD, bias_W)[:, :vocab])


def _pad_rows(rows: Tensor) -> Tensor:
    """A copy with rows of zeros appended."""
    padded = rows.new_zeros(-(-len(rows) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, *rows.shape[1:])
    padded[: len(rows)].copy_(rows.detach())
    return padded
