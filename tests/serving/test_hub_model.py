"""A model of the Hub, served by its name."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from app.http.download_responder import answer_not_ready
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


def test_port_responds_while_a_model_downloads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with answer_not_ready(listener):
            assert httpx.get(f"{url}/health/live").json() == {"status": "live"}
            ready = httpx.get(f"{url}/health/ready")
            assert (ready.status_code, ready.json()["phase"]) == (503, "downloading")
            response = httpx.post(f"{url}/complete", content=b"x" * 200_000)
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert response.json()["error"]["message"] == "the model is downloading: try again in a moment"
            assert 'http-equiv="refresh"' in httpx.get(url, headers={"Accept": "text/html"}).text
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            listener.accept()[0].close()  # the socket still listens for the service
