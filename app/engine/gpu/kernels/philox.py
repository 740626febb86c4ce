"""Philox 4x32-10 on tensors: the numbers of app/engine/sampling/philox.py, made on a device from words that lie there.

Words of 32 bits are held in int64, whose products wrap around without harm: all 64 bits of them are right.
"""

from __future__ import annotations

from torch import Tensor

_MASK32 = 0xFFFFFFFF


def uniforms(seed_low: Tensor, seed_high: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1), one for each element. Words may be signed; a position is 0 or above."""
    k0, k1 = seed_low.long() & _MASK32, seed_high.long() & _MASK32
    c0, c1, c2 = position.long() & _MASK32, position.long() >> 32, choice.long() & _MASK32
    c3 = c0 * 0
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 & _MASK32 ^ c1 ^ k0, p1 & _MASK32, p0 >> 32 & _MASK32 ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = k0 + 0x9E3779B9 & _MASK32, k1 + 0xBB67AE85 & _MASK32
    number: Tensor = ((c0 >> 5) * 2**26 + (c1 >> 6)).double() * 2.0**-53
    return number
