"""Attacks through files: weights that only `check` refuses, hostile tokenizers, files that change while serving."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.redteam.attack import Budget, Load, Setting, attack
from tests.redteam.http_client import open_stream, percentile, text_of
from tests.redteam.service import Launcher, ServiceFailed, Target, engine_of
from tests.redteam.weights_files import KINDS, TensorFile, copied_weights

PROBE = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "stream": False, "ignore_eos": True}
LIMIT_SECONDS = 0.25
STREAMS = 4


def probe_text(target: Target) -> str:
    """A greedy completion, or the status if there is none."""
    response = target.call("POST", "/complete", body=PROBE)
    return str(response.json()["choices"][0]["text"]) if response.status == 200 else f"status {response.status}"


def _reloads(target: Target) -> float:
    """The number of finished reloads, whatever their outcome."""
    text = target.call("GET", "/metrics").body.decode()
    return sum(map(float, re.findall(r"^inkstream_weights_reloads_total\{[^}]*\} (\S+)$", text, re.MULTILINE)))


def _reload(target: Target) -> bool:
    """Sends SIGHUP; returns whether the reload finished within 20 seconds."""
    before, ends = _reloads(target), time.monotonic() + 20
    os.kill(target.pid, signal.SIGHUP)
    while time.monotonic() < ends:
        if _reloads(target) > before:
            return True
        time.sleep(0.1)
    return False


@attack("bad-weights", share=26.0, needs_launcher=True)
def bad_weights(setting: Setting) -> None:
    """Weights that `check` refuses must be refused at startup, and by a reload, which keeps the old weights."""
    launcher, rng, report = setting.own_launcher, setting.rng, setting.report
    report.limit = "what check refuses is never served"
    first, *others = KINDS  # first the most likely kind: a directory without golden.json
    kinds = [first, *rng.sample(others, len(others))]
    weights_dir = copied_weights(launcher)
    with launcher.running(weights=weights_dir) as target:
        expected = probe_text(target)
        for number in setting.tries(most=min(setting.most_tries, len(kinds))):
            kind, path = kinds[number], copied_weights(launcher)
            KINDS[kind](path, rng)
            if problem := _check_and_serve(launcher, target, weights_dir, path, expected):
                repro = f"weights_files.KINDS[{kind!r}]; inkstream check DIR; serve; kill -HUP"
                report.add("high", f"{kind}: {problem}", repro)
            shutil.rmtree(path)
    report.worst = f"{report.found} of {report.tries} kinds served"


def _check_and_serve(launcher: Launcher, target: Target, weights_dir: Path, path: Path, expected: str) -> str:
    try:
        checked = launcher.run("check", path)
    except subprocess.TimeoutExpired:
        return "check does not end within a minute"
    if checked.returncode < 0 or "Traceback" in checked.stderr:
        return f"check ended with {checked.returncode}: {checked.stderr[-200:]}"
    if checked.returncode == 0:
        return ""
    problems = []
    with suppress(ServiceFailed), launcher.running(weights=path) as started:
        problems.append(f"the start says ready, and a request gets: {probe_text(started)!r}")
    if leaked := _after_reload(target, weights_dir, path, expected):
        problems.append(f"after SIGHUP a request gets: {leaked!r}")
    return f"check refuses ({checked.stderr.strip()[-120:]}); {'; '.join(problems)}" if problems else ""


def _after_reload(target: Target, weights_dir: Path, bad: Path, expected: str) -> str:
    """The output of the bad weights if a reload serves them; empty if the old ones stay."""
    aside = weights_dir.with_suffix(".good")
    weights_dir.rename(aside)
    shutil.copytree(bad, weights_dir)
    try:
        if not _reload(target):
            return "no end of the reload within 20 s"
        text = probe_text(target)
    except (OSError, ValueError) as error:
        text = f"no response: {error}"
    finally:
        shutil.rmtree(weights_dir)
        aside.rename(weights_dir)
    if text == expected:
        return ""
    _reload(target)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Backtracking:
    """A regex that takes exponential or high polynomial time, and a text that triggers it."""

    regex: str
    unit: str
    end: str

    def text(self, size: int) -> str:
        return self.unit * (size // len(self.unit)) + self.end


def backtracking_regex(rng: Random) -> Backtracking:
    """Quantifiers over one letter that are nested, overlap or follow each other, and an end that never matches.

    A literal at the end would not do: Oniguruma looks for it first. Polynomial shapes stay below its limit of retries
    for one position, and take their time at every position of the text.
    """
    letter = rng.choice("abcxyz 0")
    atom = {" ": r"\s", "0": r"\d"}.get(letter, rng.choice([letter, "[a-z]", r"\w"]))
    shape = rng.choice([
        "A*A*", "A+A+", "A*A*", "A+A*A+", "A+A?A+", "(?:AA?)*A*", "A*?A*", "A{2,}A+", "(?:A|B)*A*", "A*A*A*", "(A+)+",
        "(A|AA)+",
    ])  # fmt: skip
    end = rng.choice(["$", "[#-%]", "(?!.)", "[^A!]".replace("A", atom), r"\z"])
    return Backtracking(regex=shape.replace("A", atom).replace("B", "[b-y]") + end, unit=letter, end="!")


@attack("tokenizer-regex", share=14.0, needs_launcher=True)
def tokenizer_regex(setting: Setting) -> None:
    """Pre-tokenizer regexes with catastrophic backtracking, in a tokenizer.json that `check` accepts."""
    launcher, report = setting.own_launcher, setting.report
    report.limit = f"/health/live {LIMIT_SECONDS * 1e3:.0f} ms"
    worst = 0.0
    for _ in setting.tries():
        case = backtracking_regex(setting.rng)
        path = copied_weights(launcher)
        _rewrite(path / "tokenizer.json", case.regex)
        seconds = _slowest_health(launcher, path, case, setting.budget)
        if seconds > LIMIT_SECONDS:
            repro = f"regex {case.regex!r}, text {case.unit!r} x 244..2440 + {case.end!r}"
            report.add("high", f"/health/live waited {seconds:.1f} s for a text", repro)
        worst = max(worst, seconds)
        shutil.rmtree(path)
    report.worst = f"/health/live {worst * 1e3:.0f} ms"


def _rewrite(file: Path, regex: str) -> None:
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    rest = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, rest]}
    file.write_text(json.dumps(tokenizer))


def _slowest_health(launcher: Launcher, path: Path, case: Backtracking, budget: Budget) -> float:
    """The slowest health check during adversarial texts; 0 if the tokenizer is refused."""
    with suppress(ServiceFailed, subprocess.TimeoutExpired):
        if launcher.run("check", path).returncode:
            return 0.0
        with launcher.running(weights=path) as target:
            return _health_during_texts(target, case, Budget(min(6.0, max(2.0, budget.left()))))
    return 0.0


def _health_during_texts(target: Target, case: Backtracking, budget: Budget) -> float:
    def send(index: int) -> None:
        body = {"prompt": case.text((244, 1000, 2440, 30)[index % 4]), "max_tokens": 1, "stream": False}
        target.call("POST", ("/complete", "/tokenize")[index // 4], tenant=1, body=body, timeout=20)

    waits: list[float] = []
    with Load(send, 8):
        while budget:
            began = time.monotonic()
            with suppress(OSError, ValueError):
                target.call("GET", "/health/live", tenant=None, timeout=5)
            waits.append(time.monotonic() - began)
            time.sleep(0.05)
    return percentile(waits, 0.95)


@attack("crash-during-copy", share=14.0, needs_launcher=True)
def crash_during_copy(setting: Setting) -> None:
    """The engine is killed while new weights are copied over the loaded ones, before any SIGHUP."""
    report, rng = setting.report, setting.rng
    report.limit = "every stream byte-identical"
    ways = ["in place, whole", "in place, half", "replaced by rename", "removed"]
    rng.shuffle(ways)
    for number in setting.tries():
        how = ways[number % len(ways)]
        weights_dir = copied_weights(setting.own_launcher)
        with suppress(ServiceFailed), setting.own_launcher.running(weights=weights_dir) as target:
            if problem := _crash(rng, target, weights_dir, how):
                repro = f"{STREAMS} streams; new model.safetensors {how}; kill -9 ENGINE; no SIGHUP"
                report.add("high", f"new file {how}, then an engine crash: {problem}", repro)
    report.worst = f"{report.found} of {report.tries} crashes lost something"


def _crash(rng: Random, target: Target, weights_dir: Path, how: str) -> str:
    bodies = [{"prompt": f"Chapter {i}", "max_tokens": 300, "seed": i, "ignore_eos": True} for i in range(STREAMS)]
    expected = [_read(target, body) for body in bodies]
    probe = probe_text(target)
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [pool.submit(_read, target, body) for body in bodies]
        time.sleep(rng.uniform(0.01, 0.1))
        _change(weights_dir, how, rng)
        engine = engine_of(target.pid)
        if engine is None:
            return "no engine process found"
        os.kill(engine, signal.SIGKILL)
        same = sum(one.result() == text for one, text in zip(reading, expected, strict=True))
    if not target.is_alive():
        return "the service ended"
    if same < STREAMS:
        return f"{same} of {STREAMS} streams are byte-identical"
    return "" if probe_text(target) == probe else "another text afterwards"


def _change(weights_dir: Path, how: str, rng: Random) -> None:
    file = weights_dir / "model.safetensors"
    tensors = TensorFile(file)
    for name in rng.sample(tensors.names(), 5):
        tensors.fill(name, tensors.number(name, 0.01))
    new = tensors.to_bytes()
    if how == "removed":
        shutil.rmtree(weights_dir)
    elif how == "replaced by rename":
        (weights_dir / "new").write_bytes(new)
        (weights_dir / "new").rename(file)
    else:
        with file.open("r+b") as opened:
            opened.write(new if how.endswith("whole") else new[: rng.randrange(len(new))])


def _read(target: Target, body: dict[str, Any]) -> str:
    try:
        with open_stream(target.address, body, key=target.keys[0], timeout=30) as (status, events):
            return f"{status} {text_of(events)}"
    except (OSError, ValueError) as error:
        return f"broken off: {error}"
