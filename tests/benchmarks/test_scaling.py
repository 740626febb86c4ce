"""The scaling benchmark: fitted rates reproduce the times from which they were fitted."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from app.serving.replica_count import Rates, step_seconds
from benchmarks import scaling
from benchmarks.engine import CONTEXT_TOKENS
from benchmarks.scaling import fit, fit_synchronization
from tests.support.model.tiny_models import tiny_config


def test_fit_recovers_the_rates_behind_the_times() -> None:
    config, rates = tiny_config(), Rates(weights=2e9, products=3e9, cache=5e8, numbers=7e8)
    least = {
        rows: array(
            "d",
            [
                max(one.weight_bytes / rates.weights, one.products / rates.products)
                + one.cache_bytes / rates.cache
                + one.numbers / rates.numbers
                for one in scaling.timed_operations(config, rows)
            ],
        )
        for rows in (1, 32)
    }
    found = fit(least, config)
    for name in ("weights", "products", "cache", "numbers"):
        assert getattr(found, name) == pytest.approx(getattr(rates, name))
    two = step_seconds(config, 1, 2, replace(rates, host=0, host_row=0), context=CONTEXT_TOKENS)
    assert fit_synchronization(two, 1, found, config) == pytest.approx(rates.synchronization)
    assert step_seconds(config, 8, 1, found) == pytest.approx(step_seconds(config, 8, 1, rates))
