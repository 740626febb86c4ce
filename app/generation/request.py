"""API-independent generation request and its completion events.

TokenTable holds tokens with log-probabilities in arrays, which take a tenth of the memory of objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec import Struct

Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One token, its log-probability, and the most likely ones in its place."""

    id: int
    logprob: float | None
    """None for the first token of a prompt, which has no context."""
    top: Top
    offset: int
    """Start of its text in the whole text, in characters."""


class Delta(Struct, frozen=True, gc=False):
    """New text, with the tokens that it completes (empty unless log-probabilities were requested).

    A msgspec struct, which is created five times as fast as a dataclass: there are thousands per second.
    """

    index: int
    text: str
    tokens: tuple[TokenDetail, ...] = ()
    start: int = 0
    """Start of `text` in the whole text, in characters; counted only if there are tokens."""
    ids: tuple[int, ...] = ()
    """Ids sampled since the previous Delta, if requested, also of tokens whose text is still held back."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice."""

    index: int
    finish_reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """The request is queued behind `position` others."""

    position: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """No event for a while: the connection should send a keep-alive."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has started the first choice."""


CompletionEvent = Queued | Heartbeat | Started | Delta | Finished


Prompt = str | list[int]


def prompt_list(prompt: Prompt | list[str] | list[list[int]]) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether they were sent as a list."""
    is_batch = not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int)
    return cast("list[Prompt]", prompt if is_batch else [prompt]), is_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedChoice:
    """What the client has of a choice whose stream broke."""

    name: str
    """The place in the body, for errors."""
    text: str
    token_ids: tuple[int, ...] = ()
    """The first of the ids behind the text; none only costs time."""
    n_logprobs: int | None = None
    """Tokens that came with log-probabilities, including those of an echoed prompt; None if they were not requested."""
    is_finished: bool = False
    """Whether the client knows how the choice ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the client has of a response, which goes on from there."""

    receipt: Mapping[str, Any]
    """By field: what must be the same here."""
    choices: tuple[ReceivedChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for completions; None means the default."""

    prompts: list[Prompt]
    is_batch: bool = False
    """Whether the prompts were sent as a list."""
    is_chat: bool = False
    """Whether a chat template rendered the prompt, with all its special tokens."""
    source: Prompt | None = None
    suffix: str | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    sampling: dict[str, float | None] = field(default_factory=dict)
    """Values by the field names of SamplingParams."""
    use_model_defaults: bool = True
    """Whether missing values come from the weights' generation_config.json, or are neutral."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    speculates: bool = True
    """Whether the engine may verify drafts; it changes no text, so receipts do not have it."""
    logprobs: int | None = None
    echo: bool = False
    returns_token_ids: bool = False
    is_streamed: bool = False
    grammar: tuple[str, object] | None = None
    """(name of the field: regex, json_schema, grammar or response_format; its value)."""
    deadline_ms: int | None = None
    truncate_prompt_tokens: int | None = None
    varies_equal_prompts: bool = False
    """Whether a prompt that is given again gets other texts."""
    resumption: Resumption | None = None

    @property
    def n_sampled(self) -> int:
        """Continuations that are sampled for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more continuations are sampled than returned (best_of)."""
        return self.n_sampled > self.n


class TokenTable:
    """An append-only list of TokenDetail."""

    def __init__(self, details: Iterable[TokenDetail] = ()) -> None:
        self._ids = _UnsignedIntegers()
        self._has_logprob = bytearray()
        self._logprobs = Floats()
        self._offsets = _UnsignedIntegers()
        self._top_counts = bytearray()
        self._top_ids = _UnsignedIntegers()
        self._top_logprobs = Floats()
        self.extend(details)

    def extend(self, details: Iterable[TokenDetail]) -> None:
        """Appends all of `details`."""
        for detail in details:
            self._ids.append(detail.id)
            self._has_logprob.append(detail.logprob is not None)
            self._logprobs.append(detail.logprob or 0.0)
            self._offsets.append(detail.offset)
            self._top_counts.append(len(detail.top))
            for token, logprob in detail.top:
                self._top_ids.append(token)
                self._top_logprobs.append(logprob)

    def __len__(self) -> int:
        return len(self._ids.values)

    def __iter__(self) -> Iterator[TokenDetail]:
        tops = self._tops()
        for token, logprob, offset in zip(self._ids.values, self.logprobs, self._offsets.values, strict=True):
            yield TokenDetail(token, logprob, next(tops), offset)

    @property
    def ids(self) -> array[int]:
        """The ids of all tokens."""
        return self._ids.values

    @property
    def logprobs(self) -> Iterator[float | None]:
        """Each token's log-probability; None for the first of a prompt."""
        values = self._logprobs.values
        return (value if known else None for value, known in zip(values, self._has_logprob, strict=True))

    def _tops(self) -> Iterator[tuple[tuple[int, float], ...]]:
        end = 0
        for count in self._top_counts:
            begin, end = end, end + count
            yield tuple(zip(self._top_ids.values[begin:end], self._top_logprobs.values[begin:end], strict=True))


class _UnsignedIntegers:
    """Unsigned integers of 16 bits while all of them fit, otherwise of 32."""

    def __init__(self) -> None:
        self.values = array("H")

    def append(self, value: int) -> None:
        """Appends a value."""
        try:
            self.values.append(value)
        except OverflowError:
            self.values = array("I", self.values)
            self.values.append(value)


class Floats:
    """Floats in 32 bits while all of them are exact, as the engine's are, otherwise in 64."""

    def __init__(self) -> None:
        self.values = array("f")

    def append(self, value: float) -> None:
        """Appends a value."""
        self.values.append(value)
        if self.values.typecode == "f" and self.values[-1] != value:
            self.values = array("d", self.values)
            self.values[-1] = value
