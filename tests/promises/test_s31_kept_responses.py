"""S31: One key's requests never evict another key's responses that are kept for a repeated request."""

from __future__ import annotations

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_KEPT = 20
_FLOOD = 300
"""More cheap requests than the service keeps responses, 256."""


@pytest.fixture(scope="module")
def server(serve_module: Services, ring: Keyring, faults: Faults) -> Server:
    """The fake engine."""
    return serve_module(ring=ring, fake_ms=1, environment=faults.removing("owner_shares.none"))


def _repeated(server: Server, ring: Keyring, owner: str, number: int, prefix: str) -> int:
    """Sends a request under each of `number` keys for repeating it; returns how many got an earlier response."""
    with httpx.Client(base_url=server.url, headers=ring.headers(owner), timeout=60) as client:
        responses = [
            client.post("/tokenize", json={"prompt": "a"}, headers={"Idempotency-Key": f"{prefix}{i}"})
            for i in range(number)
        ]
    assert {response.status_code for response in responses} == {200}
    return sum(response.headers.get("idempotent-replayed") == "true" for response in responses)


def test_flood_of_one_key_evicts_no_response_of_another(server: Server, ring: Keyring, promise: Promise) -> None:
    flood = promise.size(_FLOOD, 2000)
    assert _repeated(server, ring, "victim", _KEPT, "kept") == 0
    assert _repeated(server, ring, "attacker", flood, "flood") == 0
    kept = _repeated(server, ring, "victim", _KEPT, "kept")
    promise.all_of("responses repeated after another key's flood of requests with an Idempotency-Key", kept, _KEPT)


def test_common_share_of_all_keys_is_detected(server: Server, ring: Keyring, faults: Faults) -> None:
    """Positive control."""
    with faults.armed("owner_shares.none", "remove"):
        assert _repeated(server, ring, "victim", _KEPT, "control") == 0
        _repeated(server, ring, "attacker", _FLOOD, "control flood")
        assert _repeated(server, ring, "victim", _KEPT, "control") < _KEPT
