"""Request fields that the completion APIs share: types and ranges."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from app.generation.request import GenerationRequest, prompt_list

MAX_IDS, MAX_PROMPTS = 1 << 20, 1024
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
GRAMMAR_FIELDS = ("regex", "json_schema", "grammar")


def _to_integer(value: Any) -> Any:
    """Accepts 11.0 as an integer, as JSON Schema does, up to 2**53, beyond which a float is not exact."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= 2**53 else value


def _to_integers(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Converts floats only if `validate` fails, because a list may have half a million ids."""
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, list) or float not in set(map(type, value)):
            raise
        return validate(list(map(_to_integer, value)))


def accept_integral_floats(*names: str) -> Any:
    """Makes these fields of a model accept floats with an integral value, such as 11.0."""
    return field_validator(*names, mode="before")(_to_integer)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True), WrapValidator(_to_integers)]
Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Name = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9_-]*$")]
_BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingFields(BaseModel):
    """Sampling and stop fields of every endpoint. `null` means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Maximum number of tokens to generate; clamped to the context length."
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Number of tokens to generate before an end-of-text token or a stop can end the text.",
    )
    temperature: float | None = Field(None, ge=0, le=10, description="0 is greedy; higher is wilder.")
    top_k: int | None = Field(
        None, ge=-1, lt=2**31, description="Sample from the k most likely tokens; 0 or -1 is off."
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
    logit_bias: Annotated[dict[_BiasKey, _Bias], Field(max_length=300)] | None = Field(
        None, description="Added to the logits of tokens, by id.", examples=[{"50": -100}]
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="The same seed, prompt and settings give the same text. Random if absent.",
    )
    n: int | None = Field(None, ge=1, le=16, description="Number of continuations of each prompt (default 1).")
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="The text ends before the first of these (up to 16 strings of up to 256 characters)."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64), WrapValidator(_to_integers)] | None = Field(
        None, description="Tokens that end the text, in addition to the model's own."
    )
    ignore_eos: bool | None = Field(None, description="Continue after the end-of-text token (for benchmarks).")
    regex: str | None = Field(None, description="The text must match this regular expression.")
    json_schema: dict[str, Any] | bool | str | None = Field(
        None, description="The text must be JSON that matches this schema (an object, or a string with its JSON)."
    )
    grammar: str | None = Field(None, description="The text must match this grammar, in Lark's notation.")
    deadline_ms: int | None = Field(
        None, ge=1, lt=2**31, description="Time limit of the request; at most the server's own limit."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Keep only this many tokens from the end of the prompt."
    )
    user: Name | None = Field(None, description="Echoed; up to 64 letters, digits, _ and -.")
    request_id: Name | None = Field(None, description="Echoed; up to 64 letters, digits, _ and -.")
    stream: bool | None = Field(None, description="Server-sent events, or one JSON object.")

    _sampling_integers = accept_integral_floats(
        "max_tokens", "min_tokens", "top_k", "seed", "n", "deadline_ms", "truncate_prompt_tokens"
    )

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
        stops = self.stop or []
        return GenerationRequest(
            prompts=prompts,
            is_batch=is_batch,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens or 0,
            sampling={name: getattr(self, name) for name in SAMPLING_FIELDS},
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            n=self.n or 1,
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            grammar=self.grammar_constraint,
            deadline_ms=self.deadline_ms,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            **others,
        )


class CompletionFields(SamplingFields):
    """Fields of both completion endpoints, except for the prompt."""

    logprobs: int | None = Field(
        None, ge=0, le=20, description="Report each token's log-probability and this many alternatives."
    )
    echo: bool | None = Field(
        None, description="Prepend the prompt to the text; with logprobs, report its tokens' log-probabilities too."
    )
    suffix: str | None = Field(
        None, description="Text after the completion, for models with fill-in-the-middle tokens in their vocabulary."
    )
    _logprobs_integer = accept_integral_floats("logprobs")

    def to_generation_request(self, prompt: Prompts, *, max_tokens: int, **others: Any) -> GenerationRequest:
        """See SamplingFields.to_generation_request."""
        own = {"logprobs": self.logprobs, "echo": bool(self.echo), "suffix": self.suffix}
        return super().to_generation_request(prompt, max_tokens=max_tokens, **own, **others)
