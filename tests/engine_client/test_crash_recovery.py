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
        self._queue: list[str] = []
        self._running: dict[str, int] = {}

    def submit(self, name: str) -> None:
        self.progress[name] = 0
        self.recovery.add(name)
        self._send()

    def disconnect(self, name: str) -> None:
        self.recovery.remove(name)
        self._queue = [one for one in self._queue if one != name]
        self._running.pop(name, None)

    def step(self) -> None:
        for name in self._queue[: self._slots - len(self._running)]:
            self._queue.remove(name)
            self._running[name] = 0
            self.recovery.on_started(name)
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
        self.recovery.update_trial(self.progress.__getitem__)
        while name := self.recovery.pop_next(self.progress.__getitem__):
            self._queue.append(name)
            self.recovery.on_queued(name)


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
    assert not simulation.refused
    assert not simulation.recovery.has_pending or slots < len(simulation.open)


def test_suspects_go_one_by_one_in_order_and_before_all_others() -> None:
    recovery, progress = CrashRecovery(), dict.fromkeys(["a", "b", "c", "d"], 0)

    def sent() -> list[str]:
        names = []
        while name := recovery.pop_next(progress.__getitem__):
            names.append(name)
        return names

    for name in progress:
        recovery.add(name)
    assert sent() == ["a", "b", "c", "d"]
    for name in progress:
        recovery.on_queued(name)
    for name in ("a", "c"):  # b and d wait in the engine
        recovery.on_started(name)
    assert recovery.expects_progress
    assert recovery.on_crash(progress.__getitem__) == []
    assert not recovery.expects_progress and recovery.has_pending
    progress["e"] = 0
    recovery.add("e")
    assert sent() == ["a"]
    progress["a"] += TOKENS_TO_CLEAR - 1
    assert not recovery.update_trial(progress.__getitem__) and sent() == []
    progress["a"] += 1
    assert recovery.update_trial(progress.__getitem__) and sent() == ["c"]
    recovery.remove("c")
    assert sent() == ["b", "d", "e"], "those that only waited go together, and newcomers behind them"
    assert not recovery.has_pending


def test_what_only_waited_in_the_engine_is_no_suspect_and_what_it_had_not_taken_is() -> None:
    recovery = CrashRecovery()
    for name in ("waits", "unread"):
        recovery.add(name)
    while recovery.pop_next(lambda _: 0):
        pass
    for crash in range(2):
        recovery.on_queued("waits")
        refused = recovery.on_crash(lambda _: 0)
        assert refused == (["unread"] if crash else [])
        while recovery.pop_next(lambda _: 0):
            pass
    assert recovery.pop_next(lambda _: 0) is None


def test_a_canceled_suspect_lets_the_next_one_go() -> None:
    recovery = CrashRecovery()
    for name in ("a", "b"):
        recovery.add(name)
        recovery.pop_next(lambda _: 0)
    recovery.on_crash(lambda _: 0)
    assert [recovery.pop_next(lambda _: 0), recovery.pop_next(lambda _: 0)] == ["a", None]
    recovery.remove("a")
    assert recovery.pop_next(lambda _: 0) == "b"
    recovery.on_queued("disconnected")
    recovery.on_started("disconnected")
    recovery.remove("disconnected")


def test_a_suspect_never_goes_before_its_leader_who_alone_tells_their_prompts_scores() -> None:
    recovery, progress = CrashRecovery(), dict.fromkeys(["other", "leader", "follower"], 0)
    for name in progress:
        recovery.add(name, "leader" if name == "follower" else None)
        recovery.pop_next(progress.__getitem__)
    for name in ("other", "leader"):  # the follower's grammar is still being compiled
        recovery.on_queued(name)
    assert recovery.on_crash(progress.__getitem__) == []
    assert [recovery.pop_next(progress.__getitem__), recovery.pop_next(progress.__getitem__)] == ["leader", None]
    recovery.on_started("leader")
    progress["leader"] += TOKENS_TO_CLEAR
    recovery.update_trial(progress.__getitem__)
    assert recovery.pop_next(progress.__getitem__) == "follower"
    assert recovery.on_crash(progress.__getitem__) == ["follower"], "its leader had proven itself"
