"""Streaming load against POST /complete: `python -m benchmarks.load`, or `inkstream bench`.

A level of `--streams` is a closed loop: it keeps N streams open, each on its own keep-alive connection, and when one
ends, its next request starts at once. A level of `--rate` is an open loop: R requests a second on average start at
random times (a Poisson process), whether or not earlier ones have ended, as users do that know nothing of each other.
Figures are measured at the client: tokens are the usage in the `done` event, times are when events reach this process.

- time to first token: request sent (with `--rate`: due) -> first `token` event with text
- inter-token latency: gap between two `token` events. An event may carry several tokens; gaps are reported as measured,
  neither divided nor weighted

The last line of stdout is one JSON object. Exit status: 0; 1 if a request failed or a level missed the `--slo`; 2 if
the flags are invalid or no server answers; 130 after Ctrl+C, with the results so far.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
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
from benchmarks.client import Address, Exchange, exchange_alone, keep_busy, keep_rate, parse_address
from benchmarks.common import Machine, Percentiles, json_line, now_text, percentiles_ms, this_machine
from benchmarks.completions import Completed, CompletionRequest, Failed, OpenAIRequest, measure
from benchmarks.prompts import pseudo_prose
from model.command_line import OneLineParser

APIS = {"complete": CompletionRequest, "openai": OpenAIRequest}
TABLE_HEAD = (
    "streams  requests  errors  tokens/s  requests/s  first token p50/p99 ms  inter-token p50/p99 ms\n"
    "-------  --------  ------  --------  ----------  ----------------------  ----------------------"
)
_RATE_HEAD = TABLE_HEAD.replace("streams", "   rate", 1)
_RATE_SECONDS = 30
"""Length of a level of --rate without --requests."""
_SENDING_SHARE = 0.75
"""Of the time limit, in which a rate must have sent its requests on average: the last ones take time, too."""
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
            head = _RATE_HEAD if plan.rates else TABLE_HEAD
            print(table_row(result.levels[-1]) if result.levels else head, flush=True)

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
class ServiceLevel:
    """A service level objective: limits of the 99th percentiles, in milliseconds."""

    first_token_ms: float = 1000.0
    inter_token_ms: float = 100.0

    def missed_by(self, level: LevelResult) -> tuple[str, ...]:
        """What of the level is beyond its limit; empty if the objective is met."""
        found = []
        if level.errors or level.unfinished or not level.completed:
            found.append("requests")
        if (level.first_token_ms.p99 or 0.0) > self.first_token_ms:
            found.append("first token")
        if (level.inter_token_ms.p99 or 0.0) > self.inter_token_ms:
            found.append("inter-token")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What the load generator sends. Raises ValueError with a message for the user if a value is invalid."""

    url: str = "http://127.0.0.1:8000"
    streams: tuple[int, ...] = (1, 8, 32)
    """Concurrency levels, in order."""
    rates: tuple[float, ...] = ()
    """Requests per second of each level, in place of `streams`."""
    slo: ServiceLevel | None = None
    requests: int | None = None
    """Requests per level; None: four per stream, or 30 seconds of a rate, at least 8."""
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
        if not all(0 < rate <= 10_000 for rate in self.rates):
            raise ValueError("--rate takes requests per second above 0 and at most 10000, such as 0.5,2,8")
        if self.requests is not None and self.requests < 1:
            raise ValueError("--requests must be at least 1")
        if self.requests is not None and not self.rates and self.requests < max(self.streams):
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
        for level in self.levels if self.rates else []:
            if level.rate and (sending := self.requests_for(level) / level.rate) > _SENDING_SHARE * self.seconds:
                count = self.requests_for(level)
                raise ValueError(
                    f"--rate {level.rate:g} takes {sending:.0f} s to send {count} requests: give "
                    f"--seconds {math.ceil(sending / _SENDING_SHARE)} or fewer --requests"
                )

    @property
    def address(self) -> Address:
        return replace(parse_address(self.url), key=self.api_key)

    @property
    def levels(self) -> list[LevelProgress]:
        """A new level for each rate or, without rates, for each number of streams."""
        if self.rates:
            return [LevelProgress(rate=rate) for rate in self.rates]
        return [LevelProgress(streams=streams) for streams in self.streams]

    def requests_for(self, level: LevelProgress) -> int:
        count = math.ceil(level.rate * _RATE_SECONDS) if level.rate else 4 * level.streams
        return self.requests if self.requests is not None else max(8, count)

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
    add = parser.add_mutually_exclusive_group().add_argument
    add("--streams", type=_numbers, default=default.streams, metavar="N,N", help="concurrency levels (1,8,32)")
    add(
        "--rate",
        dest="rates",
        type=_rates,
        default=(),
        metavar="R,R",
        help="levels of so many requests per second, at random times, in place of --streams",
    )
    add = parser.add_argument
    add(
        "--slo",
        type=_service_level,
        nargs="?",
        const=ServiceLevel(),
        metavar="MS,MS",
        help="objective: most milliseconds to the first token and between tokens, p99 (1000,100); a level that misses "
        "it gives the exit status 1",
    )
    add("--requests", type=int, metavar="N", help="requests per level (four per stream, or 30 s of a rate; at least 8)")
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


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 0.5,2,8") from None


def _service_level(text: str) -> ServiceLevel:
    try:
        first_token_ms, inter_token_ms = (float(part) for part in text.split(","))
        if first_token_ms > 0 and inter_token_ms > 0:
            return ServiceLevel(first_token_ms=first_token_ms, inter_token_ms=inter_token_ms)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of milliseconds such as 1000,100")


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
    for progress in plan.levels:
        progress.started_at = time.monotonic()
        try:
            await run_level(plan, islice(indices, plan.requests_for(progress)), progress)
        finally:
            level = progress.result()
            level = replace(level, missed=plan.slo.missed_by(level)) if plan.slo else level
            result = replace(result, levels=(*result.levels, level))
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
    """Results of one level."""

    streams: int
    """Streams that the level keeps open; with a rate, the most requests that were open at a time."""
    rate: float | None
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
    missed: tuple[str, ...] | None = None
    """What was beyond the limits of the service level objective; None without one."""


@dataclass(slots=True, kw_only=True)
class LevelProgress:
    """Progress of one level, readable at any moment."""

    streams: int = 0
    rate: float | None = None
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
            rate=self.rate,
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
            if progress.rate:
                progress.streams = max(progress.streams, progress.started - len(progress.outcomes))
            yield plan.request(index).exchange(plan.address)

    def on_end(exchange: Exchange) -> None:
        progress.outcomes.append(measure(exchange))

    with suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds):
            if progress.rate:
                await keep_rate(plan.address, _gaps(progress.rate, plan.seed), exchanges(), on_end)
            else:
                await keep_busy(plan.address, progress.streams, exchanges(), on_end)


def _gaps(rate: float, seed: int) -> Iterator[float]:
    """Seconds between the arrivals of a Poisson process."""
    generator = random.Random(seed)  # nosec B311 - no secret depends on it
    while True:
        yield generator.expovariate(rate)


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
        """Whether any request failed, or a level ended without a completed request or missed the objective."""
        return any(level.errors or not level.completed or level.missed for level in self.levels)


def table_row(level: LevelResult) -> str:
    first, inter = level.first_token_ms, level.inter_token_ms
    text = (
        f"{level.rate or level.streams:7}  {level.requests:8}  {level.errors:6}  {level.output_tokens_per_second:8.1f}"
        f"  {level.requests_per_second:10.2f}  {first!s:>22}  {inter!s:>22}"
    )
    if level.missed is not None:
        text += f"\n         SLO missed: {', '.join(level.missed)}" if level.missed else "\n         SLO met"
    if level.unfinished:
        text += f"\n         {level.unfinished} unfinished when the level was stopped after {level.seconds:.1f} s"
    if level.first_error is not None:
        text += f"\n         first error: {level.first_error}"
    return text


def _last_line(result: LoadResult) -> str:
    return json_line("load", **msgspec.to_builtins(result))


if __name__ == "__main__":
    sys.exit(main())
