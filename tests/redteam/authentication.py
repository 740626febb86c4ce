"""Attacks on keys: spellings of paths and headers, foreign streams, and what timing reveals."""

from __future__ import annotations

import base64
import time
from contextlib import suppress
from random import Random
from typing import Any

from tests.redteam.attack import Attack, Setting
from tests.redteam.http_client import (
    Answer,
    MalformedAnswer,
    open_stream,
    parse_answers,
    percentile,
    read_until_close,
    text_of,
)
from tests.redteam.service import as_json

PROTECTED = (
    ("POST", "/complete"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/score"), ("GET", "/metrics"),
    ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/tokenizer_info"),
)  # fmt: skip
TIMING_SECONDS = 0.002
"""A difference of medians that an attacker could measure over a network."""


class Authentication(Attack):
    """No spelling of a path or header opens a route without exactly one valid key."""

    name = "authentication"
    share = 6.0

    def run(self, setting: Setting) -> None:
        report, rng = setting.report, setting.rng
        report.limit = "401 without one valid key"
        if setting.target.keys[0] is None:
            report.skipped = "the service asks for no key"
            return
        opened = 0
        for _ in setting.tries():
            method, path = rng.choice(PROTECTED)
            spelled, header = self._path(rng, path), self._credentials(rng, setting.target.keys[0])
            message = self._message(method, spelled, header)
            answers = self._send(setting, message)
            if any(answer.status < 400 and self._is_protected(answer) for answer in answers):
                opened += 1
                report.add("critical", f"{method} {spelled} with {header!r} is answered", message.hex())
        report.worst = f"{opened} of {report.tries} opened a route"

    @staticmethod
    def _is_protected(answer: Answer) -> bool:
        """Public answers (the page, health) may come for odd spellings; these may not."""
        marks = (
            b"inkstream_requests",
            b'"object":"list"',
            b'"tokens"',
            b'"choices"',
            b"event: ",
            b'"openapi"',
            b"swagger",
            b"bos_token",
        )
        return any(mark in answer.body for mark in marks)

    @staticmethod
    def _path(rng: Random, path: str) -> str:
        encoded = "".join(f"%{ord(c):02x}" if rng.random() < 0.2 else c for c in path[1:])
        return rng.choice([
            path, path, "/" + encoded, path + "/", path.upper(), "/" + path, "/health/.." + path,
            "/health/live/../.." + path,
            path + "?x=/health", path + "#/health", path + ";/health/live", "/./" + path[1:], "/web/..%2f" + path[1:],
            path + "%00",
            "http://127.0.0.1" + path, "/health%2f.." + path, path.replace("/", "//"), "\\" + path[1:], path + "%20",
            "/web/.." + path,
        ])  # fmt: skip

    @staticmethod
    def _credentials(rng: Random, key: str) -> list[str]:
        """Header lines without a valid credential, however near."""
        wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
        basic = base64.b64encode(f":{key}".encode()).decode()
        return rng.choice([
            [], ["Authorization:"], ["Authorization: Bearer"], [f"Authorization: {key}"],
            [f"Authorization: Bearer {wrong}"],
            [f"Authorization: Basic {basic}"], [f"Authorization: Bearer {key[:-1]}"],
            [f"Authorization: Bearer {key}{key}"],
            [f"Authorization: Bearer {key.swapcase()}"], [f"X-Api-Key: {key}"], [f"Cookie: key={key}"],
            [f"Proxy-Authorization: Bearer {key}"],
            [f"Authorization: Bearer {wrong}", f"Authorization: Bearer {key}"],
            [f"Authorization: Bearer {key}, Bearer {wrong}"],
            [f"Authorization: Bearer {wrong},{key}"], [f"Authorization: Bearer\x00 {key}"],
            ["X-Forwarded-For: 127.0.0.1"],
            [f"Authorization: Token {key}"], [f'Authorization: Bearer "{key}"'], [f"Authorization: Bearer {key[4:]}"],
            [f"Authorization: Bearer {key}\x00"], [f"Authorization : Bearer {key}"], [f"Authorization_: Bearer {key}"],
            [f"Authorization: Bearer {wrong}", f"AUTHORIZATION: Bearer {key}"],
            [f"X-Original-Authorization: Bearer {key}"],
        ])  # fmt: skip

    @staticmethod
    def _message(method: str, path: str, header: list[str]) -> bytes:
        body = as_json({"prompt": "a", "max_tokens": 1, "stream": False}).encode() if method == "POST" else b""
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, *header, "Connection: close", "", ""]).encode("latin-1") + body

    @staticmethod
    def _send(setting: Setting, message: bytes) -> list[Answer]:
        with suppress(OSError), setting.target.address.connect(timeout=10.0) as connection:
            connection.sendall(message)
            try:
                return parse_answers(read_until_close(connection, seconds=10.0))
            except MalformedAnswer as error:
                setting.report.add("medium", f"not HTTP: {error}", message.hex())
        return []


class ForeignStreams(Attack):
    """Another tenant's streams cannot be read, resumed or stopped, and a cache reveals nothing of its prompts."""

    name = "foreign-streams"
    share = 6.0

    def run(self, setting: Setting) -> None:
        report, target = setting.report, setting.target
        report.limit = "404, no shared cache, no timing"
        if target.keys[0] is None or target.keys[0] == target.keys[1]:
            report.skipped = "needs two keys"
            return
        self._streams(setting)
        cached = self._cache(setting)
        difference = self._key_timing(setting)
        report.worst = f"{cached} foreign tokens cached, keys differ by {difference * 1e3:.2f} ms"
        if cached:
            report.add(
                "high", f"{cached} tokens of another key's prompt came from the cache", "the same prompt with two keys"
            )
        if difference > TIMING_SECONDS:
            report.add("low", f"known and unknown keys differ by {difference * 1e3:.2f} ms", "medians of /tokenize")

    @staticmethod
    def _streams(setting: Setting) -> None:
        target, rng, budget = setting.target, setting.rng, setting.budget.share(0.4)
        while budget and setting.report.tries < setting.most_tries:
            body = {"prompt": setting.canary, "max_tokens": 300, "ignore_eos": True, "seed": rng.getrandbits(30)}
            with open_stream(target.address, body, key=target.keys[0]) as (_, events):
                start = next(events)
                name = str(start.data["id"])
                for method, path in [
                    ("GET", f"/complete/{name}/events"), ("DELETE", f"/complete/{name}"),
                    ("GET", f"/complete/{name}/events?after=0"),
                    ("DELETE", f"/complete/%{ord(name[0]):x}{name[1:]}"), ("DELETE", f"/complete/{name}/"),
                    ("GET", f"//complete/{name}/events"),
                ]:  # fmt: skip
                    setting.report.tries += 1
                    answer = target.call(method, path, tenant=1, timeout=10)
                    if answer.status < 300:
                        setting.report.add(
                            "critical", f"a foreign stream: {method} {path} gets {answer.status}", as_json(body)
                        )
                rest = list(events)
                if not rest or rest[-1].name != "done" or rest[-1].data["choices"][0]["finish_reason"] != "length":
                    setting.report.add("high", f"a foreign key changed a stream: {rest[-1:]}", as_json(body))
                if not text_of(rest):
                    setting.report.add("high", "a stream without text while sending foreign requests", as_json(body))

    @staticmethod
    def _cache(setting: Setting) -> int:
        """Tokens that the second key's first request found in the cache; the first key's second one is the control."""
        target, foreign = setting.target, 0
        for i in range(min(5, setting.most_tries)):
            body = {
                "prompt": f"{setting.rng.getrandbits(60)} {setting.canary} {i} " * 8,
                "max_tokens": 1,
                "stream": False,
            }
            counts = []
            for tenant in (0, 0, 1):
                setting.report.tries += 1
                answer: Any = target.call("POST", "/complete", tenant=tenant, body=body).json()
                counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            foreign += counts[2]
            if not counts[1]:
                setting.report.add("low", "control failed: a key's own prompt is not cached", as_json(body))
        return int(foreign)

    @staticmethod
    def _key_timing(setting: Setting) -> float:
        """Seconds between the medians of keys that share a beginning with a real one and of random ones."""
        key = setting.target.keys[0] or ""
        times: dict[bool, list[float]] = {True: [], False: []}
        for i in range(60 if setting.most_tries > 100 else 10):
            near = i % 2 == 0
            tried = key[:-1] + "~" if near else "ink-" + f"{setting.rng.getrandbits(250):x}"[:43].ljust(43, "a")
            began = time.perf_counter()
            setting.target.call("GET", "/v1/models", tenant=None, headers=[f"Authorization: Bearer {tried}"])
            times[near].append(time.perf_counter() - began)
            setting.report.tries += 1
        return abs(percentile(times[True], 0.5) - percentile(times[False], 0.5))
