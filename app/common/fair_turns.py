"""Fair turns between owners (tenants, addresses) by cost, and the dynamic threshold on what an owner may hold.

FairTurns decides whose turn is next where owners share something that serves one piece of work at a time: workers,
an engine's attention, the event loop. It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) for costs
that are known only afterwards, and self-clocked fair queueing (Golestani, INFOCOM 1994) for estimated ones: each owner
has a virtual time, its cost so far, and the owner whose next piece of work has the lowest rank is next.

    rank = virtual time of the owner + estimate of its next work      clock = highest rank of a granted turn

An owner that returns after it was idle starts at the clock, so that it has no credit from its idle time, or at its own
virtual time if that is later, so that it cannot leave a debt behind. With equal costs owners simply take turns in order
of arrival (round robin).

may_hold() decides whether an owner may add to what it holds of something limited that is not taken back: the space of
a queue, memory, slots.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner", bound=Hashable)
_MOST_DEBTORS = 256
_owner_of = itemgetter(2)


@dataclass(slots=True, eq=False)
class _Account:
    virtual: float
    """Virtual time: what the owner has been charged since the clock's zero, at least the clock when it last came."""
    estimate: float = 0.0
    """Of its next work."""
    number: int = 0
    """Numbers owners in the order of wait(): of equal ranks the lowest is next."""
    is_waiting: bool = False
    open_turns: int = 0


class FairTurns(Generic[_Owner]):
    """Order of the turns of owners that have work waiting; the caller keeps the work itself.

    Each call costs O(log n) comparisons with n waiting owners. Only owners with work or debt are remembered, at most
    256 of the latter.
    """

    def __init__(self) -> None:
        self._accounts: dict[_Owner, _Account] = {}
        self._order: list[tuple[float, int, _Owner]] = []
        """Waiting owners: rank and number, sorted."""
        self._debtors: list[tuple[float, int, _Owner]] = []
        """Heap of idle owners that are ahead of the clock: virtual time and number; outdated if the number is."""
        self._clock = 0.0
        self._number = self._n_open_turns = 0

    def __iter__(self) -> Iterator[_Owner]:
        """The waiting owners in the order of their turns; the caller may pass over those that cannot use theirs."""
        return map(_owner_of, self._order)

    def __contains__(self, owner: _Owner) -> bool:
        """Whether the owner has work waiting."""
        account = self._accounts.get(owner)
        return account is not None and account.is_waiting

    def wait(self, owner: _Owner, estimate: float = 0.0) -> None:
        """The owner's next work waits, and costs `estimate` as far as is known; replaces an earlier estimate."""
        self._number += 1
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account(self._clock)
        elif account.is_waiting:
            self._remove(account)
        elif not account.open_turns and account.virtual < self._clock:
            account.virtual = self._clock
        account.estimate, account.number, account.is_waiting = estimate, self._number, True
        insort(self._order, (account.virtual + estimate, self._number, owner))

    def leave(self, owner: _Owner) -> None:
        """The owner has no work waiting any more."""
        account = self._accounts.get(owner)
        if account and account.is_waiting:
            self._remove(account)
            account.is_waiting = False
            self._forget_if_idle(owner, account)

    def begin(self, owner: _Owner) -> float:
        """Grants a waiting owner's turn and returns the estimate, which it is charged. wait() follows if it has more.

        That may be before end(), which keeps what end() gives back of the estimate.
        """
        account = self._accounts[owner]
        self._remove(account)
        account.virtual += account.estimate
        self._clock = max(self._clock, account.virtual)
        account.is_waiting = False
        account.open_turns += 1
        self._n_open_turns += 1
        return account.estimate

    def end(self, owner: _Owner, correction: float = 0.0) -> None:
        """Ends a turn of the owner, which cost `correction` more than begin() returned, or less if it is negative."""
        account = self._accounts[owner]
        account.open_turns -= 1
        self._n_open_turns -= 1
        if correction and account.is_waiting:
            self._remove(account)
            account.virtual += correction
            insort(self._order, (account.virtual + account.estimate, account.number, owner))
        else:
            account.virtual += correction
            self._forget_if_idle(owner, account)

    def take(self, owner: _Owner, estimate: float | None = None) -> None:
        """A turn that costs what it was estimated at: begin(), end(), and with `estimate` wait() for the next one."""
        account = self._accounts[owner]
        self._remove(account)
        account.virtual += account.estimate
        self._clock = max(self._clock, account.virtual)
        if estimate is None:
            account.is_waiting = False
            self._forget_if_idle(owner, account)
            return
        if not account.open_turns:
            account.virtual = self._clock
        self._number += 1
        account.estimate, account.number = estimate, self._number
        insort(self._order, (account.virtual + estimate, self._number, owner))

    def _remove(self, account: _Account) -> None:
        order, number = self._order, account.number
        is_next = order[0][1] == number
        del order[0 if is_next else bisect_left(order, (account.virtual + account.estimate, number))]

    def _forget_if_idle(self, owner: _Owner, account: _Account) -> None:
        if account.is_waiting or account.open_turns:
            return
        if not self._order and not self._n_open_turns:  # all owners are idle: earlier usage delayed no other owner
            self._accounts.clear()
            self._debtors.clear()
            self._clock = 0.0
        elif account.virtual <= self._clock:
            del self._accounts[owner]
        else:
            heappush(self._debtors, (account.virtual, account.number, owner))
            self._forget_debtors()

    def _forget_debtors(self) -> None:
        """Forgets the owners that the clock has caught up with, and the smallest debts beyond 256."""
        while self._debtors and (self._debtors[0][0] <= self._clock or len(self._debtors) > _MOST_DEBTORS):
            _, number, owner = heappop(self._debtors)
            account = self._accounts.get(owner)
            if account and account.number == number and not account.is_waiting and not account.open_turns:
                del self._accounts[owner]


def may_hold(used: float, added: float, free: float, *, factor: float = 1.0) -> bool:
    """Whether an owner that holds `used` may hold `added` more while `free` is free; always if it holds nothing.

    An owner may hold `factor` times what is free, so that a lone owner takes factor / (1 + factor) of the whole, and
    there is always something left for the next one (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998).
    """
    return not used or used + added <= factor * free
