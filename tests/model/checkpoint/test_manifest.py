"""manifest.json: a set of files is complete, or the error names the file that does not match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.manifest import MANIFEST_FILE, check_manifest, manifest_file, read_model_name
from model.files import CheckpointError, sha256, write_files
from tests.support import ROOT

FILES = {"config.json": b"{}", "model.safetensors": b"abc"}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A directory with its manifest."""
    write_files(tmp_path, {**FILES, MANIFEST_FILE: manifest_file(FILES)})
    return tmp_path


def test_complete_set_passes_and_may_have_extra_files(whole: Path) -> None:
    (whole / "README.md").write_text("an unrelated file")
    assert check_manifest(whole)
    (whole / MANIFEST_FILE).unlink()
    assert not check_manifest(whole)


@pytest.mark.parametrize("name", FILES)
def test_changed_or_missing_file_is_named(whole: Path, name: str) -> None:
    (whole / name).write_bytes(b"other")
    with pytest.raises(CheckpointError, match=rf"{name}: differs from manifest\.json"):
        check_manifest(whole)
    (whole / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read"):
        check_manifest(whole)


def test_known_hashes_are_reused_and_still_checked(whole: Path) -> None:
    path = whole / "model.safetensors"
    known = {path: sha256(path)}
    path.write_bytes(b"replaced since")
    assert check_manifest(whole, known)
    with pytest.raises(CheckpointError, match="differs from"):
        check_manifest(whole, {path: "0" * 64})


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "sha256"),
        *[({"sha256": {name: "0" * 64}}, "key") for name in ("../secret", MANIFEST_FILE, "", "a\n")],
        *[({"sha256": {"config.json": value}}, "sha256") for value in ("0" * 63, "0" * 65, 5)],
        *[({"name": name, "sha256": {}}, "name") for name in ("", 5, "a b", "a/b", "-a", "a\n", "a" * 101, ["a"])],
    ],
)
def test_invalid_manifest_is_refused(whole: Path, content: Any, field: str) -> None:
    """A name that no client could send is refused, too."""
    (whole / MANIFEST_FILE).write_text(json.dumps(content))
    read = read_model_name if field == "name" else check_manifest
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{field}"):
        read(whole)


def test_manifest_may_name_the_model(whole: Path) -> None:
    assert read_model_name(whole) is None
    (whole / MANIFEST_FILE).write_bytes(manifest_file(FILES, "plays-5m"))
    assert read_model_name(whole) == "plays-5m" and check_manifest(whole)
    (whole / MANIFEST_FILE).unlink()
    assert read_model_name(whole) is None


def test_manifest_does_not_follow_links_out_of_the_directory(
    whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "config.json"
    other.write_bytes(FILES["config.json"])
    (whole / "config.json").unlink()
    (whole / "config.json").symlink_to(other)
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        check_manifest(whole)


@pytest.mark.parametrize(("name", "model_name"), [("weights", "period-8.7m"), ("weights-32m", "period-32m")])
def test_default_weights_are_complete_and_have_a_name(name: str, model_name: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ROOT / name, tmp_path / name))
    assert check_manifest(copy) and read_model_name(copy) == model_name
    assert set(json.loads((copy / MANIFEST_FILE).read_text())["sha256"]) == {
        path.name for path in copy.iterdir() if path.suffix not in (".md", ".svg") and path.name != MANIFEST_FILE
    }
