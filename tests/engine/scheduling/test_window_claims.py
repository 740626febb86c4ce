"""A cache group with a window beside others: few blocks, given chunk by chunk, and a claim of each sequence."""

from __future__ import annotations

import msgspec
import pytest

from app.common.types import Request, SamplingParams
from app.engine.scheduling.batch_plan import BatchPlan
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.block_pool import BlockPool, blocks_in_window
from app.engine.scheduling.scheduler import Scheduler
from tests.support.engine.scheduler_simulation import (
    Delivered,
    SimulatedDevice,
    Windows,
    expected_output,
    make_scheduler,
    step,
)

WINDOWS: Windows = (6, None)


def _request(name: str, length: int, *, max_tokens: int = 9, first: int = 1, seed: int = 0) -> Request:
    prompt = tuple(range(first, first + length))
    return Request(id=name, prompt=prompt, max_tokens=max_tokens, params=SamplingParams(seed=seed))


def _steps(scheduler: Scheduler, count: int, device: SimulatedDevice) -> list[BatchPlan]:
    return [step(scheduler, device)[0] for _ in range(count)]


def _run(scheduler: Scheduler, *requests: Request, device: SimulatedDevice | None = None) -> Delivered:
    """Runs requests to their end: each gets its output, and no block stays in use or set aside."""
    device, delivered = device or SimulatedDevice(4, WINDOWS), Delivered(list(requests))
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        delivered.take(step(scheduler, device)[1])
    for request in requests:
        assert delivered.tokens(request.id) == expected_output(request, WINDOWS).tokens(request.id)
    assert [(pool.active, pool.set_aside) for pool in scheduler.pools] == [(0, 0)] * len(scheduler.pools)
    return delivered


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_claim_is_what_one_more_token_needs(block_size: int) -> None:
    """The blocks from the first that the token at a block's start sees, to the one that it begins."""
    for window in range(1, 50):
        pool = BlockPool(1, block_size, window=window)
        most = max(n - pool.first_visible(n * block_size) + 1 for n in range(60))
        assert blocks_in_window(window, block_size) == most


def test_prompt_longer_than_the_window_takes_blocks_chunk_by_chunk() -> None:
    """The example of block_allocator.py."""
    scheduler, device, found = make_scheduler([5, 20], 4, 8, 1, windows=WINDOWS), SimulatedDevice(4, WINDOWS), []
    scheduler.add(_request("long", 40))
    pool, whole = scheduler.pools
    for _ in range(3):
        plan = scheduler.plan()
        (chunk,) = plan.chunks
        before = pool.active, pool.set_aside
        scheduler.commit(plan, device.run(plan))
        found.append((chunk.stop - chunk.start, *before, pool.active, pool.set_aside, whole.active))
        assert not scheduler.violations()
    assert found == [(8, 2, 1, 2, 1, 10), (8, 4, 0, 2, 1, 10), (8, 4, 0, 2, 1, 10)]
    assert scheduler.counters.blocks_active == 12, "three of five blocks, of twenty"


@pytest.mark.parametrize("blocks", [3, 4, 5, 20])
def test_smallest_group_with_a_window_serves_any_prompt(blocks: int) -> None:
    """A claim of 3 blocks is all that a group needs; it takes more steps."""
    scheduler = make_scheduler([blocks, 20], 4, 40, 4, windows=WINDOWS)
    _run(scheduler, *(_request(f"r{i}", 30, first=40 * i, seed=i) for i in range(5)))
    assert scheduler.preemptions == 0, "who has no claim waits"


def test_short_sequences_claim_no_more_than_their_tokens() -> None:
    scheduler, device = make_scheduler([7, 40], 4, 40, 8, windows=(30, None)), SimulatedDevice(4, (30, None))
    for i in range(3):
        scheduler.add(_request(f"r{i}", 3, first=10 * i, max_tokens=1))
    plan = scheduler.plan()
    assert [each.sequence.claims for each in plan.chunks] == [[1, 0]] * 3
    scheduler.commit(plan, device.run(plan))
    assert not scheduler.has_work


def test_sequence_is_not_admitted_into_the_claim_of_another() -> None:
    scheduler, device = make_scheduler([6, 40], 4, 40, 4, windows=WINDOWS), SimulatedDevice(4, WINDOWS)
    for i in range(2):
        scheduler.add(_request(f"r{i}", 12, first=20 * i))
    _steps(scheduler, 2, device)
    assert [sequence.request.id for sequence in scheduler.running] == ["r0"], "no spare block is left"
    scheduler = make_scheduler([7, 40], 4, 40, 4, windows=WINDOWS)
    for i in range(2):
        scheduler.add(_request(f"r{i}", 12, first=20 * i))
    device = SimulatedDevice(4, WINDOWS)
    _steps(scheduler, 2, device)
    assert len(scheduler.running) == 2
    while scheduler.has_work:
        step(scheduler, device)
    assert scheduler.preemptions == 0


def test_long_prompts_beside_others_keep_their_chunks() -> None:
    """The long one waits for its turn; if it did not, its chunks would be shorter, because 11 blocks hold no more."""
    sizes = []
    for blocks_per_step in (4, 0):
        scheduler, device = make_scheduler([11, 100], 4, 18, 3, windows=WINDOWS), SimulatedDevice(4, WINDOWS)
        scheduler._allocator._blocks_per_step = blocks_per_step
        for i, length in enumerate((5, 5, 100)):
            scheduler.add(_request(f"r{i}", length, first=100 * i, max_tokens=12))
        plans = _steps(scheduler, 18, device)
        lengths = [[c.stop - c.start for c in plan.chunks if c.sequence.request.id == "r2"] for plan in plans]
        sizes.append([length for each in lengths for length in each if length > 1])
    assert sizes == [[18, 18, 18, 18, 18, 10], [8, 16, 16, 16, 12, 12, 12, 8]]


@pytest.mark.parametrize("length", [9, 12, 13, 14])
def test_choices_share_the_blocks_of_a_window(length: int) -> None:
    """The prompt is computed once, and only the block of its last token is copied, in each group."""
    lead = _request("lead", length)
    forks = [msgspec.structs.replace(lead, id=f"f{i}", leader="lead", params=SamplingParams(seed=i)) for i in range(3)]
    device, scheduler = SimulatedDevice(4, WINDOWS), make_scheduler([20, 40], 4, 40, 8, windows=WINDOWS)
    _run(scheduler, lead, *forks, device=device)
    assert device.prompt_tokens == length + 3


def test_choices_get_on_although_their_shared_blocks_leave_too_few() -> None:
    """Their claims count the blocks of the prompt once; when the windows have passed it, each needs its own."""
    lead = _request("lead", 13, max_tokens=20)
    forks = [msgspec.structs.replace(lead, id=f"f{i}", leader="lead", params=SamplingParams(seed=i)) for i in range(5)]
    scheduler = make_scheduler([12, 100], 4, 40, 8, windows=WINDOWS)
    _run(scheduler, lead, *forks)
    assert scheduler.preemptions > 0, "the group was meant to be too small"


def test_prefix_is_found_if_its_last_window_is_cached() -> None:
    """Of 33 tokens, 8 blocks are full; the next token sees the last two of them."""
    scheduler, device = make_scheduler([8, 40], 4, 40, 4, windows=WINDOWS), SimulatedDevice(4, WINDOWS)
    _run(scheduler, _request("first", 33, max_tokens=1), device=device)
    windowed = scheduler.pools[0]
    assert windowed.counts.cached == 8 - windowed.counts.free
    scheduler.add(_request("again", 33))
    (plan,) = _steps(scheduler, 1, device)
    assert plan.started[0].cached_tokens == 32
    (sequence,) = scheduler.running
    assert sequence.blocks[0].count(windowed.null_block) == 6
    scheduler.cancel("again")
    windowed.release(windowed.allocate(8))
    scheduler.add(_request("later", 33))
    (plan,) = _steps(scheduler, 1, device)
    assert plan.started[0].cached_tokens == 0, "the blocks of its window went to others"


def _forget_claim(self: BlockAllocator, sequence: object) -> None:
    RELEASE(self, sequence)  # type: ignore[arg-type]
    self.pools[0].set_aside += 1


RELEASE = BlockAllocator.release


def test_claim_that_is_not_given_back_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(BlockAllocator, "release", _forget_claim)
    with pytest.raises(AssertionError):
        _run(make_scheduler([8, 40], 4, 40, 4, windows=WINDOWS), _request("a", 12))
    scheduler = make_scheduler([8, 40], 4, 40, 4, windows=WINDOWS)
    scheduler.pools[0].set_aside = 1
    assert scheduler.violations() == ["cache group 0: 1 blocks are set aside, and claims lack 0"]
