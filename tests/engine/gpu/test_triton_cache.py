"""Triton's default kernel cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.gpu.triton_cache import keep_triton_cache


@pytest.mark.parametrize(
    ("directory", "environment", "kept"),
    [
        (None, {"HOME": "/home/a", "XDG_CACHE_HOME": "/home/a/cache"}, "/home/a/cache/inkstream/triton"),
        (None, {"INKSTREAM_CACHE_DIR": "/kept", "TRITON_CACHE_DIR": ""}, "/kept/triton"),
        (Path("/given"), {"INKSTREAM_CACHE_DIR": "/kept"}, "/given/triton"),
        (Path("here"), {}, str(Path.cwd() / "here/triton")),
        (Path("/given"), {"TRITON_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
    ],
)
def test_triton_cache_is_below_ours_unless_set_explicitly(
    directory: Path | None, environment: dict[str, str], kept: str
) -> None:
    variables = dict(environment)
    keep_triton_cache(directory, variables)
    assert variables["TRITON_CACHE_DIR"] == kept


@pytest.mark.parametrize("writable", ["cache", "cache/triton"])
def test_triton_loads_no_libraries_from_a_directory_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: str
) -> None:
    (tmp_path / "cache" / "triton").mkdir(mode=0o755, parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / writable).chmod(0o777)
    variables = {"HOME": str(tmp_path)}
    keep_triton_cache(tmp_path / "cache", variables)
    assert variables == {"HOME": str(tmp_path)}  # Triton's default, ~/.triton
    for home in ("/nonexistent", "/tmp"):
        variables = {"HOME": home}
        keep_triton_cache(tmp_path / "cache", variables)
        folder = Path(variables["TRITON_CACHE_DIR"])
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / writable).chmod(0o755)
    variables = {}
    keep_triton_cache(tmp_path / "cache", variables)
    assert variables == {"TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton")}
