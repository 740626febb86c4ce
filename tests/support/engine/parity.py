"""Engine parity: alone = batched = cached = chunked = preempted = resubmitted = speculated = one step ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from model.nn.transformer import Decoder
from tests.support.engine.delayed_runner import DelayedRunner, WatchedPool
from tests.support.engine.guessing_planner import guess_from, speculating
from tests.support.engine.mixed_requests import Outcome, serve
from tests.support.model.tiny_models import block_pools, least_counts, tiny_engine


def alone(
    decoder: Decoder, requests: list[Request], guides: Callable[[], GrammarTracker | None] = lambda: None
) -> dict[str, Outcome]:
    """Runs each request on its own fresh engine, with its prompt in one chunk."""
    outcomes = {r.id: serve(tiny_engine(decoder, tokens_per_step=1024, guides=guides()), [r])[r.id] for r in requests}
    assert not any(outcome.failures for outcome in outcomes.values())
    return outcomes


def expect_parity(
    decoder: Decoder,
    requests: list[Request],
    *,
    tight: int,
    guides: Callable[[], GrammarTracker | None] = lambda: None,
) -> dict[str, Outcome]:
    """Checks parity, also with only `tight` blocks, which must cause preemptions unless all layers have windows.

    If layers differ in their windows, also with the fewest blocks that the windows of one sequence and of two need.
    Returns the outcomes.
    """
    expected, engine = alone(decoder, requests, guides), partial(tiny_engine, decoder, blocks=400)
    roomy, small = engine(guides=guides()), engine(guides=guides(), blocks=tight, tokens_per_step=97)
    assert serve(roomy, requests) == expected, "batched"
    assert roomy.scheduler.pool.counts.cached > 0, "the second round must hit the cache"
    assert serve(roomy, requests) == expected, "cached"
    assert serve(engine(guides=guides(), tokens_per_step=7, max_running=4), requests) == expected, "chunked"
    assert serve(small, requests) == expected, "preempted"
    if len(engine().scheduler.pools) > 1:
        for blocks, sequences in ((400, 1), (tight, 2)):
            counts = least_counts(decoder.config, blocks, 16, sequences=sequences)
            narrow = engine(guides=guides(), blocks=counts, tokens_per_step=97)
            assert serve(narrow, requests) == expected, f"blocks for {sequences} windows"
            assert serve(narrow, requests) == expected, f"blocks for {sequences} windows, cached"
    _expect_the_same_with_drafts(engine, requests, expected, tight, guides, decoder.config.vocab_size)
    frees_blocks = None not in decoder.config.windows
    assert small.scheduler.preemptions > 0 or frees_blocks, "the cache must be too small"
    again = [_resubmitted(request, expected[request.id]) for request in requests]
    rest = {r.id: Outcome(expected[r.id].events[len(r.generated) :], expected[r.id].scores[r.scored :]) for r in again}
    assert serve(roomy, again) == rest, "resubmitted"
    counts, masks = least_counts(decoder.config, 400, 16, sequences=12), guides()
    pools = block_pools(decoder.config, counts, 16, pool_type=WatchedPool)
    device = DelayedRunner(engine(max_running=16, guides=masks, blocks=counts).runner, *pools)
    ahead = Engine(Scheduler(StepLimits(tokens_per_step=64, max_running=16), *pools), device, device, masks=masks)
    assert serve(ahead, requests) == expected, "one step ahead"
    assert device.n_launched > 5 or any(r.grammar for r in requests), "the engine must run ahead"
    return expected


def _expect_the_same_with_drafts(
    engine: Callable[..., Engine],
    requests: list[Request],
    expected: dict[str, Outcome],
    tight: int,
    guides: Callable[[], GrammarTracker | None],
    vocab: int,
) -> None:
    """Right drafts and wrong ones, with many blocks and few."""
    n_accepted = 0
    for blocks, budget in ((400, 128), (tight, 97)):
        masks = guides()
        guess = guess_from({name: each.events for name, each in expected.items()}, vocab=vocab)
        allow = masks.allow_drafts if masks else lambda _sequence, drafts: drafts
        drafting = speculating(engine(guides=masks, blocks=blocks, tokens_per_step=budget), guess, allow=allow)
        assert serve(drafting, requests) == expected, f"speculated, {blocks} blocks"
        n_accepted += drafting.scheduler.accepted
        assert drafting.scheduler.accepted < drafting.scheduler.drafted, "some drafts must be wrong"
    assert n_accepted > 5, "some drafts must be right"


def _resubmitted(request: Request, outcome: Outcome) -> Request:
    """The request with half of its tokens already generated; if that is none, with half of its scores."""
    tokens = tuple(event.token for event in outcome.events if event.token is not None)
    generated = tokens[: len(tokens) // 2]
    scored = len(outcome.scores) if generated else len(outcome.scores) // 2
    return msgspec.structs.replace(request, generated=generated, scored=scored)
