"""Encoder-decoder models: every request attends to its own source, with the same bits in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from app.common.types import Request, SamplingParams
from model.nn.reference import generate
from model.nn.transformer import Decoder
from tests.support.completion_client import fetch_completion
from tests.support.engine.mixed_requests import serve
from tests.support.engine.parity import alone, expect_parity
from tests.support.model.tiny_models import VOCAB, run_all, tiny_config, tiny_decoder, tiny_engine, tiny_weights
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

ENCODER = {"n_encoder_layers": 2, "positions": "sinusoidal", "norm": "layernorm", "norm_position": "post"}


def _decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    return tiny_decoder(tiny_config(**ENCODER, final_norm=False), dtype=dtype)


def _requests(count: int, seed: int, sources: int) -> list[Request]:
    """Greedy and seeded requests over sources of up to three tiles; half share a long prompt, some are forks."""
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 180))) for _ in range(sources)]
    common = tuple(rng.randrange(1, VOCAB) for _ in range(40))
    made = []
    for i in range(count):
        own = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 60)))
        params = SamplingParams(temperature=rng.choice([0.0, 0.9]), seed=rng.getrandbits(63), logprobs=3)
        prompt = common + own if i % 2 else own
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=25, params=params, source=texts[i % sources]))
        if i % 3 == 0:
            fork = msgspec.structs.replace(params, temperature=1.0, choice=1)
            made.append(msgspec.structs.replace(made[-1], id=f"r{i}/1", leader=f"r{i}", params=fork))
    return made


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scheduling_does_not_change_a_bit(dtype: torch.dtype) -> None:
    expect_parity(_decoder(dtype), _requests(10, seed=1, sources=5), tight=8)


@pytest.mark.parametrize(("sources", "reads"), [(1, 1), (7, None)])
def test_source_is_encoded_once_for_all_its_requests_and_again_after_eviction(
    sources: int, reads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, requests, n_reads = _decoder(), _requests(12, seed=2, sources=sources), 0
    expected, encode = alone(decoder, requests), decoder.encode

    def counted(*arguments: torch.Tensor) -> object:
        nonlocal n_reads
        n_reads += 1
        return encode(*arguments)

    monkeypatch.setattr(decoder, "encode", counted)
    assert serve(tiny_engine(decoder, blocks=400, max_running=3), requests) == expected
    assert n_reads == reads if reads else n_reads > 7, "three slots must be too few for seven sources"


def test_engine_samples_the_tokens_of_the_oracle() -> None:
    decoder = _decoder()
    for request in _requests(6, seed=4, sources=6):
        greedy = Request(
            id="g", prompt=request.prompt, max_tokens=25, source=request.source, params=SamplingParams(temperature=0)
        )
        events = run_all(tiny_engine(decoder), [greedy])["g"]
        assert [e.token for e in events] == generate(decoder, list(greedy.prompt), 25, source=list(greedy.source))


def test_slot_with_non_finite_values_does_not_affect_later_requests() -> None:
    decoder, requests = _decoder(), _requests(1, seed=6, sources=1)
    engine = tiny_engine(decoder, max_running=1)
    sources = engine.runner.executor._attend_sources.__self__  # type: ignore[attr-defined]
    sources._cache.data.fill_(torch.nan)
    sources._cache.clear([sources._cache.padding_block])
    assert serve(engine, requests) == alone(decoder, requests)


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("cross")
    tiny_weights(folder / "model", **ENCODER, final_norm=False)
    running = start_server(folder, folder / "model", "--dtype", "float32", "--max-context", "100")
    yield running
    assert stop_server(running) == 0


def test_http_completion_of_a_source_equals_that_of_the_oracle(crossing: Server) -> None:
    source, ids = "Once upon a time", [0, 5, 6]
    answer = fetch_completion(
        crossing.url, prompt=ids, source=source, max_tokens=12, temperature=0, logprobs=0, ignore_eos=True
    )
    assert httpx.get(f"{crossing.url}/v1/models").json()["data"][0]["has_encoder"] is True
    decoder = tiny_decoder(tiny_config(**ENCODER, final_norm=False))
    from_ids = fetch_completion(crossing.url, prompt=ids, source=[7, 8, 9], max_tokens=12, temperature=0, logprobs=0)
    expected = generate(decoder, ids, 12, source=[7, 8, 9], eos_ids=(0,))
    assert [token["id"] for token in from_ids["choices"][0]["tokens"]] == [t for t in expected if t]
    assert from_ids["usage"]["prompt_tokens"] == 6
    assert answer["receipt"]["source_sha256"] != from_ids["receipt"]["source_sha256"]
    assert fetch_completion(crossing.url, source=source, max_tokens=2)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a"}, "needs a source"),
        ({"prompt": "a", "source": ""}, "needs a source"),
        ({"prompt": "a", "source": []}, "needs a source"),
        ({"prompt": "a", "source": [VOCAB]}, "vocabulary"),
        ({"prompt": "a", "source": [1] * 101}, "at most 100"),
        ({"prompt": "a", "source": "x" * 40_000}, "at most 100"),
        ({"prompt": "a", "source": 5}, "source"),
        ({"source": None}, "prompt"),
    ],
)
def test_invalid_sources_are_refused(crossing: Server, body: dict[str, object], words: str) -> None:
    response = httpx.post(f"{crossing.url}/complete", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"] or words == error["param"]
    assert error["param"] == ("prompt" if "prompt" not in body else "source")


def test_a_model_without_encoder_refuses_a_source(server: Server) -> None:
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "source": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "source"
