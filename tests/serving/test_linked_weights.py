"""A weights directory of links into a Hugging Face cache: served, reloaded, checked, and said."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.servers import running_server

pytestmark = pytest.mark.slow


@pytest.fixture
def linked(tmp_path: Path, weights: Path) -> Path:
    """A directory whose files are links to blobs."""
    blobs, directory = tmp_path / "hub/models--a--b/blobs", tmp_path / "linked"
    blobs.mkdir(parents=True)
    directory.mkdir()
    for path in weights.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (directory / path.name).symlink_to(blobs / name)
    return directory


def test_check_says_that_files_are_in_a_cache(linked: Path) -> None:
    command = [sys.executable, "-m", "app", "check", str(linked)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    count = len(list(linked.iterdir()))
    assert f"  links        {count} files are in the cache {linked.parent / 'hub/models--a--b'}\n" in ran.stdout


def test_service_says_so_and_reloads_changed_links_but_none_to_elsewhere(tmp_path: Path, linked: Path) -> None:
    with running_server(tmp_path, linked) as server:
        cache = linked.parent / "hub/models--a--b"
        assert server.has_logged(f"{len(list(linked.iterdir()))} files are links into the cache {cache}")
        config = linked / "generation_config.json"
        config.unlink(missing_ok=True)
        blob = cache / "blobs" / ("d" * 40)
        blob.write_text(json.dumps({"temperature": 0.25}))
        config.symlink_to(blob)
        server.process.send_signal(signal.SIGHUP)
        assert server.wait_for(lambda: server.metric('weights_reloads_total{outcome="switched"}') == 1)
        (tmp_path / "outside.json").write_text("{}")
        config.unlink()
        config.symlink_to(tmp_path / "outside.json")
        server.process.send_signal(signal.SIGHUP)
        assert server.has_logged("generation_config.json: leads out of the directory")
        assert server.metric('weights_reloads_total{outcome="switched"}') == 1
