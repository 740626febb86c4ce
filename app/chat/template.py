"""Renders chat messages to a prompt with the weights' chat template.

Jinja runs in a worker process (app/chat/template_worker.py), which gets a RenderJob and returns a RenderResult.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from app.access.tenant_queue import WorkAccount
from app.common.errors import EngineFailed, InvalidRequest
from app.sandbox.sandbox import Sandbox, SandboxError, SandboxPool
from model.checkpoint.tensor_index import ChatTemplateFile, read_chat_template
from model.files import one_line

_WORKER = "app.chat.template_worker"
_SECONDS = 5.0
_MAX_ERROR_BYTES = 1 << 20


class RenderJob(Struct):
    """A request to the worker: the template, and the variables to render it with."""

    source: str
    variables: dict[str, Any] | None
    """None compiles the template and renders nothing."""


class RenderResult(Struct):
    """The worker's response: the rendered text, or an error."""

    text: str = ""
    error: str = ""


_decoder = msgspec.msgpack.Decoder(RenderResult)


class ChatTemplate:
    """Runs the template in sandboxed processes, which start with the first chat. The owner must call close()."""

    def __init__(self, file: ChatTemplateFile, *, seconds: float = _SECONDS) -> None:
        self.path = file.path
        self.source = file.source
        """The Jinja source, for clients that render prompts themselves."""
        self._names, self._seconds = file.names, seconds
        self._pool = SandboxPool(_WORKER, seconds=seconds)

    @classmethod
    def load(cls, weights: Path) -> ChatTemplate | None:
        """Loads the template; None if the weights have none. Raises CheckpointError for an unreadable one."""
        file = read_chat_template(weights)
        return None if file is None else cls(file)

    async def problem(self) -> str:
        """Why no chat can be rendered, with the file and the line; empty if the template compiles.

        Compiles it in a process of its own, which ends afterwards. Where none can start, the result is empty, too: that
        is no problem of the template, and the first chat reports it.
        """
        job = msgspec.msgpack.encode(RenderJob(source=self.source, variables=None))
        try:
            with contextlib.closing(Sandbox(_WORKER, str(self._seconds))) as sandbox:
                response = await asyncio.to_thread(sandbox.call, job, seconds=self._seconds, max_bytes=_MAX_ERROR_BYTES)
            error = _decoder.decode(response).error
        except SandboxError as failure:
            error = str(failure)
        except (EngineFailed, OSError):
            error = ""
        return one_line(f"{self.path}: the chat template {error[:200]}") if error else ""

    async def render(self, messages: Sequence[Mapping[str, Any]], account: WorkAccount) -> str:
        """Renders the prompt. Raises InvalidRequest, and Busy if too many chats are waiting."""
        # As in transformers: templates test whether a field is defined, so drop nulls.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        variables = {
            **self._names,
            "messages": given,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            request = msgspec.msgpack.encode(RenderJob(source=self.source, variables=variables))
            response = await self._pool.call(request, account)
        except SandboxError as error:
            raise InvalidRequest(f"the model's chat template {error} for these messages", "messages") from None
        rendered = _decoder.decode(response)
        if rendered.error:
            raise InvalidRequest(f"the model's chat template {one_line(rendered.error[:200])}", "messages")
        return rendered.text

    async def close(self) -> None:
        """Stops the processes; idempotent."""
        self._pool.close()
