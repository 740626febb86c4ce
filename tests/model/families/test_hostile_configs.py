"""Mutated configurations of every family: read, or refused in one sentence, at once and with little memory."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from model.config import ConfigError
from model.families.registry import read_config
from tests.support.model.hub_checkpoints import CASES, FAMILIES, FAMILY_CASES, family_name, reference_config

_JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 10**400, 2**31, 10**9),
    *("", "9", "full_attention", "\x00\n", "x" * 100_000, [], [[]], [None] * 3, [1e9] * 3, ["sliding_attention"] * 2),
    *({}, {"rope_type": "yarn"}, {"factor": "8"}, {"full_attention": []}, {"type": "longrope", "short_factor": [0]}),
    {"rope_type": "yarn", "factor": 1e-9, "original_max_position_embeddings": 1, "beta_fast": 1e-300},
]
_MUTATIONS = 300
"""Of each family: more than 10,000 in all."""
_SECONDS = 1.0


def _mutated(rng: random.Random, raw: dict[str, Any]) -> dict[str, Any]:
    changed = dict(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        key = rng.choice([*changed])
        inner = changed[key]
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            changed[key] = {**inner, rng.choice([*inner]): rng.choice(_JUNK)}
        elif isinstance(inner, list) and inner and rng.random() < 0.5:
            changed[key] = [*inner[:-1], rng.choice(_JUNK)]
        elif rng.random() < 0.1:
            del changed[key]
        else:
            changed[key] = rng.choice(_JUNK)
    return changed


@pytest.mark.parametrize("name", FAMILIES)
def test_mutated_configuration_is_read_or_refused_in_one_sentence(name: str) -> None:
    rng = random.Random(name)
    cases = [case for case in CASES if family_name(case) == name]
    bases = [dict(FAMILY_CASES[name].minimal), *(dict(CASES[case]) for case in cases)]
    bases += [reference_config(name, **base).to_dict() for base in bases]
    outcomes = {True: 0, False: 0}
    for number in range(_MUTATIONS):
        raw = {**_mutated(rng, {"vocab_size": 99, **rng.choice(bases)}), "model_type": name}
        started = time.process_time()
        try:
            read_config(raw)
            outcomes[True] += 1
        except ConfigError as error:
            outcomes[False] += 1
            text = str(error)
            assert "\n" not in text and "\x00" not in text and 0 < len(text) < 600, (name, number, raw)
        assert time.process_time() - started < _SECONDS, (name, number, raw)
    assert min(outcomes.values()) > _MUTATIONS / 10, outcomes
