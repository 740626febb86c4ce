"""Random numbers: the published test vectors, in one lane and in many; each seed, choice and position has its own."""

from __future__ import annotations

import pytest
import torch

from app.engine.sampling.sampler import Draw, philox, uniforms

# Known answers of philox4x32-10 from the Random123 distribution: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _side_by_side(words: tuple[int, ...]) -> int:
    return sum(word << 64 * lane for lane, word in enumerate(words))


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


def test_every_lane_is_a_generator_of_its_own() -> None:
    counters, keys, results = (list(zip(*column, strict=True)) for column in zip(*VECTORS, strict=True))
    counter, key = tuple(map(_side_by_side, counters)), tuple(map(_side_by_side, keys))
    assert philox(counter, key, lanes=3) == tuple(map(_side_by_side, results))  # type: ignore[arg-type]


def test_uniform_numbers_are_uniform() -> None:
    numbers = torch.tensor(uniforms(Draw(7, position) for position in range(20_000)), dtype=torch.float64)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(numbers.var()) - 1 / 12) < 0.01


def test_each_seed_choice_and_position_has_a_number_of_its_own_in_any_company() -> None:
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]
    draws = [
        Draw(seed, position, choice) for seed in seeds for position in (0, 1, 2**20, 2**33) for choice in (0, 1, 15)
    ]
    together = uniforms(draws)
    assert len(set(together)) == len(draws)
    assert together == [number for draw in draws for number in uniforms([draw])]
    assert uniforms([]) == []


def test_the_first_choice_draws_what_was_published() -> None:
    """Counter (position, 0, choice, 0), key (low seed word, high seed word), 53 bits of the first two words."""
    first, second, _, _ = philox((5, 0, 3, 0), (9, 1))
    assert uniforms([Draw(2**32 + 9, 5, 3)]) == [((first >> 5) * 2**26 + (second >> 6)) / 2**53]
