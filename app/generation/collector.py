"""Collects the whole output of a completion, for responses that are not streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from app.engine_client.open_sequences import Writes
from app.generation.completion import Completion
from app.generation.request import Delta, Finished, TokenTable


@dataclass(slots=True)
class CollectedOutput:
    """The collected output of one choice."""

    finished: Finished
    text: str
    tokens: TokenTable = field(default_factory=TokenTable)


async def collect(completion: Completion, on_progress: Callable[[], None] = lambda: None) -> list[CollectedOutput]:
    """The output of all choices. Raises EngineError.

    on_progress: called whenever events have arrived.
    """
    text_parts: list[list[str]] = [[] for _ in completion.choices]
    tokens: dict[int, TokenTable] = {}
    finished: dict[int, Finished] = {}
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(_writes: Writes) -> bool:
        try:
            on_progress()
            while completion.events:
                event = completion.events.popleft()
                if isinstance(event, Delta):
                    text_parts[event.index].append(event.text)
                    if event.tokens:
                        tokens.setdefault(event.index, TokenTable()).extend(event.tokens)
                elif isinstance(event, Finished):
                    finished[event.index] = event
            if completion.failure:
                raise completion.failure
        except Exception as error:
            if not ended.done():
                ended.set_exception(error)
        if completion.is_done and not ended.done():
            ended.set_result(None)
        return True

    completion.read(take)
    take([])
    try:
        await ended
    finally:
        completion.read(None)
    none = TokenTable()
    return [CollectedOutput(finished[i], "".join(text), tokens.get(i, none)) for i, text in enumerate(text_parts)]
