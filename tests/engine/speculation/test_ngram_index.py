"""The index finds the last occurrence of a text's last tokens, as a search through the whole text does."""

from __future__ import annotations

import random
from array import array

import pytest

from app.engine.speculation.ngram_index import LONGEST_MATCH, Match, NgramIndex


def _found(tokens: array[int], text: array[int]) -> tuple[int, int] | None:
    """Position and length by a search: the last place after three equal tokens, else after two."""
    for count in (3, 2):
        for position in range(len(tokens) - 1, count - 1, -1):
            if len(text) >= count and tokens[position - count : position] == text[-count:]:
                length = count
                while (
                    length < min(position, len(text), LONGEST_MATCH)
                    and tokens[position - 1 - length] == text[-1 - length]
                ):
                    length += 1
                return position, length
    return None


@pytest.mark.parametrize("vocab", [3, 30, 2**26])
@pytest.mark.parametrize("growth", [1, 5, 200])
def test_matches_are_those_of_a_search(vocab: int, growth: int) -> None:
    """Tokens that are indexed one by one, and many at once. Few entries are lost to others in their slots."""
    rng, tokens, n_equal = random.Random(vocab + growth), array("q"), 0
    index, n_searches = NgramIndex(tokens), 400 if growth < 200 else 20
    for _ in range(n_searches):
        tokens.extend(rng.randrange(vocab) for _ in range(growth))
        if len(tokens) > 20 and rng.random() < 0.5:
            start = rng.randrange(len(tokens) - 10)
            tokens.extend(tokens[start : start + rng.randint(2, 9)])
        index.catch_up()
        found = index.find(tokens)
        n_equal += _found(tokens, tokens) == (found and (found.position, found.length))
        if found:
            assert found.length >= 2
            assert tokens[found.position - found.length : found.position] == tokens[-found.length :]
    assert n_equal >= 0.95 * n_searches


def test_longer_matches_come_first() -> None:
    index = NgramIndex(array("q", [1, 2, 3, 4, 9, 2, 3, 8]))
    index.catch_up()
    assert index.find(array("q", [7, 1, 2, 3])) == Match(index.tokens, 3, 3)
    assert index.find(array("q", [7, 2, 3])) == Match(index.tokens, 7, 2)
    assert index.find(array("q", [3])) is None and index.find(array("q", [5, 6, 7])) is None


def test_last_tokens_are_no_match_of_themselves() -> None:
    index = NgramIndex(array("q", [1, 2, 3]))
    index.catch_up()
    assert index.find(index.tokens) is None


@pytest.mark.parametrize("length", [2**12, 2**17])
def test_memory_is_a_small_part_of_the_keys_and_values(length: int) -> None:
    index = NgramIndex(array("q", range(length)))
    index.catch_up()
    assert sum(len(table) * table.itemsize for table in (index._by_two, index._by_three)) <= 32 * length


def test_text_may_grow_after_it_was_indexed_at_once() -> None:
    """No view of its memory is kept, which an array that grows would refuse."""
    index = NgramIndex(array("q", range(1000)))
    index.catch_up()
    index.tokens.extend(range(500))
    index.catch_up()
    found = index.find(index.tokens)
    assert found is not None
    assert (found.position, found.length) == (500, LONGEST_MATCH)
