"""Shares of owners: the one with the most loses; nothing is left of an owner without names."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.access.owner_shares import EntryCounts, OwnerShares


def test_the_owner_with_the_most_names_is_the_largest() -> None:
    shares = OwnerShares[int](3)
    for owner, name in (("a", 1), ("b", 2), ("b", 3)):
        shares.add(owner, name)
    assert (list(shares.largest), shares.is_exceeded) == ([2, 3], False)
    shares.add("a", 4)
    shares.add("a", 5)
    assert (list(shares.largest), shares.is_exceeded) == ([1, 4, 5], True)


def test_names_are_discarded_once_and_owners_with_their_last_name() -> None:
    shares = OwnerShares[int](1)
    shares.add("a", 1)
    shares.add("b", 2)
    for _ in range(2):
        shares.discard("a", 1)
        shares.discard("c", 1)
    assert not shares.is_exceeded
    assert list(shares._names) == ["b"], "an attacker's owners must not accumulate"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=200))
def test_largest_matches_a_plain_search(steps: list[tuple[bool, int]]) -> None:
    counts, plain, changed = EntryCounts[int](), Counter[int](), dict[int, int]()
    for step, (is_added, owner) in enumerate(steps):
        if is_added or not plain[owner]:
            counts.add(owner)
            plain[owner] += 1
        else:
            counts.remove(owner)
            plain[owner] -= 1
        changed[owner] = step
        owners = [each for each in plain if plain[each]]
        assert counts.largest == max(owners, key=lambda each: (plain[each], -changed[each]), default=None)
        assert set(counts._counts) == set(owners) and set(counts._owners) == {plain[each] for each in owners}
