"""The sampler: logits and parameters of each row in, tokens and log-probabilities out. Pure functions on tensors.

Order (docs/sampling.md): log-probabilities of the raw logits; then the stages ADJUSTMENTS and FILTERS, and the draw.
Rows are independent: the sampled token depends on (seed, choice, position) and the row alone. draw_tokens() serves
TorchSampler and the reference implementation of the GPU's kernels (benchmarks/gpu/reference_kernels.py).

Random numbers come from Philox 4x32-10 (Salmon et al., 2011), a pure function of (seed, choice, position). On the host
it is computed in plain Python integers for many counters at once: each occupies a lane of 64 bits of one long integer.
A product of two 32-bit words fits into its lane, so one multiplication serves all lanes (6 us a row became 1 us at 32
rows). The GPU's reference computes the same function with tensors of int64, whose low 64 bits are correct if products
wrap.

repetition_penalty r (CTRL: Keskar et al., 2019), for each token of prompt and output: logit / r where it is positive,
logit * r elsewhere. presence_penalty p and frequency_penalty f (OpenAI), for each token generated c > 0 times:
logit - f c - p. Computed in float64 and clamped to the range of float32, so that no penalty results in an infinity.

Every filter is a threshold that keeps all tokens at or above it, so that tokens of equal logits stay together and the
result never depends on the order of a sort. Sums are float64. A row's weights depend on that row alone. Nothing waits
for the device unless RowParameters.may_wait allows it: then a filter tries the top tokens before it sorts whole rows,
with the same result.

Shape legend: S rows, V vocabulary, B blocks of it, N entries of a row, X columns of any kind or flattened.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from app.common.types import TokenScore
from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import SamplingInput, is_counted
from app.engine.sampling.sampled_token import SampledToken

_MASK32 = 0xFFFFFFFF
_MIN_FLOAT32 = torch.finfo(torch.float32).min
_PIECE_BYTES = 32 << 20
Word = TypeVar("Word", int, Tensor)


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


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], lanes: int = 1
) -> tuple[Word, Word, Word, Word]:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowParameters:
    """The parameters of the sampled rows, as columns, and what the rows' sequences add."""

    stages: frozenset[str]
    """Names of the stages to run: at least those that a row requests. A stage leaves all other rows as they are."""
    may_wait: bool
    """Whether the host may wait for values on the device; if not, all shapes are static, as a CUDA graph needs."""
    header_SX: Tensor
    """int32: the first words of the layout."""
    stop_ids_SN: Tensor
    """int64; -1 for unused entries."""
    bias_ids_SN: Tensor
    """int64; -1 for unused entries."""
    biases_SN: Tensor
    """float64."""
    positions_S1: Tensor
    """Positions of the new tokens in their sequences."""
    counts_SV: Tensor | None
    """int32, as count_tokens() counts; None if no row has penalties."""
    counted_ids_SN: Tensor | None = None
    """int64: ids with all counts that are not 0; None if no row has penalties."""
    allowed_SX: Tensor | None = None
    """int32 bitmasks of grammars; None if no row has one."""

    def number(self, index: int) -> Tensor:
        """[S, 1] float64."""
        return self.header_SX.view(torch.float64)[:, index : index + 1]

    def word(self, index: int) -> Tensor:
        """[S, 1] int64."""
        return self.header_SX[:, index : index + 1].long()


def count_tokens(counts_X: Tensor, index_X: Tensor, is_generated_X: Tensor) -> None:
    """Counts tokens in place, from 0: twice how often a token was generated, plus 1 if it is in the prompt."""
    generated_X = is_generated_X.to(torch.int32)
    # Prompt tokens first, while all counts are 0: amax sets the lowest bit.
    counts_X.scatter_reduce_(0, index_X, 1 - generated_X, "amax")
    counts_X.index_add_(0, index_X, 2 * generated_X)


NEG_INF = float("-inf")
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_TOP_TRIED = 256
"""Number of highest keys that are tried before a row is sorted completely."""
_SUM_BLOCK = 128


@dataclass(slots=True)
class StageValues:
    """Values that the stages change."""

    logits_SV: Tensor
    scaled_SV: Tensor
    """Logits below the best one, divided by the temperature; from the stage `temperature` on."""
    weights_SV: Tensor
    """1 for the best token, 0 for filtered tokens; from the stage `temperature` on."""


class Stage(NamedTuple):
    """A step of the specification (docs/sampling.md)."""

    name: str
    is_requested: Callable[[SamplingInput], bool]
    apply: Callable[[StageValues, RowParameters], None]


def apply_stages(logits_SV: Tensor, rows: RowParameters, stages: Items[Stage]) -> StageValues:
    """Applies the `stages` that rows.stages names; the caller's logits stay as they are."""
    values = StageValues(logits_SV, logits_SV, logits_SV)
    for stage in stages:
        if stage.name in rows.stages:
            stage.apply(values, rows)
    return values


def _add_biases(values: StageValues, rows: RowParameters) -> None:
    vocab = values.logits_SV.shape[1]
    logits_SX = F.pad(values.logits_SV, (0, 1))  # one more column, for unused entries
    ids_SN = rows.bias_ids_SN.where(rows.bias_ids_SN >= 0, vocab)
    logits_SX.scatter_(1, ids_SN, _clamped(logits_SX.gather(1, ids_SN) + rows.biases_SN))
    values.logits_SV = logits_SX[:, :vocab]


def _penalize(values: StageValues, rows: RowParameters) -> None:
    if rows.counts_SV is None or (ids_SN := rows.counted_ids_SN) is None:
        return
    logits_SX, counts_SX = values.logits_SV.gather(1, ids_SN), rows.counts_SV.gather(1, ids_SN)
    r_S1 = rows.number(layout.REPETITION)
    repeated_SX = _clamped((logits_SX / r_S1).where(logits_SX > 0, logits_SX * r_S1)).where(counts_SX > 0, logits_SX)
    generated_SX = counts_SX >> 1
    # One subtraction: penalties that cancel out must not take a tiny logit's digits with them.
    penalty_SX = rows.number(layout.FREQUENCY) * generated_SX + rows.number(layout.PRESENCE)
    logits_SX = _clamped(repeated_SX - penalty_SX).where(generated_SX > 0, repeated_SX)
    values.logits_SV = values.logits_SV.scatter(1, ids_SN, logits_SX)


def _mask(values: StageValues, rows: RowParameters) -> None:
    """Comes after biases and penalties, whose clamp to finite numbers would allow a masked token again."""
    if rows.allowed_SX is not None:
        shifts = torch.arange(32, dtype=torch.int32, device=rows.allowed_SX.device)  # the lowest bit of a word first
        is_allowed_SX = (rows.allowed_SX[:, :, None] >> shifts & 1).bool().flatten(1)
        values.logits_SV = values.logits_SV.where(is_allowed_SX[:, : values.logits_SV.shape[1]], NEG_INF)


def _ban_stop_tokens(values: StageValues, rows: RowParameters) -> None:
    """Before min_tokens; a row that may only end is allowed to end."""
    is_early_S1 = rows.positions_S1 - rows.word(layout.N_PROMPT) < rows.word(layout.MIN_TOKENS)
    ceilings_SN = torch.where((rows.stop_ids_SN >= 0) & is_early_S1, NEG_INF, -NEG_INF)
    banned_SV = values.logits_SV.scatter_reduce(1, rows.stop_ids_SN.clamp(min=0), ceilings_SN, "amin")
    values.logits_SV = values.logits_SV.where(banned_SV.amax(-1, keepdim=True) == NEG_INF, banned_SV)


def _weigh(values: StageValues, rows: RowParameters) -> None:
    best_S1 = values.logits_SV.amax(-1, keepdim=True).clamp(min=-_MAX_FLOAT32)
    # Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    values.scaled_SV = (values.logits_SV - best_S1) / rows.number(layout.TEMPERATURE).to(best_S1.dtype)
    values.weights_SV = values.scaled_SV.exp()


def _keep_top_k(values: StageValues, rows: RowParameters) -> None:
    vocab = values.logits_SV.shape[1]
    k_S1 = rows.word(layout.TOP_K)
    k_S1 = k_S1.where((k_S1 > 0) & (k_S1 < vocab), vocab)
    most = int(k_S1.where(k_S1 < vocab, 1).amax()) if rows.may_wait else vocab
    best_SX = values.logits_SV.topk(most, dim=-1).values
    least_S1 = best_SX.gather(1, k_S1.clamp(max=most) - 1).where(k_S1 < vocab, NEG_INF)
    # Weights, not logits: exp() takes ten times as long for -inf as for other numbers.
    values.weights_SV = values.weights_SV.where(values.logits_SV >= least_S1, 0.0)


def _keep_typical(values: StageValues, rows: RowParameters) -> None:
    """Keeps the fewest tokens that together reach typical_p, in order of the distance of surprise from entropy."""
    weights_SV, share_S1 = values.weights_SV, rows.number(layout.TYPICAL_P)
    total_S1 = _total(weights_SV)
    surprise_SV = total_S1.log() - values.scaled_SV
    entropy_S1 = _total((surprise_SV * weights_SV).where(weights_SV > 0, 0.0)) / total_S1
    nearness_SV = (-(surprise_SV - entropy_S1).abs()).where(weights_SV > 0, NEG_INF)
    least_S1 = _threshold(nearness_SV, weights_SV, share_S1, may_wait=rows.may_wait)
    values.weights_SV = weights_SV.where((nearness_SV >= least_S1) | (share_S1 >= 1), 0.0)


def _keep_top_p(values: StageValues, rows: RowParameters) -> None:
    weights_SV, share_S1 = values.weights_SV, rows.number(layout.TOP_P)
    least_S1 = _threshold(weights_SV, weights_SV, share_S1, may_wait=rows.may_wait)
    values.weights_SV = weights_SV.where((weights_SV >= least_S1) | (share_S1 >= 1), 0.0)


def _keep_min_p(values: StageValues, rows: RowParameters) -> None:
    least_S1 = rows.number(layout.MIN_P).to(values.weights_SV.dtype) * values.weights_SV.amax(-1, keepdim=True)
    values.weights_SV = values.weights_SV.where(values.weights_SV >= least_S1, 0.0)


ADJUSTMENTS = (
    Stage("logit_bias", lambda row: bool(row.params.logit_bias), _add_biases),
    Stage("penalties", lambda row: is_counted(row.params), _penalize),
    Stage("grammar", lambda row: row.allowed is not None, _mask),
    Stage("min_tokens", lambda row: row.params.min_tokens > 0, _ban_stop_tokens),
)
"""Stages before a greedy row takes its best token."""
FILTERS = (
    Stage("temperature", lambda _row: True, _weigh),
    Stage("top_k", lambda row: row.params.top_k > 0, _keep_top_k),
    Stage("typical_p", lambda row: row.params.typical_p < 1, _keep_typical),
    Stage("top_p", lambda row: row.params.top_p < 1, _keep_top_p),
    Stage("min_p", lambda row: row.params.min_p > 0, _keep_min_p),
)
"""Stages of all other rows."""
GREEDY = "greedy"
"""Name of the choice of the best token; the filters' rows draw instead."""


def requested_stages(rows: Items[SamplingInput]) -> frozenset[str]:
    """Names of the stages that any of the rows requests; filters only if not all rows are greedy."""
    drawing = [row for row in rows if not row.is_greedy]
    stages = [stage for stage in ADJUSTMENTS if any(map(stage.is_requested, rows))]
    stages += [stage for stage in FILTERS if any(map(stage.is_requested, drawing))]
    return frozenset([GREEDY] * (len(drawing) < len(rows)) + [stage.name for stage in stages])


def _clamped(logit_SX: Tensor) -> Tensor:
    """Converts to float32 without infinities."""
    return logit_SX.clamp(-_MAX_FLOAT32, _MAX_FLOAT32).float()


def _block_sums(weights_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of weights [S, B, 128], and the cumulative sums of the blocks [S, B], which end with the row's sum."""
    if spare := -weights_SX.shape[1] % _SUM_BLOCK:
        weights_SX = F.pad(weights_SX, (0, spare))
    blocks_SBX = weights_SX.reshape(len(weights_SX), -1, _SUM_BLOCK)
    # In blocks, because torch may sum a whole row in another order when the row is alone.
    return blocks_SBX, blocks_SBX.sum(-1, dtype=torch.float64).cumsum(-1)


def _total(weights_SX: Tensor) -> Tensor:
    return _block_sums(weights_SX)[1][:, -1:]


def _threshold(key_SX: Tensor, weights_SX: Tensor, share_S1: Tensor, *, may_wait: bool) -> Tensor:
    """[S, 1] key of the last token, in descending order of keys, needed to reach share_S1 of the total weight."""
    target_S1, width = _total(weights_SX) * share_S1, key_SX.shape[1]
    tried = min(_TOP_TRIED, width) if may_wait else width
    least_S1, reached_S1 = _threshold_in_top(key_SX, weights_SX, target_S1, tried)
    if tried < width:
        # Few rows are so flat that the top tokens do not suffice: only those are sorted.
        wide = (~reached_S1 & (share_S1 < 1)).squeeze(1).nonzero().squeeze(1)
        if len(wide):
            least_S1[wide], _ = _threshold_in_top(key_SX[wide], weights_SX[wide], target_S1[wide], width)
    return least_S1


def _threshold_in_top(key_SX: Tensor, weights_SX: Tensor, target_S1: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Key of the last token that is needed, and whether the `count` highest keys suffice."""
    order = key_SX.topk(count, dim=-1) if count < key_SX.shape[1] else key_SX.sort(dim=-1, descending=True)
    sums_SX = weights_SX.gather(1, order.indices).cumsum(-1, dtype=torch.float64)
    needed_S1 = (sums_SX < target_S1).sum(-1, keepdim=True)
    return order.values.gather(1, needed_S1.clamp(max=count - 1)), needed_S1 < count


def inverse_cdf(weights_SX: Tensor, numbers_S1: Tensor) -> Tensor:
    """[S, 1] first column at which the cumulative weight exceeds the row's number times its total weight.

    In the order of the vocabulary.
    """
    blocks_SBX, sums_SB = _block_sums(weights_SX)
    target_S1 = numbers_S1 * sums_SB[:, -1:]
    if sums_SB.shape[1] == 1:
        return _first_above(blocks_SBX.squeeze(1).cumsum(-1, dtype=torch.float64), target_S1)
    block_S1 = _first_above(sums_SB, target_S1)
    within_SX = blocks_SBX.gather(1, block_S1[:, :, None].expand(-1, -1, blocks_SBX.shape[2])).squeeze(1)
    before_S1 = sums_SB.gather(1, (block_S1 - 1).clamp(min=0)).where(block_S1 > 0, 0.0)
    index_S1 = _first_above(within_SX.cumsum(-1, dtype=torch.float64), target_S1 - before_S1)
    return block_S1 * blocks_SBX.shape[2] + index_S1


def _first_above(sums_SX: Tensor, target_S1: Tensor) -> Tensor:
    """[S, 1] first index whose sum exceeds the target; if rounding lets none exceed it, the last nonzero weight."""
    last_S1 = torch.searchsorted(sums_SX, sums_SX[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_SX, target_S1, right=True), last_S1)


_LIST_BLOCK = 32


def most_likely(values_SV: Tensor, count: int) -> Tensor:
    """[S, N] ids of the `count` highest values, all above -inf: the highest first, the lower id first among equals."""
    count = min(count, values_SV.shape[1])
    padded_SV = F.pad(values_SV, (0, -values_SV.shape[1] % _LIST_BLOCK), value=NEG_INF)
    blocks_SBX = padded_SV.unflatten(1, (-1, _LIST_BLOCK))
    # Tokens in blocks that come after `count` others, by their best token, come after `count` tokens.
    blocks_SB = torch.arange(blocks_SBX.shape[1], device=values_SV.device).expand(len(values_SV), -1)
    block_SN = _in_order(blocks_SBX.amax(-1), blocks_SB, count)
    ids_SX = (block_SN[:, :, None] * _LIST_BLOCK + torch.arange(_LIST_BLOCK, device=values_SV.device)).flatten(1)
    return _in_order(padded_SV.gather(1, ids_SX), ids_SX, count)


def _in_order(values_SX: Tensor, ids_SX: Tensor, count: int) -> Tensor:
    """[S, N] ids of up to `count` highest values: the highest first, the lower id first among equals."""
    bits_SX = (values_SX + 0.0).view(torch.int32)  # both zeros are equal
    # The upper bits are integers in the order of the floats, the lower bits the id from the end: all keys differ.
    order_SX = (bits_SX ^ (bits_SX >> 31 & 0x7FFFFFFF)).long() << 32 | 0xFFFFFFFF - ids_SX
    return 0xFFFFFFFF - (order_SX.topk(min(count, order_SX.shape[1]), dim=-1).values & 0xFFFFFFFF)


class Drawn(NamedTuple):
    """Result of draw_tokens(), on the device."""

    tokens_S1: Tensor
    """Ids of the vocabulary, also for rows without a result."""
    is_valid_S1: Tensor
    """False if the logits were not finite, or if a grammar allowed no token of this vocabulary."""
    raw_SV: Tensor
    """float32 logits for score(): the model's, or 0 in rows that are not finite."""


def draw_tokens(logits_SV: Tensor, rows: RowParameters, numbers_S1: Tensor) -> Drawn:
    """One token for each row, drawn with its number in [0, 1); greedy ties go to the lowest id."""
    raw_SV = logits_SV.float()
    # amax and amin propagate NaN; isfinite() over all logits would take most of the time.
    is_valid_S1 = raw_SV.amax(-1, keepdim=True).isfinite() & raw_SV.amin(-1, keepdim=True).isfinite()
    if not (rows.may_wait and is_valid_S1.all()):
        raw_SV = raw_SV.where(is_valid_S1, 0.0)
    logits_SV = apply_stages(raw_SV, rows, ADJUSTMENTS).logits_SV
    is_valid_S1 = is_valid_S1 & (logits_SV.amax(-1, keepdim=True) > NEG_INF)
    tokens_S1 = logits_SV.argmax(-1, keepdim=True) if GREEDY in rows.stages else None
    if tokens_S1 is None or "temperature" in rows.stages:
        # top_p 0 keeps the best token alone, the lowest id among equals.
        numbers_S1 = numbers_S1.where(rows.number(layout.TOP_P) > 0, 0.0)
        drawn_S1 = inverse_cdf(apply_stages(logits_SV, rows, FILTERS).weights_SV, numbers_S1)
        is_greedy_S1 = rows.word(layout.FLAGS) & layout.GREEDY > 0
        tokens_S1 = drawn_S1 if tokens_S1 is None else tokens_S1.where(is_greedy_S1, drawn_S1)
    return Drawn(tokens_S1, is_valid_S1, raw_SV)


def score(raw_SV: Tensor, tokens_S1: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability [S] of each row's token; ids and log-probabilities [S, N] of the `count` most likely tokens.

    For finite logits. Most likely first, the lower id first among equals; a token has one log-probability in both.
    """
    # log_softmax instead of subtracting logsumexp, which sums a single long row in another order than a batch.
    # Clamped above -inf, which a finite logit far below the others could reach.
    logprobs_SV = raw_SV.log_softmax(-1).clamp_(min=_MIN_FLOAT32)
    ids_SN = most_likely(logprobs_SV, count)
    return logprobs_SV.gather(1, tokens_S1).squeeze(1), ids_SN, logprobs_SV.gather(1, ids_SN)


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens."""
    own_X, ids_XN, values_XN = score(logits_XV.float(), chosen_X[:, None], max(counts))
    table = zip(own_X.tolist(), counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(own, tuple(zip(ids[:n], values[:n], strict=True))) for own, n, ids, values in table]


class TorchSampler:
    """A `Sampler` of app/engine/execution/runner.py, on any device."""

    @torch.inference_mode()
    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See sample(). Processes rows in pieces to bound the memory of its copies, up to 20 of them in float32."""
        piece = max(1, _PIECE_BYTES // (4 * logits_SV.shape[1]))
        pieces = (slice(start, start + piece) for start in range(0, len(rows), piece))
        return [token for part in pieces for token in sample(logits_SV[part], rows[part])]

    @torch.inference_mode()
    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore] | None:
        """See top_logprobs() and Sampler."""
        logits_XV = logits_XV.float()
        # One pass, which propagates NaN; isfinite() takes 10 to 20 times as long, and as much memory again.
        if not torch.isfinite(torch.stack(logits_XV.aminmax())).all():
            return None
        return top_logprobs(logits_XV, torch.tensor(chosen, device=logits_XV.device), [count] * len(chosen))


def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
    """One token for each row; a row with non-finite logits gets no token."""
    device = logits_SV.device
    numbers = uniforms(Draw(row.params.seed, row.position, row.params.choice) for row in rows)
    numbers_S1 = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
    drawn = draw_tokens(logits_SV, row_parameters(rows, logits_SV.shape[1], device), numbers_S1)
    requested = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    scores: dict[int, TokenScore] = {}
    if requested:
        raw_XV, tokens_X = (x if len(requested) == len(rows) else x[requested] for x in (drawn.raw_SV, drawn.tokens_S1))
        counts = [rows[i].params.logprobs or 0 for i in requested]
        scores = dict(zip(requested, top_logprobs(raw_XV, tokens_X.squeeze(1), counts), strict=True))
    pairs = zip(drawn.tokens_S1.squeeze(1).tolist(), drawn.is_valid_S1.squeeze(1).tolist(), strict=True)
    return [
        SampledToken(token, *scores.get(i, ())) if is_valid else SampledToken(None)
        for i, (token, is_valid) in enumerate(pairs)
    ]


def row_parameters(rows: Items[SamplingInput], vocab: int, device: torch.device | str) -> RowParameters:
    """Uploads the parameters of rows that the host samples."""
    header = bytearray(b"".join(map(layout.pack_header, rows)))
    stop_ids = [[token for token in row.stop_ids if token < vocab] if row.params.min_tokens else [] for row in rows]
    biases = [[(token, bias) for token, bias in row.params.logit_bias if token < vocab] for row in rows]
    counts_SV, counted_ids_SN = _counts(rows, vocab, device)
    return RowParameters(
        stages=requested_stages(rows),
        may_wait=True,
        header_SX=torch.frombuffer(header, dtype=torch.int32).view(len(rows), -1).to(device),
        stop_ids_SN=_table(stop_ids, -1, torch.int64, device),
        bias_ids_SN=_table([[token for token, _ in each] for each in biases], -1, torch.int64, device),
        biases_SN=_table([[bias for _, bias in each] for each in biases], 0.0, torch.float64, device),
        positions_S1=torch.tensor([row.position for row in rows], device=device)[:, None],
        counts_SV=counts_SV,
        counted_ids_SN=counted_ids_SN,
        allowed_SX=_masks(rows, device),
    )


def _table(rows: Items[Items[float]], filler: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[S, N]: rows padded to equal length."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (most - len(row))] for row in rows], dtype=dtype, device=device)


def _counts(
    rows: Items[SamplingInput], vocab: int, device: torch.device | str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """counts_SV and counted_ids_SN of RowParameters."""
    tokens = [row.tokens if layout.is_counted(row.params) else () for row in rows]
    if not any(tokens):
        return None, None
    most = max(map(len, tokens))
    ids = array("q")
    for each in tokens:
        ids.extend(each if isinstance(each, array) else array("q", each))
        ids.extend([-1] * (most - len(each)))
    ids_SN = torch.frombuffer(ids, dtype=torch.int64).view(len(rows), most).to(device)
    n_prompt_S1 = torch.tensor([row.n_prompt for row in rows], device=device)[:, None]
    # One more column, for unused entries.
    counts_SX = torch.zeros(len(rows), vocab + 1, dtype=torch.int32, device=device)
    index_SN = ids_SN.where(ids_SN >= 0, vocab) + torch.arange(len(rows), device=device)[:, None] * (vocab + 1)
    is_generated_SN = torch.arange(most, device=device) >= n_prompt_S1
    count_tokens(counts_SX.view(-1), index_SN.view(-1), is_generated_SN.view(-1))
    return counts_SX[:, :vocab], ids_SN.clamp(min=0)  # a token that was not counted stays as it is


def _masks(rows: Items[SamplingInput], device: torch.device | str) -> Tensor | None:
    masks = [row.allowed for row in rows]
    example = next((mask for mask in masks if mask is not None), None)
    if example is None:
        return None
    every_token = np.full_like(example, -1)
    return torch.from_numpy(np.stack([every_token if mask is None else mask for mask in masks])).to(device)
