"""Values that are not finite stay with the request that caused them, whatever hides them from its sampled rows."""

from __future__ import annotations

import pytest
import torch

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.block_allocator import BlockAllocator
from model.config import LayerKind, Rope
from model.nn.transformer import Decoder
from tests.support.engine.guessing_planner import guess_from, speculating
from tests.support.engine.mixed_requests import POISON, serve
from tests.support.model.tiny_models import VOCAB, tiny_config, tiny_decoder, tiny_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "way"),
    pytest.mark.parametrize("way", ["torch", "native"], indirect=True),  # int8 rounds NaN to a number
]
_AVOID = SamplingParams(temperature=0, logit_bias=((POISON, -100.0),))


def _poisoned(*windows: int | None) -> Decoder:
    """A decoder with a token whose embedding is not finite."""
    kinds = tuple(LayerKind(window=window, rope=Rope()) for window in windows)
    types = tuple(range(len(kinds))) if len(kinds) > 1 else ()
    decoder = tiny_decoder(tiny_config(n_layers=2, layer_kinds=kinds, layer_types=types, tied_head=False))
    decoder.embedding[POISON] = torch.nan
    return decoder


def _victim(length: int, at: int) -> Request:
    prompt = [8 + 3 * i for i in range(length)]
    prompt[at] = POISON
    return Request(id="victim", prompt=tuple(prompt), max_tokens=3, params=_AVOID)


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize("windows", [(None,), (9, None)])
def test_request_with_values_that_are_not_finite_fails_with_an_int8_cache(windows: tuple[int | None, ...]) -> None:
    test_request_with_values_that_are_not_finite_fails_whatever_its_chunks(windows, 60)


@pytest.mark.usefixtures("int8_cache")
def test_blocks_with_codes_are_cleared_for_their_next_owner() -> None:
    assert _innocent_failures(16, length=33, at=4) == 0


@pytest.mark.parametrize("windows", [(None,), (9,), (24,), (9, None)])
@pytest.mark.parametrize("at", [3, 60, 95])
def test_request_with_values_that_are_not_finite_fails_whatever_its_chunks(
    windows: tuple[int | None, ...], at: int
) -> None:
    """A window hides them from the sampled row, and chunks decide which rows are computed together."""
    decoder = _poisoned(*windows)
    for tokens_per_step in (1024, 64, 32, 7):
        engine = tiny_engine(decoder, tokens_per_step=tokens_per_step, max_running=4)
        for _ in range(2):
            assert serve(engine, [_victim(100, at)])["victim"].failures, (tokens_per_step, windows)


def _innocent_failures(engine_blocks: int, *, length: int, at: int) -> int:
    """Requests that fail after one whose prompt was computed but for its last token, and which was cancelled then."""
    decoder, failures = _poisoned(None), 0
    for size in range(10, 60, 7):
        engine = tiny_engine(decoder, blocks=engine_blocks, tokens_per_step=32, max_running=4)
        engine.add(_victim(length, at))
        engine.step()
        engine.cancel("victim")
        requests = [
            Request(id=f"r{i}", prompt=tuple(range(50 + i, 50 + size + i)), max_tokens=30, params=_AVOID)
            for i in range(5)
        ]
        failures += sum(bool(outcome.failures) for outcome in serve(engine, requests).values())
    return failures


@pytest.mark.parametrize(("length", "at"), [(33, 4), (33, 31), (34, 4), (40, 20)])
def test_blocks_of_a_prompt_without_its_last_row_are_cleared_for_their_next_owner(length: int, at: int) -> None:
    assert _innocent_failures(16, length=length, at=at) == 0


def test_blocks_that_are_not_cleared_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(BlockAllocator, "_mark_dirty", lambda *_: None)
    assert _innocent_failures(16, length=33, at=4) > 0


@pytest.mark.parametrize("windows", [(None,), (24,), (24, None)])
def test_requests_with_the_prefix_of_a_failed_one_are_served(windows: tuple[int | None, ...]) -> None:
    """Rows before the bad token, in one chunk or tile with it, are not finite either; their block has a clean hash."""
    decoder = _poisoned(*windows)
    expected = Request(id="r", prompt=tuple(_victim(100, 40).prompt[:40]), max_tokens=4, params=_AVOID)
    alone = serve(tiny_engine(decoder), [expected])["r"].events
    for tokens_per_step in (1024, 33, 8):
        engine = tiny_engine(decoder, tokens_per_step=tokens_per_step, max_running=4)
        outcomes = serve(engine, [_victim(100, 40)])
        assert outcomes["victim"].failures
        assert serve(engine, [expected])["r"].events == alone, tokens_per_step


def _beside_poison(requests: list[Request], **engine_options: int) -> tuple[dict[str, object], Engine]:
    """Outcomes of requests whose drafts are a right token, then one whose values are not finite."""
    decoder = _poisoned(None)
    right = serve(tiny_engine(decoder, **engine_options), requests)
    guess = guess_from({name: each.events for name, each in right.items()}, vocab=VOCAB, most=2)
    engine = speculating(tiny_engine(decoder, **engine_options), lambda sequence: [*guess(sequence), POISON])
    assert serve(engine, requests) == right
    return dict(right), engine


def test_draft_that_is_not_finite_changes_no_row_before_it() -> None:
    """Its keys and values are in the cache while the rows before it attend: 0 times NaN is NaN."""
    requests = [
        Request(id=f"r{i}", prompt=tuple(8 + 3 * j + i for j in range(length)), max_tokens=20, params=_AVOID)
        for i, length in enumerate((3, 15, 16, 17, 40))
    ]
    _, engine = _beside_poison(requests)
    assert 0 < engine.scheduler.preemptions <= len(requests), "each is computed again once, and then without drafts"
    _, engine = _beside_poison(requests, blocks=8)
    assert not engine.scheduler.check_blocks() and engine.scheduler.block_violations == 0


def test_draft_that_is_not_finite_would_change_rows_if_they_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: the rows before it are not finite either, or its block is not cleared for the next step."""
    monkeypatch.setattr("app.engine.execution.runner.DRAFTS_NOT_FINITE", SampledToken(None))
    with pytest.raises(AssertionError):
        test_draft_that_is_not_finite_changes_no_row_before_it()


def test_request_that_is_not_finite_itself_fails_after_the_same_tokens_with_drafts() -> None:
    """The model writes the token: then its row is not finite although all drafts are right."""
    decoder = _poisoned(None)
    wanted = SamplingParams(temperature=0, logit_bias=((POISON, 100.0),), min_tokens=0)
    request = Request(id="victim", prompt=(8, 11, 14), max_tokens=9, params=wanted)
    right = serve(tiny_engine(decoder), [request])
    engine = speculating(tiny_engine(decoder), lambda _sequence: [POISON, 5])
    assert right["victim"].failures and serve(engine, [request]) == right
