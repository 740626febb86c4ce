"""The model's name for clients: that in its manifest; its directory's name works, too."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from tests.support.servers import running_server

pytestmark = pytest.mark.slow


def test_a_named_model_is_served_under_its_name_and_that_of_its_directory(tmp_path: Path, weights: Path) -> None:
    directory = Path(shutil.copytree(weights, tmp_path / "weights"))
    (directory / MANIFEST_FILE).write_bytes(manifest_file({}, "plays-5m"))
    with running_server(tmp_path, directory, fake_ms=1) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["id"] == "plays-5m"
        body = {"prompt": "x", "max_tokens": 2, "stream": False}
        for name in ("plays-5m", "weights"):
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, "model": name}, timeout=60).json()
            assert answer["model"] == "plays-5m"
            assert httpx.get(f"{server.url}/v1/models/{name}").json() == model
        assert httpx.post(f"{server.url}/complete", json=body, timeout=60).json()["model"] == "plays-5m"
        refused = httpx.post(f"{server.url}/v1/completions", json={**body, "model": "weights-32m"}, timeout=60)
        assert refused.status_code == 404 and "the served model is 'plays-5m'" in refused.json()["error"]["message"]
