"""Templates in the manner of the model families, rendered as transformers' apply_chat_template renders them."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest

from app.access.worker_turns import WorkAccount
from app.chat.template_client import ChatTemplate, RenderJob, TemplateInputs
from app.chat.template_worker import render
from app.common.errors import InvalidRequest
from model.checkpoint.chat_template_file import ChatTemplateFile, read_chat_template
from tests.support.chat_templates import CHAT_TEMPLATES
from tests.support.lazy_modules import transformers
from tests.support.model.sample_tokenizers import llama2, save

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
USER, ANSWER = {"role": "user", "content": " Why is a fox red? \U0001f98a "}, {"role": "assistant", "content": "a b\n"}
SYSTEM = {"role": "system", "content": "Answer in one word /no_think "}
CALLS = [
    {"type": "function", "id": "abcdef123", "function": {"name": "weather", "arguments": {"city": "R\u00f6m", "n": 2}}}
]
CALL, RESULT = {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": '{"t": 21.5}'}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, {**USER, "name": "Ada"}],
    [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}, USER],
    [USER, CALL, RESULT, ANSWER],
    [SYSTEM, USER, CALL, RESULT, RESULT],
    [USER, {**ANSWER, "reasoning_content": "let me see"}],
    [USER, {**ANSWER, "reasoning": "old name"}, USER, {**ANSWER, "thinking": "older", "reasoning": "unread"}],
    [USER, USER],
    [ANSWER, USER],
    [{"role": "critic", "content": "'quoted' <b> & \u05e9\u05dc\u05d5\u05dd"}],
]
CITY = {"type": "string", "enum": ["R\u00f6m", "<Oslo>"], "description": "Where"}
PROPERTIES = {
    "city": CITY,
    "days": {"type": "array", "items": {"type": "integer"}},
    "at": {"type": "number", "default": 1.0},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": 'It\'s "weather"', "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
DOCUMENTS = [{"title": "Foxes", "text": "They are r\u00e9d."}, {"title": "Owls", "text": "Night\nbirds", "rank": 2}]
VARIABLES = {"enable_thinking": False, "controls": {"citations": True}, "date_string": "1 Jan 2030"}


@cache
def _oracle() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=llama2(), **NAMES)


def _template(source: str, tools_source: str | None = None) -> ChatTemplate:
    file = ChatTemplateFile(path=Path("chat_template.jinja"), source=source, tools_source=tools_source, names=NAMES)
    return ChatTemplate(file)


class _Refused(Exception):
    """The error of a template."""


def _ours(source: str, inputs: TemplateInputs) -> str:
    """Renders in this process, rather than in a worker for each template. Raises _Refused."""
    result = render(msgspec.json.decode(_template(source)._job(inputs), type=RenderJob))
    if result.error:
        assert "\n" not in result.error
        raise _Refused(result.error)
    return result.text


def _uses(source: str) -> frozenset[str]:
    extensions = ["jinja2.ext.loopcontrols"]
    content = source.replace("endgeneration", "endwith").replace("generation", "with")
    return frozenset(jinja2.meta.find_undeclared_variables(jinja2.Environment(extensions=extensions).parse(content)))


def _expect_same(source: str, chat: list[dict[str, Any]], **options: Any) -> bool:
    """Compares the texts, or that both refuse the messages for the same reason; returns whether there is a text."""
    variables = {name: value for name, value in options.items() if name in VARIABLES}
    inputs = TemplateInputs(
        messages=chat,
        tools=options.get("tools"),
        documents=options.get("documents"),
        variables=variables,
        adds_generation_prompt=options.get("add_generation_prompt", False),
        continues_final_message=options.get("continue_final_message", False),
    )
    try:
        expected = _oracle().apply_chat_template(chat, chat_template=source, tokenize=False, **options)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        reason = str(error) if isinstance(error, jinja2.TemplateError) else ""
        with pytest.raises(_Refused) as caught:
            _ours(source, inputs)
        assert reason in str(caught.value)
        return False
    assert _ours(source, inputs) == expected
    return True


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_text_is_that_of_transformers(name: str) -> None:
    source = CHAT_TEMPLATES[name]
    given = {"tools": TOOLS, "documents": DOCUMENTS, **VARIABLES}
    used = {key: value for key, value in given.items() if key in _uses(source)}
    rendered = 0
    for chat in CHATS:
        for prompt in (True, False):
            rendered += _expect_same(source, chat, add_generation_prompt=prompt)
            rendered += _expect_same(source, chat, add_generation_prompt=prompt, **used)
            for key, value in used.items():
                rendered += _expect_same(source, chat, add_generation_prompt=prompt, **{key: value})
    assert rendered > len(CHATS) / 2


WRITES_TWICE = {"filters", "strings"}


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES.keys() - WRITES_TWICE))
def test_continued_text_is_that_of_transformers(name: str) -> None:
    endings = [
        "Once upon",
        "Once upon ",
        " \n a\n\n",
        "Once Once",
        "</turn>",
        "\u00e9\U0001f98a",
        "a<think>x</think>b ",
    ]
    for content in endings:
        chat = [USER, {"role": "assistant", "content": content}]
        _expect_same(CHAT_TEMPLATES[name], chat, continue_final_message=True)


def test_some_templates_continue_and_some_cannot() -> None:
    chat = [USER, ANSWER]
    assert _expect_same(CHAT_TEMPLATES["chatml"], chat, continue_final_message=True)
    assert _expect_same(CHAT_TEMPLATES["opt"], chat, continue_final_message=True)
    for name in WRITES_TWICE:
        inputs = TemplateInputs(messages=[{"role": "assistant", "content": "Once"}], continues_final_message=True)
        with pytest.raises(_Refused, match="more than once"):
            _ours(CHAT_TEMPLATES[name], inputs)
    assert not _expect_same("{{ messages[-1].content | upper }}", chat, continue_final_message=True)
    assert not _expect_same("{{ messages[-1].content.split('b')[-1] }}", chat, continue_final_message=True)


def test_there_are_forty_templates_that_use_every_feature() -> None:
    assert len(CHAT_TEMPLATES) >= 40
    everything = "".join(CHAT_TEMPLATES.values())
    for feature in (
        *("raise_exception", "strftime_now", "tojson(indent", "ensure_ascii", "separators", "sort_keys", "{% break %}"),
        *(
            "{% continue %}",
            "{% generation %}",
            "tools",
            "documents",
            "namespace(",
            "macro",
            "{%+",
            "{%-",
            "dict.fromkeys",
        ),
    ):
        assert feature in everything, feature


NAMED = [{"name": "default", "template": "d{{ tools }}"}, {"name": "tool_use", "template": "t{{ tools | tojson }}"}]


@pytest.mark.parametrize(
    ("config", "jinja"),
    [
        (NAMED, None),
        ([*NAMED, {"name": "rag", "template": "r"}, {"name": "default", "template": "again {{ tools }}"}], None),
        ({"default": "d{{ tools }}", "tool_use": "t{{ tools }}"}, None),
        ({"default": "d{{ tools }}"}, None),
        (NAMED, "file {{ tools }}"),
        ("text {{ tools }}", None),
        ("text", "file {{ tools }}"),
    ],
)
def test_template_of_a_request_is_the_one_that_transformers_chooses(
    config: Any, jinja: str | None, tmp_path: Path
) -> None:
    save(llama2(), tmp_path, chat_template=config, **NAMES)
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    async def ours(tools: list[dict[str, Any]] | None) -> str:
        template = ChatTemplate.load(tmp_path)
        assert template and await template.problem() == ""
        try:
            return await template.render(TemplateInputs(messages=[USER], tools=tools), WorkAccount())
        finally:
            await template.close()

    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template([USER], tools=tools, tokenize=False, add_generation_prompt=True)
        assert asyncio.run(ours(tools)) == expected


def test_both_templates_are_compiled_before_the_first_chat(tmp_path: Path) -> None:
    broken = [NAMED[0], {"name": "tool_use", "template": "{% for"}]
    save(llama2(), tmp_path, chat_template=broken)
    template = ChatTemplate.load(tmp_path)
    assert template and "cannot be read (line 1)" in asyncio.run(template.problem())


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "GemmaTokenizer"},
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": None},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"},
        {"bos_token": "<s>"},
    ],
)
def test_names_of_a_class_reach_the_template(config: dict[str, Any], tmp_path: Path) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ mask_token is defined }}"
    save(llama2(), tmp_path, chat_template=source, **config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    file, oracle = read_chat_template(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert file
    rendered = render(RenderJob(source=file.source, variables={**file.names, "messages": [USER]})).text
    assert rendered == oracle.apply_chat_template([USER], tokenize=False)


def test_error_is_one_sentence_that_names_the_reason() -> None:
    async def run() -> str:
        template = _template(CHAT_TEMPLATES["exceptions"])
        try:
            return await template.render(TemplateInputs(messages=[{"role": "critic\n", "content": "a"}]), WorkAccount())
        finally:
            await template.close()

    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(run())
    assert str(caught.value).startswith("the model's chat template refuses these messages: Unexpected role: critic")
    assert "\n" not in str(caught.value)
