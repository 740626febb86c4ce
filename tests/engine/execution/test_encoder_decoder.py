"""Encoder-decoder models: every request attends to its own source, with the same bits in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from app.common.types import Request, SampledEvent, SamplingParams
from model.nn.reference import generate
from model.nn.transformer import Decoder
from tests.support.completion_client import whole
from tests.support.model.tiny_models import VOCAB, run_all, tiny_config, tiny_decoder, tiny_engine, tiny_weights
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

ENCODER = {"n_encoder_layers": 2, "positions": "sinusoidal", "norm": "layernorm", "norm_position": "post"}
DTYPES = [torch.float32, torch.bfloat16]


def _decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    return tiny_decoder(tiny_config(**ENCODER, final_norm=False), dtype=dtype)


def _requests(count: int, seed: int, sources: int) -> list[Request]:
    """Greedy and seeded draws over `sources` different sources of up to three tiles; half share a long prompt."""
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 180))) for _ in range(sources)]
    common = tuple(rng.randrange(1, VOCAB) for _ in range(40))
    made = []
    for i in range(count):
        own = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 60)))
        params = SamplingParams(temperature=rng.choice([0.0, 0.9]), seed=rng.getrandbits(63), logprobs=3)
        prompt = common + own if i % 2 else own
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=25, params=params, source=texts[i % sources]))
    return made


def _alone(decoder: Decoder, requests: list[Request]) -> dict[str, list[SampledEvent]]:
    return {r.id: run_all(tiny_engine(decoder, tokens_per_step=512), [r])[r.id] for r in requests}


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest) -> tuple[Decoder, list[Request], dict[str, list[SampledEvent]]]:
    """A decoder, requests, and what each of them gets alone."""
    decoder, requests = _decoder(request.param), _requests(12, seed=1, sources=5)
    return decoder, requests, _alone(decoder, requests)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("together", {"blocks": 400}),
        ("in pieces", {"blocks": 400, "tokens_per_step": 7, "max_running": 4}),
        ("preempted", {"blocks": 12, "tokens_per_step": 1000}),
    ],
)
def test_a_request_gets_the_same_bits_in_any_batch(
    name: str, engine: dict[str, int], case: tuple[Decoder, list[Request], dict[str, list[SampledEvent]]]
) -> None:
    decoder, requests, alone = case
    running = tiny_engine(decoder, **engine)
    assert run_all(running, requests) == alone
    assert (running.scheduler.preemptions > 0) == (name == "preempted")


def test_more_sources_than_slots_are_read_again_and_change_nothing() -> None:
    decoder, requests = _decoder(), _requests(14, seed=2, sources=7)
    engine, reads = tiny_engine(decoder, blocks=400, max_running=3), 0
    encode = decoder.encode

    def counted(*arguments: torch.Tensor) -> object:
        nonlocal reads
        reads += 1
        return encode(*arguments)

    decoder.encode = counted  # type: ignore[method-assign, assignment]
    result = run_all(engine, [*requests, *(_again(r) for r in requests)])
    del decoder.encode
    assert reads > 7, "three slots for seven sources were meant to be too few"
    alone = _alone(decoder, requests)
    assert all(_without_id(result[f"{r.id} again"]) == _without_id(result[r.id]) for r in requests)
    assert {r.id: result[r.id] for r in requests} == alone


def test_a_source_is_read_once_for_all_who_look_at_it() -> None:
    decoder, requests = _decoder(), _requests(8, seed=3, sources=1)
    engine, reads, encode = tiny_engine(decoder, blocks=400), [], decoder.encode
    decoder.encode = lambda *arguments: reads.append(1) or encode(*arguments)  # type: ignore[method-assign]
    run_all(engine, requests)
    assert len(reads) == 1


def test_the_engine_draws_the_tokens_of_the_oracle() -> None:
    decoder = _decoder()
    for request in _requests(6, seed=4, sources=6):
        greedy = Request(id="g", prompt=request.prompt, max_tokens=25, source=request.source, params=_GREEDY)
        events = run_all(tiny_engine(decoder), [greedy])["g"]
        assert [e.token for e in events] == generate(decoder, list(greedy.prompt), 25, source=list(greedy.source))


def test_another_source_gives_another_text_although_the_prompt_is_cached() -> None:
    decoder, (one, two) = _decoder(), _requests(2, seed=5, sources=2)
    prompt = tuple(range(1, 60))
    engine = tiny_engine(decoder, blocks=400)
    greedy = [Request(id=r.id, prompt=prompt, max_tokens=20, params=_GREEDY, source=r.source) for r in (one, two)]
    texts = [_tokens(run_all(engine, [request])[request.id]) for request in greedy]
    assert texts[0] != texts[1]
    assert texts == [_tokens(run_all(tiny_engine(decoder), [request])[request.id]) for request in greedy]


def test_a_slot_that_held_numbers_that_are_not_finite_harms_no_later_request() -> None:
    decoder, request = _decoder(), _requests(1, seed=6, sources=1)[0]
    engine = tiny_engine(decoder, max_running=1)
    sources = engine.runner.compute._sources
    sources._cache.data.fill_(torch.nan)
    sources._cache.clear([sources._cache.padding_block])
    assert run_all(engine, [request]) == _alone(decoder, [request])


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("cross")
    tiny_weights(folder / "model", **ENCODER, final_norm=False)
    running = start_server(folder, folder / "model", "--dtype", "float32", "--max-context", "100")
    yield running
    assert stop_server(running) == 0


def test_a_source_is_answered_over_http_like_by_the_oracle(crossing: Server) -> None:
    source, ids = "Once upon a time", [0, 5, 6]
    answer = whole(crossing.url, prompt=ids, source=source, max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
    assert httpx.get(f"{crossing.url}/v1/models").json()["data"][0]["has_encoder"] is True
    decoder = tiny_decoder(tiny_config(**ENCODER, final_norm=False))
    from_ids = whole(crossing.url, prompt=ids, source=[7, 8, 9], max_tokens=12, temperature=0, logprobs=0)
    expected = generate(decoder, ids, 12, source=[7, 8, 9], eos_ids=(0,))
    assert [token["id"] for token in from_ids["choices"][0]["tokens"]] == [t for t in expected if t]
    assert from_ids["usage"]["prompt_tokens"] == 6
    assert answer["receipt"]["source_sha256"] != from_ids["receipt"]["source_sha256"]
    assert whole(crossing.url, source=source, max_tokens=2)["usage"]["completion_tokens"] > 0


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
def test_what_is_wrong_with_a_source_is_told(crossing: Server, body: dict[str, object], words: str) -> None:
    response = httpx.post(f"{crossing.url}/complete", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"] or words == error["param"]
    assert error["param"] == ("prompt" if "prompt" not in body else "source")


def test_a_model_without_encoder_refuses_a_source(server: Server) -> None:
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "source": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "source"


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path, weights: Path) -> None:
    server = start_server(tmp_path, weights, "--max-context", "257", wait=False)
    assert server.process.wait(timeout=60) == 2
    assert "--max-context 257 is more than the model's context of 256" in server.log.read_text()


_GREEDY = SamplingParams(temperature=0)


def _again(request: Request) -> Request:
    fields = {"prompt": request.prompt, "max_tokens": 25, "params": request.params, "source": request.source}
    return Request(id=f"{request.id} again", **fields)  # type: ignore[arg-type]


def _tokens(events: list[SampledEvent]) -> list[int | None]:
    return [event.token for event in events]


def _without_id(events: list[SampledEvent]) -> list[tuple[object, ...]]:
    return [(e.token, e.logprob, e.top) for e in events]
