"""One poisoned request fails alone, over HTTP: one clean error, and the 31 others get byte for byte what they had.

Nine places, each in an event stream, in a whole answer and in a stream of /v1/completions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.checkpoint import weights_files
from model.files import write_files
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import Faults
from tests.support.load.concurrent_clients import Answer, Ask, visit
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


def _all_at_once(server: Server, bodies: list[dict[str, Any]], mode: str) -> list[Answer]:
    path = "/v1/completions" if mode == "chunks" else "/complete"
    return visit(server, [Ask(path=path, body={**body, "stream": mode != "whole"}) for body in bodies])


def _error(output: Any) -> dict[str, Any] | None:
    """Of an event, a chunk or a whole answer; without the request's id, which is its answer's name."""
    errors = output.get("errors") or [output.get("end", output).get("error")]
    assert len(errors) == 1
    return errors[0]


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
    before = [answer.told() for answer in _all_at_once(server, bodies, mode)]
    assert not any(map(_error, before))
    for case in CASES:
        written = len(server.told())
        point = _arm(service.faults, case, mode)
        sent = bodies
        if case == "NaN row":
            sent = [{**b, "prompt": [*VICTIMS_IDS, POISON, 5]} if b.get("user") == "victim" else b for b in bodies]
        answers = _all_at_once(server, sent, mode)
        service.faults.disarm(point or "nothing")
        after = [answer.told() for answer in answers]
        error = _error(after[VICTIM])
        assert error and set(error) == {"message", "type", "param", "code"}, (case, after[VICTIM])
        assert error["type"] == "server_error", case
        if case != "NaN row":  # which is not a programming error, so it has no traceback in the log
            assert server.tells(answers[VICTIM].name, "InjectedFault", since=written), case
            begun = {kind: after[VICTIM].get(kind, {}).get(0, []) for kind in ("texts", "tokens")}
            assert all(before[VICTIM][kind][0][: len(part)] == part for kind, part in begun.items() if part), case
        good += [*after[:VICTIM], *after[VICTIM + 1 :]] == [*before[:VICTIM], *before[VICTIM + 1 :]]
        assert server.wait_for(lambda: server.metric("kv_cache_usage_ratio") == 0), f"{case}: leaked blocks"
        assert server.wait_for(lambda: server.metric("requests_running") == 0)
        assert server.metric("block_violations_total") == 0
    assert server.metric("engine_restarts_total") == 0
    promise.all_of(f"places where only the poisoned one of 32 clients fails ({mode})", good, len(CASES))


def test_a_guide_whose_compilation_raises_fails_its_request_alone(service: Service, promise: Promise) -> None:
    """Only guided requests reach this fault point; it used to end the engine."""
    server, bodies = service.server, _bodies()
    bodies[VICTIM] = {"prompt": "A number:", "max_tokens": 9, "seed": 1, "user": "victim", "regex": "[0-9]{4}"}
    bodies[3] = {**bodies[VICTIM], "user": "u3", "regex": "[a-z]{4}"}
    before = _all_at_once(server, bodies, "events")
    with service.faults.armed("engine.guide", "raise", match="[0-9]{4}"):
        after = _all_at_once(server, bodies, "events")
    error = _error(after[VICTIM].told())
    assert error and error["type"] == "server_error" and "guide" in error["message"]
    assert server.tells(after[VICTIM].name)
    pairs = [(one, other) for i, (one, other) in enumerate(zip(before, after, strict=True)) if i != VICTIM]
    assert server.metric("engine_restarts_total") == 0
    promise.all_of("answers beside one whose guide raises", sum(a.told() == b.told() for a, b in pairs), N - 1)
