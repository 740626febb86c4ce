"""GPU steps emulated on the CPU: the same tokens as the torch backend at both depths, captured or not, in any batch."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable
from dataclasses import replace as replace_config
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.common.types import Request, SampledEvent, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.cuda_capture import CudaCapture
from app.engine.gpu.executor import DeviceExecutor
from app.engine.gpu.format_support import describe_unsupported
from app.engine.gpu.resident_batch import ResidentBatch
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.transfers import Download
from app.engine.gpu.triton_loader import triton_kernels
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.scheduler import StepLimits
from app.engine.startup_checks import check_batch_invariance
from app.guided.grammar import grammar_from
from benchmarks.gpu.reference_kernels import ReferenceKernels
from model.config import LayerKind, ModelConfig
from model.nn.transformer import Decoder
from tests.engine.execution.test_parity import _requests
from tests.engine.execution.test_parity_switches import _requests as _few_requests
from tests.support.engine.mixed_requests import serve
from tests.support.gpu.emulated_engine import tiny_device_engine, tiny_device_runner
from tests.support.gpu.kernel_backends import DEVICE, needs_triton
from tests.support.model.random_configs import random_config
from tests.support.model.tiny_models import (
    ROPE,
    least_counts,
    mixture_config,
    run_all,
    tiny_config,
    tiny_decoder,
    tiny_engine,
)

pytestmark = pytest.mark.slow

CLOSE = 1e-3
DEPTHS = [0, 1]
Events = dict[str, list[SampledEvent]]


def _assert_same_outputs(some: Events, others: Events) -> None:
    """Asserts equal tokens, and log-probabilities equal up to another order of sums."""
    assert some.keys() == others.keys()
    for name, events in some.items():
        assert [(e.token, e.finish) for e in events] == [(e.token, e.finish) for e in others[name]], name
        for one, other in zip(events, others[name], strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert abs(one.logprob - other.logprob) < CLOSE, name
            assert len(one.top) == len(other.top)
            assert all(abs(a[1] - b[1]) < CLOSE for a, b in zip(one.top, other.top, strict=True)), name


_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "item", "_unique2")
"""Operations that wait for the device: the host decides by their result, or a shape depends on it."""


class RecordingMode(TorchDispatchMode):
    """Emulates a CUDA graph without CUDA: records the operations of a step with their tensors.

    `replay` repeats them without the Python code of the step: what the host decided or read during the recording
    stays as it was. Reading a value of the device during the recording is an error, as with CUDA.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in _READS, f"the host waits for the device in {name}"
        if name == "index":
            indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
            assert not any(t.dtype == torch.bool for t in indices), "the shape depends on a mask"
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in given]
        self._seen.append((func, args, kwargs or {}, fresh if len(fresh) == len(made) else []))
        return result

    def replay(self) -> None:
        """Repeats the operations on the same tensors."""
        for func, args, kwargs, fresh in self._seen:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, new in zip(fresh, again, strict=False):
                old.copy_(new)


def _recorded(work: Callable[[], None], replayed: list[bool]) -> Callable[[], None]:
    """A `Capture` of app/engine/gpu/cuda_capture.py that counts the replays."""
    with RecordingMode() as watch:
        work()
    return lambda: (replayed.append(True), watch.replay())[1]


@pytest.fixture(scope="module")
def outputs() -> Events:
    return run_all(tiny_engine(tiny_decoder(), blocks=400), _requests(16, seed=1))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "limits",
    [{"blocks": 400}, {"blocks": 22}, {"blocks": 200, "tokens_per_step": 20, "max_running": 4}],
    ids=["together", "preempted", "in pieces"],
)
def test_device_samples_the_tokens_of_the_torch_backend(depth: int, limits: dict[str, int], outputs: Events) -> None:
    engine = tiny_device_engine(tiny_decoder(), depth=depth, **limits)
    drawn = run_all(engine, _requests(16, seed=1))
    assert (engine.scheduler.preemptions > 0) == (limits["blocks"] == 22)
    _assert_same_outputs(drawn, outputs)


@pytest.mark.parametrize("depth", DEPTHS)
def test_captured_step_reads_nothing_on_the_host_and_samples_the_same(depth: int, outputs: Events) -> None:
    replayed, decoder = list[bool](), tiny_decoder()
    capture = partial(_recorded, replayed=replayed)
    engine = tiny_device_engine(decoder, depth=depth, blocks=400, max_running=8, capture=capture)
    _assert_same_outputs(run_all(engine, _requests(16, seed=1)), outputs)
    assert len(replayed) > 50


@needs_triton
def test_triton_samples_the_tokens_of_the_torch_backend() -> None:
    requests = [replace(r, prompt=r.prompt[-30:], max_tokens=min(5, r.max_tokens)) for r in _requests(3, seed=1)]
    wanted = run_all(tiny_engine(tiny_decoder()), requests)
    found = triton_kernels()
    assert found and found.numerics.startswith("triton-3.")
    decoder = tiny_decoder().to(DEVICE)
    engine = tiny_device_engine(decoder, max_running=2, tokens_per_step=40, kernels=found.kernels)
    for name, events in run_all(engine, requests).items():
        assert [event.token for event in events] == [event.token for event in wanted[name]]


MIXTURES: dict[str, ModelConfig] = {
    "as gpt-oss": replace_config(
        mixture_config(score="softmax_of_chosen", router_bias=True, bias=True), sinks=True, activation="swiglu_clamped"
    ),
    "as Qwen3": mixture_config(normalized=True),
    "sigmoid, shared": mixture_config(score="sigmoid", choice_bias=True, factor=2.5, shared_width=33),
}


@needs_triton
@pytest.mark.parametrize("name", MIXTURES)
def test_triton_samples_the_tokens_of_the_torch_backend_with_experts(name: str) -> None:
    """Without a GPU the warm-up takes most of the time in Triton's interpreter."""
    config = replace_config(MIXTURES[name], n_layers=1 if DEVICE == "cpu" else 2)
    requests = [replace(r, prompt=r.prompt[:21], max_tokens=3) for r in _long_requests()[:2]]
    requests = [replace(r, params=SamplingParams(temperature=0)) for r in requests]
    wanted, found = run_all(tiny_engine(tiny_decoder(config)), requests), triton_kernels()
    assert found
    decoder, sizes = tiny_decoder(config).to(DEVICE), {"max_running": 4, "tokens_per_step": 40}
    engine = tiny_device_engine(decoder, kernels=found.kernels, is_warmed_up=DEVICE == "cuda", **sizes)
    for name, events in run_all(engine, requests).items():
        assert [event.token for event in events] == [event.token for event in wanted[name]]


@pytest.mark.parametrize("name", MIXTURES)
def test_captured_experts_read_nothing_on_the_host_and_sample_the_same(name: str) -> None:
    replayed, decoder = list[bool](), tiny_decoder(MIXTURES[name])
    capture, requests = partial(_recorded, replayed=replayed), _requests(8, seed=1)
    engine = tiny_device_engine(decoder, blocks=400, max_running=8, capture=capture)
    _assert_same_outputs(run_all(engine, requests), run_all(tiny_engine(decoder, blocks=400), requests))
    assert len(replayed) > 20


WINDOWS: dict[str, tuple[int | None, ...]] = {"as Mistral": (24,), "two groups": (24, None)}


def _windowed(windows: tuple[int | None, ...]) -> Decoder:
    kinds = tuple(LayerKind(window=window, rope=ROPE) for window in windows)
    return tiny_decoder(tiny_config(layer_kinds=kinds, layer_types=(0, 1) if len(kinds) > 1 else ()))


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_released_blocks_of_windows_change_nothing(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks, which go to other sequences, against many that are kept until the sequence ends."""
    decoder, requests = _windowed(windows), _long_requests()
    sizes: dict[str, Any] = {"blocks": 14, "tokens_per_step": 50, "max_running": 4, "capture": lambda work: work}
    engine = tiny_device_engine(decoder, **sizes)
    ours = run_all(engine, requests)
    assert (None in windows) == (engine.scheduler.preemptions > 0)
    assert engine.scheduler.pools[0].counts.active == 0
    for blocks, sequences in ((14, 1), (60, 3)) if len(windows) > 1 else ():
        counts = least_counts(decoder.config, blocks, 16, sequences=sequences)
        narrow = tiny_device_engine(decoder, **{**sizes, "blocks": counts})
        _assert_same_outputs(run_all(narrow, requests), ours)
    monkeypatch.setattr(BlockAllocator, "release_before", lambda *_: None)
    kept = tiny_device_engine(decoder, **{**sizes, "blocks": 200})
    _assert_same_outputs(run_all(kept, requests), ours)


def _long_requests() -> list[Request]:
    return [
        Request(
            id=f"r{i}", prompt=tuple(range(1 + i, 61 + i)), max_tokens=60, params=SamplingParams(seed=i, logprobs=2)
        )
        for i in range(4)
    ]


@needs_triton
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_triton_samples_the_tokens_of_the_torch_backend_with_windows(windows: tuple[int | None, ...]) -> None:
    """The blocks that a sequence has passed serve the next one.

    Without a GPU the warm-up takes most of the time in Triton's interpreter; the test above has one.
    """
    requests = [replace(r, max_tokens=8, params=SamplingParams(temperature=0)) for r in _long_requests()[:2]]
    wanted = run_all(tiny_engine(_windowed(windows)), requests)
    found = triton_kernels()
    assert found
    decoder, sizes = _windowed(windows).to(DEVICE), {"blocks": 7, "max_running": 2, "tokens_per_step": 40}
    engine = tiny_device_engine(decoder, kernels=found.kernels, is_warmed_up=DEVICE == "cuda", **sizes)
    for name, events in run_all(engine, requests).items():
        assert [event.token for event in events] == [event.token for event in wanted[name]]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, where torch raises on synchronization")
def test_launches_do_not_synchronize_with_cuda() -> None:
    """Captured decode steps and steps with prompts alike; only collect() waits."""
    found = triton_kernels()
    assert found
    runner = tiny_device_runner(tiny_decoder().to(DEVICE), max_running=8, kernels=found.kernels)
    runner.warm_up(128)
    runner.capture(CudaCapture())
    for plan in (dummies(3, 1), dummies(2, 30), dummies(8, 1)):
        with warnings.catch_warnings(action="ignore"):  # torch's warning about this mode
            torch.cuda.set_sync_debug_mode("error")
        try:
            flight = runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(runner.collect(flight).sampled) == len(plan.chunks)


def test_launch_does_not_wait() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=8)
    for plan in (dummies(3, 1), dummies(2, 30), dummies(8, 1)):
        with RecordingMode():
            flight = runner.launch(plan)
        assert len(runner.collect(flight).sampled) == len(plan.chunks)


def test_step_without_samples_is_awaited_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all pieces of a long prompt would be launched at once, and a new request would wait for them."""
    waited, wait = [], Download.wait
    monkeypatch.setattr(Download, "wait", lambda self: (waited.append(1), wait(self))[1])
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    (sequence,) = _sequences(1)
    sequence.tokens *= 12
    guided = Sequence(
        request=replace(sequence.request, grammar="any"),
        tokens=array("q", [3]) * 12,
        arrival=1,
        blocks=(array("i", [1]),),
    )
    for part in (Chunk(sequence, 0, 4), Chunk(sequence, 4, 8), Chunk(guided, 0, 4)):
        assert runner.run(BatchPlan((part,))).sampled == {}
    assert len(waited) == 3
    assert len(runner.run(BatchPlan((Chunk(sequence, 8, 12),))).sampled) == 1


@pytest.mark.parametrize("seed", range(12))
def test_every_kind_of_decoder_gives_the_output_of_torch(seed: int) -> None:
    assert describe_unsupported(random_config(seed)) is None
    decoder = tiny_decoder(random_config(seed), seed=seed)
    requests = [replace(r, max_tokens=8) for r in _few_requests(decoder.config.vocab_size, greedy=True)]
    wanted = run_all(tiny_engine(decoder, blocks=200), requests)
    _assert_same_outputs(run_all(tiny_device_engine(decoder, blocks=200), requests), wanted)


def test_guided_rows_and_scored_prompts_are_launched_and_replayed() -> None:
    """Completions and scores equal the torch backend's; only a step with a mask waits for the one before."""
    decoder, requests, replayed = tiny_decoder(), _mixed(), list[bool]()
    wanted = serve(tiny_engine(decoder, blocks=200, guides=_grammar_tracker()), requests)
    sizes, capture = {"blocks": 200, "max_running": 12}, partial(_recorded, replayed=replayed)
    engine = tiny_device_engine(decoder, **sizes, capture=capture, guides=_grammar_tracker())
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    launched, launch = list[tuple[bool, bool]](), runner.launch

    def recorded(plan: BatchPlan) -> Any:
        launched.append((runner.launchable(plan), any(chunk.scores for chunk in plan.chunks)))
        return launch(plan)

    runner.launch = recorded  # type: ignore[method-assign]
    found = serve(engine, requests)
    assert not any(outcome.failures for outcome in found.values())
    _assert_same_outputs({r.id: found[r.id].events for r in requests}, {r.id: wanted[r.id].events for r in requests})
    assert len(replayed) > len(launched), "a forward pass and a draw per step, and no step here is too large to capture"
    assert {(True, False), (False, True), (False, False)} == {*launched}
    assert runner.launchable(dummies(1, 4, prompt_logprobs=0)), "the host must not contribute to a score"
    for name, outcome in wanted.items():
        for (one, top), (other, other_top) in zip(outcome.scores, found[name].scores, strict=True):
            assert abs(one - other) < CLOSE and [x for x, _ in top] == [x for x, _ in other_top], name


def test_row_next_to_a_guided_one_stays_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is uploaded once, although the other row gets a mask from the host in each step."""
    loaded, load = list[str](), ResidentBatch._load
    monkeypatch.setattr(ResidentBatch, "_load", lambda self, s, *x: (loaded.append(s.request.id), load(self, s, *x))[1])
    grammar = grammar_from("regex", "[ab]{9}")
    assert grammar
    requests = [
        Request(id=name, prompt=(3, 4), max_tokens=8, grammar=text) for name, text in (("g", grammar.lark), ("p", ""))
    ]
    engine = tiny_device_engine(tiny_decoder(), guides=_grammar_tracker())
    run_all(engine, requests)
    assert loaded.count("p") == 1 and "g" in loaded


class _MarkedKernels(ReferenceKernels):
    """Kernels that report the same log-probability for every token."""

    MARK = -7.25

    def sample(self, *args: Any) -> None:  # type: ignore[override]
        ReferenceKernels.sample(*args)
        args[4].logprob_S.fill_(self.MARK)


def test_every_log_probability_comes_from_one_implementation() -> None:
    """Covers plain, guided and scored rows, alone and together: two implementations would differ in the last bit."""
    requests = [replace(r, params=replace(r.params, logprobs=0)) for r in _mixed()]
    for batch in ([requests], [[request] for request in requests]):
        for each in batch:
            engine = tiny_device_engine(tiny_decoder(), blocks=200, kernels=_MarkedKernels(), guides=_grammar_tracker())
            outcomes = serve(engine, each).values()
            assert not any(outcome.failures for outcome in outcomes)
            reported = {e.logprob for outcome in outcomes for e in outcome.events if e.token is not None}
            reported |= {own for outcome in outcomes for own, _ in outcome.scores}
            assert reported == {_MarkedKernels.MARK}


def test_batch_invariance_holds_with_fixed_shapes() -> None:
    """The startup check of --deterministic: scored prompts next to decodes, in chunks, in a full batch."""
    decoder = tiny_decoder()

    def make_engine(limits: StepLimits) -> Engine:
        sizes = {"tokens_per_step": limits.tokens_per_step, "max_running": limits.max_running, "blocks": 200}
        return tiny_device_engine(decoder, deterministic=True, **sizes)

    limits = StepLimits(tokens_per_step=64, max_running=8)
    assert "verified" in check_batch_invariance(make_engine, limits, decoder.config, context=decoder.config.context)


def test_with_fixed_shapes_no_other_request_changes_a_bit() -> None:
    decoder, requests = tiny_decoder(), [replace(r, leader=None) for r in _mixed()]

    def fixed(blocks: int) -> Engine:
        sizes = {"blocks": blocks, "max_running": 8, "guides": _grammar_tracker()}
        return tiny_device_engine(decoder, deterministic=True, **sizes)

    alone = {r.id: serve(fixed(64), [r])[r.id] for r in requests}
    assert not any(outcome.failures for outcome in alone.values())
    preemptions = 0
    for blocks, batch in ((400, requests), *[(12, requests[::-1])] * 5):
        engine = fixed(blocks)
        assert serve(engine, batch) == alone
        if preemptions := engine.scheduler.preemptions:
            break  # late masks may keep requests apart, so that none is preempted
    assert preemptions > 0


@pytest.mark.parametrize(("is_fixed", "shapes"), [(True, {(104, 4)}), (False, {(16, 1), (64, 1)})])
def test_steps_have_few_shapes_or_a_single_one(
    is_fixed: bool, shapes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts tokens and samples: a library may choose another algorithm for another number of rows."""
    tokens, samples, prefill, draw = list[int](), list[int](), DeviceExecutor.prefill, DeviceExecutor.draw
    monkeypatch.setattr(DeviceExecutor, "prefill", lambda s, x, n: (tokens.append(len(x.rows_T)), prefill(s, x, n))[1])
    monkeypatch.setattr(DeviceExecutor, "draw", lambda s, count: (samples.append(count), draw(s, count))[1])
    runner = tiny_device_runner(tiny_decoder(), max_running=4, tokens_per_step=100, deterministic=is_fixed)
    for length in (2, 8, 9, 50):
        plan = dummies(1, length)
        runner.run(plan)
        runner._resident.release_rows(chunk.sequence for chunk in plan.chunks)
    assert {*zip(tokens, samples, strict=True)} == shapes


def test_failed_launch_leaves_no_state_behind(outputs: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever point a launch stops, rows that the host believed uploaded are uploaded again."""
    engine = tiny_device_engine(tiny_decoder(), blocks=400)
    failing = _FailingLaunches(engine.runner)
    engine.isolation._ahead = failing
    kernels = engine.runner.graphs.executor._kernels  # type: ignore[attr-defined]
    for owner, name in ((kernels, "sample"), (ResidentBatch, "apply"), (DeviceExecutor, "prepare")):
        monkeypatch.setattr(owner, name, failing.failing_at_times(getattr(owner, name)))
    _assert_same_outputs(run_all(engine, _requests(16, seed=1)), outputs)
    assert engine.isolation.failed_launches > 3


class _FailingLaunches:
    """A runner whose launches fail at every seventh call of a wrapped function; other calls never fail."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._calls, self._launching = runner, 0, False
        self.launchable, self.collect = runner.launchable, runner.collect

    def launch(self, plan: BatchPlan) -> Any:
        self._launching = True
        try:
            return self._runner.launch(plan)
        finally:
            self._launching = False

    def failing_at_times(self, whole: Callable[..., None]) -> Callable[..., None]:
        def step(*given: Any) -> None:
            self._calls += self._launching
            if self._launching and self._calls % 7 == 0:
                raise RuntimeError("no memory, say")
            whole(*given)

        return step


def test_row_is_reassigned_only_if_its_sequence_does_not_run() -> None:
    rows = tiny_device_runner(tiny_decoder(), max_running=2)._resident
    first, second, third = ([Chunk(s, 0, 1)] for s in _sequences(3))
    assert rows.assign_rows([*first, *second])[0] == [1, 0]
    first[0].sequence.ended = True
    second[0].sequence.tokens.append(7)
    indices, changes = rows.assign_rows([Chunk(second[0].sequence, 1, 2), *third])
    assert indices == [0, 1] and changes.loaded_rows == [1], "the second row is resident"
    assert first[0].sequence not in rows._resident_rows and second[0].sequence in rows._resident_rows


def test_trial_row_fits_next_to_the_maximum_of_running_rows() -> None:
    """After a failed step, isolation runs a trial row to see whether the device computes at all."""
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    running = _sequences(2)
    runner.run(BatchPlan(tuple(Chunk(sequence, 0, 1) for sequence in running)))
    assert runner.run(dummies(1, 1)).sampled["dummy 0"][0].token is not None
    running[0].tokens.append(7)
    assert runner.run(BatchPlan((Chunk(running[0], 1, 2),))).sampled["r0"][0].token is not None


def test_preempted_sequence_is_uploaded_again() -> None:
    rows = tiny_device_runner(tiny_decoder(), max_running=2)._resident
    (sequence,) = _sequences(1)
    rows.assign_rows([Chunk(sequence, 0, 1)])
    sequence.tokens.append(7)
    _, changes = rows.assign_rows([Chunk(sequence, 1, 2)])
    assert not changes.loaded_rows and not changes.tokens, "its token and length are on the device"
    sequence.blocks = (array("i", [5]),)
    sequence.tokens.append(8)
    _, changes = rows.assign_rows([Chunk(sequence, 2, 3)])
    assert changes.loaded_rows and list(changes.blocks.values()) == [5], "reloaded although it kept its row"


def _sequences(count: int) -> list[Sequence]:
    requests = [Request(id=f"r{i}", prompt=(3,), max_tokens=5) for i in range(count)]
    return [
        Sequence(request=r, tokens=array("q", [3]), arrival=i, blocks=(array("i", [i]),))
        for i, r in enumerate(requests)
    ]


def _mixed() -> list[Request]:
    """Plain, forked, guided and prompt-scored requests, and one with more stop ids than a row can store."""
    grammar = grammar_from("regex", "[ab]{3,9}")
    assert grammar
    made = []
    for i, request in enumerate(_requests(9, seed=2)):
        changes: dict[str, Any] = [{}, {"grammar": grammar.lark}, {"prompt_logprobs": 2}][i % 3]
        made.append(replace(request, **changes))
    leader = made[0]
    forked = replace(leader.params, choice=5, temperature=1.0)
    late = replace(made[3], id="late", stop_ids=tuple(range(100, 140)), params=replace(leader.params, min_tokens=5))
    return [*made, replace(leader, id="fork", leader=leader.id, params=forked), late]


def _grammar_tracker() -> GrammarTracker:
    bytes_of = [bytes([i % 256]) for i in range(320)]
    return GrammarTracker(lambda: bytes_of, vocab_size=320, max_states=32)
