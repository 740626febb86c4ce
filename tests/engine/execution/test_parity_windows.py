"""Blocks that a window has passed are released, and the bits stay the same as with a cache that keeps them."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from app.common.types import Request, RequestStarted, SamplingParams
from app.engine.scheduling.block_allocator import BlockAllocator
from model.config import LayerKind, ModelConfig, Rope
from tests.support.engine.mixed_requests import serve
from tests.support.engine.parity import alone, expect_parity
from tests.support.model.tiny_models import tiny_config, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "as Mistral": (24,), "wide": (100,), "two groups": (24, None), "three groups": (100, None, 9)
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "way")]


def _config(windows: tuple[int | None, ...]) -> ModelConfig:
    """Every window has two layers, which are not adjacent."""
    kinds = tuple(LayerKind(window=window, rope=Rope()) for window in windows)
    types = (*range(len(kinds)), *range(len(kinds))) if len(kinds) > 1 else ()
    return tiny_config(layer_kinds=kinds, layer_types=types, n_layers=2 * len(kinds))


def _requests(count: int = 6) -> list[Request]:
    """Longer than the windows, one in two with a common prefix, one in three a fork."""
    rng = random.Random(7)
    common, made = [rng.randrange(1, 320) for _ in range(60)], list[Request]()
    for i in range(count):
        own = [rng.randrange(1, 320) for _ in range(rng.choice([5, 40, 75]))]
        params = SamplingParams(temperature=i % 2, seed=i, logprobs=3)
        prompt = tuple(common + own if i % 2 else own)
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=rng.randint(40, 70), params=params))
    forks = [msgspec.structs.replace(lead, id=f"{lead.id}/1", leader=lead.id, max_tokens=20) for lead in made[::3]]
    return made + forks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WINDOWS)
def test_scheduling_does_not_change_a_bit(case: str, dtype: torch.dtype) -> None:
    expect_parity(tiny_decoder(_config(WINDOWS[case]), dtype=dtype), _requests(), tight=13)


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize("dtype", DTYPES)
def test_scheduling_does_not_change_a_bit_with_an_int8_cache(dtype: torch.dtype) -> None:
    expect_parity(tiny_decoder(_config(WINDOWS["three groups"]), dtype=dtype), _requests(), tight=13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WINDOWS)
def test_released_blocks_change_no_bit(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a cache that keeps every block until the sequence ends."""
    decoder, requests, released = tiny_decoder(_config(WINDOWS[case]), dtype=dtype), _requests(), list[int]()
    release_before = BlockAllocator.release_before

    def watched(self: BlockAllocator, sequence: object, position: int) -> None:
        held = self.pools[0].available
        release_before(self, sequence, position)  # type: ignore[arg-type]
        released.append(self.pools[0].available - held)

    monkeypatch.setattr(BlockAllocator, "release_before", watched)
    ours = serve(tiny_engine(decoder, blocks=40, tokens_per_step=50), requests)
    assert sum(released) > 2, "positive control: blocks must be released"
    monkeypatch.setattr(BlockAllocator, "release_before", lambda *_: None)
    assert ours == alone(decoder, requests)


def test_block_that_the_next_token_sees_changes_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: one block more than the window has passed."""
    decoder, requests = tiny_decoder(_config((24,))), _requests(2)
    expected, release_before = alone(decoder, requests), BlockAllocator.release_before

    def too_many(self: BlockAllocator, sequence: object, position: int) -> None:
        release_before(self, sequence, position + 16)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockAllocator, "release_before", too_many)
    assert alone(decoder, requests) != expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_is_found_after_its_passed_blocks_were_evicted(dtype: torch.dtype) -> None:
    """Its last two blocks are all that the next token sees."""
    decoder, starts = tiny_decoder(_config((24,)), dtype=dtype), list[RequestStarted]()
    engine, prompt = tiny_engine(decoder, blocks=20), tuple(range(1, 101))
    first = Request(id="first", prompt=prompt, max_tokens=1)
    serve(engine, [first])
    pool = engine.scheduler.pool
    assert pool.counts.cached == 6
    pool.release(pool.allocate(pool.available - 2))
    again = Request(id="again", prompt=prompt, max_tokens=50, params=SamplingParams(logprobs=3))
    engine.add(again)
    events = list(engine.step(starts.extend).events)
    while engine.has_work:
        events += engine.step().events
    assert [started.cached_tokens for started in starts] == [96] and not engine.scheduler.violations()
    assert events == alone(decoder, [again])["again"].events
