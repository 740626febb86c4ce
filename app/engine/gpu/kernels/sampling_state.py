"""Sampling parameters and token counts of resident rows on the device, and the layout of a request's parameters.

static_sampler.py and triton/sampler.py sample from them. Nothing here waits for the device.

Shape legend: R resident rows (the last one is padding: greedy, never counted), W words of a row, V vocabulary,
N rows that change, X tokens of their histories, S sampled rows of a step.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.types import MAX_BIASES, Request, SamplingParams
from app.engine.sampling.logits_processors import MIN_TEMPERATURE
from app.engine.sampling.sampler_io import SamplingInput

# word    what
#     0..13   seven float64, each two words, the low one first: temperature, top_p, min_p, typical_p, repetition,
#             presence and frequency penalty
#     14, 15  the seed's low and high word
#     16..23  choice, top_k, prompt length, min_tokens, logprobs (-1: none), flags, number of biases, number of stop ids
#     24..39  stop ids; -1 for unused entries
#     40..339 token ids of the biases; -1 for unused entries
#     340..   biases, float64
#
# The number of words is even, so that 64-bit floats are aligned.

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
"""Indices of the float64 values, which take two words each."""
SEED, CHOICE, TOP_K, N_PROMPT, MIN_TOKENS, LOGPROBS, FLAGS, N_BIASES, N_STOPS = 14, *range(16, 24)
STOPS = 24
MAX_STOPS = 16
BIAS_IDS = STOPS + MAX_STOPS
BIASES = BIAS_IDS + MAX_BIASES
WORDS = BIASES + 2 * MAX_BIASES
GREEDY = 1
"""Flag: select the most likely token, with the lowest id if several tie."""
COUNTED = 2
"""Flag: the row has penalties, so the sampler counts its tokens."""

_HEADER = struct.Struct("=7dq8i")
_SECTION = struct.Struct(f"={MAX_STOPS + MAX_BIASES}i")
assert _HEADER.size == 4 * STOPS and WORDS % 2 == 0


def is_counted(request: Request) -> bool:
    """Whether sampling depends on the earlier tokens themselves, not only on their number."""
    p = request.params
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def fits(request: Request, vocab_size: int) -> bool:
    """Whether these words can say all of it: no guide, and not too many tokens that end the text."""
    return not request.grammar and len(_stops(request, vocab_size)) <= MAX_STOPS


def pack_request(request: Request, vocab_size: int) -> array[int]:
    """Packs a request that fits into words; ignores token ids beyond the vocabulary."""
    p = request.params
    stops = _stops(request, vocab_size)
    biases = [(token, bias) for token, bias in p.logit_bias if token < vocab_size]
    probabilities = (max(p.temperature, MIN_TEMPERATURE), p.top_p, p.min_p, p.typical_p)
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    is_greedy = SamplingInput(p, request.prompt, len(request.prompt)).is_greedy
    flags = GREEDY * is_greedy | COUNTED * is_counted(request)
    logprobs = -1 if p.logprobs is None else p.logprobs
    counts = (p.choice, p.top_k, len(request.prompt), p.min_tokens, logprobs, flags, len(biases), len(stops))
    ids = [*_pad(stops, MAX_STOPS), *_pad([token for token, _ in biases], MAX_BIASES)]
    words = array("i", _HEADER.pack(*probabilities, *penalties, p.seed, *counts))
    words.frombytes(_SECTION.pack(*ids))
    words.frombytes(array("d", [bias for _, bias in biases]).tobytes().ljust(8 * MAX_BIASES, b"\0"))
    return words


def _stops(request: Request, vocab_size: int) -> list[int]:
    """Stop tokens that are banned before min_tokens."""
    return [token for token in request.stop_ids if token < vocab_size] if request.params.min_tokens else []


def _pad(ids: list[int], size: int) -> list[int]:
    return ids + [-1] * (size - len(ids))


TOP = 20
"""Most likely tokens reported for a sampled row."""


@dataclass(frozen=True, slots=True)
class SampleOut:
    """A step's samples, in tensors with fixed addresses; log-probabilities only for rows that request them."""

    tokens_S: Tensor
    """int32; -1 if the logits were not finite."""
    logprob_S: Tensor
    """float32: of the sampled token."""
    top_ids_SN: Tensor
    """int32 [S, 20]: the most likely first, the lower id first among ties; -1 beyond a small vocabulary."""
    top_logprobs_SN: Tensor
    """float32."""

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> SampleOut:
        """Allocates outputs for steps of up to `rows` rows."""
        return cls(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, device=device),
            torch.full((rows, TOP), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, TOP, device=device),
        )

    def first(self, rows: int) -> SampleOut:
        """Views of the first `rows` rows."""
        return SampleOut(
            self.tokens_S[:rows], self.logprob_S[:rows], self.top_ids_SN[:rows], self.top_logprobs_SN[:rows]
        )


class SamplingTable:
    """The packed parameters of each resident row, and the counts of its tokens. Owns these tensors."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        padding = pack_request(Request(id="", prompt=(0,), max_tokens=1, params=SamplingParams(temperature=0)), 1)
        self.words_RW = torch.tensor(padding, dtype=torch.int32).to(device).repeat(rows, 1)
        self.counts_RV: Tensor | None = None
        """int32: twice the generated count of a token, plus 1 if it is in the prompt. None until with_counts()."""

    def words(self, request: Request) -> array[int]:
        """Packs a request that fits into a row of words_RW."""
        return pack_request(request, self.vocab_size)

    def fits(self, request: Request) -> bool:
        """Whether the request can be sampled on the device."""
        return fits(request, self.vocab_size)

    def is_counted(self, request: Request) -> bool:
        """Whether load() needs the request's tokens."""
        return is_counted(request)

    def with_counts(self) -> Tensor:
        """counts_RV, allocated on the first call. Graphs that were captured earlier do not use it."""
        if self.counts_RV is None:
            shape = (len(self.words_RW), self.vocab_size)
            self.counts_RV = torch.zeros(shape, dtype=torch.int32, device=self.words_RW.device)
        return self.counts_RV

    def load(
        self,
        rows_N: Tensor,
        words_NW: Tensor,
        history_X: Tensor,
        history_rows_X: Tensor,
        history_is_generated_X: Tensor,
    ) -> None:
        """Loads rows for new requests. The history holds the tokens of counted requests, each with its resident row."""
        self.words_RW.index_copy_(0, rows_N.long(), words_NW)
        if len(history_X):
            self.with_counts()
        if self.counts_RV is None:
            return
        self.counts_RV.index_fill_(0, rows_N.long(), 0)
        if not len(history_X):
            return
        flat, generated_X = self.counts_RV.view(-1), history_is_generated_X.to(torch.int32)
        index_X = history_rows_X.long() * self.vocab_size + history_X.long()
        # Prompt tokens first, while all counts are 0: amax sets the lowest bit.
        flat.scatter_reduce_(0, index_X, 1 - generated_X, "amax")
        flat.index_add_(0, index_X, 2 * generated_X)
