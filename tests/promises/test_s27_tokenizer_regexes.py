"""S27: No text and no tokenizer file can block the event loop.

A tokenizer that is not proven to run in linear time is tried in a sandboxed process before it is loaded, and encodes
all texts in sandboxed processes with a time limit.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenizers import Regex, pre_tokenizers

from app.cli import check
from model.tokenizer.regexes import LINEAR_PATTERNS
from tests.support.armed_faults import Faults
from tests.support.load import open_loop
from tests.support.load.open_loop import Plan
from tests.support.promise_figures import Promise
from tests.support.regex_attacks import attacks
from tests.support.servers import Server
from tests.support.services import Services

SLOW = r"\w{0,100}\w{0,100}\w{0,100};"
"""About a hundred thousand retries per character; the regex engine gives up after ten million."""
BEYOND_THE_LIMIT = r"(?:\w+\s?)+!|\w+|\W"


def attack(length: int) -> str:
    """A text whose letters match neither pattern, with the end of a match present, so that both retry."""
    return "a" * (length - 3) + "\n;!"


def weights_with(pattern: str, weights: Path, directory: Path) -> Path:
    """The tiny model, with this pattern before all others in its tokenizer.json."""
    shutil.copytree(weights, directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"].insert(0, split)
    path.write_text(json.dumps(content))
    (directory / "manifest.json").unlink(missing_ok=True)
    return directory


def _started(serve: Services, folder: Path, weights: Path, *protections: str) -> Server:
    """Start a service without these protections."""
    faults = Faults(folder / "faults")
    for protection in protections:
        faults.arm(protection, "remove")
    return serve(weights=weights, fake_ms=1, environment=faults.removing(*protections), is_killed=True)


@pytest.mark.parametrize("pattern", [SLOW, BEYOND_THE_LIMIT])
def test_check_accepts_an_unproven_pattern_and_names_the_consequence(
    tmp_path: Path, weights: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(weights_with(pattern, weights, tmp_path / "weights"))]) == 0
    assert "texts are tokenized in sandboxed processes" in capsys.readouterr().out


def test_text_beyond_the_limit_of_retries_is_a_clear_400(serve: Services, tmp_path: Path, weights: Path) -> None:
    server = _started(serve, tmp_path, weights_with(BEYOND_THE_LIMIT, weights, tmp_path / "weights"))
    status, text = _ask(server, "/tokenize", "a" * 60 + "\n;!")
    assert status == 400 and "tokenizer gives up for this text" in text
    assert _ask(server, "/complete", "hello")[0] == 200


def _ask(server: Server, path: str, text: str) -> tuple[int, str]:
    body = {"prompt": text, "max_tokens": 1, "stream": False} if path == "/complete" else {"prompt": text}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    return answer.status_code, answer.text


def _health_during(server: Server, length: int, seconds: float) -> tuple[open_loop.Spread, list[tuple[int, str]]]:
    """Times of /health/live (maximum if unanswered) during attacks of two clients, and the attackers' responses."""
    stop = threading.Event()

    def send(number: int) -> list[tuple[int, str]]:
        answers = []
        while not stop.is_set():
            answers.append(_ask(server, ("/complete", "/tokenize")[number], attack(length)))
        return answers

    checks = Plan(url=server.url, bodies=(), path="/health/live", rate=50, seconds=seconds)
    longest = checks.seconds + checks.patience
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(send, number) for number in range(2)]
        with open_loop.started(checks) as health:
            time.sleep(seconds)
            stop.set()
            outcomes = health.outcomes()
        answers = [answer for each in sent for answer in each.result()]
    return open_loop.spread(longest if o.end is None else o.end for o in outcomes), answers


@pytest.mark.timed
def test_adversarial_texts_do_not_block_the_event_loop(
    serve: Services, tmp_path: Path, weights: Path, promise: Promise
) -> None:
    directory = weights_with(SLOW, weights, tmp_path / "weights")
    server = _started(serve, tmp_path, directory)
    _ask(server, "/complete", "hello")
    health, answers = promise.measured(
        lambda: _health_during(server, 2440, promise.size(8, 60)), lambda found: found[0].p99 <= 0.1
    )
    refused = [text for status, text in answers if status == 400]
    assert len(refused) == len(answers) and all("tokenizer takes more than" in text for text in refused), answers
    assert _ask(server, "/complete", "hello")[0] == 200
    assert json.loads(_ask(server, "/tokenize", "hello you")[1])["count"] > 0
    assert "panicked" not in server.log.read_text() and "Traceback" not in server.log.read_text()
    what = "GET /health/live p99 beside 2,440-character texts of catastrophic patterns"
    promise.at_most(what, health.p99, target=0.05, floor=0.1, unit="s", n=health.n)
    promise.all_of("such requests that get a clear 400", len(refused), len(answers))


def test_service_that_trusts_every_pattern_is_detected(serve: Services, tmp_path: Path, weights: Path) -> None:
    """Positive control: the service tokenizes such texts on the event loop."""
    directory = weights_with(SLOW, weights, tmp_path / "weights")
    server = _started(serve, tmp_path, directory, "tokenizer.trusted")
    health, _ = _health_during(server, 244, 2)
    assert health.most > 0.3 and health.p99 > 0.1


def _seconds(pattern: str, length: int) -> float:
    """Minimum CPU seconds of three runs on the worst known text for the pattern."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str

    def timed(text: str) -> float:
        began = time.process_time()
        split(text)
        return time.process_time() - began

    worst = max(attacks(pattern), key=lambda attack: timed(attack.text(1000)))
    return min(timed(worst.text(length)) for _ in range(3))


@pytest.mark.timed
def test_known_patterns_take_linear_time(promise: Promise) -> None:
    long = promise.size(1 << 16, 1 << 20)
    short_times = {pattern: _seconds(pattern, 2440) for pattern in LINEAR_PATTERNS}
    long_times = {pattern: _seconds(pattern, long) for pattern in LINEAR_PATTERNS}
    growth = max(long_times[p] / max(short_times[p], 5e-4) / (long / 2440) for p in LINEAR_PATTERNS)
    n = len(LINEAR_PATTERNS)
    what = "CPU for 2,440 adversarial characters, worst of the known patterns"
    promise.at_most(what, max(short_times.values()), target=0.02, floor=0.05, unit="s", n=n)
    what = "CPU time's growth to a long text, relative to linear"
    promise.at_most(what, growth, target=4, floor=8, unit="x", n=n)
    per_mebibyte = max(long_times.values()) * (1 << 20) / long
    promise.at_most(
        "CPU time for a mebibyte of them, off the event loop", per_mebibyte, target=4, floor=12, unit="s", n=n
    )


def test_quadratic_pattern_is_detected() -> None:
    """Positive control."""
    assert _seconds(r"\s+$", 20_000) > 4 * 8 * _seconds(r"\s+$", 2440) / 2
