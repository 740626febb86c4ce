"""Layout of a step's tokens and attention tiles.

Shape legend: T tokens of the step, X tiles, or numbers of all sections one after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from app.engine.scheduling.batch_plan import Chunk, Sequence

Numbers = TypeVar("Numbers")
"""array[int] on the host, Tensor on the device."""


class StepInputs(NamedTuple, Generic[Numbers]):
    """Inputs of a step with prompts, on the host or on the device: of its tokens and of its attention tiles.

    The tokens that sample come first, one for each chunk that does; then the other tokens of the chunks, then padding.
    """

    rows_T: Numbers
    lengths_T: Numbers
    """Tokens of the sequence up to and including this one."""
    tokens_T: Numbers
    """-1 stands for the last token of the row, which only the device knows."""
    tile_row_X: Numbers
    tile_start_X: Numbers
    tile_position_X: Numbers
    tile_length_X: Numbers

    @classmethod
    def of(cls, numbers_X: Tensor, n_tokens: int, n_tiles: int) -> StepInputs[Tensor]:
        """Views of the sections of a step, one after the other."""
        return StepInputs(*numbers_X.split([n_tokens] * 3 + [n_tiles] * 4))


def pad(inputs: StepInputs[array[int]], padding_row: int, n_tokens: int, n_tiles: int) -> None:
    """Adds padding tokens and tiles."""
    sizes = (n_tokens,) * 3 + (n_tiles,) * 4
    for section, size, filler in zip(inputs, sizes, _fillers(padding_row), strict=True):
        section.extend([filler] * (size - len(section)))


def clear(inputs: StepInputs[Tensor], padding_row: int) -> None:
    """Makes all tokens and tiles padding."""
    for section, filler in zip(inputs, _fillers(padding_row), strict=True):
        section.fill_(filler)


def _fillers(padding_row: int) -> tuple[int, ...]:
    """Padding of each section of StepInputs."""
    return (padding_row, 1, 0, -1, 0, 0, 0)


class Layout(NamedTuple):
    """The tokens of a step, on the host."""

    inputs: StepInputs[array[int]]
    scored_X: array[int]
    """Indices of the tokens whose logits score a prompt."""
    next_tokens_X: array[int]
    """The prompt's next token after each of them."""


def lay_out(chunks: Items[Chunk], rows: Items[int], *, tile_tokens: int) -> Layout:
    """Lays out the tokens and tiles of a step, without padding."""
    inputs = StepInputs(*(array("i") for _ in StepInputs._fields))
    layout = Layout(inputs, array("i"), array("i"))
    for chunk, row in zip(chunks, rows, strict=True):
        if chunk.samples:
            assert not chunk.drafts, "the device samples the last row of a chunk only"
            _add_tokens(inputs, chunk.sequence, row, chunk.stop - 1, chunk.stop, 1)
    for chunk, row in zip(chunks, rows, strict=True):
        first, stop = len(inputs.rows_T) - chunk.start, chunk.stop - chunk.samples
        if stop > chunk.start:
            _add_tokens(inputs, chunk.sequence, row, chunk.start, stop, tile_tokens)
        if positions := chunk.scores:
            layout.scored_X.extend(range(first + positions.start - 1, first + positions.stop - 1))
            layout.next_tokens_X.extend(chunk.sequence.request.prompt[positions.start : positions.stop])
    return layout


def _add_tokens(
    inputs: StepInputs[array[int]], sequence: Sequence, row: int, start: int, stop: int, tile_tokens: int
) -> None:
    first, known_tokens = len(inputs.rows_T), sequence.tokens
    inputs.rows_T.extend([row] * (stop - start))
    inputs.lengths_T.extend(range(start + 1, stop + 1))
    inputs.tokens_T.extend(known_tokens[start:stop].tolist())
    inputs.tokens_T.extend([-1] * (stop - max(start, len(known_tokens))))
    positions = range(start, stop, tile_tokens)
    inputs.tile_row_X.extend([row] * len(positions))
    inputs.tile_start_X.extend(range(first, first + stop - start, tile_tokens))
    inputs.tile_position_X.extend(positions)
    inputs.tile_length_X.extend(min(tile_tokens, stop - position) for position in positions)
