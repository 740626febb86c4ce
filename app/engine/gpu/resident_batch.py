"""State of running sequences on the device, and the updates that a step uploads.

A sequence keeps its row from its first step until another sequence needs the row. Between two steps the host uploads
only changes: new sequences, added blocks, the last token of a sequence that was away. One stream orders all work of the
device, so that a row may be reassigned while a step that uses it still runs.

Shape legend: G cache groups, R rows, B blocks of a row's table, N rows of an update, W words, X flattened.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import RowState
from app.engine.gpu.kernels.sample_out import ALIGNED
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.transfers import EMPTY
from app.engine.sampling.parameters import is_counted, pack_request, token_mask
from app.engine.scheduling.batch_plan import Chunk, Sequence


@dataclass(slots=True, kw_only=True, eq=False)
class _ResidentRow:
    """The host's view of a row, as it will be after the launched steps. Owned by ResidentBatch."""

    row: int
    blocks: tuple[array[int], ...]
    """The tuple object of the sequence, which is replaced if the sequence is preempted and readmitted."""
    n_blocks: list[int]
    """How many of them the device has, for each cache group."""
    capacity: int = -1
    """The sequence's capacity then: while it stays the same, no step needs another block."""
    length: int = 0
    """Tokens whose keys and values are in the cache."""
    last_token_position: int = -1
    """Position of the token in last_token_R."""


@dataclass(slots=True)
class ResidentUpdates:
    """Row updates that a step must upload before it starts. Owned by its launch."""

    loaded_rows: list[int] = field(default_factory=list)
    words: array[int] = field(default_factory=lambda: array("i"))
    history: array[int] = field(default_factory=lambda: array("i"))
    history_rows: array[int] = field(default_factory=lambda: array("i"))
    history_generated: array[int] = field(default_factory=lambda: array("i"))
    masked_rows: list[int] = field(default_factory=list)
    masks: array[int] = field(default_factory=lambda: array("i"))
    blocks: dict[int, int] = field(default_factory=dict)
    """By index in the flattened block tables."""
    tokens: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to upload."""
        return bool(self.loaded_rows or self.blocks or self.tokens)

    def sections(self) -> tuple[Collection[int], ...]:
        """The sections of an upload that ResidentBatch.apply() takes."""
        history = (self.history, self.history_rows, self.history_generated)
        pairs = (part for each in (self.blocks, self.tokens) for part in (each.keys(), each.values()))
        return (self.loaded_rows, self.words, *history, self.masked_rows, self.masks, *pairs)


class ResidentBatch:
    """Device state of up to `count` sequences. The last row is for padding.

    The block tables, one for each cache group, may list blocks that a window has passed and that others own now: no
    later token of the row sees them.
    """

    def __init__(
        self, *, count: int, context: int, block_size: int, padding_blocks: Items[int], table: SamplingTable
    ) -> None:
        """padding_blocks: of each cache group."""
        self.padding_row = count
        self.context = context
        self.table = table
        device, table_blocks = table.words_RW.device, -(-context // block_size)
        self._padding_blocks = padding_blocks
        size = (count + 1) * table_blocks
        paddings_G1 = torch.tensor(padding_blocks, dtype=torch.int32, device=device)[:, None]
        self._block_tables_GX = paddings_G1.repeat(1, -(-size // ALIGNED) * ALIGNED)
        tables = [table_X[:size].view(count + 1, table_blocks) for table_X in self._block_tables_GX]
        self.states = [RowState(table_RB, table.last_token_R, block_size) for table_RB in tables]
        """Of each cache group."""
        self._resident_rows: dict[Sequence, _ResidentRow] = {}
        self._free = list(range(count))

    def row_of(self, sequence: Sequence) -> int:
        """The row of a resident sequence."""
        return self._resident_rows[sequence].row

    def assign_rows(self, chunks: Items[Chunk]) -> tuple[list[int], ResidentUpdates]:
        """Returns the row of each chunk's sequence, and the updates to upload before the step."""
        updates, rows, get = ResidentUpdates(), list[int](), self._resident_rows.get
        known = [get(chunk.sequence) for chunk in chunks]
        if (missing := known.count(None)) > len(self._free):
            self._evict_rows(missing, {chunk.sequence for chunk in chunks})
        for chunk, resident in zip(chunks, known, strict=True):
            sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
            if resident is None or resident.blocks is not sequence.blocks or resident.length != start:
                resident = self._load(sequence, resident, updates)
            if resident.capacity != sequence.capacity:
                resident.capacity = sequence.capacity
                self._add_blocks(resident, updates)
            samples = stop >= len(sequence.tokens)  # chunk.samples
            if samples and resident.last_token_position != start and stop == start + 1:
                updates.tokens[resident.row] = sequence.tokens[start]
            resident.length, resident.last_token_position = stop, stop if samples else -1
            rows.append(resident.row)
        return rows, updates

    def release_rows(self, sequences: Iterable[Sequence]) -> None:
        """Frees the rows of sequences."""
        for sequence in sequences:
            if resident := self._resident_rows.pop(sequence, None):
                self._free.append(resident.row)

    def apply(self, numbers_X: Tensor, sections: list[slice]) -> None:
        """Applies the uploaded updates on the device."""
        loaded_rows, words, history, owners, generated, masked_rows, masks, *pairs = sections
        if loaded_rows != EMPTY:
            rows_N, *histories = (numbers_X[section] for section in (loaded_rows, history, owners, generated))
            self.table.load(rows_N, numbers_X[words].view(len(rows_N), -1), *histories)
        if masked_rows != EMPTY:
            self.table.load_masks(numbers_X[masked_rows], numbers_X[masks])
        targets = (self._block_tables_GX, self.table.last_token_R)
        for target, index, values in zip(targets, pairs[::2], pairs[1::2], strict=True):
            if index != EMPTY:
                target.view(-1).index_copy_(0, numbers_X[index].long(), numbers_X[values])

    def _evict_rows(self, count: int, present: set[Sequence]) -> None:
        """Frees rows for `count` new sequences: of sequences that do not run, then of any that are not in this step.

        The latter happens only when the trial sequence of app/engine/execution/fault_isolation.py runs in addition to
        the maximum: no step is in flight then, and a sequence that lost its row is uploaded again.
        """
        others = [old for old in self._resident_rows if old not in present]
        self.release_rows(old for old in others if old.ended or not old.blocks)
        self.release_rows([old for old in others if old in self._resident_rows][: max(0, count - len(self._free))])

    def _add_blocks(self, resident: _ResidentRow, updates: ResidentUpdates) -> None:
        for group, blocks in enumerate(resident.blocks):
            known = resident.n_blocks[group]
            updates.blocks.update(enumerate(blocks[known:], self._first_entry(group, resident.row) + known))
            resident.n_blocks[group] = len(blocks)

    def _first_entry(self, group: int, row: int) -> int:
        """Index of a row's first block in the flattened block tables."""
        return group * self._block_tables_GX.shape[1] + row * self.states[group].block_table_RB.shape[1]

    def _load(self, sequence: Sequence, resident: _ResidentRow | None, updates: ResidentUpdates) -> _ResidentRow:
        request, row = sequence.request, resident.row if resident else self._free.pop()
        if not sequence.blocks:  # without blocks, the sequence writes to the padding block
            for group in range(len(self.states)):
                first, size = self._first_entry(group, row), self.states[group].block_table_RB.shape[1]
                updates.blocks.update(dict.fromkeys(range(first, first + size), self._padding_blocks[group]))
        updates.loaded_rows.append(row)
        updates.words.extend(pack_request(request, self.table.vocab_size))
        if request.params.min_tokens and not request.grammar:  # a guided row gets its mask in each step
            updates.masked_rows.append(row)
            updates.masks.extend(token_mask(request, 0, self.table.vocab_size))
        if is_counted(request.params):
            prompt, length = len(request.prompt), len(sequence.tokens)
            updates.history.extend(sequence.tokens.tolist())
            updates.history_rows.extend([row] * length)
            updates.history_generated.extend([0] * prompt + [1] * (length - prompt))
        resident = _ResidentRow(row=row, blocks=sequence.blocks, n_blocks=[0] * len(self.states))
        self._resident_rows[sequence] = resident
        return resident
