"""A model of the Hub, served by its name."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from app.common.settings import Settings
from app.main import create_app
from tests.support.async_test import async_test
from tests.support.completion_client import fetch_completion
from tests.support.fake_hub import fake_hub
from tests.support.servers import start_server, stop_server

pytestmark = pytest.mark.slow


def test_served_hub_model_has_its_name_and_commit(tmp_path: Path, weights: Path) -> None:
    with fake_hub() as hub:
        hub.repositories["org/tiny"] = {path.name: path.read_bytes() for path in weights.iterdir()}
        commit = hub.commit("org/tiny")
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        server = start_server(tmp_path, Path("org/tiny@main"), "--watch", "60", environment=environment, fake_ms=1.0)
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (model["id"], model["weights_revision"]) == ("org/tiny", commit)
        assert httpx.get(f"{server.url}/v1/models/org/tiny").json() == model
        response = fetch_completion(server.url, prompt="fox", max_tokens=1)
        assert (response["model"], response["receipt"]["weights_revision"]) == ("org/tiny", commit)
        assert "HTTP Request" not in server.log_text()  # the addresses of the storage server are signed
        assert server.has_logged("downloading org/tiny: ", "downloaded org/tiny, commit", "--watch has no effect")

        hub.repositories["org/tiny"]["generation_config.json"] = b"{}"  # a newer commit: a reload does not take it
        server.process.send_signal(signal.SIGHUP)
        assert server.has_logged(f"this is commit {commit[:12]} of org/tiny again: restart for a newer one")
        assert server.has_logged("new weights are served: org/tiny")
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["weights_revision"] == commit
        assert stop_server(server) == 0


@async_test
async def test_requests_while_a_model_downloads() -> None:
    app = create_app(Settings(weights=Path("org/tiny")))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        live, ready, page = await client.get("/health/live"), await client.get("/health/ready"), await client.get("/")
        assert (live.status_code, live.json()) == (200, {"status": "live"})
        assert (ready.status_code, ready.json()) == (503, {"status": "not ready", "phase": "downloading"})
        refused = await client.post("/complete", json={"prompt": "a"})
        for response in (ready, page, refused):
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        for response in (page, refused):
            assert response.json()["error"]["message"] == "the model is downloading: try again in a moment"
        assert 'http-equiv="refresh"' in (await client.get("/", headers={"Accept": "text/html"})).text
        app.state.is_started.set()
        assert (await client.get("/")).status_code == 200


@async_test
async def test_application_with_weights_of_its_own_has_no_such_gate() -> None:
    app = create_app(Settings(weights=Path("weights")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/")).status_code == 200
