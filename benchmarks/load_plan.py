"""Plan of a load run, and the command-line flags that set it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.client import Address, parse_address
from benchmarks.completions import Api, CompletionRequest, OpenAIRequest
from benchmarks.prompts import pseudo_prose
from model.command_line import OneLineParser

APIS = tuple(api.value for api in Api)
_KEY = "INKSTREAM_API_KEY"


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
        kind = OpenAIRequest if self.api == Api.OPENAI.value else CompletionRequest
        return kind(
            prompt=self.prompt(index), max_tokens=self.max_tokens, temperature=self.temperature, seed=max(index, 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    plan: LoadPlan
    json_only: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Exits with a usage line and status 2 if the flags are invalid."""
    parser = _parser()
    flags = vars(parser.parse_args(argv))
    json_only = flags.pop("json_only")
    try:
        return Options(plan=LoadPlan(**flags, api_key=os.environ.get(_KEY, "")), json_only=json_only)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="inkstream bench", description="Streaming load against a running server.")
    add, default = parser.add_argument, LoadPlan()
    add(
        "--url",
        default=default.url,
        help=f"server URL (%(default)s); the API key, if needed, is read from {_KEY}",
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
