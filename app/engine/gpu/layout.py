"""The tokens of a step and the tiles of its attention, as numbers for the device. Knows no tensor."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from app.common.types import Chunk
from app.engine.gpu.kernels.interface import SPLIT


@dataclass(slots=True)
class Layout:
    """A step with prompts in it. Rows of tokens stand in the order of the chunks; padding behind them."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    """-1: the last token of its row, which only the device knows."""
    token_rows: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("i"))
    tile_rows: array[int] = field(default_factory=lambda: array("i"))
    tile_starts: array[int] = field(default_factory=lambda: array("i"))
    tile_positions: array[int] = field(default_factory=lambda: array("i"))
    tile_lengths: array[int] = field(default_factory=lambda: array("i"))
    ends: array[int] = field(default_factory=lambda: array("i"))
    """Of the chunks that sample: where the last token stands."""
    end_rows: array[int] = field(default_factory=lambda: array("i"))

    def sections(self) -> tuple[array[int], ...]:
        """In the order of `Told`'s fields in app/engine/gpu/step.py."""
        tiles = (self.tile_rows, self.tile_starts, self.tile_positions, self.tile_lengths)
        return (self.tokens, self.token_rows, self.positions, *tiles, self.ends, self.end_rows)


def lay_out(
    chunks: Items[Chunk], rows: Items[int], *, tile_tokens: int, nobody: int, tokens: int, draws: int
) -> Layout:
    """`tokens` and `draws`: to how many both are padded, with what is `nobody`'s."""
    layout = Layout()
    for chunk, row in zip(chunks, rows, strict=True):
        start, stop, known = chunk.start, chunk.stop, chunk.sequence.tokens
        first = len(layout.tokens)
        layout.tokens.extend(known[start:stop])
        layout.tokens.extend([-1] * (stop - max(start, len(known))))
        layout.token_rows.extend([row] * (stop - start))
        layout.positions.extend(range(start, stop))
        places = range(start, stop, tile_tokens)
        layout.tile_rows.extend([row] * len(places))
        layout.tile_starts.extend(range(first, first + stop - start, tile_tokens))
        layout.tile_positions.extend(places)
        layout.tile_lengths.extend(min(tile_tokens, stop - place) for place in places)
        if chunk.samples:
            layout.ends.append(len(layout.tokens) - 1)
            layout.end_rows.append(row)
    for section, wanted, filler in (
        (layout.tokens, tokens, 0),
        (layout.token_rows, tokens, nobody),
        (layout.positions, tokens, 0),
        (layout.ends, draws, 0),
        (layout.end_rows, draws, nobody),
    ):
        section.extend([filler] * (wanted - len(section)))
    return layout


def splits(length: int) -> int:
    """Pieces in which the keys of so long a sequence are read."""
    return -(-length // SPLIT)


def decode_buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows that a decode step may have, up to `most`: small ones close together, then every 16."""
    return (*(n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most), most)


def bucket(count: int, buckets: Items[int]) -> int:
    """The smallest that has room for `count`."""
    return next(n for n in buckets if n >= count)
