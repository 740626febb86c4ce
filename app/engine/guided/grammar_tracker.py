"""Grammar states of running requests: which tokens each may sample next. Masks are computed outside the steps.

    step n       forward | sample token n -> accept_tokens(): consume it and compute mask n+1 in a worker thread
    step n+1     forward (meanwhile)      -> allowed(): mask n+1, or MASK_NOT_READY: the step skips the row

Drafts are cut to what the grammar allows before the step (allow_drafts()); a job computes the masks after each of them
meanwhile, and rolls the grammar back. What drafts cost is work of the request, and counts against none of its limits:
if a grammar that consumed drafts fails, its state is built again from the text, and the request gets no more drafts.

The mask also shows whether more text can follow, so a text ends with the row after its last token, which samples
nothing. A state is valid for a sequence if it has consumed exactly the generated tokens; otherwise it is rebuilt.
GrammarTracker owns the states of all running requests (app/engine/guided/token_masks.py).

Shape legend: S rows, W words of 32 bits, one bit for each token of the model and one for the end of the text.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from msgspec.structs import replace

from app.common.types import Request
from app.engine.guided.grammar_workers import GrammarWorkers, Job
from app.engine.guided.token_masks import GrammarMasks, GrammarState
from app.engine.sampling.sampled_token import MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import Sequence
from model.number_formats import Array

_log = logging.getLogger("inkstream")
_STEP_SECONDS, _SHARED_STEP_SECONDS = 0.002, 0.001
"""Time that a step may spend on masks of its rows that are not ready when it needs them: less while several tenants
share the engine."""
_LOST_SHARE = 0.02
"""Share of time that steps may lose to overruns and timeouts; after losing more, they stop waiting for a while."""
_LEAST_MASK_SECONDS = 2e-5
_DRAFT_SECONDS = 0.004
"""How long a step waits for the masks of its drafts."""
_REPORT_SECONDS = 0.01


class GrammarTracker:
    """Owns the grammar states of running requests. Only the engine's thread calls it."""

    def __init__(
        self,
        load_token_bytes: Callable[[], Items[bytes]],
        *,
        vocab_size: int,
        max_states: int,
        workers: GrammarWorkers | None = None,
    ) -> None:
        """The first grammar calls `load_token_bytes`; at most `max_states` states of running requests are kept."""
        self._masks = GrammarMasks(load_token_bytes, vocab_size)
        self._max_states = max_states
        self._workers = workers or GrammarWorkers()
        self._states: OrderedDict[str, GrammarState] = OrderedDict()
        self._prepared: dict[str, GrammarState] = {}
        self._work: dict[str, float] = {}
        self._background: set[str] = set()
        """Tenants whose masks are computed by threads alone."""
        self._is_shared = False
        """Whether several tenants shared the last step."""
        self._draft_budget = 0.0
        """Seconds that masks of drafts may still take in the next step."""
        self._wait_budget = _STEP_SECONDS
        self._wait_budget_at = time.monotonic()

    def prepare(self, request: Request) -> Job:
        """Starts to compile the request's grammar and to compute its first mask."""
        state = self._prepared[request.id] = self._build(request, request.generated)
        assert state.job is not None
        return state.job

    @property
    def n_prepared(self) -> int:
        """Number of states of requests that have not started."""
        return len(self._prepared)

    def forget(self, request_id: str) -> None:
        """Drops the states of a request, if there are any."""
        for states in (self._states, self._prepared):
            if state := states.pop(request_id, None):
                self._release(state)

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """Returns and resets unreported CPU seconds by request: of ended requests, and above a minimum."""
        for request_id, state in self._states.items():
            is_busy = state.is_pending or state.is_drafting
            if not is_busy and state.seconds + state.draft_seconds - state.reported >= _REPORT_SECONDS:
                self._record_work(request_id, state)
        work, self._work = tuple(self._work.items()), {}
        return work

    def must_wait(self, sequences: Items[Sequence]) -> list[bool]:
        """Whether the next step leaves out each sequence: its mask is late or likely to be, or its turn is later.

        A step takes no more rows of a tenant whose masks come from the threads than cost them a shared step's time, the
        least recently sampled first: costly grammars fill no batch in which other tenants wait for their tokens.
        """
        if not self._states:
            return [False] * len(sequences)
        # While tenants share the steps, a tenant's drafts must not take the time of another's tokens.
        self._draft_budget = 0.0 if self._is_shared and not self._workers.n_spare_cores else _STEP_SECONDS
        states = {sequence.request.id: self._states.get(sequence.request.id) for sequence in sequences}
        waits = {request_id for request_id, state in states.items() if state and self._is_left_out(state)}
        seconds: dict[str, float] = defaultdict(float)
        for request_id, state in self._states.items():  # the least recently sampled first
            if request_id in states and request_id not in waits and self._is_in_background(state):
                tenant = state.request.cache_namespace
                if seconds[tenant] >= _SHARED_STEP_SECONDS:
                    waits.add(request_id)
                seconds[tenant] += state.mask_seconds
        return [sequence.request.id in waits for sequence in sequences]

    def wait(self, seconds: float) -> None:
        """Waits for the next mask; called while the engine is otherwise idle."""
        pending = [state.job for state in self._states.values() if state.is_pending and state.job]
        self._workers.wait(pending[:1], seconds)

    def allowed(self, sequences: Items[Sequence]) -> list[Array | SampledToken | None]:
        """For each sequence the [W] bitmask of tokens that its grammar allows next, on the CPU, or None for all tokens.

        A SampledToken instead means that no token is to be sampled: the mask is not ready, the text has ended, or the
        grammar cannot be followed. Raises the error of a failed job.
        """
        states = [self._state_of(sequence) if _is_guided(sequence) else None for sequence in sequences]
        while len(self._states) > max(self._max_states, len(sequences)):
            self._release(self._states.popitem(last=False)[1])
        guided = [state for state in states if state]
        is_shared = self._share_steps({sequence.request.cache_namespace for sequence in sequences})
        self._wait_for(guided, _SHARED_STEP_SECONDS if is_shared else _STEP_SECONDS)
        self._masks.read([state for state in guided if not state.is_pending and state.outcome is None])
        return [
            self._outcome_for(sequence, state) if state else None
            for sequence, state in zip(sequences, states, strict=True)
        ]

    def allow_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The drafts up to the first one that the grammar does not allow, and none if its mask is late or costly.

        All masks of a step's drafts may take as long as it may wait for masks. must_wait() comes before.
        The masks of the rows after them are computed from now on, for allowed_after().
        """
        state = self._states.get(sequence.request.id)
        if state is None or state.request is not sequence.request or state.consumed != sequence.num_generated:
            return ()
        if not self._end_drafts(sequence, state):
            return ()
        if state.is_slow or self._is_in_background(state):
            return ()
        if state.is_pending:
            self._wait_for([state], _SHARED_STEP_SECONDS)
        if state.is_pending or (state.job and state.job.error):
            return ()
        if state.outcome is None:
            self._masks.read([state])
        if state.problem or state.outcome is None or isinstance(state.outcome, SampledToken):
            return ()
        cost = max(state.mask_seconds, _LEAST_MASK_SECONDS)
        drafts = drafts[: int(self._draft_budget / cost)]
        if not drafts:
            return ()
        self._draft_budget -= len(drafts) * cost
        state.has_drafted = True
        try:
            state.drafts = self._masks.allowed_drafts(state, drafts)
        except BaseException:  # a panic in Rust is not an Exception; without drafts it concerns this request alone
            _log.exception("request %s: its grammar cannot check drafts", sequence.request.id)
            self._give_up_drafts(sequence)
            return ()
        if state.drafts:
            tenant = state.request.cache_namespace
            state.draft_job = Job(tenant, partial(self._masks.advance_drafts, state))
            if self._workers.n_spare_cores:
                self._workers.submit(state.draft_job)
        return state.drafts

    def allowed_after(self, sequence: Sequence, drafts: tuple[int, ...]) -> Items[Array | SampledToken | None]:
        """For the row of each draft what allowed() returns, which is called first. MASK_NOT_READY drops the rows."""
        if not _is_guided(sequence):
            return [None] * len(drafts)
        state = self._states.get(sequence.request.id)
        if state is None or state.draft_job is None or state.drafts[: len(drafts)] != drafts:
            return [MASK_NOT_READY] * len(drafts)
        self._workers.run_here(state.draft_job)
        if not self._end_drafts(sequence, state):
            return [MASK_NOT_READY] * len(drafts)
        return self._masks.read_drafts(state)[: len(drafts)]

    def accept_drafts(
        self, sequence: Sequence, drafts: tuple[int, ...], rows: Items[SampledToken]
    ) -> tuple[SampledToken, ...]:
        """Does what accept_tokens() does for the rows of one sequence, up to the first that differs from its draft."""
        accepted = next((i for i, draft in enumerate(drafts) if rows[i].token != draft), len(drafts))
        kept = [row for row in rows[: accepted + 1] if row.token is not None]
        if not _is_guided(sequence) or not kept:
            return tuple(rows)
        ends_after = len(kept) <= accepted and rows[len(kept)] is not MASK_NOT_READY
        if ends_after or kept[-1].token in sequence.request.stop_ids:
            self.forget(sequence.request.id)
            return tuple(rows)
        return (*self._advance(sequence, kept), *rows[len(kept) :])

    def accept_tokens(self, sequences: Items[Sequence], sampled: Items[SampledToken]) -> list[SampledToken]:
        """Starts to compute the next masks; returns the tokens, marked undecided where they reach max_tokens."""
        if not self._states:
            return [*sampled]
        return [
            self._accept_token(sequence, result) if _is_guided(sequence) else result
            for sequence, result in zip(sequences, sampled, strict=True)
        ]

    def _accept_token(self, sequence: Sequence, result: SampledToken) -> SampledToken:
        if result.token is None or result.token in sequence.request.stop_ids:
            self.forget(sequence.request.id)
            return result
        return self._advance(sequence, (result,))[-1]

    def _advance(self, sequence: Sequence, rows: Items[SampledToken]) -> tuple[SampledToken, ...]:
        """Lets the grammar consume tokens, none of which ends the text; marks the last one if it reaches max_tokens.

        Without a state, the next step builds one from the text.
        """
        state = self._states.get(sequence.request.id)
        if state and self._end_drafts(sequence, state):
            state.consumed += len(rows)
            state.outcome = None
            self._submit(state, tuple(row.token for row in rows if row.token is not None))
        is_undecided = sequence.num_generated + len(rows) >= sequence.request.max_tokens
        return (*rows[:-1], replace(rows[-1], is_undecided=is_undecided))

    def _end_drafts(self, sequence: Sequence, state: GrammarState) -> bool:
        """Ends the job of the state's drafts, if there is one; False if its matcher cannot be used any more.

        The step may have gone on without the drafts: for lack of a block, or because it failed.
        """
        job, state.draft_job = state.draft_job, None
        if job is None or self._workers.cancel(job):
            return True
        self._workers.wait([job], _DRAFT_SECONDS)
        if job.done and not job.error and state.draft_masks_KW is not None:
            return True
        self._give_up_drafts(sequence)
        return False

    def _give_up_drafts(self, sequence: Sequence) -> None:
        """Drops the state, which later steps build again from the text, and all further drafts of the request."""
        sequence.may_speculate = False
        self.forget(sequence.request.id)

    def _state_of(self, sequence: Sequence) -> GrammarState:
        request = sequence.request
        if prepared := self._prepared.pop(request.id, None):
            self._states[request.id] = prepared
        state = self._states.get(request.id)
        if state is None or state.request is not request or state.consumed != sequence.num_generated:
            self.forget(request.id)
            state = self._build(request, sequence.tokens[len(request.prompt) :])
            self._states[request.id] = state
        self._states.move_to_end(request.id)
        return state

    def _build(self, request: Request, tokens: Items[int]) -> GrammarState:
        state = self._masks.new_state(request, len(tokens))
        self._submit(state, tuple(tokens))
        return state

    def _submit(self, state: GrammarState, tokens: tuple[int, ...]) -> None:
        """Submits the next job. If cores are scarce, a probably cheap mask is left to the step that needs it."""
        is_compile, state.is_late = state.matcher is None, False
        state.job = Job(state.request.cache_namespace, partial(self._masks.advance, state, tokens), is_long=is_compile)
        if is_compile or state.is_slow or self._is_in_background(state) or self._workers.n_spare_cores:
            self._workers.submit(state.job)

    def _share_steps(self, tenants: set[str]) -> bool:
        """Whether several tenants share the engine: in this step, or with rows that sit it out.

        If so, a tenant whose masks cost more than a step may spend gets them from the threads alone, and its rows sit
        out until then: no other tenant's next token waits for them.
        """
        seconds: dict[str, float] = defaultdict(float)
        for state in self._states.values():
            seconds[state.request.cache_namespace] += 0.0 if state.is_slow else state.mask_seconds
        is_shared = self._is_shared = len(tenants | set(seconds)) > 1
        self._background = {tenant for tenant, cost in seconds.items() if is_shared and cost > _SHARED_STEP_SECONDS}
        return is_shared

    def _is_left_out(self, state: GrammarState) -> bool:
        if not state.is_pending:
            return False
        if self._is_in_background(state):
            assert state.job
            self._workers.submit(state.job)  # it was left to a step that the row sits out
            return True
        return state.is_slow or state.is_late

    def _is_in_background(self, state: GrammarState) -> bool:
        return state.request.cache_namespace in self._background

    def _wait_for(self, states: Items[GrammarState], seconds: float) -> None:
        """Spends at most `seconds` on masks that are probably cheap: computes those that no thread has started, a
        tenant's first before another's second, and waits for the others."""
        pending = [state for state in states if state.is_pending]
        expected = _in_turns([state.job for state in pending if state.job and not state.is_slow])
        now = time.monotonic()
        self._wait_budget = min(_STEP_SECONDS, self._wait_budget + (now - self._wait_budget_at) * _LOST_SHARE)
        self._wait_budget_at = now
        if expected and self._wait_budget > 0:
            spent, started = 0.0, time.thread_time()  # CPU time: other load on the cores makes no mask expensive
            for job in expected:
                if spent < seconds:
                    self._workers.run_here(job)
                    spent = time.thread_time() - started
            self._workers.wait([job for job in expected if job.has_started], max(0.0, seconds - spent))
            has_timed_out = not all(job.done for job in expected)
            self._wait_budget -= max(0.0, spent - seconds) + seconds * has_timed_out
        for state in pending:
            if state.is_pending and state.job:
                state.is_late = True
                self._workers.submit(state.job)

    def _outcome_for(self, sequence: Sequence, state: GrammarState) -> Array | SampledToken:
        if state.problem and state.has_drafted:
            self._give_up_drafts(sequence)
            return MASK_NOT_READY
        if state.outcome is None:
            return MASK_NOT_READY
        if isinstance(state.outcome, SampledToken):  # it ends the request
            self.forget(state.request.id)
        return state.outcome

    def _release(self, state: GrammarState) -> None:
        if state.is_pending:
            assert state.job is not None
            self._workers.cancel(state.job)
        self._record_work(state.request.id, state)

    def _record_work(self, request_id: str, state: GrammarState) -> None:
        seconds = state.seconds + state.draft_seconds
        if seconds > state.reported:
            self._work[request_id] = self._work.get(request_id, 0.0) + seconds - state.reported
            state.reported = seconds


def _is_guided(sequence: Sequence) -> bool:
    return bool(sequence.request.grammar) and sequence.request.max_tokens > 0


def _in_turns(jobs: Items[Job]) -> list[Job]:
    """The first job of each tenant, then the second of each: a tenant with costly jobs is not among them."""
    numbers: Counter[str] = Counter()
    order = []
    for job in jobs:
        numbers[job.tenant] += 1
        order.append((numbers[job.tenant], job))
    return [job for _, job in sorted(order, key=lambda entry: entry[0])]
