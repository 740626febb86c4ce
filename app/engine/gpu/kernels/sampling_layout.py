"""How one request's sampling is written down for a device: a fixed number of words of 32 bits. Knows no tensors.

    word    what
    0..13   seven float64, each two words, the low one first: temperature, top_p, min_p, typical_p, repetition,
            presence and frequency penalty
    14, 15  the seed's low and high word
    16..23  choice, top_k, length of the prompt, min_tokens, logprobs (-1: none), flags, number of biases, of stop ids
    24..39  stop ids; -1 where there is none
    40..339 ids of biases; -1 where there is none
    340..   their biases, float64

The number of words is even: floats of 64 bits lie where a device can read them.
"""

from __future__ import annotations

import struct
from array import array

from app.common.params import MAX_BIASES
from app.common.types import Request
from app.engine.sampling.filters import COLDEST
from app.engine.sampling.sampling_input import SamplingInput

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
"""Places among the float64: two words each."""
SEED, CHOICE, TOP_K, N_PROMPT, MIN_TOKENS, LOGPROBS, FLAGS, N_BIASES, N_STOPS = 14, *range(16, 24)
STOPS = 24
MAX_STOPS = 16
BIAS_IDS = STOPS + MAX_STOPS
BIASES = BIAS_IDS + MAX_BIASES
WORDS = BIASES + 2 * MAX_BIASES
GREEDY = 1
"""Flag: the best token alone, the lowest id among equals."""
COUNTED = 2
"""Flag: there are penalties, so it counts which tokens were there before."""

_HEAD = struct.Struct("=7dq8i")
_SECTION = struct.Struct(f"={MAX_STOPS + MAX_BIASES}i")
assert _HEAD.size == 4 * STOPS and WORDS % 2 == 0


def is_counted(request: Request) -> bool:
    """Whether its draws depend on what was there before, beyond how much it was."""
    p = request.params
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def fits(request: Request, vocab_size: int) -> bool:
    """Whether these words can say all of it: no guide, and not too many tokens that end the text."""
    return not request.guide and len(_stops(request, vocab_size)) <= MAX_STOPS


def pack(request: Request, vocab_size: int) -> array[int]:
    """The words of a request that fits; what names ids beyond the vocabulary is left out."""
    p = request.params
    stops = _stops(request, vocab_size)
    biases = [(token, bias) for token, bias in p.logit_bias if token < vocab_size]
    shares = (max(p.temperature, COLDEST), p.top_p, p.min_p, p.typical_p)
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    is_greedy = SamplingInput(p, request.prompt, len(request.prompt)).is_greedy
    flags = GREEDY * is_greedy | COUNTED * is_counted(request)
    logprobs = -1 if p.logprobs is None else p.logprobs
    counts = (p.choice, p.top_k, len(request.prompt), p.min_tokens, logprobs, flags, len(biases), len(stops))
    ids = [*_filled(stops, MAX_STOPS), *_filled([token for token, _ in biases], MAX_BIASES)]
    words = array("i", _HEAD.pack(*shares, *penalties, p.seed, *counts))
    words.frombytes(_SECTION.pack(*ids))
    words.frombytes(array("d", [bias for _, bias in biases]).tobytes().ljust(8 * MAX_BIASES, b"\0"))
    return words


def _stops(request: Request, vocab_size: int) -> list[int]:
    """Tokens that may have to be forbidden."""
    return [token for token in request.stop_ids if token < vocab_size] if request.params.min_tokens else []


def _filled(ids: list[int], size: int) -> list[int]:
    return ids + [-1] * (size - len(ids))
