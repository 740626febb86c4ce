"""What inkstream check prints about a model that it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.__main__ import main
from tests.support.model.tiny_models import tiny_weights


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(0, None), ([0, 1], None), (1, '0 "<|endoftext|>"')],
    ids=["the files agree", "one names more", "they differ"],
)
def test_end_tokens_that_only_a_chat_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generation: object, expected: str | None
) -> None:
    weights = tiny_weights(tmp_path / "weights")
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert main(["check", str(weights)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = [line.removeprefix("EOS of chats").strip() for line in lines if line.startswith("EOS of chats")]
    assert found == ([f"also {expected}: the files name different tokens"] if expected else [])
