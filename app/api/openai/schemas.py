"""Schemas of requests and responses of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.api.schemas import (
    GRAMMAR_FIELDS,
    ChoiceIndex,
    CompletionFields,
    Echo,
    IsTruncated,
    ModelName,
    Natural,
    Prompts,
    RequestBody,
    SamplingFields,
    StopReason,
    TopToken,
    UpTo16,
    UpTo20,
    Usage,
    documented_defaults,
)
from app.generation.request import GenerationRequest
from app.http.response_model import NOT_SENT, Array, ResponseModel

_DEFAULT_MAX_TOKENS = 16
_WHOLE_CONTEXT = 2**31 - 1
_DEFAULTS: dict[str, Any] = {"include_stop_str_in_output": False, "stream": False}
_COMPLETIONS_ONLY_FIELDS = ("prompt", "echo", "suffix", "best_of", "tools", "tool_choice", "functions", "function_call")


class StreamOptions(RequestBody):
    """What a stream reports besides its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="Send a final chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")


class OpenAIFields(SamplingFields):
    """Fields of both OpenAI endpoints. An unknown field is accepted and named in `warnings`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="A model id from GET /v1/models; optional.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or token at the end of the text."
    )
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {...}}.'
    )

    @model_validator(mode="after")
    def _one_grammar_or_format(self) -> OpenAIFields:
        if self.response_format is not None and any(getattr(self, name) is not None for name in GRAMMAR_FIELDS):
            raise ValueError(f"response_format cannot be combined with {', '.join(GRAMMAR_FIELDS)}: send one of them")
        return self

    @property
    def grammar_constraint(self) -> tuple[str, Any] | None:
        """The grammar constraint: the name of the field, and its value."""
        return super().grammar_constraint if self.response_format is None else ("response_format", self.response_format)

    @property
    def warnings(self) -> list[str]:
        """Fields that were sent and have no effect."""
        names = list(self.model_extra or {})
        if options := self.stream_options:
            names += [f"stream_options.{name}" for name in options.model_extra or {}]
        warnings = [f"unknown field {name[:60]!r} has no effect" for name in names[:20]]
        return [*warnings, *(["stream_options has no effect without stream"] if options and not self.stream else [])]


class CompletionsRequest(OpenAIFields, CompletionFields):
    """Body of POST /v1/completions. An unknown field is accepted and named in `warnings`."""

    model_config = ConfigDict(
        json_schema_extra=documented_defaults(**_DEFAULTS, prompt="", max_tokens=_DEFAULT_MAX_TOKENS)
    )

    prompt: Prompts | None = Field(
        None, description="Text, token ids, or a list of either. Absent means empty.", examples=["Once upon a"]
    )
    best_of: UpTo16 | None = Field(
        None, description="Generate this many, return the n with the best mean log-probability; not in streams."
    )

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionsRequest:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise ValueError(f"best_of ({best_of}) must be at least n ({n})")
        if best_of is not None and best_of > n and self.stream:
            raise ValueError("best_of above n cannot be streamed: set stream to false")
        return self

    @property
    def generation_request(self) -> GenerationRequest:
        """The generation request; missing values are neutral, regardless of the weights' generation_config.json."""
        return self.to_generation_request(
            "" if self.prompt is None else self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            best_of=self.best_of,
            include_stop=bool(self.include_stop_str_in_output),
            use_model_defaults=False,
            is_streamed=bool(self.stream),
        )


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"] = Field(description="Only text is supported.")
    text: str = Field(description="The text of this part.")


_TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


class Message(RequestBody):
    """One message of a chat; other fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(max_length=64, description="system, user, assistant, or another role of the chat template.")
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        None, description="The message's text."
    )
    name: str | None = Field(None, max_length=64, description="Name of the author, for chat templates that use it.")

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: the content as one string."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {**(self.model_extra or {}), "role": self.role, "content": content, "name": self.name}


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions. An unknown field is accepted and named in `warnings`."""

    model_config = ConfigDict(json_schema_extra=documented_defaults(**_DEFAULTS, logprobs=False))

    messages: list[Message] = Field(
        min_length=1,
        max_length=1024,
        fail_fast=True,
        description="The conversation so far, oldest message first.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    max_completion_tokens: Natural | None = Field(
        None, description="Alias of max_tokens; if absent, the context length is the limit."
    )
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: UpTo20 | None = Field(
        None, description="Number of alternatives to report at each position; requires logprobs."
    )

    @model_validator(mode="after")
    def _check_fields(self) -> ChatRequest:
        for name in _COMPLETIONS_ONLY_FIELDS:
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not supported for chats: leave it out, or use POST /v1/completions")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are aliases: send one of them")
        return self

    def generation_request_for(self, prompt: str) -> GenerationRequest:
        """The generation request for the prompt that the chat template rendered."""
        limit = _WHOLE_CONTEXT if self.max_completion_tokens is None else self.max_completion_tokens
        return self.to_generation_request(
            prompt,
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            include_stop=bool(self.include_stop_str_in_output),
            use_model_defaults=False,
            is_streamed=bool(self.stream),
        )


class LegacyLogprobs(ResponseModel):
    """Log-probabilities in lists of one length: an entry for each token."""

    tokens: Annotated[Array[str], "Text of each token; if it has none, its bytes or its name."]
    token_logprobs: Annotated[Array[float | None], "Log-probability of each token; null for the first one of a prompt."]
    top_logprobs: Annotated[
        Array[dict[str, float | None] | None],
        "The most likely tokens at this position, by text; always includes the token itself.",
    ]
    text_offset: Annotated[Array[int], "Start of each token in the text, in code points."]
    top_tokens: Annotated[
        Array[list[TopToken]], "The most likely tokens as a list, in which two may have the same text."
    ]


class ChatTop(ResponseModel):
    """A candidate token at one position of the text."""

    token: Annotated[str, "Text of the token; if it has none, its bytes or its name."]
    logprob: Annotated[float, "Log-probability from the raw logits."]
    bytes: Annotated[list[int], "Exact bytes of the token."]


class ChatToken(ChatTop):
    """A token of the text."""

    top_logprobs: Annotated[list[ChatTop], "The most likely tokens at this position."]


class ChatLogprobs(ResponseModel):
    """Log-probabilities, if requested."""

    content: Annotated[Array[ChatToken], "One entry for each token."]


class ChatMessage(ResponseModel):
    """The model's message; in a stream, its new part."""

    role: Annotated[str | None, "assistant; in a stream only in a choice's first chunk."] = None
    content: Annotated[str | None, "The text."] = None


class CompletionsChoice(ResponseModel):
    """One continuation, or in a stream a part of one."""

    index: ChoiceIndex
    text: Annotated[str, "The generated text; in a stream, the new part."]
    logprobs: Annotated[LegacyLogprobs | None, "Log-probabilities, if requested."]
    finish_reason: Annotated[str | None, "stop, length, timeout or cancelled; in a stream only at the end."]
    stop_reason: StopReason


class ChatChoice(ResponseModel):
    """One choice."""

    index: Annotated[int, "Index of the choice."]
    message: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, "Log-probabilities, if requested."]
    finish_reason: Annotated[str | None, "stop, length, timeout or cancelled."]
    stop_reason: StopReason


class ChatChunkChoice(ResponseModel):
    """A part of one choice."""

    index: Annotated[int, "Index of the choice."]
    delta: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, "Log-probabilities of this part, if requested."]
    finish_reason: Annotated[str | None, "stop, length, timeout or cancelled; only at the end of the choice."]
    stop_reason: StopReason


class _Head(ResponseModel):
    """Leading fields of every response and chunk."""

    id: str
    object: str
    created: Annotated[int, "When the request arrived, as a Unix time."]
    model: ModelName
    system_fingerprint: Annotated[str, "Prefix of the SHA-256 of the weights, and the numerics."]
    seed: Annotated[int, "Seed of the random numbers."]
    choices: list[Any]


class OpenAIResponse(_Head):
    """A whole response, or the chunk of a stream that reports the usage."""

    usage: Annotated[Usage | None, "In a stream, only if stream_options requests it."] = None
    user: Echo = None
    request_id: Echo = None
    truncated: IsTruncated = None
    warnings: Annotated[list[str] | None, "Fields that were sent and have no effect."] = None


class OpenAIChunk(_Head):
    """A chunk of a stream, with one choice."""

    user: Echo = None
    request_id: Echo = None
    truncated: IsTruncated = None
    warnings: Annotated[list[str] | None, "Fields that were sent and have no effect."] = None
    usage: Annotated[Usage | None, "Only if stream_options requests it."] = NOT_SENT


class CompletionsResponse(OpenAIResponse):
    """Response of POST /v1/completions, and every chunk of its stream."""

    id: Annotated[str, "Starts with cmpl-; the same in all chunks."]
    object: Annotated[Literal["text_completion"], "Type of the object."]
    choices: Annotated[list[CompletionsChoice], "Empty in the chunk that reports the usage."]


class ChatResponse(OpenAIResponse):
    """Response of POST /v1/chat/completions."""

    id: Annotated[str, "Starts with chatcmpl-; the same in all chunks."]
    object: Annotated[Literal["chat.completion"], "Type of the object."]
    choices: Annotated[list[ChatChoice], "The choices."]
    usage: Usage


class ChatChunk(OpenAIChunk):
    """Chunk of the stream of POST /v1/chat/completions."""

    id: Annotated[str, "Starts with chatcmpl-; the same in all chunks."]
    object: Annotated[Literal["chat.completion.chunk"], "Type of the object."]
    choices: Annotated[list[ChatChunkChoice], "Empty in the chunk that reports the usage."]
