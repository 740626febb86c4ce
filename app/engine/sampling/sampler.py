"""The sampler: logits and parameters of each row in, tokens and log-probabilities out. Pure functions on tensors.

Order (docs/sampling.md): log-probabilities of the raw logits; then guide mask -> logit_bias -> penalties ->
temperature -> top_k -> typical_p -> top_p -> min_p -> draw. Every row is computed on its own: what is drawn depends on
(seed, choice, position) and the row alone, and so does the way it is computed.

Random numbers come from Philox 4x32-10 (Salmon et al., 2011), a pure function of (seed, choice, position), in plain
Python integers. It is computed for many counters at once: each sits in a lane of 64 bits of one long integer. A product
of two words of 32 bits fills a lane and never leaves it, so one multiplication serves all lanes (6 us a row became 1 us
at 32 rows).

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
from app.engine.sampling.logits_processors import MOST_CANDIDATES, adjust, candidates, forbid, places, weights
from app.engine.sampling.sampler_io import SampledToken, SamplingInput

_MASK32 = 0xFFFFFFFF
Words4 = tuple[int, int, int, int]


class Draw(NamedTuple):
    """Which random number is meant."""

    seed: int
    position: int
    """Of the token in its sequence."""
    choice: int = 0


def uniforms(draws: Iterable[Draw]) -> list[float]:
    """A number in [0, 1) for each draw: the same on every device, in every batch, after every restart."""
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


# Shape legend: X rows, V vocabulary, N most likely tokens, W rows too crowded for a short list. The bits of a row
# depend on that row alone.

_LEAST = torch.finfo(torch.float32).min


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens.

    Most likely first, the lower id among equals. The chosen token's number is the very one it has among those.
    """
    # log_softmax and not a difference of logsumexp: that one sums a single long row in another order than a batch.
    # Held above -inf, which a finite logit far below the others may come to.
    all_XV = logits_XV.float().log_softmax(-1).clamp_(min=_LEAST)
    own = all_XV.gather(1, chosen_X[:, None])[:, 0].tolist()
    most = min(max(counts), all_XV.shape[1])
    if not most:
        return [(x, ()) for x in own]
    ids_XN, values_XN = _best(all_XV, most)
    table = zip(own, counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(x, tuple(zip(ids[:n], values[:n], strict=True))) for x, n, ids, values in table]


def _best(all_XV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[X, N] ids and values. Candidates lie in the order of the vocabulary; a stable sort leaves equal ones in it."""
    found = candidates(all_XV, [count] * len(all_XV))
    values_XN, order_XN = found.values_SX.sort(dim=-1, descending=True, stable=True)
    values_XN, ids_XN = values_XN[:, :count], found.ids_SX.gather(1, order_XN[:, :count])
    # Rows where very many tokens are as good as the last one: common where all logits are equal.
    crowded = [row for row, fits in enumerate(found.fits) if not fits]
    if crowded:
        values_WV, ids_WV = all_XV[crowded].sort(dim=-1, descending=True, stable=True)
        values_XN[crowded], ids_XN[crowded] = values_WV[:, :count], ids_WV[:, :count]
    return ids_XN, values_XN


_PIECE_BYTES = 32 << 20


class TorchSampler:
    """A `Sampler` of app/engine/execution/runner.py, on any device."""

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See sample(). So many rows at once as its copies of them, up to 21 in float32, may be there for."""
        piece = max(1, _PIECE_BYTES // (4 * logits_SV.shape[1]))
        pieces = (slice(start, start + piece) for start in range(0, len(rows), piece))
        return [drawn for part in pieces for drawn in sample(logits_SV[part], rows[part])]

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore]:
        """See logprobs.top_logprobs()."""
        return top_logprobs(logits_XV, torch.tensor(chosen, device=logits_XV.device), [count] * len(chosen))


def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
    """One token for each row; greedy ties go to the lowest id; a row that is not finite gives no token."""
    raw_SV = logits_SV.float()
    # Both let NaN through. In plain floats, since isfinite() over all logits takes longer than all else.
    finite = [
        isfinite(a) and isfinite(b) for a, b in zip(raw_SV.amax(-1).tolist(), raw_SV.amin(-1).tolist(), strict=True)
    ]
    if not all(finite):
        raw_SV = raw_SV.where(torch.tensor(finite, device=raw_SV.device)[:, None], 0.0)
    adjusted_SV = _adjusted(raw_SV, rows)
    best_S1 = adjusted_SV.amax(-1, keepdim=True)
    # A guide that allows nothing of this vocabulary leaves a row without a finite logit, too.
    drawable = [ok and isfinite(best) for ok, (best,) in zip(finite, best_S1.tolist(), strict=True)]
    chosen_S = _choose(adjusted_SV, best_S1.clamp(min=torch.finfo(torch.float32).min), rows)
    scores = _scores(raw_SV, chosen_S, rows)
    pairs = zip(chosen_S.tolist(), drawable, strict=True)
    return [
        SampledToken(token, *scores.get(i, ())) if ok else SampledToken(None) for i, (token, ok) in enumerate(pairs)
    ]


def _adjusted(raw_SV: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """The logits that are drawn from. Masks come last, which is the same: nothing lifts -inf."""
    if not any(_touches(row) for row in rows):
        return raw_SV
    logits_SV = raw_SV.clone()
    adjust(logits_SV, rows)
    forbid(logits_SV, rows)
    return logits_SV


def _touches(row: SamplingInput) -> bool:
    p = row.params
    penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    return bool(penalised or p.logit_bias or p.min_tokens or row.allowed is not None)


def _choose(logits_SV: Tensor, best_S1: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """[S] ids, each by the way that its own row takes: greedy, from few candidates, or from the whole vocabulary."""
    chosen_S = torch.zeros(len(rows), dtype=torch.int64, device=logits_SV.device)
    greedy = [i for i, row in enumerate(rows) if row.is_greedy]
    if greedy:
        _put(chosen_S, greedy, _only(logits_SV, greedy).argmax(-1))
    warm = sorted({*range(len(rows))} - {*greedy}) if greedy else list(range(len(rows)))
    # Not for a guide: inside a JSON string nearly all is allowed, and candidates sought in vain made eight such rows
    # take 3.0 ms instead of 0.3 (vocabulary 4,096), 59 instead of 5 (131,072); where few are allowed it saved nothing.
    hopeful = [i for i in warm if 0 < rows[i].params.top_k <= MOST_CANDIDATES]
    done = _choose_of_few(chosen_S, logits_SV, best_S1, rows, hopeful) if hopeful else []
    wide = sorted({*warm} - {*done})
    if wide:
        drawn_S = _draw(_only(logits_SV, wide), _only(best_S1, wide), [rows[i] for i in wide])
        _put(chosen_S, wide, drawn_S)
    return chosen_S


def _choose_of_few(
    chosen_S: Tensor, logits_SV: Tensor, best_S1: Tensor, rows: Items[SamplingInput], hopeful: list[int]
) -> list[int]:
    """Draws for those of the hopeful rows whose candidates are few enough; returns which."""
    found = candidates(_only(logits_SV, hopeful), [rows[i].params.top_k for i in hopeful])
    fitting = [i for i, fits in enumerate(found.fits) if fits]
    if not fitting:
        return []
    narrow = [hopeful[i] for i in fitting]
    values_SX, ids_SX = _only(found.values_SX, fitting), _only(found.ids_SX, fitting)
    place_S = _draw(values_SX.double(), _only(best_S1, narrow).double(), [rows[i] for i in narrow])
    _put(chosen_S, narrow, ids_SX.gather(1, place_S[:, None]).squeeze(1))
    return narrow


def _put(values_S: Tensor, where: list[int], new_S: Tensor) -> None:
    if len(where) == len(values_S):
        values_S.copy_(new_S)
    else:
        values_S[where] = new_S


def _only(values_S: Tensor, where: list[int]) -> Tensor:
    return values_S if len(where) == len(values_S) else values_S[where]


def _draw(logits_SX: Tensor, best_S1: Tensor, rows: Items[SamplingInput]) -> Tensor:
    """[S] places, by the inverse of the cumulative distribution in the order of the vocabulary."""
    weights_SX = weights(logits_SX, best_S1, [row.params for row in rows])
    numbers = uniforms(Draw(row.params.seed, row.position, row.params.choice) for row in rows)
    # top_p 0 is the best token alone, the lowest id among equals.
    numbers = [0.0 if row.params.top_p == 0 else number for row, number in zip(rows, numbers, strict=True)]
    return places(weights_SX, torch.tensor(numbers, dtype=torch.float64, device=logits_SX.device)[:, None])


def _scores(raw_SV: Tensor, chosen_S: Tensor, rows: Items[SamplingInput]) -> dict[int, TokenScore]:
    """For the rows that ask."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asking:
        return {}
    counts = [rows[i].params.logprobs or 0 for i in asking]
    return dict(zip(asking, top_logprobs(_only(raw_SV, asking), _only(chosen_S, asking), counts), strict=True))
