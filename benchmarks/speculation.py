"""Speculative decoding, with and without: `python -m benchmarks.speculation --weights DIR --streams 1,8,32`.

Two engines in this process decode the same requests in turn; their tokens must be equal. Texts that repeat something:
code that is edited, JSON records, a document that is quoted; and free prose, greedy and sampled. A cache namespace for
each run keeps a run from finding its text in the one before. The last line is one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec.structs import replace

from app.common.ipc import WorkerConfig
from app.common.types import Request
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.execution.engine import Engine
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from benchmarks.common import alternate, command_line, median_of, print_result
from benchmarks.engine_driver import Outputs, request
from model.files import one_line
from model.tokenizer.tokenizer import Tokenizer
from model.weight_formats import Quantize

Way = Literal["off", "lookup"]
_CODE = '''def load_users(path):
    """Reads users from a CSV file."""
    users = []
    with open(path) as file:
        for line in file:
            name, email, age = line.strip().split(",")
            users.append({"name": name, "email": email, "age": int(age)})
    return users


def oldest_user(users):
    """Returns the oldest user."""
    oldest = None
    for user in users:
        if oldest is None or user["age"] > oldest["age"]:
            oldest = user
    return oldest


def print_users(users):
    """Prints all users, the oldest first."""
    for user in sorted(users, key=lambda user: -user["age"]):
        print(user["name"], user["email"], user["age"])
'''
_BOOKS = (
    ("Emma", "Jane", "Austen", 1815),
    ("Persuasion", "Jane", "Austen", 1817),
    ("Jane Eyre", "Charlotte", "Bronte", 1847),
    ("Middlemarch", "George", "Eliot", 1871),
)
_DOCUMENT = """The harbor office opens at six in the morning and closes at ten at night. Boats longer than twelve meters
need a permit, which the office gives out on weekdays until noon. The permit costs forty euros for a week and is valid
for one boat and its crew. Whoever arrives at night moors at the eastern pier and registers in the morning. Water and
electricity are included; fuel is sold at the western pier on Mondays and Thursdays. Dogs must be on a leash. Fires are
allowed on the northern beach only, and only between May and September."""
_EDIT = "Rename load_users to read_users in this file, and give back the whole file:\n```python\n"
_COPY = "Answer from the document, word for word.\n\nDocument:\n"
_QUESTION = "\n\nQuestion: what are the rules of the harbor?\n\nAnswer: The harbor office opens"
_PROSE = "It was late in the autumn when the old lighthouse keeper came down to the village for the last time. He had"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and how it is continued."""

    prompt: str
    temperature: float


def _record(number: int, title: str, first: str, last: str, year: int) -> str:
    return (
        f'{{"id": {number}, "title": "{title}", "author": {{"first": "{first}", "last": "{last}"}}, '
        f'"year": {year}, "tags": ["novel", "english"]}}\n'
    )


TEXTS: Mapping[str, Text] = {
    "code edit": Text(f"{_EDIT}{_CODE}```\nThe file:\n```python\ndef read_users(path):", 0.0),
    "JSON records": Text("".join(_record(number, *book) for number, book in enumerate(_BOOKS)), 0.0),
    "copied answer": Text(f"{_COPY}{_DOCUMENT}{_QUESTION}", 0.0),
    "prose, greedy": Text(_PROSE, 0.0),
    "prose, sampled": Text(_PROSE, 0.9),
}


class Run:
    """An engine, and what its last run has shown."""

    def __init__(self, engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, temperature: float) -> None:
        self._engine, self._prompts, self._tokens, self._temperature = engine, prompts, tokens, temperature
        self._number = 0
        self.texts: list[tuple[int, ...]] = []
        self.drafted = self.accepted = 0

    def tokens_per_second(self) -> float:
        """Decodes all prompts at once; tokens after the first ones, and their time."""
        engine, scheduler, outputs = self._engine, self._engine.scheduler, Outputs()
        self._number += 1
        drafted, accepted = scheduler.drafted, scheduler.accepted
        for each in self._requests():
            engine.add(each)
        started, count, n_tokens = 0.0, 0, 0
        while engine.has_work:
            report = engine.step()
            outputs.take(report)
            n_tokens += sum(event.token is not None for event in report.events)
            if not started and len(outputs.events) == len(self._prompts):  # all prompts are computed
                started, count = time.perf_counter(), n_tokens
        seconds = time.perf_counter() - started
        self.texts = [outputs.tokens(name) for name in sorted(outputs.events)]
        self.drafted, self.accepted = scheduler.drafted - drafted, scheduler.accepted - accepted
        return (n_tokens - count) / seconds

    def _requests(self) -> list[Request]:
        return [
            replace(
                request(f"{i:03}", prompt, self._tokens, temperature=self._temperature, top_p=0.95, seed=i),
                cache_namespace=f"run {self._number}",
            )
            for i, prompt in enumerate(self._prompts)
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a text differs."""
    parser = command_line("speculation", __doc__)
    add = parser.add_argument
    add("--weights", type=Path, default=Path("weights"), help="weights directory")
    add("--dtype", default="auto", help="as --dtype of the service (auto)")
    add("--quantize", choices=get_args(Quantize), default="none", help="as --quantize of the service (none)")
    add("--streams", default="1,8", help="numbers of streams (1,8)")
    add("--texts", default=",".join(TEXTS), help=f"out of {', '.join(TEXTS)}; separated by commas")
    add("--tokens", type=int, default=128, help="tokens of a stream (128)")
    add("--rounds", type=int, default=5, help="rounds; each runs both (5)")
    options = parser.parse_args(arguments)
    results, are_equal = list[dict[str, Any]](), True
    try:
        engines = {way: _engine(options, way) for way in get_args(Way)}
        tokenizer = Tokenizer.load(options.weights)
        names = [name for name in TEXTS if name in options.texts]
        print(
            f"{'text':16} {'streams':>7} {'off':>8} {'lookup':>8} {'ratio':>6}  drafts: right of verified", flush=True
        )
        for streams in map(int, options.streams.split(",")):
            for name in names:
                result = _compare(engines, tokenizer, name, streams, options.tokens, options.rounds)
                results.append(result)
                are_equal = are_equal and result["equal"]
    except (ValueError, OSError, EngineStartError) as error:
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print_result("speculation", weights=str(options.weights), quantize=options.quantize, results=results)
    return 0 if are_equal else 1


def _engine(options: Any, way: Way) -> Engine:
    return build_engine(
        WorkerConfig(
            weights=str(options.weights),
            device="cpu",
            dtype=options.dtype,
            quantize=options.quantize,
            speculate=way,
            library=str(find_or_build(None)),
        )
    ).engine


def _compare(
    engines: Mapping[Way, Engine], tokenizer: Tokenizer, name: str, streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    text = TEXTS[name]
    prompts = [tuple(tokenizer.encode(f"{i}.\n{text.prompt}" if streams > 1 else text.prompt)) for i in range(streams)]
    runs = {way: Run(engine, prompts, tokens, text.temperature) for way, engine in engines.items()}
    measured = alternate({way: partial(run.tokens_per_second) for way, run in runs.items()}, rounds)
    off, lookup = median_of(measured, "off"), median_of(measured, "lookup")
    ratio, run = median_of(measured, "lookup", "off"), runs["lookup"]
    is_equal = runs["off"].texts == run.texts
    note = "" if is_equal else "  THE TEXTS DIFFER"
    print(
        f"{name:16} {streams:7} {off:8.1f} {lookup:8.1f} {ratio:5.2f}x  {run.accepted} of {run.drafted}{note}",
        flush=True,
    )
    facts = {"off": off, "lookup": lookup, "ratio": ratio, "drafted": run.drafted, "accepted": run.accepted}
    return {"text": name, "streams": streams, **facts, "equal": is_equal, "samples": measured}


if __name__ == "__main__":
    sys.exit(main())
