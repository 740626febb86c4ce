"""Finds the last occurrence of a text's last tokens in another text, in constant time for each token.

Two hash tables map an n-gram, three tokens or two, to the position after its last occurrence. A slot holds the newest
position only, and n-grams that share a slot overwrite each other: a match is therefore compared with the text itself,
and a lost entry costs a draft. A table has at least two slots of four bytes for each token, so that an index takes 16
to 32 bytes for a token, a small part of the token's keys and values.

    tokens       a b c d e a b c          the last occurrence of (a b c) ends before position 3: d follows
    position     0 1 2 3 4 5 6 7
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

_FIRST, _SECOND, _THIRD, _SHIFT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 15
"""Odd multipliers below 2^32, so that sums of three ids of up to 2^26 fit into 60 bits."""
_LEAST_SLOTS = 1 << 10
_BULK = 64
"""From this many new tokens on, numpy indexes them at once; below, a loop is faster."""
LONGEST_MATCH = 32
"""Matches are compared up to this length."""


class Match(NamedTuple):
    """A place where a text continues as another one did."""

    tokens: array[int]
    position: int
    """Index in `tokens` of the token that followed there."""
    length: int
    """Number of tokens before it that are equal, at most LONGEST_MATCH."""


class NgramIndex:
    """Index of one growing text."""

    def __init__(self, tokens: array[int]) -> None:
        """tokens: of type "q"; the caller appends to it, and changes nothing else."""
        self.tokens = tokens
        self._n_indexed = 2
        self._by_three, self._by_two = array("i"), array("i")
        self._mask = -1

    def catch_up(self) -> None:
        """Indexes the tokens that were appended since the last call."""
        tokens, start = self.tokens, self._n_indexed
        count = len(tokens)
        if count <= start:
            return
        if 2 * count > self._mask + 1:
            self._grow(count)
            start = self._n_indexed
        if count - start >= _BULK:
            self._index_at_once(start)
        else:
            by_three, by_two, mask = self._by_three, self._by_two, self._mask
            for position in range(start, count):
                last = tokens[position - 2] * _SECOND + tokens[position - 1] * _THIRD
                by_two[last >> _SHIFT & mask] = position
                if position > 2:
                    by_three[last + tokens[position - 3] * _FIRST >> _SHIFT & mask] = position
        self._n_indexed = count

    def find(self, text: array[int]) -> Match | None:
        """The last occurrence of the last three tokens of `text`, else of its last two, that a token follows here."""
        mask = self._mask
        if mask < 0 or len(text) < 2:
            return None
        tokens, one, two = self.tokens, text[-1], text[-2]
        last = two * _SECOND + one * _THIRD
        if len(text) > 2:
            position = self._by_three[last + text[-3] * _FIRST >> _SHIFT & mask]
            if position and tokens[position - 1] == one and tokens[position - 2] == two:
                length = self._matched(text, position)
                if length > 2:
                    return Match(tokens, position, length)
        position = self._by_two[last >> _SHIFT & mask]
        if position and tokens[position - 1] == one and tokens[position - 2] == two:
            return Match(tokens, position, self._matched(text, position))
        return None

    def _matched(self, text: array[int], position: int) -> int:
        """How many of the last tokens of `text` precede `position` in this text."""
        tokens, end, length = self.tokens, len(text), 0
        most = min(position, end, LONGEST_MATCH)
        while length < most and tokens[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def _grow(self, count: int) -> None:
        slots = max(_LEAST_SLOTS, 1 << (4 * count - 1).bit_length())
        self._mask = slots - 1
        self._by_three, self._by_two = (array("i", bytes(4 * slots)) for _ in range(2))
        self._n_indexed = 2

    def _index_at_once(self, start: int) -> None:
        first = max(0, start - 3)
        tokens = np.frombuffer(self.tokens[first:], np.int64)  # a copy: an array that shares its memory cannot grow
        positions = np.arange(start, first + len(tokens), dtype=np.int32)
        at = positions - first
        last = tokens[at - 2] * _SECOND + tokens[at - 1] * _THIRD
        np.frombuffer(self._by_two, np.int32)[last >> _SHIFT & self._mask] = positions
        is_third = positions > 2
        keys = last[is_third] + tokens[at[is_third] - 3] * _FIRST
        np.frombuffer(self._by_three, np.int32)[keys >> _SHIFT & self._mask] = positions[is_third]
