"""Errors for a directory without weights: what is missing, and what to do with its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.cli.check import main as check
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError

CASES = [
    ({"pytorch_model.bin"}, "model.safetensors", "pytorch_model.bin is not read.*bring-your-model"),
    ({"ckpt.pt"}, "model.safetensors", "ckpt.pt is not read"),
    ({"model-00001-of-00002.safetensors"}, "model.safetensors", "index.json is missing"),
    (set(), "model.safetensors", "model.safetensors: no such file$"),
    ({"tokenizer.model"}, "tokenizer.json", "save_pretrained.* of transformers from tokenizer.model"),
    ({"vocab.json", "merges.txt"}, "tokenizer.json", "of transformers from merges.txt"),
    ({"snapshots"}, "config.json", "pass the revision folder under snapshots"),
    ({"adapter_config.json"}, "config.json", "an adapter: merge it"),
]


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(weights, tmp_path / "copy"))


@pytest.mark.parametrize(("there", "missing", "words"), CASES)
def test_what_is_missing_is_named_with_what_to_do(directory: Path, there: set[str], missing: str, words: str) -> None:
    check_layout(directory)
    (directory / missing).unlink()
    for name in there:
        (directory / name).touch()
    with pytest.raises(CheckpointError, match=words):
        check_layout(directory)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(directory: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert check([str(directory)]) == 2
    assert f"{name}: is only a pointer of git-lfs" in capsys.readouterr().err
