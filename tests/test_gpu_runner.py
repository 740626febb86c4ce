"""Steps as on a GPU, on the CPU: the tokens of the torch way at both depths, captured or not, in any company."""

from __future__ import annotations

import pytest
from on_device import tiny_device_engine, tiny_device_runner
from recorded import Watch, record
from test_parity import _requests
from test_parity_switches import _config
from test_parity_switches import _requests as _few_requests
from tiny import run_all, tiny_decoder, tiny_engine

from app.engine.dummy import dummies
from app.engine.types import Request, TokenEvent

CLOSE = 1e-3
DEPTHS = [0, 1]
Events = dict[str, list[TokenEvent]]


def _assert_same_texts(some: Events, others: Events) -> None:
    """Token by token; log-probabilities as far as another order of sums lets them."""
    assert some.keys() == others.keys()
    for name, events in some.items():
        assert [(e.token, e.finish) for e in events] == [(e.token, e.finish) for e in others[name]], name
        for one, other in zip(events, others[name], strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert abs(one.logprob - other.logprob) < CLOSE, name
            assert len(one.top) == len(other.top)
            assert all(abs(a[1] - b[1]) < CLOSE for a, b in zip(one.top, other.top, strict=True)), name


@pytest.fixture(scope="module")
def texts() -> Events:
    return run_all(tiny_engine(tiny_decoder(), blocks=400), _requests(16, seed=1))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "room",
    [{"blocks": 400}, {"blocks": 22}, {"blocks": 200, "tokens_per_step": 20, "max_running": 4}],
    ids=["together", "preempted", "in pieces"],
)
def test_the_device_draws_the_tokens_of_the_torch_way(depth: int, room: dict[str, int], texts: Events) -> None:
    engine = tiny_device_engine(tiny_decoder(), depth=depth, **room)
    drawn = run_all(engine, _requests(16, seed=1))
    assert (engine.scheduler.preemptions > 0) == (room["blocks"] == 22)
    _assert_same_texts(drawn, texts)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_captured_step_reads_nothing_on_the_host_and_draws_the_same(depth: int, texts: Events) -> None:
    engine = tiny_device_engine(tiny_decoder(), depth=depth, blocks=400, max_running=8, capture=record)
    assert engine.runner.graphs.bucket(3) == 4
    _assert_same_texts(run_all(engine, _requests(16, seed=1)), texts)


def test_a_launch_waits_for_nothing() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=8)
    for plan in (dummies(3, 1), dummies(2, 30), dummies(8, 1)):
        with Watch():
            flight = runner.launch(plan)
        assert len(runner.collect(flight).drawn) == len(plan.chunks)


@pytest.mark.parametrize("seed", range(12))
def test_every_kind_of_decoder_says_what_it_says_in_torch(seed: int) -> None:
    decoder = tiny_decoder(_config(seed), seed=seed)
    requests = [replace_max(r) for r in _few_requests(decoder.config.vocab_size, greedy=True)]
    wanted = run_all(tiny_engine(decoder, blocks=200), requests)
    _assert_same_texts(run_all(tiny_device_engine(decoder, blocks=200), requests), wanted)


def replace_max(request: Request, most: int = 8) -> Request:
    return Request(id=request.id, prompt=request.prompt, max_tokens=most, params=request.params)
