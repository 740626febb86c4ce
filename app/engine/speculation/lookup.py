"""Drafts by prompt lookup: text that occurred before is expected to continue as it did.

    1. catch up   compare the tokens drawn since the last step with what the followed place has there
    2. find       if they differ, find where the last tokens occurred: in the sequence itself, or in recent sequences;
                  or a little further where it was followed, for records that differ in their values
    3. propose    what follows at that place

The chance of a draft is the share of right guesses so far after matches of the same length. Guesses are counted in
every step, also where no draft was verified, since the token that is drawn tells whether the guess was right. So a text
that never repeats itself costs a lookup for each token and no rows, and one that begins to repeat is noticed at once.

Recent sequences are kept for each cache namespace, and found only there: how fast a text is written would otherwise
tell one tenant what another one has written.

Sources: Saxena, "Prompt lookup decoding" (2023); Oliaro et al., "SuffixDecoding" (2024).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict

from app.engine.scheduling.batch_plan import Sequence
from app.engine.speculation.ngram_index import LONGEST_MATCH, Match, NgramIndex
from app.engine.speculation.proposer import Proposal

_GRADES = (2, 3, 4, 6, 10, 18)
"""Lengths of matches from which on another rate of right guesses holds."""
_FIRST_RATES = (0.25, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9)
"""Rates before any guess was counted."""
_FIRST_WEIGHT = 4.0
"""Number of guesses for which those rates count."""
_MEMORY = 24.0
"""Guesses of a grade after which the older ones count half."""
_LEAST_CHANCE = 0.05
_LEAST_RETURN = 4
"""Length of a match from which on the text may return to the place that it has left."""
_MOST_SKIPPED = 12
"""Tokens that the text, and the place that it followed, may have instead of each other before they agree again."""
_MOST_UNSEEN = 64
"""After more tokens without a proposal, no place is followed any more."""
_RECENT_TOKENS = 1 << 15
"""Tokens of a generation of recent sequences; a namespace keeps two."""
_MOST_OF_SEQUENCE = 1 << 12
"""Last tokens that are kept of a sequence that has ended."""
_MOST_NAMESPACES = 32
_SEPARATOR = -1
_GRADE_OF = [bisect_right(_GRADES, length) for length in range(LONGEST_MATCH + 1)]


class GuessRates:
    """How often guesses were right, by the length of the match; older guesses count less and less."""

    __slots__ = ("rates", "right", "tried")

    def __init__(self, prior: GuessRates | None = None) -> None:
        """prior: rates to begin with, which count as few guesses."""
        self.rates: list[float] = list(prior.rates if prior else _FIRST_RATES)
        self.tried = [_FIRST_WEIGHT] * len(self.rates)
        self.right = [_FIRST_WEIGHT * rate for rate in self.rates]

    def count(self, grade: int, *, is_right: bool) -> None:
        """Counts a guess."""
        self._add(grade, float(is_right), 1.0)

    def learn(self, others: GuessRates) -> None:
        """Counts what another one, which began with these rates, counted of each grade that it saw."""
        for grade, (right, tried) in enumerate(zip(others.right, others.tried, strict=True)):
            if tried > _FIRST_WEIGHT:
                self._add(grade, right, tried)

    def _add(self, grade: int, right: float, tried: float) -> None:
        self.right[grade] += right
        self.tried[grade] += tried
        while self.tried[grade] > _MEMORY:
            self.right[grade] /= 2
            self.tried[grade] /= 2
        self.rates[grade] = self.right[grade] / self.tried[grade]


class _Namespace:
    """Recent sequences of a cache namespace, and how well guesses did in them."""

    def __init__(self) -> None:
        self.rates = GuessRates()
        self._newer, self._older = NgramIndex(array("q")), NgramIndex(array("q"))

    def add(self, tokens: array[int]) -> None:
        """Adds the text of a sequence that has ended; the oldest sequences are forgotten."""
        if len(self._newer.tokens) + len(tokens) > _RECENT_TOKENS:
            self._newer, self._older = NgramIndex(array("q")), self._newer
        self._newer.tokens.extend(tokens)
        self._newer.tokens.append(_SEPARATOR)
        self._newer.catch_up()

    def find(self, text: array[int]) -> Match | None:
        """The last occurrence of the last tokens of `text` that has a token after it."""
        return self._newer.find(text) or self._older.find(text)


class _Lookup:
    """What is known of one running sequence."""

    __slots__ = ("at", "index", "left", "length", "namespace", "rates", "seen", "source")

    def __init__(self, tokens: array[int], namespace: _Namespace) -> None:
        self.namespace = namespace
        self.index = NgramIndex(tokens)
        self.rates = GuessRates(namespace.rates)
        self.seen = len(tokens)
        """Tokens that guesses were compared with."""
        self.source: array[int] | None = None
        """The text whose token at `at` is the next guess; None: no place is followed."""
        self.at = self.length = 0
        self.left: tuple[array[int], int, int] | None = None
        """Where the text left a place that it had followed: that text, the position there, and its own length then."""

    def catch_up(self) -> None:
        """Compares new tokens with the guesses, and finds another place to follow after a wrong one."""
        tokens = self.index.tokens
        count = len(tokens)
        if self.source is not None:
            if count - self.seen > _MOST_UNSEEN:
                self.source = None
            for position in range(self.seen, count):
                self._compare(position)
        self.seen = count
        self.index.catch_up()
        if self.source is None:
            self._find(tokens)

    def propose(self, most: int) -> Proposal:
        """The tokens at the followed place. Where they reach the end of the sequence itself, they repeat."""
        source, at = self.source, self.at
        if source is None:
            return _NOTHING
        chance, chances, rates, length = 1.0, list[float](), self.rates.rates, self.length
        for _ in range(most):
            chance *= rates[_GRADE_OF[length]]
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
            length = min(length + 1, LONGEST_MATCH)
        drafts = source[at : at + len(chances)]
        if len(drafts) < len(chances) and source is self.index.tokens:
            while len(drafts) < len(chances):
                drafts.extend(drafts[: len(chances) - len(drafts)])
        if _SEPARATOR in drafts:
            drafts = drafts[: drafts.index(_SEPARATOR)]
        return Proposal(tuple(drafts), tuple(chances[: len(drafts)]))

    def _compare(self, position: int) -> None:
        if self.source is None:
            return
        is_right = self.source[self.at] == self.index.tokens[position]
        self.rates.count(_GRADE_OF[self.length], is_right=is_right)
        if not is_right:
            if self.length >= _LEAST_RETURN:
                self.left = (self.source, self.at, position)
            self.source = None
            return
        self.at += 1
        self.length = min(self.length + 1, LONGEST_MATCH)
        if self.at >= len(self.source) or self.source[self.at] == _SEPARATOR:
            self.source = None

    def _find(self, tokens: array[int]) -> None:
        own, recent = self.index.find(tokens), self.namespace.find(tokens)
        match = recent if recent and (own is None or recent.length > own.length) else own
        if match is None or match.length < 3:  # two equal tokens are often chance
            match = self._returned(tokens) or match
        if match and match.tokens[match.position] != _SEPARATOR:
            self.source, self.at, self.length = match

    def _returned(self, tokens: array[int]) -> Match | None:
        """Where the last token occurs soon after the place that the text has left."""
        if self.left is None:
            return None
        source, at, length = self.left
        if len(tokens) - length > _MOST_SKIPPED:
            self.left = None
            return None
        for position in range(at + 1, min(at + 1 + _MOST_SKIPPED, len(source) - 1)):
            if source[position] == tokens[-1]:
                return Match(source, position + 1, 1)
        return None


_NOTHING = Proposal()


class LookupProposer:
    """A Proposer. Keeps an index of each running sequence, and the recent ones of each namespace."""

    def __init__(self) -> None:
        self._lookups: dict[str, _Lookup] = {}
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """See Proposer."""
        lookup = self._lookups.get(sequence.request.id)
        if lookup is None:
            namespace = self._namespace(sequence.request.cache_namespace)
            lookup = self._lookups[sequence.request.id] = _Lookup(sequence.tokens, namespace)
        lookup.catch_up()
        return lookup.propose(most)

    def forget(self, sequence: Sequence) -> None:
        """See Proposer. The sequence's text and rates help later ones of its namespace."""
        if lookup := self._lookups.pop(sequence.request.id, None):
            lookup.namespace.rates.learn(lookup.rates)
            lookup.namespace.add(sequence.tokens[-_MOST_OF_SEQUENCE:])

    def _namespace(self, name: str) -> _Namespace:
        found = self._namespaces.setdefault(name, _Namespace())
        self._namespaces.move_to_end(name)
        while len(self._namespaces) > _MOST_NAMESPACES:
            self._namespaces.popitem(last=False)
        return found
