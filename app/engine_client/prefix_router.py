"""Which of several engines a request goes to: the one that has its beginning, unless that one has too much to do. Pure.

An engine that has the prompt's first blocks in its prefix cache need not compute them. What each of them has is not
asked but remembered: the chained hashes of the blocks that were sent there, as many as its cache has blocks, the
least recently used ones forgotten first, as the cache itself does.

The bound on what an engine may have to do is that of "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and
Zadimoghaddam, SODA 2018): _BOUND times the mean, rounded up. A beginning that everybody shares fills one engine up to
that, then a second one has it, too.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from app.common.types import Request

_BOUND = 1.25
_MOST_HASHES = 4096
"""Of the prompts of one request: 65,536 tokens in blocks of 16, which take some two milliseconds."""


def block_hashes(requests: Iterable[Request], block_size: int) -> list[int]:
    """Names of the full blocks of all prompts, each beginning before what follows it.

    A name says all tokens up to the end of its block, and the caller's salt, without which nothing is shared. Two
    blocks of one name by accident cost a prompt that is computed twice, and nothing else.
    """
    chains = (_chain(request, block_size) for request in requests if request.leader is None)
    return list(dict.fromkeys(islice((name for chain in chains for name in chain), _MOST_HASHES)))


def _chain(request: Request, block_size: int) -> Iterator[int]:
    name = hash((request.salt, request.source))
    for start in range(0, len(request.prompt) - block_size + 1, block_size):
        name = hash((name, request.prompt[start : start + block_size]))
        yield name


class PrefixRouter:
    """Remembers what went where. Owned by the event loop."""

    def __init__(self, engines: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._turns = [0] * engines
        self._turn = 0

    def choose(self, hashes: Sequence[int], loads: Mapping[int, int], adding: int) -> int:
        """One of the engines in `loads`, which tells how many sequences each of them has; `adding` more will come.

        Of those that the bound leaves: the one that knows most of the blocks, then the one with the least to do, then
        the one whose last turn is longest ago.
        """
        bound = math.ceil(_BOUND * (sum(loads.values()) + adding) / len(loads))
        least = min(loads.values())
        fit = [engine for engine, load in loads.items() if load == least or load + adding <= bound]
        return max(fit, key=lambda engine: (self.known(engine, hashes), -loads[engine], -self._turns[engine]))

    def known(self, engine: int, hashes: Iterable[int]) -> int:
        """How many of these blocks the engine has, or had last."""
        known = self._known[engine]
        return sum(name in known for name in hashes)

    def note(self, engine: int, hashes: Sequence[int], most: int) -> None:
        """They went there, where `most` blocks are kept."""
        self._turn += 1
        self._turns[engine] = self._turn
        known = self._known[engine]
        # The last ones first: a block is always forgotten before the one that it goes on from.
        for name in reversed(hashes):
            known[name] = None
            known.move_to_end(name)
        while len(known) > most:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """It has lost its cache."""
        self._known[engine].clear()
