"""Renders chat messages to a prompt with the weights' chat template.

Jinja runs in a worker process (app/chat/template_worker.py), which gets a RenderJob in JSON, whose
numbers may have any length, and returns a RenderResult.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from app.access.worker_turns import WorkAccount
from app.common.errors import EngineFailed, InvalidRequest
from app.sandbox.sandbox import Sandbox, SandboxError, SandboxPool
from model.checkpoint.chat_template_file import ChatTemplateFile, read_chat_template
from model.files import one_line
from model.weights_version import Directory

_WORKER = "app.chat.template_worker"
_SECONDS = 5.0
_MAX_ERROR_BYTES = 1 << 20


class RenderJob(Struct):
    """A request to the worker: the template, and the variables to render it with."""

    source: str
    variables: dict[str, Any] | None
    """None compiles the template and renders nothing."""
    required: tuple[str, ...] = ()
    """Variables that the template must use: without a place for them, they would be ignored."""
    mark: str = ""
    """If given, the prompt ends where this text stands, which the last message's content ends with.

    The space at its end shows whether the template trims the content.
    """


class RenderResult(Struct):
    """The worker's response: the rendered text, or an error."""

    text: str = ""
    error: str = ""
    param: str = "messages"
    """The field of the request that caused the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInputs:
    """What a chat request gives the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template's own, such as enable_thinking."""
    adds_generation_prompt: bool = True
    continues_final_message: bool = False


_decoder = msgspec.msgpack.Decoder(RenderResult)


class ChatTemplate:
    """Runs the template in sandboxed processes, which start with the first chat. The owner must call close()."""

    def __init__(self, file: ChatTemplateFile, *, seconds: float = _SECONDS) -> None:
        self.path = file.path
        self._tools_source = file.source if file.tools_source is None else file.tools_source
        self.source = file.source
        """The Jinja source, for clients that render prompts themselves."""
        self._names, self._seconds = file.names, seconds
        self._pool = SandboxPool(_WORKER, seconds=seconds)

    @classmethod
    def load(cls, weights: Directory) -> ChatTemplate | None:
        """Loads the template; None if the weights have none. Raises CheckpointError for an unreadable one."""
        file = read_chat_template(weights)
        return None if file is None else cls(file)

    async def problem(self) -> str:
        """Why no chat can be rendered, with the file and the line; empty if the template compiles.

        Compiles it in a process of its own, which ends afterwards. Where none can start, the result is empty, too: that
        is no problem of the template, and the first chat reports it.
        """
        sources = dict.fromkeys((self.source, self._tools_source))
        jobs = [msgspec.json.encode(RenderJob(source=source, variables=None)) for source in sources]
        try:
            with contextlib.closing(Sandbox(_WORKER, str(self._seconds))) as sandbox:
                compile_ = partial(sandbox.call, seconds=self._seconds, max_bytes=_MAX_ERROR_BYTES)
                results = [_decoder.decode(await asyncio.to_thread(compile_, job)) for job in jobs]
            error = next((result.error for result in results if result.error), "")
        except SandboxError as failure:
            error = str(failure)
        except (EngineFailed, OSError):
            error = ""
        return one_line(f"{self.path}: the chat template {error[:200]}") if error else ""

    async def render(self, inputs: TemplateInputs, account: WorkAccount) -> str:
        """Renders the prompt. Raises InvalidRequest, and Busy if too many chats are waiting."""
        try:
            response = await self._pool.call(self._job(inputs), account)
        except SandboxError as error:
            raise InvalidRequest(f"the model's chat template {error} for these messages", "messages") from None
        rendered = _decoder.decode(response)
        if rendered.error:
            raise InvalidRequest(f"the model's chat template {one_line(rendered.error[:200])}", rendered.param)
        return rendered.text

    def _job(self, inputs: TemplateInputs) -> bytes:
        if taken := sorted(set(inputs.variables) & set(self._names)):
            name = "chat_template_kwargs"
            raise InvalidRequest(f"{name} cannot have {taken[0]}: the tokenizer's configuration has it", name)
        # As in transformers: templates test whether a field is defined, so drop nulls.
        messages = [
            {name: value for name, value in message.items() if value is not None} for message in inputs.messages
        ]
        mark = f"{secrets.token_hex(16)} " if inputs.continues_final_message else ""
        if mark:
            messages[-1]["content"] += mark
        variables = {
            **self._names,
            **inputs.variables,
            "messages": messages,
            "tools": inputs.tools,
            "documents": inputs.documents,
            "add_generation_prompt": inputs.adds_generation_prompt,
        }
        own = {name: value for name, value in inputs.variables.items() if value is not False}
        required = (*(name for name in ("tools", "documents") if variables[name]), *own)
        source = self._tools_source if inputs.tools else self.source
        job = RenderJob(source=source, variables=variables, required=required, mark=mark)
        try:
            return msgspec.json.encode(job)
        except (ValueError, RecursionError):
            raise InvalidRequest("messages: a number is too long, or a list is nested too deeply", "messages") from None

    async def close(self) -> None:
        """Stops the processes; idempotent."""
        self._pool.close()
