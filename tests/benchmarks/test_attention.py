"""The notebook's benchmark runs, and its last line is the result as JSON."""

from __future__ import annotations

import json

import pytest

from benchmarks.attention import main
from model.presets import preset

pytestmark = pytest.mark.slow


def test_the_last_line_is_one_json_object_with_both_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["benchmark"], result["preset"]) == ("attention", "gpt")
    heads, cache = result["heads"], result["cache"]
    assert [(row["heads"], row["length"]) for row in heads] == [(6, 32), (6, 64), (1, 256), (4, 256)]
    assert [row["tokens"] for row in cache][:-1] == [32, 64]
    assert 200 < cache[-1]["tokens"] < preset("gpt").context
    times = [value for row in [*heads, *cache] for name, value in row.items() if name.endswith("_ms")]
    assert len(times) == 2 * (len(heads) + len(cache)) and min(times) > 0
    assert len(table) == len(heads) + len(cache) + 3


@pytest.mark.parametrize("name", ["toy", "cross", "gpt5"])
def test_a_preset_that_cannot_continue_a_text_alone_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--preset", name])
    assert ended.value.code == 2
    assert f"invalid choice: '{name}'" in capsys.readouterr().err
