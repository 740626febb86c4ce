"""Work that no quota pays for: metrics, documents, refusals, resumes, and what is kept for a repeated request."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

from tests.redteam.attack import Load, Setting, attack, measure_slowdown
from tests.redteam.http_client import as_json, request_bytes
from tests.redteam.service import Target, resident_bytes

VICTIM, ATTACKER = 0, 1
THREADS = 8
UNREAD = 200
MOST_UNREAD_BYTES = 64 << 20
KEPT, FLOOD = 5, 300
"""Requests with an Idempotency-Key of the victim, and of the attacker, who sends more than a service may keep."""
VICTIM_SECONDS = 5.0
_ASKED = ("/metrics", "/openapi.json", "/docs", "/", "/web/x", "/v1/models", "/tokenizer_info", "/complete/x/events")
_COMPLETION = {"prompt": "a", "max_tokens": 1, "stream": False}


def _asking(rng: Random) -> Callable[[Target], None]:
    """One of the paths that a key may ask for as often as it likes, mostly the metrics."""
    path = rng.choice([*_ASKED, *["/metrics"] * 4])
    method = rng.choice(["GET", "GET", "HEAD"]) if path == "/metrics" else "GET"
    accept = rng.choice(["*/*", "application/openmetrics-text", "text/plain"])

    def send(target: Target) -> None:
        with target.address.connect(timeout=20) as connection:
            headers = [f"Accept: {accept}", "Connection: close"]
            connection.sendall(request_bytes(method, path, key=target.keys[ATTACKER], headers=headers))
            while connection.recv(1 << 16):
                pass

    return send


def wrong_body(rng: Random) -> tuple[str, dict[str, Any]]:
    """A route and a body with very many mistakes, of any size up to half a megabyte."""
    n = rng.choice([250, 300, 3000, 30_000])
    wrong: Any = rng.choice([1, 1.5, "x", None, True, {}, [], -1, {"type": "x"}])
    numbered = {f"{rng.choice(['', 'x', 'f-'])}{i}": wrong for i in range(n)}
    route, field, body = rng.choice([
        ("/complete", "", numbered),
        ("/score", "prompt", [wrong] * n),
        ("/score", "prompt", [[wrong]] * min(n, 10_000)),
        ("/tokenize", "prompt", [wrong] * n),
        ("/detokenize", "tokens", [1, 1.0] * n + [wrong]),
        ("/complete", "logit_bias", numbered),
        ("/complete", "stop", [wrong] * n),
        ("/complete", "stop_token_ids", [wrong] * n),
        ("/v1/completions", "prompt", ["a", wrong] * n),
        ("/v1/completions", "stream_options", numbered),
        ("/v1/completions", "response_format", [wrong] * n),
        ("/v1/chat/completions", "messages", [wrong] * n),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": [wrong] * n}]),
        ("/v1/chat/completions", "messages", [{"role": wrong, **numbered}]),
        ("/v1/chat/completions", "tools", [wrong] * n),
    ])  # fmt: skip
    start = {"prompt": "a"} if route in ("/complete", "/v1/completions") and rng.random() < 0.8 else {}
    return route, {**start, **({field: body} if field else numbered)}


def _asked(target: Target, rng: Random) -> tuple[Load, str]:
    """Requests for metrics and documents, and how to repeat them."""
    sends = [_asking(rng) for _ in range(THREADS)]
    return Load(lambda index: sends[index](target), THREADS), f"{THREADS} x GET {', '.join(_ASKED)}"


def _refused(target: Target, rng: Random) -> tuple[Load, str]:
    """Bodies with mistakes, and how to repeat them."""
    wrong = [wrong_body(rng) for _ in range(THREADS)]

    def send(index: int) -> None:
        route, body = wrong[index]
        target.call("POST", route, tenant=ATTACKER, body=body, timeout=20)

    return Load(send, THREADS), "; ".join(f"POST {route} {as_json(body)[:100]}" for route, body in wrong)


def _victim(target: Target) -> float:
    response = target.call("POST", "/complete", tenant=VICTIM, body=_COMPLETION, timeout=VICTIM_SECONDS)
    return response.seconds if response.status == 200 else VICTIM_SECONDS


@attack("unpaid-work", share=12.0)
def unpaid_work(setting: Setting) -> None:
    """Floods of requests that cost no quota, during another key's shortest completion; memory of unread resumes."""
    target, report, rng = setting.target, setting.report, setting.rng
    report.limit = "5 times that with health checks"
    _evict(setting)
    if target.process is not None:
        _resume_unread(setting)
    worst = 0.0
    for number in setting.tries(most=min(setting.most_tries, 4)):
        load, repro = _asked(target, rng) if number % 2 else _refused(target, rng)
        health = Load(lambda _: target.call("GET", "/health/live", tenant=ATTACKER, timeout=20), THREADS)
        budget = setting.budget.share(0.25)
        found = measure_slowdown(lambda: _victim(target), load, budget=budget, baseline=health)
        figure = f"{found.loaded * 1e3:.0f} ms, with health checks {found.alone * 1e3:.0f} ms"
        if found.is_excessive:
            what = "requests for metrics and documents" if number % 2 else "refused bodies"
            report.add("medium", f"a token of another key takes {figure} beside {what}", repro, group=what)
        if found.loaded / found.limit > worst:
            worst, report.worst = found.loaded / found.limit, figure
        target.settle()


def _evict(setting: Setting) -> None:
    """Another key's flood must not evict the responses that are kept for a repeated request."""
    target, number = setting.target, setting.rng.randrange(1 << 30)

    def send(tenant: int, name: str) -> bool:
        headers = [f"Idempotency-Key: {name}-{number}"]
        answer = target.call("POST", "/tokenize", tenant=tenant, body={"prompt": "a"}, headers=headers, timeout=20)
        return answer.headers.get("idempotent-replayed") == "true"

    for index in range(KEPT):
        send(VICTIM, f"kept-{index}")
    kept = sum(send(VICTIM, f"kept-{index}") for index in range(KEPT))
    for index in range(FLOOD):
        if not setting.budget:
            return
        send(ATTACKER, f"flood-{index}")
    left = sum(send(VICTIM, f"kept-{index}") for index in range(KEPT))
    if left < kept:
        repro = f"{KEPT} requests with Idempotency-Key, {FLOOD} of another key, the {KEPT} again"
        setting.report.add("medium", f"{kept - left} of {kept} kept responses were evicted", repro, group="evicted")


def _resume_unread(setting: Setting) -> None:
    """Resumes of a finished stream that are not read: each must hold a part of it, not a copy."""
    target, report = setting.target, setting.report
    key = target.keys[ATTACKER]
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "logprobs": 5}
    name = target.call("POST", "/complete", tenant=ATTACKER, body=body, timeout=30).headers.get("x-request-id", "")
    message = request_bytes("GET", f"/complete/{name}/events?after=-1", key=key)
    with ExitStack() as stack:
        before = resident_bytes(target.pid)
        for _ in range(UNREAD):
            with suppress(OSError):
                connection = stack.enter_context(target.address.connect())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(message)
                connection.recv(1)
        time.sleep(0.3)
        grown = resident_bytes(target.pid) - before
    if grown > MOST_UNREAD_BYTES:
        repro = f"{UNREAD} x GET /complete/ID/events?after=-1 of one finished stream, unread"
        report.add("medium", f"{UNREAD} unread resumes hold {grown >> 20} MiB", repro, group="unread")
