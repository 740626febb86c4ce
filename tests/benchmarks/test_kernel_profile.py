"""The benchmark of operations reports every kind of them, and their times add up to the step."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernel_profile import main, profile
from tests.support.model.tiny_models import tiny_config


@pytest.mark.usefixtures("native_library")
def test_the_last_line_is_one_json_object_with_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "2", "--int8"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["benchmark"], result["shape"], result["int8"]) == ("operations", "default", True)
    names = {"norm", "q, k, v", "rotate, cache", "attention", "out", "gate, up", "down"}
    for each in result["profiles"]:
        assert set(each["operations_us"]) == names and min(each["operations_us"].values()) > 0
    assert [each["rows"] for each in result["profiles"]] == [1, 8, 32]
    assert len(table) == 1 + len(names) + 2


@pytest.mark.usefixtures("native_library")
def test_every_layout_has_its_own_operations() -> None:
    (classic,) = profile(tiny_config(gated=False, out_projection=False), steps=1, rows=(2,))
    assert {"up", "add"} <= set(classic.operations_us) and "out" not in classic.operations_us
