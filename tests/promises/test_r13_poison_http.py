"""One poisoned request fails alone, over HTTP: one clean error, and the 31 others get byte for byte what they had.

Nine places, each in an event stream, in a whole answer and in a stream of /v1/completions.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model.checkpoint.checkpoint import weights_files
from model.files import write_files
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import Faults
from tests.support.completion_client import parse_events
from tests.support.model.tiny_models import TEXT, VOCAB, tiny_config, tiny_decoder
from tests.support.promise_figures import Promise
from tests.support.servers import Server, start_server, stop_server

N, VICTIM = 32, 16
MODES = ("events", "whole", "chunks")
CASES = ("validate", "tokenise", "prefill", "sampler", "NaN row", "logprobs", "detokenise", "stop", "encode")
TOKENIZER = Tokenizer.train([TEXT], VOCAB)
POISON = TOKENIZER.bytes_of.index(b"\xf5")
"""No text in UTF-8 has this byte."""
VICTIMS_IDS = TOKENIZER.encode("The victim sang to the moon")


def _poisoned_weights(folder: Path) -> Path:
    """All numbers are finite, as the loader wants them; what the model makes of one token is not."""
    decoder = tiny_decoder(tiny_config(norm="none", final_norm=False, tied_head=False))
    decoder.embedding[POISON] = 3e38
    files = weights_files(decoder, dtype=torch.float32, eos_id=TOKENIZER.eos_id, generation={})
    write_files(folder, {**files, **{name: text.encode() for name, text in TOKENIZER.files().items()}})
    return folder


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, and where its faults are armed."""

    server: Server
    faults: Faults


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("poison")
    faults = Faults(folder / "faults")
    weights = _poisoned_weights(folder / "weights")
    server = start_server(folder, weights, "--dtype", "float32", "--threads", "1", environment=faults.environment)
    yield Service(server, faults)
    assert stop_server(server) == 0, server.log.read_text()[-2000:]


def _bodies() -> list[dict[str, Any]]:
    rng, words = random.Random(5), TEXT.split()[:60]
    return [_body(index, rng, words) for index in range(N)]


def _body(index: int, rng: random.Random, words: list[str]) -> dict[str, Any]:
    if index == VICTIM:
        own = {"prompt": "The victim sang to the moon", "user": "victim", "logprobs": 2, "echo": True}
        return {**own, "stop": ["never written"], "max_tokens": 9, "seed": 1, "logit_bias": {str(POISON): -100}}
    return {
        "prompt": " ".join(rng.choices(words, k=rng.randint(1, 4))),
        "max_tokens": rng.randint(4, 9),
        "seed": index,
        "temperature": rng.choice([0.0, 0.9]),
        "logprobs": rng.choice([None, None, None, 1]),
        "stop": rng.choice([None, ["the"]]),
        "logit_bias": {str(POISON): -100},
        "user": f"u{index}",
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client makes of an answer; `output` is all of it but ids and times."""

    output: tuple[str, ...]
    error: dict[str, Any] | None


def _all_at_once(url: str, bodies: list[dict[str, Any]], mode: str) -> list[Answer]:
    async def ask_all() -> list[Answer]:
        limits = httpx.Limits(max_connections=N)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(_ask(client, body, mode) for body in bodies))

    return asyncio.run(ask_all())


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], mode: str) -> Answer:
    route = "/v1/completions" if mode == "chunks" else "/complete"
    response = await client.post(route, json={**body, "stream": mode != "whole"})
    if response.status_code != 200:
        return Answer((str(response.status_code),), response.json()["error"])
    if mode == "events":
        return _of_events(response.text)
    if mode == "chunks":
        return _of_chunks(response.text)
    return Answer((json.dumps(response.json()["choices"]),), None)


def _of_events(body: str) -> Answer:
    events = parse_events(body)
    assert [e.name for e in events if e.name in ("done", "error")] == [events[-1].name], "not one end, at the end"
    texts = [e.data["text"] + json.dumps(e.data.get("tokens")) for e in events if e.name == "token"]
    if events[-1].name == "error":
        return Answer(tuple(texts), events[-1].data["error"])
    return Answer((*texts, json.dumps(events[-1].data["choices"])), None)


def _of_chunks(body: str) -> Answer:
    *blocks, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parts = [json.loads(block.removeprefix("data: ")) for block in blocks]
    errors = [part["error"] for part in parts if "error" in part]
    assert len(errors) <= 1 and (not errors or "error" in parts[-1])
    return Answer(tuple(json.dumps(part["choices"]) for part in parts if "choices" in part), *errors or [None])


def _arm(faults: Faults, case: str, mode: str) -> str:
    """Arms the fault point of a case for the victim alone; empty where the victim's own body causes the failure."""
    ids = str(tuple(VICTIMS_IDS))[:-1]
    encoding = {"events": "api.event", "whole": "api.answer", "chunks": "api.chunk"}[mode]
    points: dict[str, tuple[str, dict[str, Any]]] = {
        "validate": ("api.validate", {"match": "victim"}),
        "tokenise": ("text.encode", {"match": "The victim sang"}),
        "prefill": ("engine.forward", {"match": ids}),
        "sampler": ("engine.sample", {"match": ids, "after": 5}),
        "logprobs": ("engine.score", {"match": ids}),
        "detokenise": ("text.decode", {"match": ids, "after": 4}),
        "stop": ("text.stop", {"match": ids, "after": 4}),
        "encode": (encoding, {"match": "'victim'"}),
    }
    if case not in points:
        return ""
    point, order = points[case]
    faults.arm(point, "raise", **order)
    return point


@pytest.mark.parametrize("mode", MODES)
def test_31_of_32_clients_do_not_notice_a_poisoned_one(service: Service, mode: str, promise: Promise) -> None:
    server, bodies, good = service.server, _bodies(), 0
    before = _all_at_once(server.url, bodies, mode)
    assert not [answer.error for answer in before if answer.error]
    for case in CASES:
        written = len(server.told())
        point = _arm(service.faults, case, mode)
        sent = bodies
        if case == "NaN row":
            sent = [{**b, "prompt": [*VICTIMS_IDS, POISON, 5]} if b.get("user") == "victim" else b for b in bodies]
        after = _all_at_once(server.url, sent, mode)
        service.faults.disarm(point or "nothing")
        victim, error = after[VICTIM], after[VICTIM].error
        assert error and set(error) == {"message", "type", "param", "code", "request_id"}, (case, victim)
        assert error["type"] == "server_error", case
        if case != "NaN row":  # which is not a programming error, so it has no traceback in the log
            assert server.tells(error["request_id"], "InjectedFault", since=written), case
        if mode == "events":
            assert victim.output in (("500",), before[VICTIM].output[: len(victim.output)]), case
        good += all(one == other for i, (one, other) in enumerate(zip(before, after, strict=True)) if i != VICTIM)
        assert server.wait_for(lambda: server.metric("kv_cache_usage_ratio") == 0), f"{case}: leaked blocks"
        assert server.wait_for(lambda: server.metric("requests_running") == 0)
        assert server.metric("block_violations_total") == 0
    assert server.metric("engine_restarts_total") == 0
    what = f"places where only the poisoned one of 32 clients fails ({mode})"
    promise.all_of(what, good, len(CASES))


def test_a_guide_whose_compilation_raises_fails_its_request_alone(service: Service, promise: Promise) -> None:
    """Only guided requests reach this fault point; it used to end the engine."""
    server, bodies = service.server, _bodies()
    bodies[VICTIM] = {"prompt": "A number:", "max_tokens": 9, "seed": 1, "user": "victim", "regex": "[0-9]{4}"}
    bodies[3] = {**bodies[VICTIM], "user": "u3", "regex": "[a-z]{4}"}
    before = _all_at_once(server.url, bodies, "events")
    service.faults.arm("engine.guide", "raise", match="[0-9]{4}")
    after = _all_at_once(server.url, bodies, "events")
    service.faults.disarm("engine.guide")
    error = after[VICTIM].error
    assert error and error["type"] == "server_error" and "guide" in error["message"]
    assert server.tells(error["request_id"])
    good = sum(one == other for i, (one, other) in enumerate(zip(before, after, strict=True)) if i != VICTIM)
    assert server.metric("engine_restarts_total") == 0
    promise.all_of("answers beside one whose guide raises", good, N - 1)
