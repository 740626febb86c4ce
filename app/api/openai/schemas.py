"""Schemas of requests and responses of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.api.completion_fields import GUIDES, CompletionFields, Prompts, SamplingFields, integers
from app.api.openai.responder import StreamOptions
from app.api.response_schemas import TopToken, Usage
from app.generation.request import GenerationRequest

_DEFAULT_MAX_TOKENS = 16
_WHOLE_CONTEXT = 2**31 - 1
_NOT_FOR_CHATS = ("prompt", "echo", "suffix", "best_of", "tools", "tool_choice", "functions", "function_call")


class OpenAIFields(SamplingFields):
    """Fields of both OpenAI endpoints. An unknown field is accepted and named in `warnings`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="The id that GET /v1/models tells; may be left out.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop at the end of the text.")
    stream_options: StreamOptions | None = Field(None, description="For streams.")
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {...}}.'
    )

    @model_validator(mode="after")
    def _one_format(self) -> OpenAIFields:
        if self.response_format is not None and any(getattr(self, name) is not None for name in GUIDES):
            raise ValueError(f"response_format cannot be combined with {', '.join(GUIDES)}: send one of them")
        return self

    @property
    def guide(self) -> tuple[str, Any] | None:
        """The grammar constraint: the name of the field, and its value."""
        return super().guide if self.response_format is None else ("response_format", self.response_format)

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

    prompt: Prompts | None = Field(
        None, description="Text, token ids, or a list of either. Absent: start from nothing.", examples=["Once upon a"]
    )
    best_of: int | None = Field(
        None, ge=1, le=16, description="Draw so many, answer the n with the best mean log-probability; not in streams."
    )
    _best_of_integer = integers("best_of")

    @model_validator(mode="after")
    def _best_of_fits(self) -> CompletionsRequest:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise ValueError(f"best_of ({best_of}) must be at least n ({n})")
        if best_of is not None and best_of > n and self.stream:
            raise ValueError("best_of above n cannot be streamed: send stream false")
        return self

    @property
    def wish(self) -> GenerationRequest:
        """The generation request; missing values are neutral, regardless of the weights' generation_config.json."""
        return self.to_wish(
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

    type: Literal["text"] = Field(description="Text is all that this model reads.")
    text: str = Field(description="The piece.")


class Message(BaseModel):
    """One turn of a chat; what else it holds is the template's to read."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(max_length=64, description="system, user, assistant, or what else the template knows.")
    content: str | list[TextPart] | None = Field(None, description="What was said.")
    name: str | None = Field(None, max_length=64, description="Who said it, for templates that show it.")

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: the content as one string."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {**(self.model_extra or {}), "role": self.role, "content": content, "name": self.name}


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions. An unknown field is accepted and named in `warnings`."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=1024,
        description="The chat so far, the oldest first.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Another name of max_tokens; absent, the context is the limit."
    )
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="This many alternatives in each place; needs logprobs."
    )
    _chat_integers = integers("max_completion_tokens", "top_logprobs")

    @model_validator(mode="after")
    def _is_a_chat(self) -> ChatRequest:
        for name in _NOT_FOR_CHATS:
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not for chats: leave it out, or use POST /v1/completions")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are two names of one value: send one of them")
        return self

    def wish_for(self, prompt: str) -> GenerationRequest:
        """The generation request for the prompt that the chat template rendered."""
        limit = _WHOLE_CONTEXT if self.max_completion_tokens is None else self.max_completion_tokens
        return self.to_wish(
            prompt,
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            include_stop=bool(self.include_stop_str_in_output),
            use_model_defaults=False,
            is_streamed=bool(self.stream),
        )


class LegacyLogprobs(BaseModel):
    """Log-probabilities in lists of one length: an entry for each token."""

    tokens: list[str] = Field(description="Text of each token; where that is none, its bytes or its name.")
    token_logprobs: list[float | None] = Field(description="Its log-probability; null for the first of a prompt.")
    top_logprobs: list[dict[str, float | None] | None] = Field(
        description="The most likely tokens in its place, by text; the token itself is always there."
    )
    text_offset: list[int] = Field(description="Where it begins in the text, in code points.")
    top_tokens: list[list[TopToken]] = Field(description="The most likely tokens again, where no two share a name.")


class CompletionsChoice(BaseModel):
    """One continuation, or in a stream a part of one."""

    index: int = Field(description="Which one: that of the prompt, times n, and the continuation's own.")
    text: str = Field(description="What was written; in a stream, what is new.")
    logprobs: LegacyLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: str | None = Field(description="stop, length, timeout or cancelled; in a stream only at the end.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")


class CompletionsResponse(BaseModel):
    """Answer of POST /v1/completions, and every chunk of its stream."""

    id: str = Field(description="Begins with cmpl-; the same in all chunks.")
    object: Literal["text_completion"] = Field(description="What this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    system_fingerprint: str = Field(description="The beginning of the SHA-256 of the weights, and the numerics.")
    seed: int = Field(description="What the random numbers came from.")
    choices: list[CompletionsChoice] = Field(description="Empty in the chunk that tells the usage.")
    usage: Usage | None = Field(None, description="In a stream, only where stream_options ask for it.")
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut a prompt.")
    warnings: list[str] | None = Field(None, description="Fields that were sent and have no effect.")
