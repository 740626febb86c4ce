"""The sampler: logits and parameters of each row in, tokens and log-probabilities out. Pure functions on tensors.

Order (docs/sampling.md): log-probabilities of the raw logits; then grammar mask -> logit_bias -> penalties ->
temperature -> top_k -> typical_p -> top_p -> min_p -> draw. Rows are independent: the sampled token and the code path
depend on (seed, choice, position) and the row alone.

Random numbers come from Philox 4x32-10 (Salmon et al., 2011), a pure function of (seed, choice, position), in plain
Python integers. It is computed for many counters at once: each occupies a lane of 64 bits of one long integer. A
product of two 32-bit words fits into its lane, so one multiplication serves all lanes (6 us a row became 1 us at 32
rows).

Shape legend: S rows, V vocabulary, X tokens to choose from.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from app.common.types import TokenScore
from app.engine.sampling.logits_processors import (
    MOST_CANDIDATES,
    apply_masks,
    apply_penalties,
    candidates,
    inverse_cdf,
    token_weights,
)
from app.engine.sampling.sampler_io import SampledToken, SamplingInput

_MASK32 = 0xFFFFFFFF
Words4 = tuple[int, int, int, int]


class Draw(NamedTuple):
    """Counter and key of one random number."""

    seed: int
    position: int
    """Position of the token in its sequence."""
    choice: int = 0


def uniforms(draws: Iterable[Draw]) -> list[float]:
    """A number in [0, 1) for each draw: identical on every device, in every batch, and after every restart."""
    words = [
        (d.position & _MASK32, d.position >> 32, d.choice, d.seed & _MASK32, d.seed >> 32 & _MASK32) for d in draws
    ]
    if not words:
        return []
    low, high, choice, key_low, key_high = map(_pack, zip(*words, strict=True))
    first, second, _, _ = philox((low, high, choice, 0), (key_low, key_high), lanes=len(words))
    # 53 bits: the upper 27 of one word, the upper 26 of the next.
    pairs = zip(_unpack(first, len(words)), _unpack(second, len(words)), strict=True)
    return [((a >> 5) * 2**26 + (b >> 6)) * 2.0**-53 for a, b in pairs]


def philox(counter: Words4, key: tuple[int, int], lanes: int = 1) -> Words4:
    """Philox 4x32-10 (Salmon et al., SC 2011): four counter words and two key words of 32 bits, in every lane."""
    ones = _pack([1] * lanes)
    mask, weyl0, weyl1 = ones * _MASK32, ones * 0x9E3779B9, ones * 0xBB67AE85
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 & mask ^ c1 ^ k0, p1 & mask, p0 >> 32 & mask ^ c3 ^ k1, p0 & mask
        k0, k1 = k0 + weyl0 & mask, k1 + weyl1 & mask
    return c0, c1, c2, c3


def _pack(words: Iterable[int]) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _unpack(packed: int, lanes: int) -> array[int]:
    words = array("Q")
    words.frombytes(packed.to_bytes(8 * lanes, sys.byteorder))
    return words


# Shape legend: X rows, V vocabulary, N most likely tokens, W rows with too many candidates. The bits of a row depend on
# that row alone.

_MIN_FLOAT32 = torch.finfo(torch.float32).min


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens.

    Most likely first, the lower id first among equals. The chosen token has the same log-probability in both.
    """
    # log_softmax instead of subtracting logsumexp, which sums a single long row in another order than a batch.
    # Clamped above -inf, which a finite logit far below the others could reach.
    all_XV = logits_XV.float().log_softmax(-1).clamp_(min=_MIN_FLOAT32)
    own = all_XV.gather(1, chosen_X[:, None])[:, 0].tolist()
    max_count = min(max(counts), all_XV.shape[1])
    if not max_count:
        return [(x, ()) for x in own]
    ids_XN, values_XN = _best(all_XV, max_count)
    table = zip(own, counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(x, tuple(zip(ids[:n], values[:n], strict=True))) for x, n, ids, values in table]


def _best(all_XV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[X, N] ids and values. Candidates are in vocabulary order, and a stable sort keeps equal ones in this order."""
    found = candidates(all_XV, [count] * len(all_XV))
    values_XN, order_XN = found.values_SX.sort(dim=-1, descending=True, stable=True)
    values_XN, ids_XN = values_XN[:, :count], found.ids_SX.gather(1, order_XN[:, :count])
    # Rows in which very many tokens tie with the last one, for example if all logits are equal.
    overflowed = [row for row, fits in enumerate(found.fits) if not fits]
    if overflowed:
        values_WV, ids_WV = all_XV[overflowed].sort(dim=-1, descending=True, stable=True)
        values_XN[overflowed], ids_XN[overflowed] = values_WV[:, :count], ids_WV[:, :count]
    return ids_XN, values_XN


_PIECE_BYTES = 32 << 20


class TorchSampler:
    """A `Sampler` of app/engine/execution/runner.py, on any device."""

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See sample(). Processes rows in pieces to bound the memory of its copies, up to 21 of them in float32."""
        piece = max(1, _PIECE_BYTES // (4 * logits_SV.shape[1]))
        pieces = (slice(start, start + piece) for start in range(0, len(rows), piece))
        return [token for part in pieces for token in sample(logits_SV[part], rows[part])]

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore]:
        """See top_logprobs()."""
        return top_logprobs(logits_XV, torch.tensor(chosen, device=logits_XV.device), [count] * len(chosen))


def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
    """One token for each row; greedy ties go to the lowest id; a row with non-finite logits gets no token."""
    raw_SV = logits_SV.float()
    # amax and amin propagate NaN. Checked as Python floats: isfinite() over all logits would take most of the time.
    finite = [
        isfinite(a) and isfinite(b) for a, b in zip(raw_SV.amax(-1).tolist(), raw_SV.amin(-1).tolist(), strict=True)
    ]
    if not all(finite):
        raw_SV = raw_SV.where(torch.tensor(finite, device=raw_SV.device)[:, None], 0.0)
    adjusted_SV = _adjusted(raw_SV, rows)
    best_S1 = adjusted_SV.amax(-1, keepdim=True)
    # A grammar that allows no token of this vocabulary also leaves a row without a finite logit.
    drawable = [ok and isfinite(best) for ok, (best,) in zip(finite, best_S1.tolist(), strict=True)]
    chosen_S = _choose(adjusted_SV, best_S1.clamp(min=torch.finfo(torch.float32).min), rows)
    scores = _scores(raw_SV, chosen_S, rows)
    pairs = zip(chosen_S.tolist(), drawable, strict=True)
    return [
        SampledToken(token, *scores.get(i, ())) if ok else SampledToken(None) for i, (token, ok) in enumerate(pairs)
    ]


def _adjusted(raw_SV: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """Logits to sample from. Applying masks last gives the same result, since no later change raises -inf."""
    if not any(_changes_logits(row) for row in rows):
        return raw_SV
    logits_SV = raw_SV.clone()
    apply_penalties(logits_SV, rows)
    apply_masks(logits_SV, rows)
    return logits_SV


def _changes_logits(row: SamplingInput) -> bool:
    p = row.params
    has_penalties = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    return bool(has_penalties or p.logit_bias or p.min_tokens or row.allowed is not None)


def _choose(logits_SV: Tensor, best_S1: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """[S] token ids, each by its row's method: greedy, from few candidates, or from the whole vocabulary."""
    chosen_S = torch.zeros(len(rows), dtype=torch.int64, device=logits_SV.device)
    greedy = [i for i, row in enumerate(rows) if row.is_greedy]
    if greedy:
        _scatter(chosen_S, greedy, _select(logits_SV, greedy).argmax(-1))
    warm = sorted({*range(len(rows))} - {*greedy}) if greedy else list(range(len(rows)))
    # Grammars do not qualify a row: inside a JSON string nearly all tokens are allowed, and the futile search for
    # candidates made eight such rows take 3.0 ms instead of 0.3 (vocabulary 4,096), 59 instead of 5 (131,072). With few
    # allowed tokens it saved nothing.
    shortlisted = [i for i in warm if 0 < rows[i].params.top_k <= MOST_CANDIDATES]
    done = _choose_from_candidates(chosen_S, logits_SV, best_S1, rows, shortlisted) if shortlisted else []
    wide = sorted({*warm} - {*done})
    if wide:
        drawn_S = _draw(_select(logits_SV, wide), _select(best_S1, wide), [rows[i] for i in wide])
        _scatter(chosen_S, wide, drawn_S)
    return chosen_S


def _choose_from_candidates(
    chosen_S: Tensor, logits_SV: Tensor, best_S1: Tensor, rows: Items[SamplingInput], shortlisted: list[int]
) -> list[int]:
    """Samples the shortlisted rows that have few enough candidates; returns which rows it sampled."""
    found = candidates(_select(logits_SV, shortlisted), [rows[i].params.top_k for i in shortlisted])
    fitting = [i for i, fits in enumerate(found.fits) if fits]
    if not fitting:
        return []
    narrow = [shortlisted[i] for i in fitting]
    values_SX, ids_SX = _select(found.values_SX, fitting), _select(found.ids_SX, fitting)
    column_S = _draw(values_SX.double(), _select(best_S1, narrow).double(), [rows[i] for i in narrow])
    _scatter(chosen_S, narrow, ids_SX.gather(1, column_S[:, None]).squeeze(1))
    return narrow


def _scatter(values_S: Tensor, indices: list[int], new_S: Tensor) -> None:
    if len(indices) == len(values_S):
        values_S.copy_(new_S)
    else:
        values_S[indices] = new_S


def _select(values_S: Tensor, indices: list[int]) -> Tensor:
    return values_S if len(indices) == len(values_S) else values_S[indices]


def _draw(logits_SX: Tensor, best_S1: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """[S] sampled columns, by the inverse CDF in the order of the vocabulary."""
    weights_SX = token_weights(logits_SX, best_S1, [row.params for row in rows])
    numbers = uniforms(Draw(row.params.seed, row.position, row.params.choice) for row in rows)
    # top_p 0 keeps the best token alone, the lowest id among equals.
    numbers = [0.0 if row.params.top_p == 0 else number for row, number in zip(rows, numbers, strict=True)]
    return inverse_cdf(weights_SX, torch.tensor(numbers, dtype=torch.float64, device=logits_SX.device)[:, None])


def _scores(raw_SV: Tensor, chosen_S: Tensor, rows: Items[SamplingInput]) -> dict[int, TokenScore]:
    """Log-probabilities for the rows that request them."""
    requested = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not requested:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in requested]
    return dict(
        zip(requested, top_logprobs(_select(raw_SV, requested), _select(chosen_S, requested), counts), strict=True)
    )
