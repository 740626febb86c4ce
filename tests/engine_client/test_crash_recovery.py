"""Crash recovery: two crashes identify a poisoned request, and no other request is ever refused."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.engine_client.crash_recovery import TOKENS_TO_CLEAR, CrashRecovery


class _World:
    """An engine that computes `slots` requests at once, and dies when it computes a poisoned one `fuse` times."""

    def __init__(self, *, slots: int, poison: Sequence[str] = (), fuse: int = 0) -> None:
        self.quarantine = CrashRecovery()
        self.progress: dict[str, int] = {}
        self.refused: list[str] = []
        self.crashes = 0
        self._slots, self._poison, self._fuse = slots, set(poison), fuse
        self._queue: list[str] = []
        self._running: dict[str, int] = {}

    def come(self, name: str) -> None:
        self.progress[name] = 0
        self.quarantine.add(name)
        self._send()

    def leave(self, name: str) -> None:
        self.quarantine.remove(name)
        self._queue = [one for one in self._queue if one != name]
        self._running.pop(name, None)

    def step(self) -> None:
        for name in self._queue[: self._slots - len(self._running)]:
            self._queue.remove(name)
            self._running[name] = 0
            self.quarantine.on_started(name)
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
        for name in self.quarantine.on_crash(self.progress.__getitem__):
            self.refused.append(name)
            self.quarantine.remove(name)
        self._send()

    @property
    def open(self) -> list[str]:
        return [name for name in self.progress if name not in self.refused]

    def _send(self) -> None:
        self.quarantine.update_trial(self.progress.__getitem__)
        while name := self.quarantine.pop_next(self.progress.__getitem__):
            self._queue.append(name)
            self.quarantine.on_queued(name)


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
    world = _World(slots=slots, poison=[victim], fuse=fuse)
    for name in names:
        if name != victim:
            world.come(name)
    for _ in range(late):
        world.step()
    world.come(victim)
    for _ in range(200):
        world.step()
        for name in [name for name in world.open if world.progress[name] > 10]:
            world.leave(name)
    assert world.refused == [victim]
    assert world.crashes == 2
    assert all(world.progress[name] > 10 for name in world.open)


@given(
    data=st.lists(st.sampled_from(["come", "step", "step", "step", "leave", "kill"]), max_size=60),
    slots=st.integers(1, 5),
)
def test_crashes_from_outside_with_progress_between_them_refuse_no_request(data: list[str], slots: int) -> None:
    world = _World(slots=slots)
    for number, deed in enumerate(data):
        if deed == "come":
            world.come(f"r{number}")
        elif deed == "step":
            world.step()
        elif deed == "leave" and world.open:
            gone = world.open[0]
            world.leave(gone)
            del world.progress[gone]
        elif deed == "kill":
            world.crash()
            # Everybody who was in flight comes to run again and makes its steps, as far as there are slots.
            for _ in range((len(world.open) + 1) * (TOKENS_TO_CLEAR + 1)):
                world.step()
    assert not world.refused
    assert not world.quarantine.has_pending or slots < len(world.open)


def test_suspects_go_one_by_one_in_order_and_before_all_others() -> None:
    quarantine, progress = CrashRecovery(), dict.fromkeys(["a", "b", "c", "d"], 0)

    def sent() -> list[str]:
        names = []
        while name := quarantine.pop_next(progress.__getitem__):
            names.append(name)
        return names

    for name in progress:
        quarantine.add(name)
    assert sent() == ["a", "b", "c", "d"]
    for name in progress:
        quarantine.on_queued(name)
    for name in ("a", "c"):  # b and d wait in the engine
        quarantine.on_started(name)
    assert quarantine.expects_progress
    assert quarantine.on_crash(progress.__getitem__) == []
    assert not quarantine.expects_progress and quarantine.has_pending
    progress["e"] = 0
    quarantine.add("e")
    assert sent() == ["a"]
    progress["a"] += TOKENS_TO_CLEAR - 1
    assert not quarantine.update_trial(progress.__getitem__) and sent() == []
    progress["a"] += 1
    assert quarantine.update_trial(progress.__getitem__) and sent() == ["c"]
    quarantine.remove("c")
    assert sent() == ["b", "d", "e"], "those that only waited go together, and newcomers behind them"
    assert not quarantine.has_pending


def test_what_only_waited_in_the_engine_is_no_suspect_and_what_it_had_not_taken_is() -> None:
    quarantine = CrashRecovery()
    for name in ("waits", "unread"):
        quarantine.add(name)
    while quarantine.pop_next(lambda _: 0):
        pass
    for crash in range(2):
        quarantine.on_queued("waits")
        refused = quarantine.on_crash(lambda _: 0)
        assert refused == (["unread"] if crash else [])
        while quarantine.pop_next(lambda _: 0):
            pass
    assert quarantine.pop_next(lambda _: 0) is None


def test_a_canceled_suspect_lets_the_next_one_go() -> None:
    quarantine = CrashRecovery()
    for name in ("a", "b"):
        quarantine.add(name)
        quarantine.pop_next(lambda _: 0)
    quarantine.on_crash(lambda _: 0)
    assert [quarantine.pop_next(lambda _: 0), quarantine.pop_next(lambda _: 0)] == ["a", None]
    quarantine.remove("a")
    assert quarantine.pop_next(lambda _: 0) == "b"
    quarantine.on_queued("gone")
    quarantine.on_started("gone")
    quarantine.remove("gone")


def test_a_suspect_never_goes_before_its_leader_who_alone_tells_their_prompts_scores() -> None:
    quarantine, progress = CrashRecovery(), dict.fromkeys(["other", "leader", "follower"], 0)
    for name in progress:
        quarantine.add(name, "leader" if name == "follower" else None)
        quarantine.pop_next(progress.__getitem__)
    for name in ("other", "leader"):  # the follower's guide is still being compiled
        quarantine.on_queued(name)
    assert quarantine.on_crash(progress.__getitem__) == []
    assert [quarantine.pop_next(progress.__getitem__), quarantine.pop_next(progress.__getitem__)] == ["leader", None]
    quarantine.on_started("leader")
    progress["leader"] += TOKENS_TO_CLEAR
    quarantine.update_trial(progress.__getitem__)
    assert quarantine.pop_next(progress.__getitem__) == "follower"
    assert quarantine.on_crash(progress.__getitem__) == ["follower"], "its leader had proven itself"
