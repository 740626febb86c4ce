"""Slots of one engine: how many requests it runs, how many more it is sent ahead, and how tenants share them."""

from __future__ import annotations

from dataclasses import dataclass

from app.common.fair_turns import may_hold
from app.common.types import Request
from app.engine_client.request_queue import prompt_tokens

_TENANT_FACTOR = 7
"""A tenant may hold seven times as many slots as are free: seven eighths if it is alone."""
_PREFETCHED_SHARE, _MAX_PREFETCHED = 4, 8
"""Requests that an engine has beyond those that it can run: a quarter as many, at most eight."""


@dataclass(slots=True)
class _Usage:
    slots: int = 0
    unread_tokens: int = 0
    """Prompt tokens of the requests that the engine has not started."""


_Group = tuple[str, bool]
"""Cache namespace, and whether the engine compiles the grammars of these requests, or has just compiled them."""


class EngineSlots:
    """Counts the requests that an engine has or will be sent again after a crash, by tenant.

    Requests whose grammars are being compiled are counted apart and take no capacity from others, since they take no
    part in the steps. Each operation takes constant time.
    """

    def __init__(self, max_running: int, step_prompt_tokens: int) -> None:
        """`step_prompt_tokens`: prompt tokens that the engine can start in one step."""
        self._max_running = max_running
        self._capacity = max_running + max(1, min(_MAX_PREFETCHED, max_running // _PREFETCHED_SHARE))
        self._step_prompt_tokens = step_prompt_tokens
        self._slots: dict[str, tuple[_Group, int]] = {}
        """By request id, with its unread tokens."""
        self._usage: dict[_Group, _Usage] = {}
        self.n_compiling = 0

    def has_capacity(self, request: Request) -> bool:
        """Whether the request may be sent now.

        With API keys, tenants share the slots by a dynamic threshold; the prefetch is for tenants that have nothing
        here. A tenant gets no further ahead than what the engine can start in one step: the requests that the engine
        has not started are in order of arrival, and others' turns must not wait for them.
        """
        n_taken = self.n_compiling if request.grammar else len(self._slots) - self.n_compiling
        if n_taken >= self._capacity:
            return False
        own = self._usage.get((request.cache_namespace, bool(request.grammar)))
        if own is None or not request.cache_namespace:
            return True
        return own.unread_tokens < self._step_prompt_tokens and may_hold(
            own.slots, 1, self._max_running - n_taken, factor=_TENANT_FACTOR
        )

    def hold(self, request: Request) -> None:
        """Takes a slot for a request that will be sent later."""
        self._put(request.id, (request.cache_namespace, False), 0)

    def take(self, request: Request) -> None:
        """Takes a slot, or the one that is held, for a request that is sent now."""
        self._put(request.id, (request.cache_namespace, bool(request.grammar)), prompt_tokens(request))

    def mark_started(self, request_id: str) -> None:
        """The engine has started the request: its grammar is compiled, and its prompt is being read."""
        if slot := self._slots.get(request_id):
            (cache_namespace, is_compiling), tokens = slot
            if is_compiling or tokens:
                self._put(request_id, (cache_namespace, False), 0)

    def hold_all(self) -> None:
        """The engine has lost its requests: they hold their slots until they are sent again."""
        for request_id in list(self._slots):
            self.mark_started(request_id)

    def release(self, request_id: str) -> None:
        """Frees the slot of a request, if it has one."""
        if slot := self._slots.pop(request_id, None):
            group, tokens = slot
            usage = self._usage[group]
            usage.slots -= 1
            usage.unread_tokens -= tokens
            self.n_compiling -= group[1]
            if not usage.slots:
                del self._usage[group]

    def _put(self, request_id: str, group: _Group, tokens: int) -> None:
        if request_id in self._slots:
            self.release(request_id)
        if (usage := self._usage.get(group)) is None:
            usage = self._usage[group] = _Usage()
        usage.slots += 1
        usage.unread_tokens += tokens
        self.n_compiling += group[1]
        self._slots[request_id] = group, tokens
