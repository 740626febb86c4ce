"""Two crashes identify a poisoned request, no other one is refused, and an engine that keeps crashing is given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine_client.crash_recovery import CrashRecovery
from app.engine_client.supervisor import MAX_FORGIVEN, TOKENS_TO_CLEAR, WINDOW_SECONDS, RestartPolicy


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

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._step()

    def clear(self) -> None:
        """All that are in flight make progress: one suspect after the other, as far as there are slots."""
        self.step((len(self.open) + 1) * (TOKENS_TO_CLEAR + 1))

    def _step(self) -> None:
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
    simulation.step(late)
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
            simulation.clear()
            simulation.crash()
    simulation.clear()
    assert not simulation.refused
    assert not simulation.recovery.n_suspects or slots < len(simulation.open)


def test_suspects_go_one_by_one_in_order_and_keep_their_count_under_another_id() -> None:
    recovery, progress = CrashRecovery(), dict.fromkeys(["a", "b", "c", "c~2"], 0)

    def sent() -> str | None:
        recovery.update_trial(progress.__getitem__)
        return recovery.pop_next(progress.__getitem__)

    for name in ("a", "b", "c"):
        recovery.add(name, 0)
    assert sent() is None and recovery.on_crash(progress.__getitem__) == []
    assert (recovery.n_in_flight, recovery.n_suspects) == (0, 3)
    assert sent() == "a"
    progress["a"] += TOKENS_TO_CLEAR - 1
    assert sent() is None
    progress["a"] += 1
    assert sent() == "b"
    crash_count = recovery.crash_count("c")
    for name in ("b", "c"):
        recovery.remove(name)
    recovery.add_suspect("c~2", crash_count)
    assert sent() == "c~2", "a cancelled suspect lets the next one go"
    assert recovery.on_crash(progress.__getitem__) == ["c~2"]


_BAD_REQUEST = "cr"
"""Two crashes of one request; the engine that the first one ended had answered the canary request."""


@pytest.mark.parametrize(
    ("crashes", "pause", "stops_at"),
    [
        ("...", 1.0, 2),
        ("d..", 1.0, 2),
        ("d" * 50, 1.0, None),
        ("d." * 20, 1.0, None),
        ("." * 20, WINDOW_SECONDS / 2, None),
        ("...", WINDOW_SECONDS / 2 - 1, 2),
        ("dr" * 5 * MAX_FORGIVEN, 1.0, None),  # tokens for any client forgive all
        ("drrr", 1.0, 3),  # it refuses whatever it is sent
        (".r.r", 1.0, 3),  # it cannot even answer the canary request
        (".r" + _BAD_REQUEST * (MAX_FORGIVEN - 1), 0.5, None),
        (".r" + _BAD_REQUEST * MAX_FORGIVEN, 0.5, 2 * MAX_FORGIVEN + 1),  # it answers nothing else
        (".r" + _BAD_REQUEST * 50, WINDOW_SECONDS / MAX_FORGIVEN, None),
    ],
)
def test_an_engine_is_given_up_once_it_crashes_without_serving_any_client(
    crashes: str, pause: float, stops_at: int | None
) -> None:
    """A crash: d after tokens for clients, c after a canary answer, r when a request is refused for it, or none."""
    policy = RestartPolicy()
    verdicts = [
        policy.record(number * pause, delivered=one == "d", is_refused=one == "r", canary_answered=one == "c")
        for number, one in enumerate(crashes)
    ]
    assert next((number for number, is_over in enumerate(verdicts) if is_over), None) == stops_at
