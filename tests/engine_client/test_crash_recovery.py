"""Crash recovery: two crashes identify a poisoned request, and no other request is ever refused."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.engine_client.crash_recovery import TOKENS_TO_CLEAR, CrashRecovery


class _Simulation:
    """An engine that computes `slots` requests at once, and dies when it computes a poisoned one `fuse` times."""

    def __init__(self, *, slots: int, poison: Sequence[str] = (), fuse: int = 0) -> None:
        self.recovery = CrashRecovery()
        self.progress: dict[str, int] = {}
        self.refused: list[str] = []
        self.crashes = 0
        self._slots, self._poison, self._fuse = slots, set(poison), fuse
        self._unsent: list[str] = []
        self._queue: list[str] = []
        self._running: dict[str, int] = {}

    def submit(self, name: str) -> None:
        self.progress[name] = 0
        self._unsent.append(name)
        self._send()

    def disconnect(self, name: str) -> None:
        self.recovery.remove(name)
        self._unsent = [one for one in self._unsent if one != name]
        self._queue = [one for one in self._queue if one != name]
        self._running.pop(name, None)

    def step(self) -> None:
        for name in self._queue[: self._slots - len(self._running)]:
            self._queue.remove(name)
            self._running[name] = 0
        for name in self._running:
            if name in self._poison and self._running[name] == self._fuse:
                self.crash()
                return
        for name in self._running:
            self._running[name] += 1
            self.progress[name] += 1
        self._send()

    def crash(self) -> None:
        self.crashes += 1
        self._queue, self._running = [], {}
        for name in self.recovery.on_crash(self.progress.__getitem__):
            self.refused.append(name)
            self.recovery.remove(name)
        self._send()

    @property
    def open(self) -> list[str]:
        return [name for name in self.progress if name not in self.refused]

    def _send(self) -> None:
        """Suspects first, one by one, as far as there are slots; then the others, one more than there are slots."""
        self.recovery.update_trial(self.progress.__getitem__)
        can_start = self.recovery.n_in_flight < self._slots
        if can_start and (name := self.recovery.pop_next(self.progress.__getitem__)):
            self._queue.append(name)
        while self._unsent and not self.recovery.n_suspects and self.recovery.n_in_flight <= self._slots:
            self._queue.append(name := self._unsent.pop(0))
            self.recovery.add(name, self.progress[name])


@given(
    names=st.integers(1, 12).map(lambda n: [f"r{i}" for i in range(n)]),
    poison=st.integers(0, 11),
    slots=st.integers(1, 12),
    fuse=st.integers(0, TOKENS_TO_CLEAR - 1),
    late=st.integers(0, 5),
)
def test_only_the_poisoned_request_is_refused_after_two_crashes(
    names: list[str], poison: int, slots: int, fuse: int, late: int
) -> None:
    """Whichever it is, whenever it comes, and also where it first makes a step of progress in every life."""
    victim = names[poison % len(names)]
    simulation = _Simulation(slots=slots, poison=[victim], fuse=fuse)
    for name in names:
        if name != victim:
            simulation.submit(name)
    for _ in range(late):
        simulation.step()
    simulation.submit(victim)
    for _ in range(200):
        simulation.step()
        for name in [name for name in simulation.open if simulation.progress[name] > 10]:
            simulation.disconnect(name)
    assert simulation.refused == [victim]
    assert simulation.crashes == 2
    assert all(simulation.progress[name] > 10 for name in simulation.open)


@given(
    data=st.lists(st.sampled_from(["submit", "step", "step", "step", "disconnect", "kill"]), max_size=60),
    slots=st.integers(1, 5),
)
def test_crashes_from_outside_with_progress_between_them_refuse_no_request(data: list[str], slots: int) -> None:
    simulation = _Simulation(slots=slots)
    for number, deed in enumerate(data):
        if deed == "submit":
            simulation.submit(f"r{number}")
        elif deed == "step":
            simulation.step()
        elif deed == "disconnect" and simulation.open:
            disconnected = simulation.open[0]
            simulation.disconnect(disconnected)
            del simulation.progress[disconnected]
        elif deed == "kill":
            simulation.crash()
            # Every request that was in flight runs again and makes its steps, as far as there are slots.
            for _ in range((len(simulation.open) + 1) * (TOKENS_TO_CLEAR + 1)):
                simulation.step()
    for _ in range((len(simulation.open) + 1) * (TOKENS_TO_CLEAR + 1)):
        simulation.step()
    assert not simulation.refused
    assert not simulation.recovery.n_suspects or slots < len(simulation.open)


def test_suspects_go_one_by_one_in_order() -> None:
    recovery, progress = CrashRecovery(), dict.fromkeys(["a", "b", "c"], 0)

    def sent() -> list[str]:
        names = []
        recovery.update_trial(progress.__getitem__)
        while name := recovery.pop_next(progress.__getitem__):
            names.append(name)
        return names

    for name in progress:
        recovery.add(name, 0)
    assert recovery.n_in_flight == 3 and not sent()
    assert recovery.on_crash(progress.__getitem__) == []
    assert (recovery.n_in_flight, recovery.n_suspects) == (0, 3)
    assert sent() == ["a"]
    progress["a"] += TOKENS_TO_CLEAR - 1
    assert sent() == []
    progress["a"] += 1
    assert sent() == ["b"]
    recovery.remove("b")
    assert sent() == ["c"], "a cancelled suspect lets the next one go"
    progress["c"] += TOKENS_TO_CLEAR
    assert sent() == [] and recovery.n_suspects == 0


def test_a_suspect_that_was_not_sent_again_is_not_in_flight() -> None:
    recovery = CrashRecovery()
    for name in ("first", "second"):
        recovery.add(name, 0)
    assert recovery.on_crash(lambda _: 0) == []
    assert recovery.pop_next(lambda _: 0) == "first"
    assert recovery.on_crash(lambda _: 0) == ["first"]
    recovery.remove("first")
    assert recovery.pop_next(lambda _: 0) == "second"


def test_who_comes_back_under_another_id_is_still_a_suspect() -> None:
    recovery = CrashRecovery()
    recovery.add("r", 0)
    recovery.on_crash(lambda _: 0)
    crash_count = recovery.crash_count("r")
    recovery.remove("r")
    recovery.add_suspect("r~2", crash_count)
    assert recovery.pop_next(lambda _: 0) == "r~2"
    assert recovery.on_crash(lambda _: 0) == ["r~2"]
