"""Schemas of requests and responses of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from app.api.openai.request_fields import CHAT, COMPLETIONS, unknown_fields
from app.api.resume_fields import ResumeChunks, resumed
from app.api.schemas import (
    ChoiceIndex,
    CompletionFields,
    Echo,
    GeneratedIds,
    IsTruncated,
    ModelName,
    Natural,
    Prompts,
    RequestBody,
    SamplingFields,
    StopReason,
    TopToken,
    UpTo20,
    UpTo64,
    Usage,
    documented_defaults,
)
from app.chat.template_client import TemplateInputs
from app.generation.receipt import GRAMMAR_FIELDS
from app.generation.request import GenerationRequest
from app.http.json_stream import Array
from app.http.response_model import NOT_SENT, ResponseModel

_DEFAULT_MAX_TOKENS = 16
_WHOLE_CONTEXT = 2**31 - 1
_DEFAULTS: dict[str, Any] = {"include_stop_str_in_output": False, "stream": False}
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "structured_outputs")
_GRAMMAR_FIELDS = (*GRAMMAR_FIELDS, "response_format", *_GUIDED_FIELDS)
_ANY_TEXT = {"type": "text"}
"""A response_format that constrains nothing."""
_INSTEAD_OF = {
    "": "send json, regex, choice or json_object, or the field grammar in Lark's notation",
    "disable_any_whitespace": 'add "x-guidance": {"whitespace_flexible": false} to the schema',
    "disable_additional_properties": 'add "additionalProperties": false to the schema',
    "whitespace_pattern": "add x-guidance.whitespace_pattern to the schema",
}
"""What to send in place of a field of structured_outputs; empty for all others."""
_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$]")
_Choices = Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]


class StreamOptions(RequestBody):
    """What a stream reports besides its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="Send a final chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")


class StructuredOutputs(RequestBody):
    """vLLM's constraint on the text: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json", description="As json_schema.")
    regex: str | None = Field(None, description="As regex.")
    choice: _Choices | None = Field(None, description="The text is one of these.")
    json_object: bool | None = Field(None, description="The text is a JSON object.")

    @property
    def constraints(self) -> list[tuple[str, Any]]:
        """The constraints, in the service's own fields."""
        return _constraints(self.json_, self.regex, self.choice, is_json_object=bool(self.json_object))


def _constraints(
    schema: Any, regex: str | None, choices: list[str] | None, *, is_json_object: bool = False
) -> list[tuple[str, Any]]:
    given = {
        "json_schema": schema,
        "regex": regex,
        "response_format": {"type": "json_object"} if is_json_object else None,
    }
    found = [(name, value) for name, value in given.items() if value is not None]
    if choices is not None:
        found.append(("regex", "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", choice) for choice in choices)))
    return found


class OpenAIFields(SamplingFields):
    """Fields of both OpenAI endpoints. request_fields.py says what other servers' fields do."""

    model_config = ConfigDict(extra="allow")
    endpoint: ClassVar[str]

    model: str | None = Field(None, description="A model id from GET /v1/models; optional.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or token at the end of the text."
    )
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {...}}.'
    )
    guided_json: dict[str, Any] | bool | str | None = Field(None, description="vLLM's name of json_schema.")
    guided_regex: str | None = Field(None, description="vLLM's name of regex.")
    guided_choice: _Choices | None = Field(None, description="The text is one of these.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description='vLLM\'s constraint: {"json": ...}, {"regex": ...}, {"choice": [...]}, {"json_object": true}.'
    )

    @model_validator(mode="after")
    def _check_structured_outputs(self) -> OpenAIFields:
        if self.structured_outputs and self.structured_outputs.model_extra:
            for name, value in self.structured_outputs.model_extra.items():
                if value and name != "disable_fallback":
                    instead = _INSTEAD_OF.get(name, _INSTEAD_OF[""])
                    raise ValueError(f"structured_outputs.{name[:40]} is not supported: {instead}")
        return self

    @model_validator(mode="after")
    def _check_constraints(self) -> OpenAIFields:
        given = self.constraint_fields
        if self.structured_outputs and len(self.structured_outputs.constraints) != 1:
            raise ValueError("structured_outputs needs one of json, regex, choice and json_object")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: send one of them")
        return self

    @property
    def grammar_constraint(self) -> tuple[str, Any] | None:
        """The grammar constraint: the name of the field, in the service's own spelling, and its value."""
        if "response_format" in self.constraint_fields:
            return "response_format", self.response_format
        structured = self.structured_outputs.constraints if self.structured_outputs else []
        guided = [*_constraints(self.guided_json, self.guided_regex, self.guided_choice), *structured]
        return guided[0] if guided else super().grammar_constraint

    @property
    def constraint_fields(self) -> list[str]:
        """The fields that constrain the text, in the client's spelling; more than one is an error."""
        given = (name for name in _GRAMMAR_FIELDS if getattr(self, name) is not None)
        return [name for name in given if name != "response_format" or self.response_format != _ANY_TEXT]

    @property
    def warnings(self) -> list[str]:
        """Fields that were sent and that no server has."""
        names = unknown_fields(self.endpoint, self.model_extra or {})
        options = self.stream_options
        if options:
            names += [f"stream_options.{name}" for name in unknown_fields(self.endpoint, options.model_extra or {})]
        warnings = [f"unknown field {name[:60]!r} has no effect" for name in names[:20]]
        return [*warnings, *(["stream_options has no effect without stream"] if options and not self.stream else [])]


class CompletionsRequest(OpenAIFields, CompletionFields):
    """Body of POST /v1/completions."""

    endpoint = COMPLETIONS

    model_config = ConfigDict(
        json_schema_extra=documented_defaults(**_DEFAULTS, prompt="", max_tokens=_DEFAULT_MAX_TOKENS)
    )

    prompt: Prompts | None = Field(
        None, description="Text, token ids, or a list of either. Absent means empty.", examples=["Once upon a"]
    )
    best_of: UpTo64 | None = Field(
        None, description="Generate this many, return the n with the best mean log-probability; not in streams."
    )

    resume: ResumeChunks | None = Field(
        None,
        description="What arrived of a stream that broke: this one goes on from there, computed with the same weights.",
    )

    @model_validator(mode="after")
    def _check_resume(self) -> CompletionsRequest:
        if self.resume and not self.stream:
            raise ValueError("resume goes on with a stream: set stream to true, or send the request without resume")
        return self

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
        request = self.to_generation_request(
            "" if self.prompt is None else self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            best_of=self.best_of,
            include_stop=bool(self.include_stop_str_in_output),
            use_model_defaults=False,
            is_streamed=bool(self.stream),
        )
        return resumed(request, self.resume.receipt, self.resume.choices) if self.resume else request


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
    content: str | _TextParts | None = Field(None, description="The message's text.")
    name: str | None = Field(None, max_length=64, description="Name of the author, for chat templates that use it.")

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: the content as one string."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {"role": self.role, "content": content, "name": self.name, **(self.model_extra or {})}


_MAX_TOOLS = 128
_TemplateName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
_OWN_VARIABLES = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "conversation", "tokenize"),
}
"""Variables of a chat template that are fields of the request, or no variables of its own."""


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=documented_defaults(**_DEFAULTS, logprobs=False))
    endpoint = CHAT

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
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions for the chat template; the text has the model's calls, as it writes them."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto, or none, which leaves the tools out of the prompt."
    )
    parallel_tool_calls: bool | None = Field(None, description="true; false is an error if there are tools.")
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = Field(
        None, description="Documents for the chat template."
    )
    chat_template_kwargs: Annotated[dict[_TemplateName, Any], Field(max_length=32)] | None = Field(
        None, description="Variables for the chat template.", examples=[{"enable_thinking": False}]
    )
    reasoning_effort: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None, description="Variable for the chat template; none also sets enable_thinking and thinking to false."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the start of the assistant's message; true by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the text of the last message, instead of beginning a new one."
    )

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        for i, tool in enumerate(self.tools or []):
            function = tool.get("function")
            if tool.get("type", "function") != "function" or not isinstance(function, dict):
                raise ValueError(f'tools[{i}] must be {{"type": "function", "function": {{"name": ...}}}}')
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise ValueError(f"tools[{i}].function.name must be text")
        if self.tool_choice not in (None, "auto", "none"):
            if self.tool_choice not in ("required", "any") and not isinstance(self.tool_choice, dict):
                raise ValueError("tool_choice must be auto or none")
            instead = "send auto and read the call from the text, or json_schema for a text of that form"
            raise ValueError(f"tool_choice cannot force a call: {instead}")
        if self.tools and self.tool_choice != "none" and self.parallel_tool_calls is False:
            raise ValueError("parallel_tool_calls cannot be false: leave it out, and use the first call of the text")
        return self

    @model_validator(mode="after")
    def _check_template_fields(self) -> ChatRequest:
        for name in self.chat_template_kwargs or {}:
            if name in _OWN_VARIABLES:
                raise ValueError(
                    f"chat_template_kwargs cannot have {name}: send it as a field of its own, if it is one"
                )
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise ValueError("reasoning_effort is also in chat_template_kwargs: send one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message cannot be combined with add_generation_prompt: send one of them")
        if self.continue_final_message and not self.messages[-1].for_template["content"]:
            raise ValueError("continue_final_message needs a last message with text")
        return self

    @property
    def template_inputs(self) -> TemplateInputs:
        """What the chat template renders."""
        kwargs = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        if self.reasoning_effort == "none":
            kwargs = {"enable_thinking": False, "thinking": False} | kwargs
        elif self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return TemplateInputs(
            messages=[message.for_template for message in self.messages],
            tools=None if self.tool_choice == "none" else self.tools or None,
            documents=self.documents or None,
            variables=kwargs,
            adds_generation_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
            continues_final_message=bool(self.continue_final_message),
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
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
            is_chat=True,
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
    token_ids: GeneratedIds = None


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
