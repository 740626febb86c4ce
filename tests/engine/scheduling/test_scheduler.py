"""The scheduler's policy: what a step contains, which sequences share blocks, and the audit of the blocks."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.model_version import Version
from app.common.types import FinishReason, Request, RequestFailed
from app.engine.execution.engine import Engine
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, StepResult
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.prefix_cache import chain_hash, find_prefix, root_hash
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.support.engine.scheduler_simulation import SimulatedDevice, make_scheduler, step


def _request(name: str, length: int, *, first: int = 1, **fields: Any) -> Request:
    return Request(id=name, prompt=tuple(range(first, first + length)), **{"max_tokens": 1, **fields})


def _steps(scheduler: Scheduler, count: int, device: SimulatedDevice | None = None) -> list[BatchPlan]:
    device = device or SimulatedDevice(4)
    return [step(scheduler, device)[0] for _ in range(count)]


def _costs(plan: BatchPlan) -> list[tuple[str, int]]:
    return [(chunk.sequence.request.id, chunk.stop - chunk.start) for chunk in plan.chunks]


def test_decodes_come_first_and_prompts_fill_what_is_left() -> None:
    scheduler, device = make_scheduler(100, 4, 8, 4), SimulatedDevice(4)
    scheduler.add(_request("short", 2, max_tokens=20))
    _steps(scheduler, 1, device)
    scheduler.add(_request("long", 40))
    assert [_costs(plan) for plan in _steps(scheduler, 5, device)] == [[("short", 1), ("long", 7)]] * 5


def test_scored_prompt_takes_half_as_many_tokens_per_step() -> None:
    """Its rows also go through the LM head, and other requests should not wait longer for that."""
    scheduler, device = make_scheduler(100, 4, 9, 4), SimulatedDevice(4)
    scheduler.add(_request("short", 2, max_tokens=20))
    _steps(scheduler, 1, device)
    scheduler.add(_request("scored", 10, max_tokens=2, prompt_logprobs=1))
    assert [_costs(plan)[1][1] for plan in _steps(scheduler, 4, device)] == [4, 4, 2, 1]


def test_steps_with_decodes_have_few_prompt_tokens() -> None:
    scheduler, device = make_scheduler(64, 4, 40, 8, beside=5), SimulatedDevice(4)
    for i in range(4):
        scheduler.add(_request(f"decode {i}", 3, first=i, max_tokens=30))
    assert [len(plan.chunks) for plan in _steps(scheduler, 2, device)] == [4, 4], (
        "without decodes, all prompts run at once"
    )
    scheduler.add(_request("prompt", 60))
    sizes = [_costs(plan)[-1][1] for plan in _steps(scheduler, 2, device)]
    assert sizes == [16] * 2, "four prompt tokens per decode if that is more than five"
    for i in range(3):
        scheduler.cancel(f"decode {i}")
    assert _costs(_steps(scheduler, 1, device)[0])[-1][1] == 5
    scheduler.cancel("decode 3")
    assert _costs(_steps(scheduler, 1, device)[0])[-1][1] == 23, "without decodes again"


@pytest.mark.parametrize(("namespace", "first"), [("", 40), ("ann", 8)])
def test_steps_with_several_keys_have_few_prompt_tokens(namespace: str, first: int) -> None:
    limits = StepLimits(tokens_per_step=64, max_running=8, prompt_tokens_shared=8)
    scheduler = Scheduler(limits, BlockPool(64, 4))
    scheduler.add(_request("x", 40, cache_namespace=namespace))
    assert _costs(_steps(scheduler, 1)[0]) == [("x", first)]


def test_short_prompt_of_another_key_is_in_the_next_step() -> None:
    scheduler, device = make_scheduler(256, 4, 16, 16), SimulatedDevice(4)
    for i in range(8):
        scheduler.add(_request(f"long {i}", 100, cache_namespace="ann"))
    _steps(scheduler, 3, device)
    scheduler.add(_request("short", 3, cache_namespace="bob"))
    plan, report = step(scheduler, device)
    assert [event.request_id for event in report.events] == ["short"]
    assert sum(chunk.cost for chunk in plan.chunks) == 16, "the rest of the budget must be used"


def test_keys_share_the_prompt_tokens_of_a_step_equally_in_order_of_arrival() -> None:
    scheduler, device = make_scheduler(256, 4, 16, 16), SimulatedDevice(4)
    for i in range(2):
        scheduler.add(_request(f"ann {i}", 170 * i + 20, first=i, cache_namespace="ann"))
    assert [_costs(plan) for plan in _steps(scheduler, 2, device)] == [[("ann 0", 16)], [("ann 0", 4), ("ann 1", 12)]]
    for name in ("bob", "cyd"):
        scheduler.add(_request(name, 200, cache_namespace=name))
    n_tokens = Counter[str]()
    for plan in _steps(scheduler, 6, device)[-3:]:
        n_tokens.update(dict(_costs(plan)))
    assert sum(n_tokens.values()) == 48 and max(n_tokens.values()) - min(n_tokens.values()) <= 3, n_tokens


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=12), st.integers(1, 100))
def test_step_is_divided_equally_and_what_a_key_does_not_need_goes_to_the_others(
    prompts: list[tuple[str, int]], budget: int
) -> None:
    """Max-min fairness: a key that needs more than it gets has at most one token less than any other key."""
    scheduler = Scheduler(StepLimits(tokens_per_step=budget + 12, max_running=12), BlockPool(900, 4))
    demand, got, chunks = Counter[str](), Counter[str](), list[Chunk]()
    for number, (key, length) in enumerate(prompts):
        demand[key] += length
        scheduler.add(_request(f"{key}{number}", length, first=100 * number, cache_namespace=key))
    assert scheduler._add_prefill_chunks(budget, scheduler.waiting, chunks) == min(budget, demand.total())
    for chunk in chunks:
        got[chunk.sequence.request.cache_namespace] += chunk.stop - chunk.start
    assert all(got[key] <= demand[key] for key in demand)
    unmet = [got[key] for key in demand if got[key] < demand[key]]
    assert not unmet or max(got.values()) - min(unmet) <= 1


@pytest.mark.parametrize(("second", "cached"), [("", 4), ("another key", 0)])
def test_prefix_cache_is_per_key_and_excludes_the_last_token(second: str, cached: int) -> None:
    scheduler, device = make_scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for namespace in ("", second):
        scheduler.add(_request(f"of {namespace}", 8, cache_namespace=namespace))
        (plan,) = _steps(scheduler, 1, device)
    assert (plan.started[0].cached_tokens, plan.chunks[0].start) == (cached, cached)


def test_zero_max_tokens_finishes_with_length_and_warms_the_cache() -> None:
    scheduler = make_scheduler(16, 4, 64, 4)
    scheduler.add(_request("warm", 9, max_tokens=0))
    (event,) = step(scheduler, SimulatedDevice(4))[1].events
    assert (event.token, event.finish) == (None, FinishReason.LENGTH)
    assert scheduler.pool.counts.cached == 2


def test_unsatisfiable_grammar_is_a_user_error_and_frees_all_blocks() -> None:
    scheduler = make_scheduler(16, 4, 64, 4)
    scheduler.add(_request("r", 9, grammar="any"))
    report = scheduler.commit(scheduler.plan(), StepResult({"r": (SampledToken(None, failure="too complex"),)}))
    assert report.failed == (RequestFailed("r", "too complex", is_user_error=True),) and not report.events
    assert not scheduler.has_work and scheduler.pool.counts.active == 0


def test_follower_lets_others_pass_while_its_leader_is_prefilled() -> None:
    scheduler = make_scheduler(64, 4, 5, 4)
    lead = _request("r/0", 9, max_tokens=6)
    for request in (lead, *(msgspec.structs.replace(lead, id=f"r/{i}", leader="r/0") for i in (1, 2))):
        scheduler.add(request)
    scheduler.add(_request("other", 2))
    plans = _steps(scheduler, 3)
    assert [[name for name, _ in _costs(plan)] for plan in plans] == [
        ["r/0"],
        ["r/0", "other"],
        ["r/0", "other", "r/1", "r/2"],
    ]
    assert [one.cached_tokens for plan in plans for one in plan.started] == [0, 0, 8, 8]


@pytest.mark.parametrize(
    "change",
    [{"cache_namespace": "x"}, {"source": (1,)}, {"prompt": (5,)}, {"leader": "unknown"}, {"prompt_logprobs": 0}],
    ids=str,
)
def test_finished_or_different_leader_has_no_followers(change: dict[str, Any]) -> None:
    scheduler, lead = make_scheduler(64, 4, 64, 8), _request("lead", 10)
    scheduler.add(lead)
    scheduler.add(msgspec.structs.replace(lead, **{"id": "follow", "leader": "lead", **change}))
    assert len(_steps(scheduler, 1)[0].chunks) == 2, "followers must not wait without a leader"


@pytest.mark.parametrize(("prompt", "cleared"), [(19, 5), (6, 0)])
def test_possibly_non_finite_blocks_are_cleared_once_for_their_next_owner(prompt: int, cleared: int) -> None:
    """A sequence that ends before its first sample counts as unknown."""
    scheduler, device = make_scheduler(16, 4, 8, 4), SimulatedDevice(4)
    scheduler.add(_request("left", prompt, max_tokens=3))
    (plan,) = _steps(scheduler, 1, device)
    blocks = [*plan.chunks[0].sequence.blocks[0]]
    scheduler.cancel("left")
    for namespace in ("a", "b"):
        scheduler.add(_request(f"of {namespace}", 64, max_tokens=0, cache_namespace=namespace))
        plans = _steps(scheduler, 8, device)
        assert sorted(each for plan in plans for each in plan.clear) == [
            (0, block) for block in sorted(blocks[:cleared])
        ]
        cleared = 0


def test_versions_with_other_adapters_share_no_cached_block() -> None:
    pool, device = BlockPool(64, 4), SimulatedDevice(4)
    versions = [Version("w"), *(Version("w", adapters) for adapters in (("a",), ("b",), ("a", "b"), ("b", "a")))]
    for version, cached in [(one, cached) for cached in (0, 8) for one in versions]:
        scheduler = Scheduler(StepLimits(tokens_per_step=64, max_running=4), pool, version=version)
        scheduler.add(_request("r", 9))
        plan, _ = step(scheduler, device)
        assert [started.cached_tokens for started in plan.started] == [cached], version


def test_leaked_block_is_counted_and_logged_once_per_audit(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(16, 4, 64, 4)
    engine = Engine(scheduler, SimulatedDevice(4))
    engine.add(_request("r", 3, max_tokens=3))
    engine.step()
    engine.check_blocks()
    assert scheduler.counters.block_violations == 0
    engine.step()
    scheduler.running[0].blocks = (array("i"),)
    for _ in range(2):  # nothing ran since the first audit
        engine.check_blocks()
        assert scheduler.counters.block_violations == 1
    assert "references, 0 owners" in caplog.text


@pytest.mark.parametrize(("blocks", "steps"), [(16, 1000), (15_000, 1500)])
def test_blocks_are_audited_periodically(blocks: int, steps: int) -> None:
    scheduler = make_scheduler(blocks, 4, 64, 4)
    scheduler.pool.allocate(1)  # a leaked block
    engine, found = Engine(scheduler, SimulatedDevice(4)), []
    for i in range(steps):
        engine.add(_request(f"r{i}", 1))
        engine.step()
        found.append(scheduler.block_violations)
    assert found == [0] * (steps - 1) + [1]


def _windowed(window: int, *others: int | None, blocks: int = 16) -> tuple[Scheduler, SimulatedDevice]:
    windows = (window, *others)
    return make_scheduler(blocks, 4, 16, 4, windows=windows), SimulatedDevice(4, windows)


def test_windowed_sequence_holds_the_blocks_that_its_next_token_sees() -> None:
    """40 tokens in a cache of 10 blocks, and 3 of them at most while it decodes; the others serve another sequence."""
    scheduler, device = _windowed(6, blocks=10)
    scheduler.add(_request("long", 2, max_tokens=38))
    _steps(scheduler, 30, device)
    (sequence,) = scheduler.running
    blocks, pool = sequence.blocks[0], scheduler.pool
    assert (len(blocks), len(pool.held(blocks)), pool.counts.active) == (8, 3, 3)
    scheduler.add(_request("next", 24, first=20, max_tokens=1))
    _steps(scheduler, 2, device)
    assert scheduler.preemptions == 0 and not scheduler.violations()


def test_hit_is_the_longest_prefix_that_all_groups_have() -> None:
    scheduler, device = _windowed(6, None)
    scheduler.add(_request("first", 33))
    _steps(scheduler, 3, device)
    windowed, whole = scheduler.pools
    (cached,) = find_prefix([windowed], hashes := _hashes_of(33))
    windowed.invalidate([cached[-1]])
    assert [len(*find_prefix([pool], hashes)) for pool in (windowed, whole)] == [7, 8]
    assert [len(blocks) for blocks in find_prefix([windowed, whole], hashes)] == [7, 7]
    scheduler.add(_request("second", 33))
    (plan,) = _steps(scheduler, 1, device)
    assert plan.started[0].cached_tokens == 28
    (sequence,) = [chunk.sequence for chunk in plan.chunks]
    assert sequence.ended and not scheduler.violations()


def _hashes_of(length: int) -> list[bytes]:
    """Block hashes of _request("", length)."""
    hashes = [root_hash(Version(""), "")]
    tokens = range(1, 1 + length)
    for start in range(0, length // 4 * 4, 4):
        hashes.append(chain_hash(hashes[-1], tokens[start : start + 4]))
    return hashes[1:]


def test_fork_does_not_use_blocks_that_its_leader_has_released() -> None:
    """The leader has passed the block of position 8, which the fork's first token at 13 sees with a window of 6."""
    scheduler, device = _windowed(6, blocks=64)
    lead = _request("lead", 14, max_tokens=20)
    scheduler.add(lead)
    _steps(scheduler, 8, device)
    (leader,) = scheduler.running
    assert scheduler.pool.first_visible(13) < leader.blocks[0].count(scheduler.pool.null_block)
    scheduler.add(msgspec.structs.replace(lead, id="fork", leader="lead", max_tokens=3))
    (plan,) = _steps(scheduler, 1, device)
    assert not plan.copies and plan.started[0].cached_tokens == 12, "its prompt is in the prefix cache all the same"


@pytest.mark.parametrize(("window", "cleared"), [(4, 9), (40, 0)])
def test_windowed_blocks_that_no_sampled_row_has_seen_are_cleared(window: int, cleared: int) -> None:
    """A prompt of 40 with a window of 4: its last row, the first that is sampled, sees none of positions 0 to 35."""
    scheduler, device = _windowed(window, blocks=12)
    scheduler.add(_request("first", 40, max_tokens=3))
    _steps(scheduler, 5, device)
    assert not scheduler.has_work
    scheduler.add(_request("second", 48, first=50, max_tokens=0))
    plans = _steps(scheduler, 3, device)
    assert len({block for plan in plans for block in plan.clear}) == cleared


def test_failed_windowed_sequence_leaves_nothing_in_the_prefix_cache() -> None:
    scheduler, device = _windowed(6, None)
    scheduler.add(_request("bad", 30, max_tokens=8))
    _steps(scheduler, 3, device)
    plan = scheduler.plan()
    assert scheduler.commit(plan, device.run(plan, bad="bad")).failed
    assert [pool.counts.cached for pool in scheduler.pools] == [0, 0] and not scheduler.violations()
