"""A step's draws as one block of numbers, for one copy to the host, and what the engine calls them there.

Shape legend: S rows that were drawn for, N most likely tokens of each, X numbers of a row: token, its log-probability,
N ids, N log-probabilities; floats by their bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.gpu.kernels.sampling_state import TOP, SampleOut
from app.engine.sampling.sampled_token import SampledToken


def packed(out: SampleOut) -> Tensor:
    """[S, X] int32, on the device."""
    floats = (out.logprob_S[:, None].view(torch.int32), out.top_logprobs_SN.view(torch.int32))
    return torch.cat((out.tokens_S[:, None], floats[0], out.top_ids_SN, floats[1]), dim=1)


def unpacked(numbers_SX: Tensor, counts: Items[int | None]) -> list[SampledToken]:
    """Of packed() on the host. Rows behind the last of `counts` are padding.

    counts: how many of the most likely tokens each row's request wants; None for no log-probabilities at all.
    """
    tokens = numbers_SX[: len(counts), 0].tolist()
    if all(count is None for count in counts):
        return [SampledToken(token if token >= 0 else None) for token in tokens]
    ids = numbers_SX[: len(counts), 2 : 2 + TOP].tolist()
    floats_SX = numbers_SX.view(torch.float32)
    own, top = floats_SX[: len(counts), 1].tolist(), floats_SX[: len(counts), 2 + TOP :].tolist()
    drawn = []
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if token < 0 or count is None:
            drawn.append(SampledToken(token if token >= 0 else None))
        else:
            likely = zip(ids[i][:count], top[i][:count], strict=True)
            drawn.append(SampledToken(token, own[i], tuple(pair for pair in likely if pair[0] >= 0)))
    return drawn
