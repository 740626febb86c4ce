"""Tokenizers of equal files are loaded once per process: building one stalls the event loop at a reload."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from app.tokenization import tokenizer_trial
from app.tokenization.tokenizer_trial import try_tokenizer
from model.tokenizer.tokenizer import Tokenizer, TokenizerError
from tests.support.model.sample_tokenizers import gpt2, save


def _directory(folder: Path, **names: str) -> Path:
    folder.mkdir()
    save(gpt2(), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_tokenizer_in_use_serves_other_weights_with_equal_files(tmp_path: Path) -> None:
    first = try_tokenizer(_directory(tmp_path / "a"))
    assert try_tokenizer(_directory(tmp_path / "b")) is first


def test_tokenizers_of_other_files_are_loaded(tmp_path: Path) -> None:
    one = _directory(tmp_path / "a")
    first = try_tokenizer(one)
    named = try_tokenizer(_directory(tmp_path / "b", eos_token="a"))
    assert named is not first
    content = json.loads((one / "tokenizer.json").read_text())
    (one / "tokenizer.json").write_text(json.dumps({**content, "normalizer": {"type": "NFC"}}))
    changed = try_tokenizer(one)
    assert changed is not first and changed.encode("e\u0301") == first.encode("\u00e9")


def test_only_a_tokenizer_in_use_is_kept(tmp_path: Path) -> None:
    directory = _directory(tmp_path / "a")
    gc.collect()  # tokenizers of tests before this one
    before = len(tokenizer_trial._in_use)
    tokenizer = try_tokenizer(directory)
    assert len(tokenizer_trial._in_use) == before + 1
    del tokenizer
    gc.collect()
    assert len(tokenizer_trial._in_use) == before


def test_tokenizer_whose_file_changes_while_it_loads_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, load = _directory(tmp_path / "a"), Tokenizer.load

    def change_and_load(folder: Path) -> Tokenizer:
        tokenizer = load(folder)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
        return tokenizer

    monkeypatch.setattr(Tokenizer, "load", change_and_load)
    first = try_tokenizer(directory)
    monkeypatch.undo()
    assert try_tokenizer(directory) is not first


def test_missing_file_is_named_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            try_tokenizer(tmp_path)
