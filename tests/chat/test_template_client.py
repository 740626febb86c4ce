"""Chat templates: the text equals transformers', and a runaway template harms no other request."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.__main__ import main
from app.access.worker_turns import WorkAccount
from app.chat.template_client import ChatTemplate, RenderJob, TemplateInputs
from app.chat.template_worker import render
from app.common.errors import InvalidRequest
from model.checkpoint.chat_template_file import ChatTemplateFile, read_chat_template
from model.files import CheckpointError
from tests.support.completion_client import fetch_completion
from tests.support.lazy_modules import transformers
from tests.support.model.sample_tokenizers import llama2, save
from tests.support.model.tiny_models import tiny_weights
from tests.support.services import Services

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% set ns = namespace(system='', count=0) %}
{% if messages[0].role == 'system' %}
{% set ns.system = messages[0].content %}
{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must take turns') }}
    {% endif %}
    {% if message.role == 'user' %}
[INST] {{ ns.system }}{{ message.content }} [/INST]
    {% else %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if ns.count > 4 %}{% break %}{% endif %}
{% endfor %}"""
EVERYTHING = """{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ dict(a=1) }}{{ tools is none }}
{{- strftime_now('%Y') }}{% if messages[-1].name is defined %}{{ messages[-1].name }}{% endif %}{{ pad_token }}
{%- macro shout(text) %}{{ text | upper }}{% endmacro %}{{ shout(messages[0].content[:3]) }}{{ unk_token }}"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " a <fox> & 'caf\u00e9' \U0001f98a "}],
    [{"role": "system", "content": "be brief "}, {"role": "user", "content": "why?\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": None}] * 3,
]


def _file(source: str) -> ChatTemplateFile:
    return ChatTemplateFile(path=Path("chat_template.jinja"), source=source, names={})


def _rendered(template: ChatTemplate | None, chat: list[dict[str, Any]], **options: Any) -> str:
    async def run() -> str:
        assert template
        try:
            return await template.render(TemplateInputs(messages=chat, **options), WorkAccount())
        finally:
            await template.close()

    return asyncio.run(run())


@pytest.mark.parametrize("source", [CHATML, LLAMA, EVERYTHING], ids=["chatml", "llama", "everything"])
def test_rendered_chat_equals_that_of_transformers(tmp_path: Path, source: str) -> None:
    save(llama2(), tmp_path, chat_template=source, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    file = read_chat_template(tmp_path)
    assert file
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for chat in CHATS:
        for prompt in (True, False):
            expected = oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            given = [{name: value for name, value in message.items() if value is not None} for message in chat]
            variables = {**file.names, "messages": given, "tools": None, "add_generation_prompt": prompt}
            assert render(RenderJob(source=source, variables=variables)).text == expected
    assert _rendered(ChatTemplate.load(tmp_path), CHATS[2]) == oracle.apply_chat_template(
        CHATS[2], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"eos_token": "x"}}, None),
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "tool_use"}, {"name": "default", "template": "b"}]}},
            "b",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "c"}]}}, None),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [5, {"name": 7, "template": []}, {"name": "default", "template": "b"}]
                }
            },
            "b",
        ),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": "d"}}, "d"),
        ({"chat_template.json": {"chat_template": "d"}, "chat_template.jinja": "e\u2581"}, "e\u2581"),
    ],
)
def test_template_is_found_wherever_transformers_stores_it(
    tmp_path: Path, files: dict[str, Any], source: str | None
) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = ChatTemplate.load(tmp_path)
    assert (found.source if found else None) == source


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat_template.jinja", b"\xff", "UTF-8"),
        ("chat_template.jinja", b"a" * (1 << 20) + b"b", "more than"),
        ("chat_template.json", b"[]", "JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "got `int`"),
        ("tokenizer_config.json", b'{"chat_template": "a\\ud800"}', "is not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 7}]}', "default is no text"),
    ],
)
def test_unreadable_template_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        ChatTemplate.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_service_does_not_start_with_an_unreadable_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert main(["serve", "--weights", str(tmp_path)]) == 2
    assert "chat_template.jinja: is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('only users speak') }}", "refuses these messages: only users speak"),
        ("{% if %}", "cannot be read (line 1): Expected an expression, got 'end of statement block'"),
        ("a\n{% for x in y %}", "cannot be read (line 2): Unexpected end of template."),
        ("{{ a | nothing }}", "cannot be read (line 1): No filter named 'nothing'."),
        ("{{ messages[0].content.nothing.at_all }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "fails with these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "refuses these messages"),
        ("{{ namespace(__init__=1) }}", "refuses these messages"),
        ("{% include '/etc/passwd' %}", "fails with these messages"),
        (r"a{{ '\ud83d' }}", "writes half a character (U+D83D)"),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
            "characters",
        ),
    ],
)
def test_template_errors_are_reported(source: str, reason: str) -> None:
    response = render(RenderJob(source=source, variables={"messages": [{"role": "user", "content": "a"}]}))
    assert response.text == ""
    assert reason in response.error


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "more than 0.5 seconds"),
        ("{{ 3 ** 1000000000 }}", "more than 0.5 seconds"),
        ("{{ ('a' * 2000000000) | length }}", "too much memory"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "memory"),
        (r"{{ '\udc00' }}", r"chat template writes half a character \(U\+DC00\)"),
        (r"{{ raise_exception('\udc00') }}", "refuses these messages: \ufffd"),
        ("{{ messages[0].content | upper }}", None),
    ],
)
def test_runaway_template_ends_with_its_process(source: str, reason: str | None) -> None:
    template = ChatTemplate(_file(source), seconds=0.5 if "seconds" in str(reason) else 20)
    chat = [{"role": "user", "content": "a fox"}]
    if reason is None:
        assert _rendered(template, chat) == "A FOX"
        return
    with pytest.raises(InvalidRequest, match=reason) as caught:
        _rendered(template, chat)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (LLAMA, ""),
        ("{{ raise_exception('refuses the empty chat') }}", ""),
        (
            "a\n{% for x in messages %}\n{% endfor",
            "chat_template.jinja: the chat template cannot be read \\(line 3\\): .*",
        ),
        ("{{ 3 ** 1000000000 }}", "chat_template.jinja: the chat template takes more than 0.5 seconds"),
        (
            "{% for a in b %}" * 30 + "{% endfor %}" * 30,
            "chat_template.jinja: the chat template cannot be compiled: .*",
        ),
    ],
)
def test_template_that_does_not_compile_is_a_problem_before_the_first_chat(source: str, problem: str) -> None:
    template = ChatTemplate(_file(source), seconds=0.5 if "seconds" in problem else 60)
    assert re.fullmatch(problem, asyncio.run(template.problem()))


def test_check_that_cannot_start_a_process_blames_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("app.chat.template_client.Sandbox", no_process)
    assert asyncio.run(ChatTemplate(_file("{% endfor")).problem()) == ""


@pytest.mark.slow
def test_broken_template_is_an_error_of_check_and_a_warning_of_the_service(
    tmp_path: Path, serve: Services, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tiny_weights(tmp_path / "weights")
    (weights / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }}\n{% endfor")
    assert main(["check", str(weights)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(
        f"error: {weights / 'chat_template.jinja'}: the chat template cannot be read (line 3): "
    )

    server = serve(weights=weights)
    assert server.has_logged("chat_template.jinja: the chat template cannot be read (line 3): ", "completions work")
    assert fetch_completion(server.url, prompt="a", max_tokens=2)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
    assert response.status_code == 400 and "(line 3)" in response.json()["error"]["message"]
