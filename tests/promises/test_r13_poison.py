"""One poisoned request fails alone, wherever it is poisoned, in the engine and over HTTP: it gets one clean error, and
the outputs of all others are byte-identical.

Over HTTP: nine fault points, each with an event stream, a response without streaming and a /v1/completions stream.
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
from tests.support.load.concurrent_clients import CompletionExchange, RequestSpec, compare_outputs, outputs, send_all
from tests.support.model.tiny_models import TEXT, VOCAB, tiny_config, tiny_decoder, tiny_engine
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services
from tests.support.trials import Trials

pytestmark = pytest.mark.usefixtures("one_thread")
FAULT_POINTS = {
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
    """Whether only the victim failed, once, and all other outcomes are unchanged."""
    victim = after[VICTIM]
    assert len(victim.failures) == victim.ends == 1
    if is_prefix:
        assert victim.events == before[VICTIM].events[: len(victim.events)]
    return all(after[name] == before[name] for name in before if name != VICTIM)


def _with_poison(requests: list[Request], *, is_scored: bool) -> list[Request]:
    """The first chunk of the victim's prompt contains a token with non-finite activations."""
    changed = list(requests)
    (index,) = [index for index, request in enumerate(requests) if request.id == VICTIM]
    prompt = (*requests[index].prompt[:2], POISON, *requests[index].prompt)
    scored = 2 if is_scored else None
    changed[index] = msgspec.structs.replace(requests[index], prompt=prompt, prompt_logprobs=scored)
    return changed


def test_poisoned_request_fails_alone_in_the_engine(
    way: str, promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All rounds share an engine: state leaked by a victim would change the next round."""
    faults = arm_this_process(tmp_path, monkeypatch)
    good = n = 0
    engine = _engine()
    for seed in range(promise.size(1, 40)):
        requests = mixed_requests(32, seed=seed)
        before = serve(_engine(), requests)
        for point, options in FAULT_POINTS.values():
            caplog.clear()
            faults.arm(point, "raise", match=f"'{VICTIM}'", **options)
            after = serve(engine, requests)
            faults.disarm(point)
            good += _failed_alone(before, after)
            n += 1
            assert caplog.text.count(f"request {VICTIM} failed") == 1 and "InjectedFault" in caplog.text
            good += serve(engine, requests) == before
            n += 1
        for is_scored in (True, False) if way != "int8" else ():  # int8 rounding turns non-finite values into numbers
            after = serve(engine, _with_poison(requests, is_scored=is_scored))
            assert "not finite" in after[VICTIM].failures[0]
            good += _failed_alone(before, after, is_prefix=False)
            good += serve(engine, requests) == before
            n += 2
    promise.all_of(f"rounds of 32 in the engine ({way}) in which only the poisoned request fails", good, n)


def test_poisoned_request_fails_the_batch_without_isolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    faults = arm_this_process(tmp_path, monkeypatch)
    engine = _engine()
    engine.isolation = engine.runner  # type: ignore[assignment]
    faults.arm("engine.forward", "raise", match=VICTIM)
    with pytest.raises(InjectedFault):
        serve(engine, mixed_requests(32))


def test_uncleared_blocks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: non-finite values reach the next owners of the victim's blocks."""
    monkeypatch.setattr(BlockAllocator, "_mark_dirty", lambda *_: None)
    requests = mixed_requests(32)
    engine = tiny_engine(poisoned_decoder(), blocks=60, tokens_per_step=96)
    rounds = [serve(engine, each) for each in (_with_poison(requests, is_scored=False), requests)]
    assert any(outcome.failures for served in rounds for name, outcome in served.items() if name != VICTIM)


N_CLIENTS, VICTIM_INDEX = 32, 16
TOKENIZER = Tokenizer.train([TEXT], VOCAB)
BAD_BYTE = TOKENIZER.bytes_of.index(b"\xf5")
"""This byte never occurs in UTF-8."""
VICTIM_IDS = TOKENIZER.encode("The victim sang to the moon")
_IDS = {"match": str(tuple(VICTIM_IDS))[:-1]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "validate": ("api.validate", {"match": "victim"}),
    "tokenise": ("text.encode", {"match": "The victim sang"}),
    "prefill": ("engine.forward", _IDS),
    "sampler": ("engine.sample", {**_IDS, "after": 5}),
    "NaN row": ("", {}),  # triggered by the victim's prompt
    "logprobs": ("engine.score", _IDS),
    "detokenise": ("text.decode", {**_IDS, "after": 4}),
    "stop": ("text.stop", {**_IDS, "after": 4}),
    "encode": ("api.{}", {"match": "'victim'"}),
}
"""Where the victim fails: a fault point and its options."""
MODES = {"events": "event", "whole": "answer", "chunks": "chunk"}
"""Mode -> the object that its encoder handles."""


def _poisoned_weights(folder: Path) -> Path:
    """All weights are finite, as the loader requires, but one token overflows in the model."""
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
        for index in range(N_CLIENTS)
    ]
    victim = {"prompt": "The victim sang to the moon", "user": "victim", "logprobs": 2, "echo": True, "seed": 1}
    victim["speculate"] = False  # a token a step: faults are armed after so many
    bodies[VICTIM_INDEX] = {**common, **victim, "stop": ["never written"], "max_tokens": 9}
    return bodies


def _all_at_once(server: Server, bodies: list[dict[str, Any]], mode: str) -> list[CompletionExchange]:
    path = "/v1/completions" if mode == "chunks" else "/complete"
    return send_all(server, [RequestSpec(path=path, body={**body, "stream": mode != "whole"}) for body in bodies])


def _without_victim(each: list[Any]) -> list[Any]:
    return [*each[:VICTIM_INDEX], *each[VICTIM_INDEX + 1 :]]


def _error(output: Any) -> dict[str, Any] | None:
    """The error of an event, a chunk or a response."""
    errors = output.get("errors") or [output.get("end", output).get("error")]
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize("mode", MODES)
def test_poisoned_request_fails_alone_over_http(server: Server, faults: Faults, mode: str, promise: Promise) -> None:
    bodies, trials = _bodies(), Trials()
    before = [answer.output() for answer in _all_at_once(server, bodies, mode)]
    assert not any(map(_error, before))
    for case, (point, options) in CASES.items():
        written, sent = len(server.log_text()), list(bodies)
        if point:
            faults.arm(point.format(MODES[mode]), "raise", **options)
        else:
            sent[VICTIM_INDEX] = {**bodies[VICTIM_INDEX], "prompt": [*VICTIM_IDS, BAD_BYTE, 5]}
        answers = _all_at_once(server, sent, mode)
        faults.disarm()
        after = [answer.output() for answer in answers]
        error = _error(after[VICTIM_INDEX])
        assert error and set(error) == {"message", "type", "param", "code"}, (case, after[VICTIM_INDEX])
        assert error["type"] == "server_error", case
        if case != "NaN row":  # not a programming error, so the log has no traceback
            assert server.has_logged(answers[VICTIM_INDEX].name, "InjectedFault", since=written), case
            begun = {kind: after[VICTIM_INDEX].get(kind, {}).get(0, []) for kind in ("texts", "tokens")}
            assert all(before[VICTIM_INDEX][kind][0][: len(part)] == part for kind, part in begun.items() if part), case
        others = compare_outputs(server, _without_victim(answers), _without_victim(before))
        trials.compare("", others.first_difference)
        assert server.wait_for(lambda: server.metric("kv_cache_usage_ratio") == 0), f"{case}: leaked blocks"
        assert server.wait_for(lambda: server.metric("requests_running") == 0)
        assert server.metric("block_violations_total") == 0
    assert server.metric("engine_restarts_total") == 0
    promise.all_of(f"fault points at which only the poisoned one of 32 clients fails ({mode})", trials)


def test_grammar_compilation_error_fails_only_its_request(server: Server, faults: Faults, promise: Promise) -> None:
    """Only requests with a grammar reach this fault point, which used to end the engine."""
    bodies = _bodies()
    bodies[VICTIM_INDEX] = {"prompt": "A number:", "max_tokens": 9, "seed": 1, "user": "victim", "regex": "[0-9]{4}"}
    bodies[3] = {**bodies[VICTIM_INDEX], "user": "u3", "regex": "[a-z]{4}"}
    before = _all_at_once(server, bodies, "events")
    with faults.armed("engine.guide", "raise", match="[0-9]{4}"):
        after = _all_at_once(server, bodies, "events")
    error = _error(after[VICTIM_INDEX].output())
    assert error and error["type"] == "server_error" and "guide" in error["message"]
    assert server.has_logged(after[VICTIM_INDEX].name)
    assert server.metric("engine_restarts_total") == 0
    others = compare_outputs(server, _without_victim(after), outputs(_without_victim(before)))
    promise.all_of("responses identical beside a request whose grammar raises", others)
