"""POST with `resume`: another service goes on with a stream that broke, on both APIs, whatever its client has of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.model.tiny_models import tiny_weights
from tests.support.resuming_client import Received, received
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow

_TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {**_TEXT},
    "choices": {**_TEXT, "n": 3, "stop": ["e", "qq"], "seed": 4},
    "prompts": {**_TEXT, "prompt": ["Once", "Once", "The moon"], "n": 2, "max_tokens": 9},
    "echo": {
        **_TEXT,
        "echo": True,
        "logprobs": 2,
        "n": 2,
        "prompt": "Once \U0001f98a upon a time there was",
        "max_tokens": 9,
    },
    "penalties": {
        **_TEXT,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_tokens": 9,
        "stop": ["a"],
        "logprobs": 0,
    },
    "grammar": {**_TEXT, "regex": "[a-z ]{5,12}\\.", "n": 2, "max_tokens": 40},
    "stop tokens": {**_TEXT, "stop_token_ids": list(range(60, 120)), "include_stop": True, "n": 4},
}


@pytest.fixture(scope="module")
def services(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Server]:
    """Two services with the same weights and numerics."""
    weights = tiny_weights(tmp_path_factory.mktemp("resume") / "tiny", context=512)
    flags = ("--dtype", "float32", "--kernels", "torch")
    return serve_module(*flags, weights=weights), serve_module(*flags, weights=weights)


def _post(server: Server, path: str, body: dict[str, Any]) -> bytes:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.content


def _body(kind: str, path: str) -> dict[str, Any]:
    body = {**_KINDS[kind], "stream": True, "return_token_ids": True}
    if path != "/complete":
        body["stream_options"] = {"include_usage": True}
        if "include_stop" in body:
            body["include_stop_str_in_output"] = body.pop("include_stop")
    return body


def _n_choices(body: dict[str, Any]) -> int:
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    return prompts * int(body.get("n", 1))


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("with_ids", [True, False], ids=["ids", "text"])
def test_stream_goes_on_at_another_service_after_any_event(
    services: tuple[Server, Server], kind: str, path: str, with_ids: bool
) -> None:
    first, second = services
    body = {**_body(kind, path), "return_token_ids": with_ids}
    content = _post(first, path, body)
    n, n_blocks = _n_choices(body), content.count(b"\n\n")
    whole = received(content, n)
    assert whole.is_done and not whole.error
    cuts = range(1, n_blocks - 1)
    for cut in random.Random(kind).sample(cuts, min(3, len(cuts))):
        client = received(content, n, n_blocks=cut)
        if client.is_done or not client.start:
            continue
        rest = _post(second, path, client.body(body, with_ids=with_ids))
        for block in rest.split(b"\n\n")[:-1]:
            client.take(block)
        expected = whole.outcome
        assert client.outcome == expected, (cut, rest.decode()[-600:])


def _cut(server: Server, path: str = "/complete", kind: str = "choices") -> tuple[Received, dict[str, Any]]:
    body = _body(kind, path)
    return received(_post(server, path, body), _n_choices(body), n_blocks=20), body


def test_resumed_stream_can_break_and_be_resumed_by_its_own_id(services: tuple[Server, Server]) -> None:
    client, body = _cut(services[0])
    response = httpx.post(f"{services[1].url}/complete", json=client.body(body), timeout=60)
    name, after = response.headers["x-request-id"], client.last_id.rpartition(":")[2]
    assert response.text.startswith(f"id: {name}:{int(after) + 1}\n")
    events = f"{services[1].url}/complete/{name}/events"
    again = httpx.get(events, headers={"Last-Event-ID": f"{name}:{after}"}, timeout=60)
    assert again.content == response.content
    assert httpx.get(events, params={"after": int(after) + 1}).content == response.content.split(b"\n\n", 1)[1]
    assert httpx.get(events, params={"after": int(after) - 1}).json()["error"]["code"] == "events_gone"


def _change(resume: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    changed = copy.deepcopy(resume)
    change(changed)
    return changed


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights_version", "0" * 64), ("numerics", "others"), ("prompt_sha256", "0" * 64), ("seed", 5)],
)
def test_another_receipt_is_refused_before_the_stream(services: tuple[Server, Server], field: str, value: Any) -> None:
    client, body = _cut(services[0])
    client.start = {**client.start, field: value}
    response = httpx.post(f"{services[1].url}/complete", json=client.body(body))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (409, "receipt_mismatch", f"resume.receipt.{field}")


def test_other_settings_and_fingerprints_are_refused(services: tuple[Server, Server]) -> None:
    client, body = _cut(services[0])
    error = httpx.post(f"{services[1].url}/complete", json=client.body({**body, "top_p": 0.5})).json()["error"]
    assert (error["code"], error["param"]) == ("receipt_mismatch", "resume.receipt.settings.top_p")
    client, body = _cut(services[0], "/v1/completions")
    client.start = {**client.start, "system_fingerprint": "another"}
    error = httpx.post(f"{services[1].url}/v1/completions", json=client.body(body)).json()["error"]
    assert (error["code"], error["param"]) == ("receipt_mismatch", "resume.receipt.system_fingerprint")


def test_another_text_ends_with_an_error(services: tuple[Server, Server]) -> None:
    """With ids before the stream, without them in it."""
    client, body = _cut(services[0], kind="plain")
    client.choices[0].text += "?"
    client.choices[0].text = "~" + client.choices[0].text[1:]
    refused = httpx.post(f"{services[1].url}/complete", json=client.body(body))
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "resume_diverged")
    rest = httpx.post(f"{services[1].url}/complete", json=client.body(body, with_ids=False), timeout=60)
    for block in rest.content.split(b"\n\n")[:-1]:
        client.take(block)
    assert client.error["code"] == "resume_diverged" and client.is_done
    assert client.error["param"] == "resume.choices[0]"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda resume: resume["choices"].pop(), "resume.choices"),
        (lambda resume: resume["choices"][1].update(token_ids=[1] * 25), "resume.choices[1].token_ids"),
        (lambda resume: resume["choices"][1].update(token_ids=[10**6]), "resume.choices[1].token_ids"),
        (lambda resume: resume["choices"][2].update(token_ids=[-1]), "resume.choices[2].token_ids[0]"),
        (lambda resume: resume["choices"][2].update(text=7), "resume.choices[2].text"),
        (lambda resume: resume["choices"][0].update(logprobs=1), "resume.choices[0].logprobs"),
        (lambda resume: resume["choices"][0].update(other=1), "resume.choices[0].other"),
        (lambda resume: resume["receipt"].pop("numerics"), "resume.receipt.numerics"),
        (lambda resume: resume.update(after=-1), "resume.after"),
    ],
)
def test_wrong_fields_are_named(services: tuple[Server, Server], change: Callable[[Any], Any], param: str) -> None:
    client, body = _cut(services[0])
    body = client.body(body)
    response = httpx.post(f"{services[1].url}/complete", json={**body, "resume": _change(body["resume"], change)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert param.partition(".")[0] in response.json()["error"]["message"]


def test_only_streams_are_resumed(services: tuple[Server, Server]) -> None:
    client, body = _cut(services[0])
    response = httpx.post(f"{services[1].url}/complete", json={**client.body(body), "stream": False})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "resume")
    client, body = _cut(services[0], "/v1/completions")
    response = httpx.post(f"{services[1].url}/v1/completions", json={**client.body(body), "stream": False})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "resume")
    chat = {"messages": [{"role": "user", "content": "a"}], "resume": {"choices": []}}
    response = httpx.post(f"{services[1].url}/v1/chat/completions", json=chat)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "resume")


def test_ids_save_computing_the_text_again(services: tuple[Server, Server]) -> None:
    client, body = _cut(services[0], kind="plain")
    for with_ids, expected in ((True, 24 - len(client.choices[0].ids)), (False, 24)):
        before = services[1].metric("generation_tokens_total")
        _post(services[1], "/complete", client.body(body, with_ids=with_ids))

        def has_counted(total: float = before + expected) -> bool:
            return services[1].metric("generation_tokens_total") == total

        assert services[1].wait_for(has_counted), f"with ids: {with_ids}; {expected} tokens"


def test_weights_of_another_kind_are_refused(services: tuple[Server, Server], serve: Services, tmp_path: Path) -> None:
    other = serve("--dtype", "bfloat16", "--kernels", "torch", weights=tiny_weights(tmp_path / "tiny", context=512))
    client, body = _cut(services[0])
    error = httpx.post(f"{other.url}/complete", json=client.body(body)).json()["error"]
    assert (error["code"], error["param"]) == ("receipt_mismatch", "resume.receipt.numerics")
