"""A scheduler whose decodes have a draft, for tests of steps that sample several rows of a sequence."""

from __future__ import annotations

from collections.abc import Callable

from app.engine.scheduling.batch_plan import Chunk, Sequence
from app.engine.scheduling.scheduler import Scheduler


class DraftingScheduler(Scheduler):
    """Decodes two rows of a sequence at a time, if there is a block for the second one: a token and its guess."""

    guess: Callable[[Sequence], int]

    def _plan_decodes(self) -> list[Chunk]:
        return [self._pair(chunk) for chunk in super()._plan_decodes()]

    def _pair(self, chunk: Chunk) -> Chunk:
        sequence = chunk.sequence
        if chunk.stop >= sequence.capacity:
            sequence.ahead += 1  # as if the chunk were in flight
            if has_blocks := self._allocator.can_extend((sequence,)):
                self._allocator.extend(sequence)
            sequence.ahead -= 1
            if not has_blocks:
                return chunk
        return Chunk(sequence, chunk.start, chunk.stop + 1, (self.guess(sequence),))
