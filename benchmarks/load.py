"""Fixed-concurrency streaming load against POST /complete: `python -m benchmarks.load`, or `inkstream bench`.

Each level keeps N streams open, each on its own keep-alive connection: when one ends, its next request starts at once.
Figures are measured at the client: tokens are the usage in the `done` event, times are when events reach this process.

- time to first token: request sent -> first `token` event with text
- inter-token latency: gap between two `token` events. An event may carry several tokens; gaps are reported as measured,
  neither divided nor weighted

The last line of stdout is one JSON object. Exit status: 0; 1 if a request failed; 2 if the flags are invalid or no
server answers; 130 after Ctrl+C, with the results so far.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from app.common import event_loop
from benchmarks.client import Address, Exchange, exchange_alone, keep_busy, parse_address
from benchmarks.common import Machine, Percentiles, json_line, now_text, percentiles_ms, this_machine
from benchmarks.completions import Completed, CompletionRequest, Failed, OpenAIRequest, measure
from benchmarks.prompts import pseudo_prose
from model.command_line import OneLineParser

APIS = {"complete": CompletionRequest, "openai": OpenAIRequest}
TABLE_HEAD = (
    "streams  requests  errors  tokens/s  requests/s  first token p50/p99 ms  inter-token p50/p99 ms\n"
    "-------  --------  ------  --------  ----------  ----------------------  ----------------------"
)
_ANSWER_SECONDS = 5
_KEY, _URL = "INKSTREAM_API_KEY", "INKSTREAM_URL"
_WARM_UP = -1
"""Prompt number of the warm-up, which no counted request uses."""


class UnreachableError(ConnectionError):
    """No HTTP server answers at the URL."""


def main(argv: Sequence[str] | None = None) -> int:
    plan, is_json_only = parse_options(argv)
    latest: LoadResult | None = None

    def show(result: LoadResult) -> None:
        nonlocal latest
        latest = result
        if not is_json_only:
            print(table_row(result.levels[-1]) if result.levels else TABLE_HEAD, flush=True)

    try:
        event_loop.run(run(plan, on_result=show))
    except UnreachableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if latest is not None:
            print(_last_line(replace(latest, interrupted=True)), flush=True)
        return 130
    assert latest
    print(_last_line(latest), flush=True)
    return 1 if latest.failed else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What the load generator sends. Raises ValueError with a message for the user if a value is invalid."""

    url: str = "http://127.0.0.1:8000"
    streams: tuple[int, ...] = (1, 8, 32)
    """Concurrency levels, in order."""
    requests: int | None = None
    """Requests per level; None: four per stream, at least 8."""
    max_tokens: int = 128
    temperature: float = 1.0
    seconds: float = 60.0
    """Hard time limit per level."""
    prompt_words: int = 64
    prompts: tuple[str, ...] = ()
    """Prompts to use in turn, instead of pseudo-prose."""
    same_prompt: bool = False
    """Whether every request sends the first prompt, so that it is in the prefix cache."""
    seed: int = 0
    """Seed of the pseudo-prose: another seed sends other prompts. Request i always samples with seed i."""
    allow_remote: bool = False
    api: str = "complete"
    """complete: POST /complete. openai: POST /v1/completions, of any server that supports `ignore_eos`."""
    api_key: str = field(default="", repr=False)
    """Read from the environment only: arguments of a process are visible to all users, and results are shared."""

    def __post_init__(self) -> None:
        if not self.address.is_loopback and not self.allow_remote:
            raise ValueError(f"{self.url} is not a loopback address; add --allow-remote to put load on another machine")
        if not self.streams or not all(1 <= streams <= 4096 for streams in self.streams):
            raise ValueError("--streams takes numbers from 1 to 4096, such as 1,8,32")
        if self.requests is not None and self.requests < max(self.streams):
            raise ValueError(f"--requests {self.requests} is too few to keep {max(self.streams)} streams busy")
        if not 1 <= self.max_tokens <= 1_000_000:
            raise ValueError("--max-tokens must be from 1 to 1000000")
        if not 1 <= self.prompt_words <= 100_000:
            raise ValueError("--prompt-words must be from 1 to 100000")
        if not 0 <= self.temperature <= 10:
            raise ValueError("--temperature must be from 0 to 10")
        if self.api not in APIS:
            raise ValueError(f"--api must be one of {', '.join(APIS)}, not {self.api}")
        if not self.api_key.isascii() or not self.api_key.isprintable():
            raise ValueError(f"the variable {_KEY} has characters that no API key has")
        if not 0 < self.seconds <= 86_400:
            raise ValueError("--seconds must be above 0 and at most 86400")

    @property
    def address(self) -> Address:
        return replace(parse_address(self.url), key=self.api_key)

    def requests_for(self, streams: int) -> int:
        return self.requests if self.requests is not None else max(8, 4 * streams)

    def prompt(self, index: int) -> str:
        index = 0 if self.same_prompt else index
        if self.prompts:
            return self.prompts[index % len(self.prompts)]
        return pseudo_prose(index=index, words=self.prompt_words, seed=self.seed)

    def request(self, index: int) -> CompletionRequest:
        return APIS[self.api](
            prompt=self.prompt(index), max_tokens=self.max_tokens, temperature=self.temperature, seed=max(index, 0)
        )


def parse_options(argv: Sequence[str] | None) -> tuple[LoadPlan, bool]:
    """The plan, and whether to print only JSON. Exits with a usage line and status 2 if the flags are invalid."""
    parser = build_parser()
    flags = vars(parser.parse_args(argv))
    is_json_only = flags.pop("json_only")
    if flags["url"] is None:
        flags["url"] = os.environ.get(_URL) or LoadPlan().url
    try:
        return LoadPlan(**flags, api_key=os.environ.get(_KEY, "")), is_json_only
    except ValueError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(prog="inkstream bench", description="Streaming load against a running server.")
    add, default = parser.add_argument, LoadPlan()
    add(
        "--url",
        help=f"server URL (the variable {_URL}, or {default.url}); the API key, if needed, is read from {_KEY}",
    )
    add("--streams", type=_numbers, default=default.streams, metavar="N,N", help="concurrency levels (1,8,32)")
    add("--requests", type=int, metavar="N", help="requests per level (four per stream, at least 8)")
    add("--max-tokens", type=int, default=default.max_tokens, metavar="N", help="tokens per request (%(default)s)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--prompt-words", type=int, default=default.prompt_words, metavar="N", help="words per prompt (%(default)s)")
    add("--prompts", type=_lines, default=(), metavar="FILE", help="file of prompts to use in turn, one per line")
    add = parser.add_argument
    add("--same-prompt", action="store_true", help="always send the same prompt, so that it is in the prefix cache")
    add(
        "--temperature",
        type=float,
        default=default.temperature,
        metavar="T",
        help="temperature; 0 is greedy (%(default)s)",
    )
    add("--seconds", type=float, default=default.seconds, metavar="S", help="time limit per level (%(default)s)")
    add("--seed", type=int, default=default.seed, metavar="N", help="seed of the prompts (%(default)s)")
    add("--api", choices=APIS, default=default.api, help="openai: /v1/completions, also of other servers (%(default)s)")
    add("--allow-remote", action="store_true", help="allow a URL that is not on this machine")
    add("--json-only", action="store_true", help="print only the last line, one JSON object")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,8,32") from None


def _lines(name: str) -> tuple[str, ...]:
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise argparse.ArgumentTypeError(f"{name} cannot be read as a text file") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise argparse.ArgumentTypeError(f"{name} holds no prompts; write one per line")
    return prompts


async def run(plan: LoadPlan, *, on_result: Callable[[LoadResult], object] = lambda _: None) -> LoadResult:
    """Carries out the plan, and reports each result so far: at the start, then after each level, even a cut one.

    Raises UnreachableError if nothing answers at the plan's URL.
    """
    settings = {name: value for name, value in asdict(plan).items() if name != "api_key"}
    result = LoadResult(
        date=now_text(),
        url=plan.url,
        machine=this_machine(),
        server=await _fetch_models(plan),
        settings=settings | {"prompts": len(plan.prompts)},
    )
    on_result(result)
    await run_level(plan, iter([_WARM_UP]), LevelProgress(streams=1))  # if it fails, counted requests report why
    indices = count()
    for streams in plan.streams:
        progress = LevelProgress(streams=streams)
        try:
            await run_level(plan, islice(indices, plan.requests_for(streams)), progress)
        finally:
            result = replace(result, levels=(*result.levels, progress.result()))
            on_result(result)
    return result


_START = "; start a service with inkstream serve, or name another with --url"


async def _fetch_models(plan: LoadPlan) -> Any:
    """Response of GET /v1/models, or None if it is not JSON. Raises UnreachableError if nothing answers."""
    exchange = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            request = Exchange(plan.address.request("GET", "/v1/models"))
            exchange = await exchange_alone(plan.address, request)
    if exchange is None:
        raise UnreachableError(f"nothing answers at {plan.url} within {_ANSWER_SECONDS} s{_START}")
    if exchange.error:
        raise UnreachableError(f"nothing answers at {plan.url}: {exchange.error}{_START}")
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(exchange.body)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """Results of one concurrency level."""

    streams: int
    requests: int
    """Requests started."""
    completed: int
    errors: int
    unfinished: int
    """Requests cut by the time limit or Ctrl+C. They are not errors, and their tokens are not counted."""
    first_error: str | None
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    """Tokens of completed requests over the whole level, ramp-down included; a lower bound if requests were cut."""
    requests_per_second: float
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    """Gaps between `token` events of completed streams. An event may carry several tokens; gaps are not weighted."""


@dataclass(slots=True, kw_only=True)
class LevelProgress:
    """Progress of one level, readable at any moment."""

    streams: int
    started_at: float = field(default_factory=time.monotonic)
    started: int = 0
    outcomes: list[Completed | Failed] = field(default_factory=list)

    def result(self) -> LevelResult:
        seconds = time.monotonic() - self.started_at
        completed = [outcome for outcome in self.outcomes if isinstance(outcome, Completed)]
        failures = [outcome for outcome in self.outcomes if isinstance(outcome, Failed)]
        tokens = sum(outcome.tokens for outcome in completed)
        return LevelResult(
            streams=self.streams,
            requests=self.started,
            completed=len(completed),
            errors=len(failures),
            unfinished=self.started - len(self.outcomes),
            first_error=failures[0].message if failures else None,
            seconds=seconds,
            output_tokens=tokens,
            output_tokens_per_second=tokens / seconds,
            requests_per_second=len(completed) / seconds,
            first_token_ms=percentiles_ms([c.first_token for c in completed if c.first_token is not None]),
            inter_token_ms=percentiles_ms([gap for c in completed for gap in c.gaps]),
        )


async def run_level(plan: LoadPlan, indices: Iterator[int], progress: LevelProgress) -> None:
    """Sends the requests with these numbers. Requests that the time limit cuts count as started and have no outcome."""

    def exchanges() -> Iterator[Exchange]:
        for index in indices:
            progress.started += 1
            yield plan.request(index).exchange(plan.address)

    with suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds):
            await keep_busy(
                plan.address,
                progress.streams,
                exchanges(),
                lambda exchange: progress.outcomes.append(measure(exchange)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of a load run. Immutable: each finished level makes a new object."""

    date: str
    url: str
    machine: Machine
    server: Any
    """Response of GET /v1/models; None if it was not JSON."""
    settings: dict[str, Any]
    levels: tuple[LevelResult, ...] = ()
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether any request failed, or a level ended without a completed request."""
        return any(level.errors or not level.completed for level in self.levels)


def table_row(level: LevelResult) -> str:
    first, inter = level.first_token_ms, level.inter_token_ms
    text = (
        f"{level.streams:7}  {level.requests:8}  {level.errors:6}  {level.output_tokens_per_second:8.1f}"
        f"  {level.requests_per_second:10.2f}  {first!s:>22}  {inter!s:>22}"
    )
    if level.unfinished:
        text += f"\n         {level.unfinished} unfinished when the level was stopped after {level.seconds:.1f} s"
    if level.first_error is not None:
        text += f"\n         first error: {level.first_error}"
    return text


def _last_line(result: LoadResult) -> str:
    return json_line("load", **msgspec.to_builtins(result))


if __name__ == "__main__":
    sys.exit(main())
