"""The one layout of sampling parameters: a row of 32-bit words, which torch and Triton read.

word    what
    0..13   seven float64, each two words, the low one first: temperature, top_p, min_p, typical_p, repetition,
            presence and frequency penalty
    14, 15  the seed's low and high word
    16..23  choice, top_k, prompt length, min_tokens, logprobs (-1: none), flags, number of biases, number of stop ids
    24..323 token ids of the biases; -1 for unused entries
    324..   biases, float64

On a device a row also has a bitmask of the tokens that it may sample while it has generated fewer than `min_tokens`:
all but those that end the text, or those that its grammar allows. A guided row's mask has no end.

The number of words is even, so that 64-bit floats are aligned. Shape legend: S sampled rows, V vocabulary, N entries of
a row, X tokens of all rows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Items

from msgspec import Struct

from app.common.types import MAX_BIASES, Request, SamplingParams
from model.number_formats import Array

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
"""Indices of the float64 values, which take two words each."""
SEED, CHOICE, TOP_K, N_PROMPT, MIN_TOKENS, LOGPROBS, FLAGS, N_BIASES, N_STOPS = 14, *range(16, 24)
HEADER_WORDS = BIAS_IDS = 24
BIASES = BIAS_IDS + MAX_BIASES
WORDS = BIASES + 2 * MAX_BIASES
GREEDY = 1
"""Flag: select the most likely token, with the lowest id if several tie."""
COUNTED = 2
"""Flag: the row has penalties, so the sampler counts its tokens."""
MIN_TEMPERATURE = 1e-30
"""Lower temperatures count as this one, which float32 still distinguishes from 0."""

_HEADER = struct.Struct("=7dq8i")
_ALWAYS_MASKED = 2**31 - 1
_EVERY_TOKEN = 2**32 - 1
assert _HEADER.size == 4 * HEADER_WORDS and WORDS % 2 == 0


class SamplingInput(Struct, frozen=True, gc=False):
    """A request's parameters, its tokens so far, and the tokens that its grammar allows next."""

    params: SamplingParams
    tokens: Items[int]
    """Prompt and generated tokens, all of them ids of the vocabulary; their number is the position of the new token."""
    n_prompt: int
    stop_ids: Items[int] = ()
    """Tokens that end the text: not sampled before min_tokens are generated."""
    allowed: Array | None = None
    """The grammar's bitmask, int32 [ceil(V / 32)]: bit i of word j is token 32 j + i. None allows every token."""

    @property
    def position(self) -> int:
        """Position of the new token in its sequence."""
        return len(self.tokens)

    @property
    def generated(self) -> Items[int]:
        """Tokens after the prompt."""
        return self.tokens[self.n_prompt :]

    @property
    def is_greedy(self) -> bool:
        """Whether the filters leave only the most likely token, the lowest id among equals."""
        p = self.params
        return p.temperature == 0 or p.top_k == 1 or (p.top_p == 0 and p.typical_p == 1)


def is_counted(params: SamplingParams) -> bool:
    """Whether sampling depends on the earlier tokens themselves, not only on their number."""
    return params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)


def pack_header(row: SamplingInput, n_biases: int = 0, n_stops: int = 0) -> bytes:
    """Packs the words before BIAS_IDS."""
    p = row.params
    flags = GREEDY * row.is_greedy | COUNTED * is_counted(p)
    logprobs = -1 if p.logprobs is None else p.logprobs
    probabilities = (max(p.temperature, MIN_TEMPERATURE), p.top_p, p.min_p, p.typical_p)
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    counts = (p.choice, p.top_k, row.n_prompt, p.min_tokens, logprobs, flags, n_biases, n_stops)
    return _HEADER.pack(*probabilities, *penalties, p.seed, *counts)


def pack_request(request: Request, vocab_size: int) -> array[int]:
    """Packs the words of a request; ignores token ids beyond the vocabulary."""
    biases = [(token, bias) for token, bias in request.params.logit_bias if token < vocab_size]
    words = array("i", pack_header(SamplingInput(request.params, request.prompt, len(request.prompt)), len(biases)))
    if request.grammar:
        words[MIN_TOKENS] = _ALWAYS_MASKED
    words.extend(token for token, _ in biases)
    words.extend([-1] * (MAX_BIASES - len(biases)))
    words.frombytes(array("d", [bias for _, bias in biases]).tobytes().ljust(8 * MAX_BIASES, b"\0"))
    return words


def mask_words(vocab_size: int) -> int:
    """Number of words of a row's bitmask."""
    return -(-vocab_size // 32)


def token_mask(request: Request, n_generated: int, vocab_size: int, allowed: Array | None = None) -> array[int]:
    """The bitmask of a row that has generated `n_generated` tokens. allowed: by its grammar.

    Without the tokens that end the text before min_tokens, unless no other token is left.
    """
    numbers = array("I", allowed.tobytes() if allowed is not None else b"\xff" * (4 * mask_words(vocab_size)))
    if n_generated < request.params.min_tokens:
        continuing = numbers[:]
        for token in request.stop_ids:
            if token < vocab_size:
                continuing[token // 32] &= ~(1 << token % 32) & _EVERY_TOKEN
        last_bits = _EVERY_TOKEN >> -vocab_size % 32
        if any(continuing[:-1]) or continuing[-1] & last_bits:
            numbers = continuing
    return array("i", numbers.tobytes())
