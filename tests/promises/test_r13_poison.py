"""One poisoned request fails alone, wherever it is poisoned, in the engine and over HTTP: it gets one clean error, and
the outputs of all others are byte-identical.

Over HTTP: nine places, each in an event stream, in a whole answer and in a stream of /v1/completions.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from app.common.fault_injection import InjectedFault
from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.scheduling.block_allocator import BlockAllocator
from model.checkpoint.checkpoint import weights_files
from model.files import write_files
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import Faults, arm_this_process
from tests.support.engine.mixed_requests import POISON, VICTIM, Outcome, mixed_requests, poisoned_decoder, serve
from tests.support.load.concurrent_clients import CompletionExchange, RequestSpec, send_all
from tests.support.model.tiny_models import TEXT, VOCAB, tiny_config, tiny_decoder, tiny_engine
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES = {
    "prefill": ("engine.forward", {}),
    "forward in mid-text": ("engine.forward", {"after": 6}),
    "sampler": ("engine.sample", {}),
    "sampler in mid-text": ("engine.sample", {"after": 4}),
    "logprobs": ("engine.score", {}),
    "logprobs of a later piece": ("engine.score", {"after": 1}),
}


def _engine() -> Engine:
    return tiny_engine(poisoned_decoder(), blocks=400, tokens_per_step=96)


def _failed_alone(before: dict[str, Outcome], after: dict[str, Outcome], *, is_prefix: bool = True) -> bool:
    """Whether only the victim failed, once, and all others have what they had."""
    victim = after[VICTIM]
    assert len(victim.failures) == victim.ends == 1
    if is_prefix:
        assert victim.events == before[VICTIM].events[: len(victim.events)]
    return all(after[name] == before[name] for name in before if name != VICTIM)


def _with_poison(requests: list[Request], *, is_scored: bool) -> list[Request]:
    """The victim reads a token that is not finite, in the first of several pieces of its prompt."""
    changed = list(requests)
    (index,) = [index for index, request in enumerate(requests) if request.id == VICTIM]
    prompt = (*requests[index].prompt[:2], POISON, *requests[index].prompt)
    scored = 2 if is_scored else None
    changed[index] = msgspec.structs.replace(requests[index], prompt=prompt, prompt_logprobs=scored)
    return changed


def test_31_of_32_do_not_notice_a_poisoned_one(
    way: str, promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same engine throughout: state that a victim leaks would show in the next round."""
    faults = arm_this_process(tmp_path, monkeypatch)
    good = n = 0
    engine = _engine()
    for seed in range(promise.size(1, 40)):
        requests = mixed_requests(32, seed=seed)
        before = serve(_engine(), requests)
        for point, order in PLACES.values():
            caplog.clear()
            faults.arm(point, "raise", match=f"'{VICTIM}'", **order)
            after = serve(engine, requests)
            faults.disarm(point)
            good += _failed_alone(before, after)
            n += 1
            assert caplog.text.count(f"request {VICTIM} failed") == 1 and "InjectedFault" in caplog.text
            good += serve(engine, requests) == before
            n += 1
        for is_scored in (True, False) if way != "int8" else ():  # rounding makes some number of what is none
            after = serve(engine, _with_poison(requests, is_scored=is_scored))
            assert "not finite" in after[VICTIM].failures[0]
            good += _failed_alone(before, after, is_prefix=False)
            good += serve(engine, requests) == before
            n += 2
    promise.all_of(f"rounds of 32 in the engine ({way}) in which only the poisoned request fails", good, n)


def test_without_isolation_a_poisoned_one_takes_all_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    faults = arm_this_process(tmp_path, monkeypatch)
    engine = _engine()
    engine.isolation = engine.runner  # type: ignore[assignment]
    faults.arm("engine.forward", "raise", match=VICTIM)
    with pytest.raises(InjectedFault):
        serve(engine, mixed_requests(32))


def test_blocks_that_are_not_cleared_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: what is not finite reaches those who get the victim's blocks."""
    monkeypatch.setattr(BlockAllocator, "invalidate", lambda _self, _sequence: None)
    requests = mixed_requests(32)
    engine = tiny_engine(poisoned_decoder(), blocks=60, tokens_per_step=96)
    serve(engine, _with_poison(requests, is_scored=False))
    outcomes = [outcome for _ in range(3) for outcome in serve(engine, requests).values()]
    assert any(outcome.failures for outcome in outcomes)


N, INDEX = 32, 16
TOKENIZER = Tokenizer.train([TEXT], VOCAB)
BAD_BYTE = TOKENIZER.bytes_of.index(b"\xf5")
"""No text in UTF-8 has this byte."""
VICTIMS_IDS = TOKENIZER.encode("The victim sang to the moon")
_IDS = {"match": str(tuple(VICTIMS_IDS))[:-1]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "validate": ("api.validate", {"match": "victim"}),
    "tokenise": ("text.encode", {"match": "The victim sang"}),
    "prefill": ("engine.forward", _IDS),
    "sampler": ("engine.sample", {**_IDS, "after": 5}),
    "NaN row": ("", {}),  # by what the victim sends
    "logprobs": ("engine.score", _IDS),
    "detokenise": ("text.decode", {**_IDS, "after": 4}),
    "stop": ("text.stop", {**_IDS, "after": 4}),
    "encode": ("api.{}", {"match": "'victim'"}),
}
"""Where the victim fails: a fault point, and what else is ordered there."""
MODES = {"events": "event", "whole": "answer", "chunks": "chunk"}
"""Each with what is encoded in it."""


def _poisoned_weights(folder: Path) -> Path:
    """All numbers are finite, as the loader wants them; what the model makes of one token is not."""
    decoder = tiny_decoder(tiny_config(norm="none", final_norm=False, tied_head=False))
    decoder.embedding[BAD_BYTE] = 3e38
    files = weights_files(decoder, dtype=torch.float32, eos_id=TOKENIZER.eos_id, generation={})
    write_files(folder, {**files, **{name: text.encode() for name, text in TOKENIZER.files().items()}})
    return folder


@pytest.fixture(scope="module")
def server(serve_module: Services, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Server:
    weights, flags = _poisoned_weights(tmp_path_factory.mktemp("poison")), ("--dtype", "float32", "--threads", "1")
    return serve_module(*flags, weights=weights, environment=faults.environment, logs_tracebacks=True)


def _bodies() -> list[dict[str, Any]]:
    rng, words, common = random.Random(5), TEXT.split()[:60], {"logit_bias": {str(BAD_BYTE): -100}}
    bodies = [
        {
            **common,
            "prompt": " ".join(rng.choices(words, k=rng.randint(1, 4))),
            "max_tokens": rng.randint(4, 9),
            "seed": index,
            "temperature": rng.choice([0.0, 0.9]),
            "logprobs": rng.choice([None, None, None, 1]),
            "stop": rng.choice([None, ["the"]]),
            "user": f"u{index}",
        }
        for index in range(N)
    ]
    victim = {"prompt": "The victim sang to the moon", "user": "victim", "logprobs": 2, "echo": True, "seed": 1}
    bodies[INDEX] = {**common, **victim, "stop": ["never written"], "max_tokens": 9}
    return bodies


def _all_at_once(server: Server, bodies: list[dict[str, Any]], mode: str) -> list[CompletionExchange]:
    path = "/v1/completions" if mode == "chunks" else "/complete"
    return send_all(server, [RequestSpec(path=path, body={**body, "stream": mode != "whole"}) for body in bodies])


def _error(output: Any) -> dict[str, Any] | None:
    """Of an event, a chunk or a whole answer; without the request's id, which is its answer's name."""
    errors = output.get("errors") or [output.get("end", output).get("error")]
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize("mode", MODES)
def test_31_of_32_clients_do_not_notice_a_poisoned_one(
    server: Server, faults: Faults, mode: str, promise: Promise
) -> None:
    bodies, good = _bodies(), 0
    before = [answer.output() for answer in _all_at_once(server, bodies, mode)]
    assert not any(map(_error, before))
    for case, (point, order) in CASES.items():
        written, sent = len(server.log_text()), list(bodies)
        if point:
            faults.arm(point.format(MODES[mode]), "raise", **order)
        else:
            sent[INDEX] = {**bodies[INDEX], "prompt": [*VICTIMS_IDS, BAD_BYTE, 5]}
        answers = _all_at_once(server, sent, mode)
        faults.disarm()
        after = [answer.output() for answer in answers]
        error = _error(after[INDEX])
        assert error and set(error) == {"message", "type", "param", "code"}, (case, after[INDEX])
        assert error["type"] == "server_error", case
        if case != "NaN row":  # which is not a programming error, so it has no traceback in the log
            assert server.has_logged(answers[INDEX].name, "InjectedFault", since=written), case
            begun = {kind: after[INDEX].get(kind, {}).get(0, []) for kind in ("texts", "tokens")}
            assert all(before[INDEX][kind][0][: len(part)] == part for kind, part in begun.items() if part), case
        good += [*after[:INDEX], *after[INDEX + 1 :]] == [*before[:INDEX], *before[INDEX + 1 :]]
        assert server.wait_for(lambda: server.metric("kv_cache_usage_ratio") == 0), f"{case}: leaked blocks"
        assert server.wait_for(lambda: server.metric("requests_running") == 0)
        assert server.metric("block_violations_total") == 0
    assert server.metric("engine_restarts_total") == 0
    promise.all_of(f"fault points at which only the poisoned one of 32 clients fails ({mode})", good, len(CASES))


def test_a_guide_whose_compilation_raises_fails_its_request_alone(
    server: Server, faults: Faults, promise: Promise
) -> None:
    """Only guided requests reach this fault point; it used to end the engine."""
    bodies = _bodies()
    bodies[INDEX] = {"prompt": "A number:", "max_tokens": 9, "seed": 1, "user": "victim", "regex": "[0-9]{4}"}
    bodies[3] = {**bodies[INDEX], "user": "u3", "regex": "[a-z]{4}"}
    before = _all_at_once(server, bodies, "events")
    with faults.armed("engine.guide", "raise", match="[0-9]{4}"):
        after = _all_at_once(server, bodies, "events")
    error = _error(after[INDEX].output())
    assert error and error["type"] == "server_error" and "guide" in error["message"]
    assert server.has_logged(after[INDEX].name)
    pairs = [(one, other) for i, (one, other) in enumerate(zip(before, after, strict=True)) if i != INDEX]
    assert server.metric("engine_restarts_total") == 0
    promise.all_of(
        "responses identical beside a request whose grammar raises",
        sum(a.output() == b.output() for a, b in pairs),
        N - 1,
    )
