"""Usage by key: counted by name, bounded, and gone with the key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from app.access.api_keys import MAX_KEYS, add_key, new_key, stored
from app.api.key_usage import MAX_LABELS, OTHERS, KeyUsage
from tests.support.servers import running_server


def _samples(usage: KeyUsage) -> dict[str, dict[str, float]]:
    return {
        family.name: {s.labels["key"]: s.value for s in family.samples if s.name.endswith("_total")}
        for family in usage.collect()
    }


def test_usage_counts_by_name_and_unused_keys_start_at_zero() -> None:
    usage = KeyUsage(lambda: ("alice", "bob"))
    usage.record("alice", 10, 3)
    usage.record("alice", 5, 0)
    assert _samples(usage) == {
        "inkstream_key_requests": {"alice": 2, "bob": 0},
        "inkstream_key_prompt_tokens": {"alice": 15, "bob": 0},
        "inkstream_key_generation_tokens": {"alice": 3, "bob": 0},
    }


def test_without_keys_there_is_one_series() -> None:
    usage = KeyUsage(tuple)
    usage.record("", 1, 1)
    assert _samples(usage)["inkstream_key_requests"] == {"": 1}


def test_keys_beyond_the_limit_share_one_series() -> None:
    names = tuple(f"key-{i}" for i in range(MAX_KEYS))
    usage = KeyUsage(lambda: names)
    for name in names:
        usage.record(name, 1, 1)
    found = _samples(usage)["inkstream_key_requests"]
    assert len(found) == MAX_LABELS + 1
    assert found[OTHERS] == MAX_KEYS - MAX_LABELS


def test_removed_keys_lose_their_series_and_late_completions_count_for_others() -> None:
    names = ["alice", "bob"]
    usage = KeyUsage(lambda: tuple(names))
    usage.record("bob", 1, 1)
    names.remove("bob")
    assert _samples(usage)["inkstream_key_requests"] == {"alice": 0}
    usage.record("bob", 1, 1)
    assert _samples(usage)["inkstream_key_requests"] == {"alice": 0, OTHERS: 1}


@pytest.mark.slow
def test_metrics_show_names_and_never_keys(tmp_path: Path, weights: Path) -> None:
    path, keys = tmp_path / "keys.json", {name: new_key() for name in ("alice", "bob")}
    keys["prometheus"] = new_key()
    for name, key in keys.items():
        add_key(path, stored(key, name, reads_usage=name == "prometheus"))
    with running_server(tmp_path, weights, "--keys-file", str(path), fake_ms=1) as server:
        headers = {"Authorization": f"Bearer {keys['alice']}"}
        body = {"prompt": "once", "max_tokens": 3, "stream": False}
        assert httpx.post(f"{server.url}/complete", json=body, headers=headers, timeout=60).status_code == 200
        scrape = {"Authorization": f"Bearer {keys['prometheus']}"}
        text = httpx.get(f"{server.url}/metrics", headers=scrape).text
        assert 'inkstream_key_requests_total{key="alice"} 1.0' in text
        assert 'inkstream_key_generation_tokens_total{key="alice"} 3.0' in text
        assert 'inkstream_key_requests_total{key="bob"} 0.0' in text
        assert not [key for key in keys.values() if key in text]
        own = httpx.get(f"{server.url}/metrics", headers=headers).text
        assert 'inkstream_key_requests_total{key="alice"} 1.0' in own and "bob" not in own
        assert "inkstream_load_ratio" in own, "everything else is shown to every key"
