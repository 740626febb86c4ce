"""Schemas of the native API: request fields that all completion APIs share, responses, events, errors, serializers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from app.common.types import SamplingParams
from app.common.version import VERSION
from app.generation.completion import Completion
from app.generation.receipt import GRAMMAR_FIELDS, SAMPLING_FIELDS, prompt_hashes, settings
from app.generation.request import GenerationRequest, TokenDetail, TokenTable, prompt_list
from app.http.errors import ErrorResponse
from app.http.json_stream import LazyArray
from app.http.response_model import ResponseModel
from app.serving.service import Admitted
from model.tokenizer.tokenizer import Tokenizer

MAX_IDS, MAX_PROMPTS, MAX_BIASES = 1 << 20, 1024, 300
MAX_FIELDS = 256
"""Fields of one object of a body, known and unknown ones together."""


class RequestBody(BaseModel):
    """Base of request bodies, and of objects in them that keep unknown fields: pydantic would list each of 85,000."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_fields(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            message = "an object has {n} fields, at most {limit} are allowed: GET /docs lists all fields"
            raise PydanticCustomError("too_many_fields", message, {"n": len(body), "limit": MAX_FIELDS})
        return body


def _to_integer(value: Any) -> Any:
    """Accepts 11.0 as an integer, as JSON Schema does, up to 2**53, beyond which a float is not exact."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= 2**53 else value


def _to_integers(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Converts floats only if `validate` fails, because a list may have half a million ids."""
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, list) or not {float} <= set(map(type, value)) <= {float, int}:
            raise
        try:
            integers = list(map(int, value))  # a Python function for each took three times as long
        except (OverflowError, ValueError):  # infinity, NaN
            integers = []
        if integers != value:  # validates the first fraction alone
            return validate([next(x for x in value if type(x) is float and not x.is_integer())])
        return validate(integers)


_BIAS_KEY = re.compile(r"^(0|[1-9][0-9]{0,8})$")


def _first_invalid_bias(value: Any) -> Any:
    """A dict with the first invalid entry alone, if there is one: an error for each of 300 would take half a ms."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        lengths = {"field_type": "Dictionary", "max_length": MAX_BIASES, "actual_length": len(value)}
        raise PydanticKnownError("too_long", lengths)
    for key, bias in value.items():
        if not (_BIAS_KEY.fullmatch(key) and type(bias) in (int, float) and -100 <= bias <= 100):
            return {key: bias}
    return value


_Integral = BeforeValidator(_to_integer)
Natural = Annotated[int, Field(ge=0, lt=2**31), _Integral]
Positive = Annotated[int, Field(ge=1, lt=2**31), _Integral]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), _Integral]
UpTo64 = Annotated[int, Field(ge=1, le=64), _Integral]
UpTo20 = Annotated[int, Field(ge=0, le=20), _Integral]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True), WrapValidator(_to_integers)]
Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)
_Stop = Annotated[str, StringConstraints(max_length=256)]
_StopIds = Annotated[list[TokenId], Field(max_length=64, fail_fast=True), WrapValidator(_to_integers)]
_Name = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9_-]*$")]
EchoedName = Annotated[_Name | None, Field(description="Echoed; up to 64 letters, digits, _ and -.")]
MAX_USER = 1024
"""Characters of `user` that are echoed. It has no effect, so no text is a reason to refuse a request."""
EchoedUser = Annotated[
    Annotated[str, AfterValidator(lambda user: user[:MAX_USER])] | None,
    Field(description=f"Any text; its first {MAX_USER} characters are echoed."),
]
DeadlineMs = Annotated[Positive | None, Field(description="Time limit of the request; at most the server's own limit.")]
_BiasKey = Annotated[str, StringConstraints(pattern=_BIAS_KEY.pattern)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = Annotated[dict[_BiasKey, _Bias], Field(max_length=MAX_BIASES), BeforeValidator(_first_invalid_bias)]


_NEUTRAL = SamplingParams()
_DEFAULTS: dict[str, Any] = {
    **{name: getattr(_NEUTRAL, name) for name in (*SAMPLING_FIELDS, "min_tokens")},
    "n": 1,
    "ignore_eos": False,
    "speculate": True,
    "echo": False,
    "return_token_ids": False,
    "include_stop": False,
}


def documented_defaults(*, unless: tuple[str, ...] = (), **defaults: Any) -> Callable[[dict[str, Any]], None]:
    """A request's json_schema_extra: the value that each absent field stands for, except for fields in `unless`."""

    def document(schema: dict[str, Any]) -> None:
        for name, value in {**_DEFAULTS, **defaults}.items():
            if name in schema["properties"] and name not in unless:
                schema["properties"][name]["default"] = value

    return document


class SamplingFields(RequestBody):
    """Sampling and stop fields of every endpoint. `null` means the default."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_tokens: Natural | None = Field(
        None, description="Maximum number of tokens to generate; clamped to the context length."
    )
    min_tokens: Natural | None = Field(
        None, description="Number of tokens to generate before an end-of-text token or a stop can end the text."
    )
    temperature: float | None = Field(None, ge=0, le=10, description="0 is greedy; higher is wilder.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _Integral] | None = Field(
        None, description="Sample from the k most likely tokens; 0 or -1 is off."
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Sample from the smallest set of tokens that reaches this probability; 0 is greedy.",
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Exclude tokens less likely than this fraction of the most likely one."
    )
    typical_p: float | None = Field(
        None, gt=0, le=1, description="Sample from the most typical tokens that reach this probability; 1 is off."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="Above 1: tokens of the prompt and the text so far become less likely."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from the logit of each token that was generated before."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from a token's logit for each time that it was generated before."
    )
    logit_bias: _Biases | None = Field(
        None, description="Added to the logits of tokens, by id.", examples=[{"50": -100}]
    )
    seed: Seed | None = Field(
        None, description="The same seed, prompt and settings give the same text. Random if absent."
    )
    n: UpTo64 | None = Field(None, description="Number of continuations of each prompt.")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64, fail_fast=True)] | None = Field(
        None,
        description="The text ends before the first of these (up to 64 strings of up to 256 characters; "
        "empty ones have no effect).",
    )
    stop_token_ids: _StopIds | None = Field(
        None, description="Tokens that end the text, in addition to the model's own."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end-of-text token (for benchmarks).")
    speculate: bool | None = Field(
        None, description="Whether drafts may make the text arrive sooner, where the service speculates: the same text."
    )
    regex: str | None = Field(None, description="The text must match this regular expression.")
    json_schema: dict[str, Any] | bool | str | None = Field(
        None, description="The text must be JSON that matches this schema (an object, or a string with its JSON)."
    )
    grammar: str | None = Field(None, description="The text must match this grammar, in Lark's notation.")
    deadline_ms: DeadlineMs = None
    truncate_prompt_tokens: Positive | None = Field(
        None, description="Keep only this many tokens from the end of the prompt."
    )
    user: EchoedUser = None
    request_id: EchoedName = None
    stream: bool | None = Field(None, description="Server-sent events, or one JSON object.")

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingFields:
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: send one of them")
        return self

    @property
    def grammar_constraint(self) -> tuple[str, Any] | None:
        """The grammar constraint: the name of the field, and its value."""
        return next(((name, value) for name in GRAMMAR_FIELDS if (value := getattr(self, name)) is not None), None)

    def to_generation_request(self, prompt: Prompts, *, max_tokens: int, **others: Any) -> GenerationRequest:
        """The generation request, with the endpoint's own default of max_tokens and its own fields."""
        prompts, is_batch = prompt_list(prompt)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationRequest(
            prompts=prompts,
            is_batch=is_batch,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens or 0,
            sampling={name: getattr(self, name) for name in SAMPLING_FIELDS},
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            n=self.n or 1,
            stops=tuple(filter(None, stops)),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            speculates=self.speculate is not False,
            grammar=self.grammar_constraint,
            deadline_ms=self.deadline_ms,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            **others,
        )


class CompletionFields(SamplingFields):
    """Fields of both completion endpoints, except for the prompt."""

    logprobs: Annotated[UpTo20 | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, description="Report each token's log-probability and this many alternatives; false means none."
    )
    echo: bool | None = Field(
        None, description="Prepend the prompt to the text; with logprobs, report its tokens' log-probabilities too."
    )
    suffix: str | None = Field(
        None, description="Text after the completion, for models with fill-in-the-middle tokens in their vocabulary."
    )
    return_token_ids: bool | None = Field(
        None,
        description="Report the ids of the generated tokens, also of those without text; fewer bytes than logprobs.",
    )
    vary_equal_prompts: bool | None = Field(
        None,
        description="Whether equal prompts of one request get different texts; by default only without a seed.",
    )

    def to_generation_request(self, prompt: Prompts, *, max_tokens: int, **others: Any) -> GenerationRequest:
        """See SamplingFields.to_generation_request."""
        own = {
            "logprobs": self.logprobs,
            "echo": bool(self.echo),
            "suffix": self.suffix or None,
            "returns_token_ids": bool(self.return_token_ids),
            "varies_equal_prompts": self.seed is None if self.vary_equal_prompts is None else self.vary_equal_prompts,
        }
        return super().to_generation_request(prompt, max_tokens=max_tokens, **own, **others)


# Annotations of fields that several responses have.
Echo = Annotated[str | None, "Echo of the request's field."]
IsTruncated = Annotated[bool | None, "True if truncate_prompt_tokens shortened a prompt."]
ModelName = Annotated[str, "Name of the model."]
WeightsVersion = Annotated[str, "SHA-256 of the weights."]
WeightsRevision = Annotated[
    str | None, "Commit of the Hugging Face Hub that the weights were downloaded as; left out for a directory."
]
ContextLength = Annotated[int, "Context length in tokens, prompt and completion together."]
VocabularySize = Annotated[int, "Size of the vocabulary: all token ids are below it."]
EffectiveSettings = Annotated[dict[str, Any], "Effective settings, under the names of the request's fields."]
Numerics = Annotated[str, "What computed (torch or native kernels), and in which number format."]
PromptHash = Annotated[str | list[str], "SHA-256 of the prompt; a list if there were several."]
SourceHash = Annotated[str | None, "SHA-256 of the source."]
SuffixHash = Annotated[str | None, "SHA-256 of the suffix."]
CachedTokenCount = Annotated[int, "Prompt tokens whose keys and values were in the prefix cache."]
ChoiceIndex = Annotated[int, "Index of the prompt times n, plus the index of the continuation."]
StopReason = Annotated[str | int | None, "The stop string or stop token that ended the text, if any."]
GeneratedIds = Annotated[
    list[int] | None,
    "Ids of the generated tokens, if return_token_ids asked for them; in a stream, those since the previous ones.",
]


class TopToken(ResponseModel):
    """A candidate token at one position of the text."""

    id: Annotated[int, "Token id."]
    text: Annotated[str, "The bytes decoded as UTF-8; incomplete characters become U+FFFD."]
    bytes: Annotated[list[int], "Exact bytes of the token; empty for a special token."]
    logprob: Annotated[float | None, "Log-probability from the raw logits, before temperature and filters."]


class Token(TopToken):
    """A token of the text and its alternatives."""

    top: Annotated[list[TopToken], "The most likely tokens at this position, as many as requested."]


class ChoiceEnd(ResponseModel):
    """How a choice ended."""

    index: Annotated[int, "Index of the choice."]
    finish_reason: Annotated[str, "stop, length, timeout or cancelled."]
    stop_reason: StopReason


class Choice(ChoiceEnd):
    """One continuation."""

    index: ChoiceIndex
    text: Annotated[str, "The generated text; with echo, after the prompt."]
    tokens: Annotated[LazyArray[Token] | None, "The tokens of the text, if logprobs was requested."]
    token_ids: GeneratedIds = None


class CachedTokens(ResponseModel):
    """Details of the prompt tokens."""

    cached_tokens: CachedTokenCount


class Usage(ResponseModel):
    """Token counts of the engine."""

    prompt_tokens: Annotated[int, "Number of prompt tokens."]
    completion_tokens: Annotated[
        int, "Number of generated tokens, including end-of-text tokens and stops that were cut from the text."
    ]
    total_tokens: Annotated[int, "Sum of both."]
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, completion: Completion) -> Usage:
        """The usage so far."""
        n_prompt, n_tokens = completion.prompt_tokens, completion.n_tokens
        return cls(n_prompt, n_tokens, n_prompt + n_tokens, CachedTokens(completion.cached_tokens))


class Timings(ResponseModel):
    """Milliseconds, and tokens per second while decoding."""

    queue_ms: Annotated[float, "From the request to its first step."]
    prefill_ms: Annotated[float, "From its first step to its first token."]
    first_token_ms: Annotated[float, "From the request to its first token."]
    decode_ms: Annotated[float, "From its first token to its last."]
    tokens_per_second: Annotated[float, "While decoding."]
    drafted_tokens: Annotated[int, "Draft tokens that were verified (speculative decoding)."]
    accepted_tokens: Annotated[int, "Draft tokens that were accepted: each saved a step."]

    @classmethod
    def of(cls, completion: Completion) -> Timings:
        """The timings so far; tokens per second count all choices, and are 0 before two tokens."""
        times = completion.times
        started = times.started or times.submitted
        first = times.first_token or started
        decode = (times.last_token or first) - first - times.detached_seconds
        later = completion.n_sampled - completion.n_started
        return cls(
            queue_ms=round((started - times.submitted) * 1e3, 3),
            prefill_ms=round(max(0.0, first - started) * 1e3, 3),
            first_token_ms=round((first - times.submitted) * 1e3, 3),
            decode_ms=round(decode * 1e3, 3),
            tokens_per_second=round(later / decode, 2) if decode > 0 else 0.0,
            drafted_tokens=completion.drafted_tokens,
            accepted_tokens=completion.accepted_tokens,
        )


class Receipt(ResponseModel, kw_only=True):
    """Everything that determines the text besides the prompt; reproduces it on the same hardware and build."""

    weights_version: WeightsVersion
    seed: Annotated[int, "Seed of the random numbers."]
    settings: EffectiveSettings
    prompt_sha256: PromptHash
    source_sha256: SourceHash = None
    suffix_sha256: SuffixHash = None
    numerics: Numerics
    version: Annotated[str, "Version of inkstream."]
    weights_revision: WeightsRevision = None

    @classmethod
    def of(cls, admitted: Admitted) -> Receipt:
        """The receipt: `settings` and `seed`, sent again with the prompt, reproduce the text."""
        return cls(
            weights_version=admitted.model_version.key,
            seed=admitted.params.seed,
            settings=settings(admitted.request, admitted.params),
            **cast("dict[str, Any]", prompt_hashes(admitted.request)),
            numerics=admitted.numerics,
            version=VERSION,
            weights_revision=admitted.instance.revision,
        )


class CompleteResponse(ResponseModel):
    """Response of POST /complete with "stream": false."""

    id: Annotated[str, "Request id."]
    model: ModelName
    choices: Annotated[list[Choice], "The continuations, by index."]
    usage: Usage
    timings: Timings
    receipt: Receipt
    user: Echo = None
    request_id: Echo = None
    truncated: IsTruncated = None


class Cancellation(ResponseModel):
    """Response of DELETE /complete/{id}."""

    id: Annotated[str, "Id of the completion."]
    cancelled: Annotated[bool, "Always true; a completion that has finished gives a 404."]


class StartEvent(ResponseModel):
    """`start`: the request has left the queue."""

    id: Annotated[str, "Request id; DELETE /complete/{id} cancels the request."]
    model: ModelName
    weights_version: WeightsVersion
    seed: Annotated[int, "Seed of the random numbers; sent again, it gives the same text."]
    prompt_tokens: Annotated[int, "Number of prompt tokens."]
    cached_tokens: CachedTokenCount
    settings: EffectiveSettings
    numerics: Numerics
    prompt_sha256: PromptHash
    source_sha256: SourceHash = None
    suffix_sha256: SuffixHash = None
    user: Echo = None
    request_id: Echo = None
    truncated: IsTruncated = None


class QueueEvent(ResponseModel):
    """`queue`: the request is still waiting; sent at most once a second."""

    position: Annotated[int, "Number of requests ahead of this one."]
    eta_ms: Annotated[int, "Estimated time until the request starts."]


class TokenEvent(ResponseModel):
    """`token`: new text. The concatenated texts of a choice are its whole text."""

    index: Annotated[int, "Index of the choice."]
    text: Annotated[str, "New text of this choice; may be empty."]
    tokens: Annotated[list[Token] | None, "The tokens of this text, if logprobs was requested."] = None
    token_ids: GeneratedIds = None


class DoneEvent(ResponseModel):
    """`done`: the last event of a stream that succeeded."""

    choices: Annotated[list[ChoiceEnd], "How each choice ended."]
    usage: Usage
    timings: Timings
    receipt: Receipt


class ErrorEvent(ErrorResponse):
    """`error`: the last event of a stream that failed."""


EVENTS: dict[str, type[ResponseModel]] = {
    "start": StartEvent,
    "queue": QueueEvent,
    "token": TokenEvent,
    "done": DoneEvent,
    "error": ErrorEvent,
}
"""Event name -> its data."""


def top_token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> TopToken:
    """One candidate token."""
    data = tokenizer.token_bytes(token_id)
    return TopToken(token_id, data.decode("utf-8", "replace"), list(data), logprob)


def token(tokenizer: Tokenizer, detail: TokenDetail) -> Token:
    """One token, and the most likely ones at its position."""
    data = tokenizer.token_bytes(detail.id)
    top = [top_token(tokenizer, token_id, logprob) for token_id, logprob in detail.top]
    return Token(detail.id, data.decode("utf-8", "replace"), list(data), detail.logprob, top)


def token_array(tokenizer: Tokenizer, details: TokenTable) -> LazyArray[Token]:
    """Tokens, encoded lazily: a response may contain hundreds of thousands of alternatives."""
    return LazyArray(lambda: ([token(tokenizer, detail)] for detail in details))
