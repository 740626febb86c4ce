"""Slow sampling oracle: every stage by its definition, in plain Python floats.

`clear` is False where rounding may change the result, so that the oracle must not be trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from app.common.types import SamplingParams
from app.engine.sampling.parameters import MIN_TEMPERATURE, SamplingInput

_CLOSE = 1e-4
_F32_MAX = torch.finfo(torch.float32).max
NOTHING = -math.inf


@dataclass(kw_only=True)
class Survivors:
    """Tokens that may be sampled, with their weights (1 for the most probable token)."""

    weights: dict[int, float]
    clear: bool = True


def allowed_tokens(row: SamplingInput, vocab: int) -> set[int]:
    """The tokens that the grammar's bitmask allows."""
    if row.allowed is None:
        return set(range(vocab))
    words = [word & 0xFFFFFFFF for word in row.allowed.tolist()]
    return {token for token in range(vocab) if words[token // 32] >> token % 32 & 1}


def adjusted(logits: list[float], row: SamplingInput) -> list[float]:
    """Logits after biases and penalties, the grammar mask and the ban on stop tokens (min_tokens).

    Bans first here: what is banned is never changed, so that no rounding can allow it again.
    """
    p, generated = row.params, list(row.tokens)[row.n_prompt :]
    allowed = allowed_tokens(row, len(logits))
    free = allowed - set(row.stop_ids) if len(generated) < p.min_tokens else allowed
    tokens = free or allowed
    result = [logit if token in tokens else NOTHING for token, logit in enumerate(logits)]
    for token, bias in p.logit_bias:
        if token in tokens:
            result[token] = _float32(result[token] + bias)
    for token in tokens & set(row.tokens):
        logit, r = result[token], p.repetition_penalty
        result[token] = _float32(logit / r if logit > 0 else logit * r)
    for token in tokens & set(generated):
        # One subtraction: penalties that cancel out must not cost a tiny logit its precision.
        penalty = p.frequency_penalty * generated.count(token) + p.presence_penalty
        result[token] = _float32(result[token] - penalty)
    return result


def survivors(logits: list[float], p: SamplingParams) -> Survivors:
    """Applies temperature and filters to adjusted logits."""
    best = max(logits)
    kept = {token: logit for token, logit in enumerate(logits) if logit > NOTHING}
    if 0 < p.top_k < len(kept):
        edge = sorted(kept.values(), reverse=True)[p.top_k - 1]
        kept = {token: logit for token, logit in kept.items() if logit >= edge}
    scaled = {token: (logit - best) / max(p.temperature, MIN_TEMPERATURE) for token, logit in kept.items()}
    left = Survivors(weights={token: math.exp(value) for token, value in scaled.items()})
    if p.typical_p < 1:
        total = sum(left.weights.values())
        entropy = sum(w / total * (math.log(total) - scaled[t]) for t, w in left.weights.items() if w)
        distance = {t: abs(math.log(total) - scaled[t] - entropy) for t, w in left.weights.items() if w}
        _keep_until(left, distance, p.typical_p, ties=scaled, slack=_CLOSE)
    if p.top_p < 1:
        _keep_until(left, {t: -weight for t, weight in left.weights.items()}, p.top_p, ties=left.weights, slack=0.0)
    least = p.min_p * max(left.weights.values())
    left.clear &= not any(0 < abs(w - least) <= _CLOSE * least for w in left.weights.values())
    left.weights = {token: w for token, w in left.weights.items() if w >= least}
    return left


def drawn(left: Survivors, number: float) -> tuple[int, bool]:
    """The token that a random number selects, and whether that is clear of rounding."""
    total, below = sum(left.weights.values()), 0.0
    for token in sorted(left.weights):
        if below + left.weights[token] > number * total:
            near = min(number * total - below, below + left.weights[token] - number * total)
            return token, left.clear and near > _CLOSE * total
        below += left.weights[token]
    return max(left.weights), False


def _keep_until(left: Survivors, cost: dict[int, float], share: float, *, ties: dict[int, float], slack: float) -> None:
    """Keeps the fewest tokens of least cost that together reach `share`, and all that tie with the last of them.

    Args:
        ties: tokens with equal values here tie in any arithmetic; rounding may make other costs equal too.
        slack: absolute rounding error of a cost, in addition to the relative one.
    """
    wanted = share * sum(left.weights.values())
    order, reached = sorted(cost, key=lambda token: cost[token]), 0.0
    for token in order:
        reached += left.weights[token]
        left.clear &= abs(reached - wanted) > _CLOSE * wanted
        if reached >= wanted:
            break
    edge = cost[token]
    others = (t for t in cost if ties[t] != ties[token])
    left.clear &= not any(abs(cost[t] - edge) <= max(slack, _CLOSE * abs(edge)) for t in others)
    left.weights = {t: left.weights[t] for t in cost if cost[t] <= edge}


def _float32(number: float) -> float:
    return float(torch.tensor(min(max(number, -_F32_MAX), _F32_MAX), dtype=torch.float32))
