"""State of running sequences on the device, the upload of a step, and the layout of its tokens and attention tiles.

A sequence has a row from the first step that it is launched in until another one needs it. Between two steps the host
uploads only changes: new sequences, added blocks, tokens sampled elsewhere. All of
it is ordered by the one stream of the device, so that a row may be reassigned while a step that uses it still runs.

Shape legend: R rows, B blocks of a row's table, S rows of a step, N rows of an update, W words, X flattened.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.common.types import Chunk, Sequence
from app.engine.gpu.kernels.interface import ALIGNED, SPLIT, RowState
from app.engine.gpu.kernels.sampling_state import SamplingTable


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
        """In the order of the fields of `StepInputs` in app/engine/gpu/step.py."""
        tiles = (self.tile_rows, self.tile_starts, self.tile_positions, self.tile_lengths)
        return (self.tokens, self.token_rows, self.positions, *tiles, self.ends, self.end_rows)


def lay_out(
    chunks: Items[Chunk], rows: Items[int], *, tile_tokens: int, padding_row: int, tokens: int, draws: int
) -> Layout:
    """Lays out the tokens and tiles of a step, padded to `tokens` tokens and `draws` samples of `padding_row`."""
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
        (layout.token_rows, tokens, padding_row),
        (layout.positions, tokens, 0),
        (layout.ends, draws, 0),
        (layout.end_rows, draws, padding_row),
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
    """The smallest bucket that holds `count`."""
    return next(n for n in buckets if n >= count)


class Upload:
    """Concatenated sections of int32, copied to the device asynchronously.

    Each section begins at a multiple of 16 bytes, as kernels require of their pointers.
    The host side is pinned memory from torch's caching allocator, which does not reuse it before the copy is done.
    """

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, numbers: Iterable[int]) -> slice:
        """Appends a section and returns its range in send()'s result."""
        self._numbers.extend([0] * (-len(self._numbers) % ALIGNED))
        start = len(self._numbers)
        self._numbers.extend(numbers)
        return slice(start, len(self._numbers))

    def send(self, device: torch.device) -> Tensor:
        """[all sections] int32 on the device."""
        if not self._numbers:
            return torch.empty(0, dtype=torch.int32, device=device)
        numbers_X = torch.frombuffer(self._numbers, dtype=torch.int32)
        if device.type != "cuda":
            return numbers_X.clone()
        pinned_X = torch.empty(len(numbers_X), dtype=torch.int32, pin_memory=True).copy_(numbers_X)
        return pinned_X.to(device, non_blocking=True)


class Download:
    """An asynchronous copy from the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Waits for the copy: the only place where the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


@dataclass(slots=True, kw_only=True)
class _Known:
    """The host's view of a row, as it will be once the launched steps have run. Owned by ResidentBatch."""

    row: int
    blocks: list[int]
    """The sequence's own list: a sequence that was preempted and readmitted has another one."""
    n_blocks: int = 0
    length: int = 0
    """Tokens whose keys and values are in the cache."""
    token_at: int = -1
    """Position of the token that `last_token` holds."""


@dataclass(slots=True)
class ResidentChanges:
    """What a step must tell the device of rows before it begins. Owned by the launch that it is part of."""

    loaded: list[int] = field(default_factory=list)
    words: array[int] = field(default_factory=lambda: array("i"))
    history: array[int] = field(default_factory=lambda: array("i"))
    history_rows: array[int] = field(default_factory=lambda: array("i"))
    history_generated: array[int] = field(default_factory=lambda: array("i"))
    table_places: array[int] = field(default_factory=lambda: array("i"))
    table_blocks: array[int] = field(default_factory=lambda: array("i"))
    lengths: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class ResidentBatch:
    """Device state of up to `count` sequences; the last row is for padding."""

    def __init__(self, *, count: int, context: int, block_size: int, padding_block: int, table: SamplingTable) -> None:
        self.padding_row = count
        self.context = context
        self.block_size = block_size
        self.table = table
        device, table_blocks = table.words_RW.device, -(-context // block_size)
        self._padding_block = padding_block
        self.block_table_RB = torch.full((count + 1, table_blocks), padding_block, dtype=torch.int32, device=device)
        self.kv_length_R = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.last_token_R = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self._known: dict[Sequence, _Known] = {}
        self._free = list(range(count))

    @property
    def state(self) -> RowState:
        """State that a decode step reads and updates."""
        return RowState(self.block_table_RB, self.kv_length_R, self.last_token_R, self.block_size)

    def knows(self, sequence: Sequence) -> bool:
        """Whether it has a row."""
        return sequence in self._known

    def enter(self, chunks: Items[Chunk]) -> tuple[list[int], ResidentChanges]:
        """The row of each chunk's sequence, and the changes to upload first."""
        changes = ResidentChanges()
        missing = sum(chunk.sequence not in self._known for chunk in chunks)
        if missing > len(self._free):
            self._make_room(missing, {chunk.sequence for chunk in chunks})
        rows = [self._enter(chunk, changes) for chunk in chunks]
        return rows, changes

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Frees the rows of sequences whose device state is stale, as after a step that the host sampled."""
        for sequence in sequences:
            if known := self._known.pop(sequence, None):
                self._free.append(known.row)

    def tell(self, changes: ResidentChanges, upload: Upload) -> list[slice]:
        """The changes as sections of the step's one copy."""
        sections = (
            changes.loaded,
            changes.words,
            changes.history,
            changes.history_rows,
            changes.history_generated,
            changes.table_places,
            changes.table_blocks,
            changes.lengths.keys(),
            changes.lengths.values(),
            changes.tokens.keys(),
            changes.tokens.values(),
        )
        return [upload.add(section) for section in sections]

    def apply(self, numbers_X: Tensor, sections: list[slice]) -> None:
        """Applies the uploaded changes on the device."""
        loaded, told, history, owners, generated, places, blocks, *rest = (numbers_X[section] for section in sections)
        if len(loaded):
            self.table.load(loaded, told.view(len(loaded), -1), history, owners, generated)
        if len(places):
            self.block_table_RB.view(-1).index_copy_(0, places.long(), blocks)
        for target_R, rows_N, values_N in ((self.kv_length_R, *rest[:2]), (self.last_token_R, *rest[2:])):
            if len(rows_N):
                target_R.index_copy_(0, rows_N.long(), values_N)

    def _make_room(self, count: int, present: set[Sequence]) -> None:
        """Frees rows for `count` new sequences: of those that do not run, then of any that is not in this step.

        The latter happens only when the trial sequence of app/engine/execution/engine.py runs in addition to
        the maximum: no step is in flight then, and a sequence that lost its row is uploaded again.
        """
        others = [old for old in self._known if old not in present]
        self.forget(old for old in others if old.ended or not old.blocks)
        self.forget([old for old in others if old in self._known][: max(0, count - len(self._free))])

    def _enter(self, chunk: Chunk, changes: ResidentChanges) -> int:
        sequence = chunk.sequence
        known = self._known.get(sequence)
        if known is None or known.blocks is not sequence.blocks or known.length != chunk.start:
            known = self._load(sequence, known, changes)
            changes.lengths[known.row] = chunk.start
        if len(sequence.blocks) > known.n_blocks:
            first = known.row * self.block_table_RB.shape[1] + known.n_blocks
            added = sequence.blocks[known.n_blocks :]
            changes.table_places.extend(range(first, first + len(added)))
            changes.table_blocks.extend(added)
            known.n_blocks = len(sequence.blocks)
        if not chunk.samples:
            changes.lengths[known.row] = chunk.stop  # else it is counted on the device, with the draw
        elif known.token_at != chunk.start and chunk.stop == chunk.start + 1:
            changes.tokens[known.row] = sequence.tokens[chunk.start]
        known.length = chunk.stop
        known.token_at = chunk.stop if chunk.samples else -1
        return known.row

    def _load(self, sequence: Sequence, known: _Known | None, changes: ResidentChanges) -> _Known:
        row = known.row if known else self._free.pop()
        known = self._known[sequence] = _Known(row=row, blocks=sequence.blocks)
        if not sequence.blocks:  # what it writes goes to the padding block
            first = row * self.block_table_RB.shape[1]
            changes.table_places.extend(range(first, first + self.block_table_RB.shape[1]))
            changes.table_blocks.extend([self._padding_block] * self.block_table_RB.shape[1])
        if self.table.fits(sequence.request):  # else the host draws
            self._load_sampling(sequence, row, changes)
        return known

    def _load_sampling(self, sequence: Sequence, row: int, changes: ResidentChanges) -> None:
        request = sequence.request
        changes.loaded.append(row)
        changes.words.extend(self.table.words(request))
        if self.table.is_counted(request):
            changes.history.extend(sequence.tokens)
            changes.history_rows.extend([row] * len(sequence.tokens))
            prompt = len(request.prompt)
            changes.history_generated.extend([0] * prompt + [1] * (len(sequence.tokens) - prompt))
