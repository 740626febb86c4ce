"""Values of the request fields of the OpenAI endpoints, and the table of docs/api.md as the code has it."""

from __future__ import annotations

from typing import Any

from app.api.openai.request_fields import CHAT, COMPLETIONS, OTHER_FIELDS, OtherField
from app.api.openai.schemas import ChatRequest, CompletionsRequest

PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
MODELS: dict[str, type[CompletionsRequest | ChatRequest]] = {COMPLETIONS: CompletionsRequest, CHAT: ChatRequest}
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 4},
}
TEMPLATE = """{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{{ tools | tojson if tools }}{{ documents | tojson if documents }}
{{- enable_thinking }}{{ reasoning_effort }}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""A chat template with a place for every field of a chat."""
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
_SAMPLES: dict[str, Any] = {
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "logit_bias": {"50": -5},
    "seed": -7,
    "n": 2,
    "stop": ["x"],
    "stop_token_ids": [50],
    "ignore_eos": True,
    "speculate": False,
    "regex": "[a-z]+",
    "json_schema": {"type": "integer"},
    "grammar": 'start: "a"',
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "integer"},
    "guided_regex": "[a-z]+",
    "guided_choice": ["a", "b"],
    "structured_outputs": {"choice": ["a", "b"]},
    "deadline_ms": 50_000,
    "truncate_prompt_tokens": 1,
    "include_stop_str_in_output": True,
    "stream": True,
}
HONORED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        **_SAMPLES,
        "prompt": "Twice",
        "best_of": 2,
        "logprobs": 2,
        "echo": True,
        "suffix": "the end",
        "vary_equal_prompts": False,
        "return_token_ids": True,
    },
    CHAT: {
        **_SAMPLES,
        "messages": [{"role": "user", "content": "Twice"}],
        "max_completion_tokens": 4,
        "logprobs": True,
        "tools": [_TOOL],
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
"""Values that change the generation, by endpoint."""
ABOUT_THE_RESPONSE = {"model", "user", "request_id", "stream_options"}
"""Honored fields that change the response and not its text."""
WITH_OTHERS = {COMPLETIONS: {"resume"}, CHAT: {"top_logprobs", "tool_choice", "parallel_tool_calls"}}
"""Honored fields that say something about another field, or need one, by endpoint."""


def described(field: OtherField) -> str:
    """A row of the table in docs/api.md."""
    names = ", ".join(f"`{name}`" for name in field.names)
    where = "both" if len(field.endpoints) == 2 else field.endpoints[0]
    values = {"True": "true", "False": "false"}
    neutral = ", ".join(f"`{values.get(str(value), value)}`".replace("'", '"') for value in field.neutral)
    return f"| {names} | {where} | {neutral} | {field.instead} |"


def refused_rows() -> list[str]:
    """The rows of the table of refused fields."""
    return [described(field) for field in OTHER_FIELDS if field.is_refused]


def names_without_effect() -> list[str]:
    """The fields without effect, in the order of the table."""
    return [name for field in OTHER_FIELDS if not field.is_refused for name in field.names]
