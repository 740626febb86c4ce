"""Guided decoding in the engine: masks against brute force, output against schemas, batch invariance."""

from __future__ import annotations

import itertools
import json
import random
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from app.common.types import FinishReason, Request, SampledEvent, SamplingParams
from app.engine.guided import grammar_tracker, token_masks
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.guided.grammar_workers import Job
from app.engine.sampling.sampled_token import MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan
from app.engine.scheduling.batch_plan import Sequence as EngineSequence
from app.guided.grammar import grammar_from
from model.nn.transformer import Decoder
from model.number_formats import Array
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import arm_this_process
from tests.support.engine.grammar_corpus import BOMBS, LEGITIMATE
from tests.support.engine.parity import expect_parity
from tests.support.model.tiny_models import TEXT, VOCAB, run_all, tiny_config, tiny_decoder, tiny_engine

TOKENIZER = Tokenizer.train([TEXT], VOCAB)
EOS = TOKENIZER.eos_id
assert EOS is not None
ALPHABET = ["a", "b", "/", "\u00e9"]
LONGEST = 5


def _tracker(bytes_of: Sequence[bytes] = TOKENIZER.bytes_of, vocab_size: int = VOCAB, most: int = 32) -> GrammarTracker:
    return GrammarTracker(lambda: bytes_of, vocab_size=vocab_size, max_states=most)


def _grammar(**fields: Any) -> str:
    grammar = grammar_from(*next(iter(fields.items())))
    assert grammar
    return grammar.lark


def _allowed(tracker: GrammarTracker, sequence: EngineSequence) -> Array | SampledToken | None:
    """The result of allowed() once the mask is ready."""
    while (allowed := tracker.allowed([sequence])[0]) is MASK_NOT_READY:
        tracker.wait(1.0)
    return allowed


def _ids(allowed_W: Array | SampledToken | None) -> set[int]:
    assert isinstance(allowed_W, np.ndarray)
    bits = allowed_W[:, None] >> np.arange(32) & 1
    return set(np.flatnonzero(bits).tolist())


def _random_regex(rng: random.Random, length: int) -> str:
    """A regex whose matches are at most `length` characters long."""
    if length <= 1 or rng.random() < 0.3:
        return rng.choice([*ALPHABET, "[ab]", "[\u00e9/]", "(?:)"])
    if rng.random() < 0.3:
        return f"(?:{_random_regex(rng, length)}|{_random_regex(rng, length)})"
    if rng.random() < 0.3:
        most = rng.randint(1, length)
        return f"(?:{_random_regex(rng, length // most)}){{{rng.randint(0, most)},{most}}}"
    first = rng.randint(1, length - 1)
    return _random_regex(rng, first) + _random_regex(rng, length - first)


@pytest.mark.parametrize("seed", range(40))
def test_token_is_allowed_exactly_where_a_match_can_continue_with_it(seed: int) -> None:
    """Brute force over all texts of ALPHABET; tokens of one to five bytes, duplicates, empty for special ones."""
    rng = random.Random(seed)
    regex = _random_regex(rng, LONGEST)
    every = ("".join(letters) for n in range(LONGEST + 1) for letters in itertools.product(ALPHABET, repeat=n))
    language = {text.encode() for text in every if re.fullmatch(regex, text)}
    prefixes = {text[:n] for text in language for n in range(len(text) + 1)}
    single = [b"a", b"b", b"/", b"\xc3", b"\xa9"]
    longer = ["".join(rng.choices(ALPHABET, k=rng.randint(1, 3))).encode() for _ in range(25)]
    bytes_of = [b"", *single, *longer, b"\xa9a", b"a\xc3", b"", b"a"]
    size = len(bytes_of) + 3  # the model's vocabulary is padded
    stop_ids = rng.choice([(0,), (0, 1), ()])
    request = Request(id="r", prompt=(0,), max_tokens=99, grammar=_grammar(regex=regex), stop_ids=stop_ids)
    for _ in range(4):
        tracker, sequence, text = (
            _tracker(bytes_of, size),
            EngineSequence(request=request, tokens=array("q", [0]), arrival=0),
            b"",
        )
        for _ in range(LONGEST * 2):
            allowed = _allowed(tracker, sequence)
            texts = {i for i, data in enumerate(bytes_of) if data and text + data in prefixes} - set(stop_ids)
            if not texts:
                assert isinstance(allowed, SampledToken)
                ending = FinishReason.STOP if text in language else None
                assert (allowed.finish, bool(allowed.failure)) == (ending, ending is None), (regex, text)
                break
            ends = set(stop_ids) if text in language else set()
            assert _ids(allowed) == texts | ends, (regex, text)
            token = rng.choice(sorted(texts))
            text += bytes_of[token]
            assert tracker.accept_tokens([sequence], [SampledToken(token)]) == [SampledToken(token)]
            sequence.tokens.append(token)


def _decoder() -> Decoder:
    return tiny_decoder(tiny_config(context=1024, n_layers=1))


def _requests(grammars: Sequence[str], max_tokens: int = 300) -> list[Request]:
    """With and without an end-of-text token; half of them with top_k, since a filter must not empty a mask."""
    return [
        Request(
            id=f"r{i}",
            prompt=(5, 6, 7 + i % 100),
            max_tokens=max_tokens,
            params=SamplingParams(temperature=1.0, seed=i, top_k=20 * (i % 2)),
            stop_ids=(EOS,) if i % 3 else (),
            grammar=grammar,
        )
        for i, grammar in enumerate(grammars)
    ]


def _text(events: Sequence[SampledEvent]) -> str:
    return b"".join(TOKENIZER.token_bytes(event.token) for event in events if event.token is not None).decode()


MIXED = [
    _grammar(
        json_schema={"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 8, "maxItems": 20}
    ),
    _grammar(regex="(?:[a-z ]{1,20}\\.\\n){2,5}"),
    "",
    _grammar(grammar='start: "(" start ")" | /[xyz]{1,30}/ | start "+" start'),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("step_seconds", [0.002, 0.0])
def test_scheduling_does_not_change_a_token(step_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes the case that all masks are late and no step waits for them: one state per waiting request is kept."""
    monkeypatch.setattr(grammar_tracker, "_STEP_SECONDS", step_seconds)
    requests = _requests(MIXED * 4, max_tokens=50)
    most = 3 if step_seconds else len(requests)
    expect_parity(_decoder(), requests, tight=13, guides=lambda: _tracker(most=most))


@pytest.mark.usefixtures("one_thread")
def test_engine_accepts_and_cancels_requests_while_all_wait_for_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = arm_this_process(tmp_path, monkeypatch)
    faults.arm("engine.mask", "sleep", seconds=1.0, times=1)
    engine = tiny_engine(_decoder(), guides=_tracker())
    slow, _, plain = _requests([MIXED[0], MIXED[1], ""], max_tokens=5)
    engine.add(slow)
    report = engine.step()
    assert engine.has_work and not report.events
    assert not engine.step().events, "the engine waits briefly and returns"
    engine.add(plain)
    while plain.id not in {event.request_id for event in engine.step().events}:
        assert not faults.is_armed("engine.mask") or not engine.scheduler.running[0].num_generated
    engine.cancel(slow.id)
    engine.runner.grammars.forget(slow.id)  # type: ignore[attr-defined]
    while engine.has_work:
        engine.step()
    assert engine.scheduler.pool.counts.active == 0


def test_grammar_time_is_reported_once_per_request() -> None:
    tracker = _tracker()
    engine = tiny_engine(_decoder(), guides=tracker)
    engine.add(Request(id="r", prompt=(1,), max_tokens=30, grammar=MIXED[0]))
    work: list[tuple[str, float]] = []
    while engine.has_work:
        engine.step()
        work += tracker.take_work()
    assert {name for name, _ in work} == {"r"} and 0 < sum(seconds for _, seconds in work) < 5
    assert len(work) < 15, "reported in sums, not for each token"
    assert tracker.take_work() == ()


def _followed(tracker: GrammarTracker, grammar: str, max_tokens: int) -> tuple[list[int], SampledToken]:
    """A random output, the worst case for a grammar, and how it ended."""
    rng, request = random.Random(1), Request(id="r", prompt=(0,), max_tokens=max_tokens, grammar=grammar)
    sequence = EngineSequence(request=request, tokens=array("q", [0]), arrival=0)
    while isinstance(allowed_W := _allowed(tracker, sequence), np.ndarray):
        token = rng.choice(sorted(_ids(allowed_W)))
        tracker.accept_tokens([sequence], [SampledToken(token)])
        sequence.tokens.append(token)
    assert isinstance(allowed_W, SampledToken) and not allowed_W.failure
    return sequence.tokens[1:], allowed_W


@pytest.mark.parametrize("name", LEGITIMATE)
def test_realistic_grammars_are_followed_for_300_tokens(name: str) -> None:
    field, value = LEGITIMATE[name]
    tokens, end = _followed(_tracker(), _grammar(**{field: value}), 300)
    text = TOKENIZER.decode(tokens)
    if end.finish is FinishReason.STOP and field == "regex":
        assert re.fullmatch(value, text)
    if end.finish is FinishReason.STOP and field == "json_schema":
        json.loads(text)


@pytest.mark.usefixtures("one_thread")
def test_grammar_is_compiled_once_despite_preemption_and_retried_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many matchers are kept as sequences may run, as in the service: compiling in a step would delay all others."""
    compiled, build = list[str](), GrammarTracker._build

    def count(self: GrammarTracker, request: Request, tokens: Sequence[int]) -> object:
        compiled.append(request.id)
        return build(self, request, tokens)

    monkeypatch.setattr(GrammarTracker, "_build", count)
    requests = _requests(MIXED * 4, max_tokens=50)
    engine = tiny_engine(_decoder(), blocks=30, guides=_tracker(most=32))
    honest = engine.runner.executor.run  # type: ignore[attr-defined]
    mishaps = iter([False, False, True] * 1000)

    def run(plan: BatchPlan) -> object:
        if len(plan.chunks) > 1 and next(mishaps):
            raise MemoryError
        return honest(plan)

    monkeypatch.setattr(engine.runner.executor, "run", run)  # type: ignore[attr-defined]
    run_all(engine, requests)
    assert engine.scheduler.preemptions > 3 and engine.isolation.retried_steps > 10
    assert sorted(compiled) == sorted(request.id for request in requests if request.grammar)


@pytest.mark.parametrize(
    ("regex", "tokens", "finish"), [("[ab]{3}", 3, FinishReason.STOP), ("[ab]*", 20, FinishReason.LENGTH)]
)
def test_output_without_an_end_token_ends_with_its_grammar_or_max_tokens(
    regex: str, tokens: int, finish: FinishReason
) -> None:
    request = Request(id="r", prompt=(1,), max_tokens=20, grammar=_grammar(regex=regex))
    events = run_all(tiny_engine(_decoder(), guides=_tracker()), [request])["r"]
    assert [event.token is None for event in events] == [False] * tokens + [True]
    assert (events[-1].finish, re.fullmatch(regex, _text(events)) is not None) == (finish, True)


@pytest.mark.parametrize(
    ("grammar", "seconds", "message"),
    [
        (_grammar(regex="\u00e9+"), 0.5, "none of this model's tokens"),
        (_grammar(regex="a\u00e9"), 0.5, "none of this model's tokens"),
        ("start: nothing", 0.5, "too complex"),
        (_grammar(json_schema={"type": "object", "properties": {f"p{i}": {} for i in range(400)}}), 0.5, "too complex"),
        (BOMBS["ambiguous words"].value, 0.001, "of CPU time"),
    ],
)
def test_unusable_grammar_fails_only_its_request(
    grammar: str, seconds: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes a grammar that takes more than its share of time."""
    monkeypatch.setattr(token_masks, "_REQUEST_SECONDS", seconds)
    monkeypatch.setattr(token_masks, "_TOKEN_SECONDS", 0.0)
    bytes_of = [b"" if "\u00e9".encode()[:1] in data else data for data in TOKENIZER.bytes_of]
    engine = tiny_engine(_decoder(), blocks=200, guides=_tracker(bytes_of))
    engine.add(Request(id="bad", prompt=(1,), max_tokens=400, grammar=grammar))
    good = Request(id="good", prompt=(2,), max_tokens=30)
    engine.add(good)
    reports = [engine.step() for _ in iter(lambda: engine.has_work, False)]
    (failed,) = [failure for report in reports for failure in report.failed]
    assert failed.request_id == "bad" and failed.is_user_error and message in failed.message
    tokens = [event for report in reports for event in report.events if event.request_id == "good"]
    assert tokens == run_all(tiny_engine(_decoder()), [good])["good"]
    assert engine.scheduler.pool.counts.active == 0


def _kept(tracker: GrammarTracker) -> int:
    return len(tracker._states) + len(tracker._prepared)


@pytest.mark.parametrize("end", ["stop", "length", "cancel"])
def test_state_of_finished_requests_is_released(end: str) -> None:
    tracker = _tracker()
    engine = tiny_engine(_decoder(), guides=tracker)
    regex = "a{4}" if end == "stop" else "a*"
    request = Request(id="r", prompt=(1,), max_tokens=6, grammar=_grammar(regex=regex), stop_ids=(0,))
    tracker.prepare(request)
    engine.add(request)
    engine.step()
    assert _kept(tracker) == 1
    if end == "cancel":
        engine.cancel("r")
        tracker.forget("r")
    while engine.has_work:
        engine.step()
    assert _kept(tracker) == 0


def test_number_of_kept_matchers_is_bounded() -> None:
    tracker = _tracker(most=4)
    for request in _requests([_grammar(regex="a*")] * 9):
        _allowed(tracker, EngineSequence(request=request, tokens=array("q", request.prompt), arrival=0))
    assert _kept(tracker) == 4


_A = TOKENIZER.encode("a")[0]


class _ManualWorkers:
    """Runs submitted jobs when the test asks for it."""

    n_spare_cores = 0

    def __init__(self) -> None:
        self.queued: list[Job] = []

    def submit(self, job: Job) -> None:
        if job not in self.queued:
            self.queued.append(job)

    def run_queued(self) -> None:
        while self.queued:
            self.run_here(self.queued.pop())

    def run_here(self, job: Job) -> None:
        job.work()
        job.done = True

    def cancel(self, job: Job) -> bool:
        self.queued = [each for each in self.queued if each is not job]
        return True

    def wait(self, jobs: Iterable[Job], seconds: float) -> None: ...


def _sequence(name: str, namespace: str, grammar: str = "start: /a*/") -> EngineSequence:
    request = Request(id=name, prompt=(1,), max_tokens=9, grammar=grammar, cache_namespace=namespace)
    return EngineSequence(request=request, tokens=array("q", [1]), arrival=0)


def _shared(count: int, *others: EngineSequence, mask_seconds: float) -> tuple[Any, Any, list[EngineSequence]]:
    """Rows of one tenant with their first masks, as if each had taken this much CPU; they share the tracker."""
    workers, costly = _ManualWorkers(), [_sequence(f"costly {i}", "costly") for i in range(count)]
    tracker = GrammarTracker(lambda: TOKENIZER.bytes_of, vocab_size=VOCAB, max_states=16, workers=workers)  # type: ignore[arg-type]
    for sequence in (*costly, *others):
        if sequence.request.grammar:
            tracker.prepare(sequence.request)
    workers.run_queued()
    tracker.allowed([*costly, *others])
    for state in tracker._states.values():
        state.is_slow, state.mask_seconds = False, mask_seconds
    return tracker, workers, costly


@pytest.mark.parametrize("grammar", ["start: /a*/", ""])
def test_rows_with_masks_too_costly_for_a_shared_step_wait(grammar: str) -> None:
    other = _sequence("other", "other", grammar)
    tracker, workers, costly = _shared(6, other, mask_seconds=0.0003)
    tracker.allowed([*costly, other])
    tracker.accept_tokens([*costly, other], [SampledToken(_A)] * 7)
    assert tracker.must_wait(costly) == [True] * 6
    assert tracker.must_wait([other]) == [False], "its mask is cheap enough for the step"
    # A step without the costly's rows changes nothing; they only wait.
    tracker.allowed([other])
    assert tracker.must_wait(costly) == [True] * 6
    workers.run_queued()
    assert tracker.must_wait(costly) == [False] * 6


def test_shared_steps_take_turns_with_rows_of_a_costly_tenant() -> None:
    tracker, _, costly = _shared(6, mask_seconds=0.0004)
    other = _sequence("other", "other")
    assert tracker.must_wait(costly) == [False] * 6, "a tenant alone shares its steps with no other tenant"
    tracker.allowed([other])
    turns = []
    for _ in range(4):
        step = [sequence for sequence, waits in zip(costly, tracker.must_wait(costly), strict=True) if not waits]
        tracker.allowed([*step, other])
        turns.append([costly.index(sequence) for sequence in step])
    assert turns == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]], "three masks of 0.4 ms reach the limit of 1 ms"


def test_deferred_mask_is_computed_when_its_row_waits() -> None:
    """Otherwise the row would wait for a mask that no thread computes."""
    tracker, workers, costly = _shared(3, mask_seconds=0.0)
    tracker.accept_tokens(costly, [SampledToken(_A)] * 3)
    assert not workers.queued, "a tenant alone computes cheap masks in its steps"
    assert isinstance(tracker.allowed(costly[1:2])[0], np.ndarray)
    for state in tracker._states.values():
        state.is_slow, state.mask_seconds = False, 0.0009
    tracker.allowed([*costly[:1], _sequence("other", "other", "")])
    assert tracker.must_wait(costly)[2]
    workers.run_queued()
    assert not tracker.must_wait(costly[2:])[0]


def test_grammar_time_is_limited_by_tokens_and_reported_in_sums() -> None:
    tracker, workers, costly = _shared(2, mask_seconds=0.0)
    states = [tracker._states[sequence.request.id] for sequence in costly]
    states[0].consumed = 250
    assert [state.budget for state in states] == pytest.approx([1.0, 0.5])
    states[0].seconds = states[0].reported = 1.0
    reported = []
    for seconds in (0.02, 0.005, 0.006):
        states[0].seconds += seconds
        reported.append([round(more, 3) for name, more in tracker.take_work() if name == "costly 0"])
    assert reported == [[0.02], [], [0.011]]
    tracker.prepare(replace(costly[0].request, id="late"))
    tracker.forget("late")
    assert not workers.queued, "the job of a cancelled request never runs"


def test_masks_of_tenants_are_computed_in_turns() -> None:
    jobs = [Job(tenant, lambda: None) for tenant in "aaabbc"]
    assert [job.tenant for job in grammar_tracker._in_turns(jobs)] == list("abcaba")


class _Clock:
    """Stands in for the module `time`; a test moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now


class _TimedWorkers(_ManualWorkers):
    """Each job that the step runs takes 0.6 ms; records what the step waits for."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock
        self.n_run_here = 0
        self.waits: list[tuple[int, float]] = []
        """(jobs, seconds) of each call."""

    def run_here(self, job: Job) -> None:
        super().run_here(job)
        self.n_run_here += 1
        self._clock.now += 0.0006

    def wait(self, jobs: Iterable[Job], seconds: float) -> None:
        self.waits.append((len(list(jobs)), round(seconds, 6)))


@pytest.mark.parametrize(("tenants", "computed", "left"), [("aaaaaa", (4, 0), 0.0014), ("aaaaab", (2, 2, 0), 0.0004)])
def test_a_step_computes_masks_within_its_time_and_stops_waiting_after_an_overrun(
    tenants: str, computed: tuple[int, ...], left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 ms for one tenant, 1 ms while several share the engine. A job that has begun is finished, in 0.6 ms, and a
    step that overran its time leaves less to the steps after it."""
    clock = _Clock()
    monkeypatch.setattr(grammar_tracker, "time", clock)
    workers = _TimedWorkers(clock)
    tracker = GrammarTracker(lambda: TOKENIZER.bytes_of, vocab_size=VOCAB, max_states=16, workers=workers)  # type: ignore[arg-type]
    rows = [_sequence(f"r{i}", tenant) for i, tenant in enumerate(tenants)]
    for step, count in enumerate(computed):
        workers.n_run_here = 0
        allowed = tracker.allowed(rows)
        assert workers.n_run_here == count
        assert sum(isinstance(mask, np.ndarray) for mask in allowed) == sum(computed[: step + 1])
    assert workers.waits == [(0, 0.0)] * (len(computed) - 1), "the last step has no time left to wait"
    tracker.wait(1.0)
    assert workers.waits[-1] == (1, 1.0), "the engine waits for one mask, not for all"
    clock.now += 1.0
    tracker.allowed([_sequence("late", tenants[0])])
    assert workers.waits[-1] == (0, pytest.approx(left)), "the rest of the step's time after one mask"
