"""What a chat request gives its template: arguments of tool calls, variables, and the message that is continued."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.access.worker_turns import WorkAccount
from app.api.openai.schemas import ChatRequest
from app.chat.template_client import ChatTemplate, RenderJob, TemplateInputs
from app.chat.template_worker import render
from app.common.errors import InvalidRequest
from model.checkpoint.chat_template_file import ChatTemplateFile

ARGUMENTS = """{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}
{{- k }}={{ v }};{% endfor %}{% endfor %}{{ m.function_call.arguments | tojson if m.function_call }}{% endfor %}"""
CHATML = """{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<no/>{% endif %}{% endif %}"""
USER = {"role": "user", "content": "hi"}


def _call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": arguments}}]}


def _rendered(source: str, **inputs: Any) -> str:
    file = ChatTemplateFile(path=Path("chat_template.jinja"), source=source, names={"bos_token": "<s>"})

    async def run() -> str:
        template = ChatTemplate(file)
        try:
            return await template.render(TemplateInputs(**{"messages": [USER], **inputs}), WorkAccount())
        finally:
            await template.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"city": "Rome"}', "city=Rome;"),
        ({"city": "Rome"}, "city=Rome;"),
        ('{"a": 1, "b": [true, null]}', "a=1;b=[True, None];"),
        ("", ""),
        (" \n", ""),
        (None, ""),
        ("{}", ""),
        ('{"n": 123456789012345678901234567890}', "n=123456789012345678901234567890;"),
    ],
)
def test_arguments_of_tool_calls_are_objects_for_the_template(arguments: Any, text: str) -> None:
    assert _rendered(ARGUMENTS, messages=[USER, _call(arguments)]) == text


def test_arguments_of_a_deprecated_function_call_are_an_object_too() -> None:
    message = {"role": "assistant", "content": "", "function_call": {"name": "w", "arguments": '{"a": "\\u00e9"}'}}
    assert _rendered(ARGUMENTS, messages=[message]) == '{"a": "\u00e9"}'


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (_call('{"city": '), "messages[1].tool_calls[0].function.arguments is not valid JSON"),
        (_call('{"a": NaN}'), "arguments is not valid JSON"),
        (_call("[" * 100_000), "arguments is not valid JSON"),
        (_call('["Rome"]'), "arguments must be JSON text of an object"),
        (_call("5"), "arguments must be JSON text of an object"),
        (_call(5), "arguments must be JSON text of an object"),
        ({"role": "assistant", "content": "", "tool_calls": "w()"}, "messages[1].tool_calls must be a list"),
        ({"role": "assistant", "content": "", "tool_calls": ["w()"]}, "messages[1].tool_calls[0] must be an object"),
        ({"role": "assistant", "content": "", "function_call": 5}, "messages[1].function_call must be an object"),
    ],
)
def test_arguments_that_are_no_object_are_named_with_their_place(message: dict[str, Any], reason: str) -> None:
    response = render(RenderJob(source=ARGUMENTS, variables={"messages": [USER, message]}))
    assert reason in response.error and response.param == "messages"


def test_a_number_of_any_length_in_a_message_is_text_or_an_error() -> None:
    source = "{{ messages[0].weight }}"
    assert _rendered(source, messages=[{**USER, "weight": 10**40}]) == str(10**40)
    with pytest.raises(InvalidRequest, match="a number is too long"):
        _rendered(source, messages=[{**USER, "weight": 10**5000}])


def test_variables_reach_the_template() -> None:
    assert _rendered(CHATML) == "<user>hi</user><assistant>"
    assert _rendered(CHATML, variables={"enable_thinking": False}) == "<user>hi</user><assistant><no/>"
    assert _rendered(CHATML, adds_generation_prompt=False) == "<user>hi</user>"
    source = "{{ tools | tojson }}{{ documents | tojson }}"
    assert _rendered(source, tools=[{"a": 1}], documents=[{"b": 2}]) == '[{"a": 1}][{"b": 2}]'


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ({"tools": [{"a": 1}]}, "tools"),
        ({"documents": [{"a": 1}]}, "documents"),
        ({"variables": {"mood": "good"}}, "chat_template_kwargs"),
        ({"variables": {"reasoning_effort": "low"}}, "reasoning_effort"),
        ({"variables": {"bos_token": "x"}}, "chat_template_kwargs"),
    ],
)
def test_variable_without_a_place_in_the_template_is_refused(inputs: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _rendered(CHATML, **inputs)
    assert caught.value.param == param
    assert next(iter(inputs.get("variables", inputs))) in str(caught.value)


def test_a_false_variable_without_a_place_asks_for_nothing() -> None:
    assert _rendered(CHATML, variables={"mood": False}) == _rendered(CHATML)


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "  a\n", "</assistant>", "Once upon Once upon"])
def test_the_prompt_ends_with_the_message_that_is_continued(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    rendered = _rendered(CHATML, messages=messages, adds_generation_prompt=False, continues_final_message=True)
    assert rendered == f"<user>hi</user><assistant>{content.strip()}"
    plain = _rendered(CHATML.replace(" | trim", ""), messages=messages, continues_final_message=True)
    assert plain == f"<user>hi</user><assistant>{content}"


def test_template_that_changes_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="nothing can continue it") as caught:
        _rendered("{{ messages[-1].content | upper }}", continues_final_message=True)
    assert caught.value.param == "continue_final_message"


def _request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], **fields})


TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "custom", "custom": {}}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": ["weather"]},
        {"tools": [TOOL] * 129},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "maybe"},
        {"parallel_tool_calls": False, "tools": [TOOL]},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"__class__": 1}},
        {"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}},
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": None}]},
        {"documents": ["a"]},
    ],
)
def test_invalid_template_fields_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        _request(**fields)


def test_fields_that_ask_for_nothing_give_the_template_nothing() -> None:
    plain = _request().template_inputs
    for fields in (
        {"tools": []},
        {"tool_choice": "none", "tools": [TOOL], "parallel_tool_calls": False},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"documents": []},
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": None}},
        {"add_generation_prompt": True},
        {"continue_final_message": False},
    ):
        assert _request(**fields).template_inputs == plain, fields


def test_no_reasoning_effort_turns_thinking_off() -> None:
    assert _request(reasoning_effort="none").template_inputs.variables == {"enable_thinking": False, "thinking": False}
    own = {"enable_thinking": True}
    assert _request(reasoning_effort="none", chat_template_kwargs=own).template_inputs.variables["enable_thinking"]
