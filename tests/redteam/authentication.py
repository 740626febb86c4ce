"""Attacks on keys: spellings of paths and headers, other tenants' streams, and timing."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

from tests.redteam.attack import Setting, attack
from tests.redteam.http_client import MalformedResponse, as_json, open_stream, percentile, text_of

PROTECTED = (
    ("POST", "/complete"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/score"), ("GET", "/metrics"),
    ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/tokenizer_info"),
)  # fmt: skip
PROTECTED_MARKS = (
    b"inkstream_requests", b'"object":"list"', b'"tokens"', b'"choices"', b"event: ", b'"openapi"', b"swagger",
    b"bos_token",
)  # fmt: skip
"""Odd spellings may get public responses (the page, health), but none with one of these marks."""
TIMING_SECONDS = 0.002
"""A difference of medians that an attacker could measure over a network."""


@attack("authentication", share=6.0)
def authentication(setting: Setting) -> None:
    """No spelling of a path or header opens a route without exactly one valid key."""
    report, rng = setting.report, setting.rng
    report.limit = "401 without one valid key"
    if setting.target.keys[0] is None:
        report.skipped = "the service asks for no key"
        return
    opened = 0
    for _ in setting.tries():
        method, path = rng.choice(PROTECTED)
        spelled, header = _path(rng, path), _credentials(rng, setting.target.keys[0])
        repro = as_json([method, spelled, header])
        try:
            more = {"body": {"prompt": "a", "max_tokens": 1, "stream": False}} if method == "POST" else {}
            response = setting.target.call(method, spelled, tenant=None, headers=header, timeout=10, **more)
        except MalformedResponse as error:
            report.add("medium", f"not HTTP: {error}", repro)
        except OSError:
            continue
        else:
            if response.status < 400 and any(mark in response.body for mark in PROTECTED_MARKS):
                opened += 1
                report.add("critical", f"{method} {spelled} with {header!r} is answered", repro)
    report.worst = f"{opened} of {report.tries} opened a route"


def _path(rng: Random, path: str) -> str:
    encoded = "".join(f"%{ord(c):02x}" if rng.random() < 0.2 else c for c in path[1:])
    return rng.choice([
        path, path, "/" + encoded, path + "/", path.upper(), "/" + path, "/health/.." + path, path + "?x=/health",
        "/health/live/../.." + path, path + "#/health", path + ";/health/live", "/./" + path[1:], path + "%00",
        "/web/..%2f" + path[1:], "http://127.0.0.1" + path, "/health%2f.." + path, path.replace("/", "//"),
        "\\" + path[1:], path + "%20", "/web/.." + path,
    ])  # fmt: skip


def _credentials(rng: Random, key: str) -> list[str]:
    """Header lines without a valid credential, including near misses."""
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    basic = base64.b64encode(f":{key}".encode()).decode()
    alone = rng.choice([
        "", " Bearer", f" {key}", f" Bearer {wrong}", f" Basic {basic}", f" Bearer {key[:-1]}", f" Token {key}",
        f" Bearer {key}{key}", f" Bearer {key.swapcase()}", f" Bearer {key}, Bearer {wrong}", f' Bearer "{key}"',
        f" Bearer {wrong},{key}", f" Bearer\x00 {key}", f" Bearer {key[4:]}", f" Bearer {key}\x00",
    ])  # fmt: skip
    return rng.choice([
        *[[f"Authorization:{alone}"]] * 15, [], [f"X-Api-Key: {key}"], [f"Cookie: key={key}"],
        [f"Proxy-Authorization: Bearer {key}"], [f"X-Original-Authorization: Bearer {key}"],
        ["X-Forwarded-For: 127.0.0.1"], [f"Authorization : Bearer {key}"], [f"Authorization_: Bearer {key}"],
        [f"Authorization: Bearer {wrong}", f"Authorization: Bearer {key}"],
        [f"Authorization: Bearer {wrong}", f"AUTHORIZATION: Bearer {key}"],
    ])  # fmt: skip


@attack("foreign-streams", share=6.0)
def foreign_streams(setting: Setting) -> None:
    """Another tenant's streams cannot be read, resumed or stopped, and a cache reveals nothing of its prompts."""
    report, target = setting.report, setting.target
    report.limit = "404, no shared cache, no timing"
    if target.keys[0] is None or target.keys[0] == target.keys[1]:
        report.skipped = "needs two keys"
        return
    _streams(setting)
    cached = _cache(setting)
    difference = _key_timing(setting)
    report.worst = f"{cached} foreign tokens cached, keys differ by {difference * 1e3:.2f} ms"
    if cached:
        summary = f"{cached} tokens of another key's prompt came from the cache"
        report.add("high", summary, "the same prompt with two keys")
    if difference > TIMING_SECONDS:
        report.add("low", f"known and unknown keys differ by {difference * 1e3:.2f} ms", "medians of /tokenize")


def _streams(setting: Setting) -> None:
    target, report = setting.target, setting.report
    for _ in setting.tries(setting.budget.share(0.4)):
        seed = setting.rng.getrandbits(30)
        body = {"prompt": setting.canary, "max_tokens": 300, "ignore_eos": True, "seed": seed}
        with open_stream(target.address, body, key=target.keys[0]) as (_, events):
            name = str(next(events).data["id"])
            for method, path in [
                ("GET", f"/complete/{name}/events"), ("DELETE", f"/complete/{name}"),
                ("GET", f"/complete/{name}/events?after=0"), ("DELETE", f"/complete/{name}/"),
                ("DELETE", f"/complete/%{ord(name[0]):x}{name[1:]}"), ("GET", f"//complete/{name}/events"),
            ]:  # fmt: skip
                status = target.call(method, path, tenant=1, timeout=10).status
                if status < 300:
                    report.add("critical", f"a foreign stream: {method} {path} gets {status}", as_json(body))
            rest = list(events)
        is_whole = rest and rest[-1].name == "done" and rest[-1].data["choices"][0]["finish_reason"] == "length"
        if not is_whole or not text_of(rest):
            report.add("high", f"a foreign key changed a stream: {rest[-1:]}", as_json(body))


def _cache(setting: Setting) -> int:
    """Cached tokens of the second key's first request; the first key's second request is the positive control."""
    foreign = 0
    for i in range(min(5, setting.most_tries)):
        prompt = f"{setting.rng.getrandbits(60)} {setting.canary} {i} " * 8
        body = {"prompt": prompt, "max_tokens": 1, "stream": False}
        counts = []
        for tenant in (0, 0, 1):
            setting.report.tries += 1
            response: Any = setting.target.call("POST", "/complete", tenant=tenant, body=body).json()
            counts.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
        foreign += counts[2]
        if not counts[1]:
            setting.report.add("low", "control failed: a key's own prompt is not cached", as_json(body))
    return foreign


def _key_timing(setting: Setting) -> float:
    """Difference in median seconds between keys that share a prefix with a real one and random keys."""
    key = setting.target.keys[0] or ""
    times: tuple[list[float], list[float]] = [], []
    for i in range(60 if setting.most_tries > 100 else 10):
        unknown = "ink-" + f"{setting.rng.getrandbits(250):x}"[:43].ljust(43, "a")
        header = f"Authorization: Bearer {unknown if i % 2 else key[:-1] + '~'}"
        times[i % 2].append(setting.target.call("GET", "/v1/models", tenant=None, headers=[header]).seconds)
        setting.report.tries += 1
    return abs(percentile(times[0], 0.5) - percentile(times[1], 0.5))
