"""Logits and per-row parameters in, token ids and log-probabilities out. Pure functions on tensors.

Shape legend: S rows, V vocabulary. Order: log-probabilities of the raw logits, then temperature -> top_k -> top_p ->
min_p -> draw. Filters are thresholds ("every token at least as likely as this one"), so that ties never depend on the
order of a sort, and every row is computed on its own: what is drawn depends on (seed, position) and the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.logprobs import top_logprobs
from app.engine.params import SamplingParams
from app.engine.types import Drawn, TokenScore

_MASK32 = 0xFFFFFFFF
_NUCLEUS_TRY = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to draw one row: the request's parameters and the position of the new token in its sequence."""

    params: SamplingParams
    position: int


def sample(logits_SV: Tensor, rows: Items[SamplingRow]) -> list[Drawn]:
    """One token for each row; greedy ties go to the lowest id; a row that is not finite gives no token."""
    finite_S1 = torch.isfinite(logits_SV).all(-1, keepdim=True)
    logits_SV = logits_SV.float().where(finite_S1, 0.0)
    chosen_S = logits_SV.argmax(-1)
    warm = [i for i, row in enumerate(rows) if not _is_greedy(row.params)]
    if warm:
        chosen_S[warm] = _draw(logits_SV[warm], [rows[i] for i in warm])
    logprobs = _logprobs(logits_SV, chosen_S, rows)
    pairs = zip(chosen_S.tolist(), finite_S1[:, 0].tolist(), strict=True)
    return [Drawn(token, *logprobs.get(i, ())) if ok else Drawn(None) for i, (token, ok) in enumerate(pairs)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for each (seed, position): the same on every device, in every batch, after every restart.

    In plain integers: 8 us a row, where the same on int64 tensors took 280 us for any number of rows up to 32.
    """
    key = (seed & _MASK32, seed >> 32 & _MASK32)
    words = philox((position & _MASK32, position >> 32, 0, 0), key)
    # 53 bits: the upper 27 of one word, the upper 26 of the next.
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 (Salmon et al., SC 2011): four counter words and two key words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK32, p0 >> 32 ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = k0 + 0x9E3779B9 & _MASK32, k1 + 0xBB67AE85 & _MASK32
    return c0, c1, c2, c3


def _is_greedy(params: SamplingParams) -> bool:
    """Whether only the best token is left, the lowest id among equals."""
    return params.temperature == 0 or params.top_k == 1 or params.top_p == 0


def _draw(logits_SV: Tensor, rows: Items[SamplingRow]) -> Tensor:
    """[S] ids, by the inverse of the cumulative distribution in the order of the vocabulary."""
    device, params = logits_SV.device, [row.params for row in rows]
    # Above what float32 can hold: a temperature that rounds to 0 would divide 0 by 0.
    temperature_S1 = torch.tensor([max(p.temperature, 1e-30) for p in params], device=device)[:, None]
    # The maximum goes out first: a tiny temperature must not make infinities of finite logits.
    scaled_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)) / temperature_S1
    if any(p.top_k for p in params):
        scaled_SV = _keep_top_k(scaled_SV, [p.top_k for p in params])
    probs_SV = scaled_SV.softmax(-1)
    if any(p.top_p < 1 for p in params):
        probs_SV = _keep_top_p(probs_SV, torch.tensor([p.top_p for p in params], device=device)[:, None])
    if any(p.min_p for p in params):
        least_S1 = torch.tensor([p.min_p for p in params], device=device)[:, None] * probs_SV.amax(-1, keepdim=True)
        probs_SV = probs_SV.where(probs_SV >= least_S1, 0.0)
    cumulative_SV = probs_SV.double().cumsum(-1)
    total_S1 = cumulative_SV[:, -1:].contiguous()
    drawn = [uniform(row.params.seed, row.position) for row in rows]
    target_S1 = torch.tensor(drawn, dtype=torch.float64, device=device)[:, None] * total_S1
    # Rounding may reach the total itself; then the last token with a probability is meant.
    last_S1 = torch.searchsorted(cumulative_SV, total_S1)
    return torch.minimum(torch.searchsorted(cumulative_SV, target_S1, right=True), last_S1).squeeze(1)


def _keep_top_k(scaled_SV: Tensor, top_k: list[int]) -> Tensor:
    """-inf for every token below the k-th best; rows with top_k 0 stay as they are."""
    vocab = scaled_SV.shape[1]
    limits = [k if 0 < k < vocab else vocab for k in top_k]
    best_SX = scaled_SV.topk(max((k for k in limits if k < vocab), default=1), dim=-1).values
    place_S1 = torch.tensor([min(k, best_SX.shape[1]) - 1 for k in limits], device=scaled_SV.device)[:, None]
    off_S1 = torch.tensor([k == vocab for k in limits], device=scaled_SV.device)[:, None]
    return scaled_SV.where((scaled_SV >= best_SX.gather(1, place_S1)) | off_S1, float("-inf"))


def _keep_top_p(probs_SV: Tensor, top_p_S1: Tensor) -> Tensor:
    """The fewest most likely tokens that together reach top_p, with all that tie with the last of them."""
    best_SX = probs_SV.topk(min(_NUCLEUS_TRY, probs_SV.shape[1]), dim=-1).values
    least_S1, reached_S1 = _nucleus_edge(best_SX, top_p_S1)
    # Few rows are so flat that their nucleus is wider than the first try: only those are sorted.
    wide = (~reached_S1 & (top_p_S1 < 1)).squeeze(1).nonzero().squeeze(1)
    if len(wide):
        least_S1[wide], _ = _nucleus_edge(probs_SV[wide].sort(dim=-1, descending=True).values, top_p_S1[wide])
    return probs_SV.where((probs_SV >= least_S1) | (top_p_S1 >= 1), 0.0)


def _nucleus_edge(best_SX: Tensor, top_p_S1: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of the last token that is needed, and whether top_p is reached within best, most likely first."""
    sums_SX = best_SX.double().cumsum(-1)
    needed_S1 = (sums_SX < top_p_S1).sum(-1, keepdim=True)
    last = best_SX.shape[1] - 1
    return best_SX.gather(1, needed_S1.clamp(max=last)), needed_S1 <= last


def _logprobs(logits_SV: Tensor, chosen_S: Tensor, rows: Items[SamplingRow]) -> dict[int, TokenScore]:
    """For the rows that ask: the chosen token's log-probability, and the most likely (id, log-probability)."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asking:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in asking]
    return dict(zip(asking, top_logprobs(logits_SV[asking], chosen_S[asking], counts), strict=True))
