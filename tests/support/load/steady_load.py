"""Closed-loop clients that send requests to three endpoints and record the answers."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from types import TracebackType
from typing import NamedTuple

import httpx

from tests.support.completion_client import parse_events, text_of

PROMPTS = ("Once upon a time", "The moon", "fox", "who sang to")


class Answer(NamedTuple):
    """The result of one request."""

    version: str
    """The beginning of the weights' SHA-256 that the answer names."""
    prompt: str
    text: str


_VERSION = re.compile(r'"(?:weights_version|system_fingerprint)": ?"(\w+)')


def _text(answer: str) -> str:
    if answer.startswith("{"):
        return str(json.loads(answer)["choices"][0]["text"])
    events = parse_events(answer)
    assert events[-1].name == "done", events[-1]
    return text_of(events)


class SteadyLoad:
    """`with SteadyLoad(url, clients=6) as load:` and look at `load.answers` and `load.failures` behind it.

    pause: seconds that each client takes between two requests, for engines that load at the same time on few cores.
    """

    def __init__(self, url: str, *, clients: int, max_tokens: int, pause: float = 0.0) -> None:
        self._url, self._pause = url, pause
        self._body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "seed": 1}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(clients)]
        self._threads.append(threading.Thread(target=self._watch_health))
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self.health_checks = 0

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _work(self, index: int) -> None:
        path, is_streamed = (("/complete", True), ("/complete", False), ("/v1/completions", False))[index % 3]
        prompt = PROMPTS[index % len(PROMPTS)]
        body = {**self._body, "prompt": prompt, "stream": is_streamed}
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(path, json=body).raise_for_status().text
                    # Every place that names the weights must name the same ones.
                    (version,) = {name[:16] for name in _VERSION.findall(answer)}
                    self.answers.append(Answer(version, prompt, _text(answer)))
                    self._stop.wait(self._pause)
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    self._stop.wait(0.05)

    def _watch_health(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.wait(0.05):
                self.health_checks += 1
                if (status := client.get("/health/ready").status_code) != 200:
                    self.failures.append(f"/health/ready: {status}")


def mixed(answers: list[Answer]) -> list[Answer]:
    """Answers that are not what their weights say: the text of a prompt is one for each version, and never the same."""
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in answers:
        texts[answer.version, answer.prompt].add(answer.text)
    versions_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in answers:
        versions_of[answer.prompt, answer.text].add(answer.version)
    return [
        answer
        for answer in answers
        if len(texts[answer.version, answer.prompt]) > 1 or len(versions_of[answer.prompt, answer.text]) > 1
    ]
