"""State of running sequences on the device, the upload of a step, and the layout of its tokens and attention tiles.

A sequence keeps its row from its first step until another sequence needs the row. Between two steps the host uploads
only changes: new sequences, added blocks, tokens sampled on the host. One stream orders all work of the device, so that
a row may be reassigned while a step that uses it still runs.

Shape legend: R rows, B blocks of a row's table, S rows of a step, N rows of an update, W words, X flattened.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from app.common.types import Chunk, Request, Sequence
from app.engine.gpu.kernels.interface import ALIGNED, SPLIT, RowState
from app.engine.gpu.kernels.sampling_state import SamplingTable
from app.engine.sampling.parameters import fits, is_counted, pack_request

Numbers = TypeVar("Numbers")
"""array[int] on the host, Tensor on the device."""


class StepInputs(NamedTuple, Generic[Numbers]):
    """Inputs of a step with prompts: the tokens of the chunks in order, then padding. On the host or on the device."""

    tokens_T: Numbers
    """-1 stands for the last token of the row, which only the device knows."""
    rows_T: Numbers
    positions_T: Numbers
    tile_row_X: Numbers
    tile_start_X: Numbers
    tile_position_X: Numbers
    tile_length_X: Numbers
    ends_S: Numbers
    """Index of the last token of each chunk that samples."""
    end_rows_S: Numbers


def lay_out(
    chunks: Items[Chunk], rows: Items[int], *, tile_tokens: int, padding_row: int, tokens: int, n_samples: int
) -> StepInputs[array[int]]:
    """Lays out the tokens and tiles of a step, padded to `tokens` tokens and `n_samples` samples of `padding_row`."""
    layout = StepInputs(*(array("i") for _ in StepInputs._fields))
    for chunk, row in zip(chunks, rows, strict=True):
        start, stop, known_tokens = chunk.start, chunk.stop, chunk.sequence.tokens
        first = len(layout.tokens_T)
        layout.tokens_T.extend(known_tokens[start:stop].tolist())
        layout.tokens_T.extend([-1] * (stop - max(start, len(known_tokens))))
        layout.rows_T.extend([row] * (stop - start))
        layout.positions_T.extend(range(start, stop))
        starts = range(start, stop, tile_tokens)
        layout.tile_row_X.extend([row] * len(starts))
        layout.tile_start_X.extend(range(first, first + stop - start, tile_tokens))
        layout.tile_position_X.extend(starts)
        layout.tile_length_X.extend(min(tile_tokens, stop - position) for position in starts)
        if chunk.samples:
            layout.ends_S.append(len(layout.tokens_T) - 1)
            layout.end_rows_S.append(row)
    for section, size, filler in (
        (layout.tokens_T, tokens, 0),
        (layout.rows_T, tokens, padding_row),
        (layout.positions_T, tokens, 0),
        (layout.ends_S, n_samples, 0),
        (layout.end_rows_S, n_samples, padding_row),
    ):
        section.extend([filler] * (size - len(section)))
    return layout


def splits(length: int) -> int:
    """Number of attention splits for a sequence of this length."""
    return -(-length // SPLIT)


def decode_buckets(most: int) -> tuple[int, ...]:
    """Row counts that decode steps are padded to, up to `most`: small ones close together, then every 16."""
    return (*(n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most), most)


def bucket(count: int, buckets: Items[int]) -> int:
    """The smallest bucket that holds `count`."""
    return next(n for n in buckets if n >= count)


class Upload:
    """Concatenated sections of int32, copied to the device asynchronously.

    Each section starts at a multiple of 16 bytes, which the kernels require of their pointers. The host side is pinned
    memory from torch's caching allocator, which does not reuse it before the copy has finished.
    """

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, numbers: Iterable[int]) -> slice:
        """Appends a section and returns its range in the result of send()."""
        self._numbers.extend([0] * (-len(self._numbers) % ALIGNED))
        start = len(self._numbers)
        self._numbers.extend(numbers)
        return slice(start, len(self._numbers))

    def send(self, device: torch.device) -> Tensor:
        """Copies all sections to the device, as one int32 tensor."""
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
        """Waits for the copy. Nothing else makes the host wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


@dataclass(slots=True, kw_only=True)
class _ResidentRow:
    """The host's view of a row, as it will be after the launched steps. Owned by ResidentBatch."""

    row: int
    blocks: array[int]
    """The list object of the sequence, which is replaced if the sequence is preempted and readmitted."""
    n_blocks: int = 0
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
    blocks: dict[int, int] = field(default_factory=dict)
    """By index in the flattened block table."""
    lengths: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def sections(self) -> tuple[Iterable[int], ...]:
        """The sections of an upload that ResidentBatch.apply() takes."""
        pairs = (part for each in (self.blocks, self.lengths, self.tokens) for part in (each.keys(), each.values()))
        return (self.loaded_rows, self.words, self.history, self.history_rows, self.history_generated, *pairs)


class ResidentBatch:
    """Device state of up to `count` sequences. The last row is for padding."""

    def __init__(self, *, count: int, context: int, block_size: int, padding_block: int, table: SamplingTable) -> None:
        self.padding_row = count
        self.context = context
        self.table = table
        device, table_blocks = table.words_RW.device, -(-context // block_size)
        self._padding_block = padding_block
        block_table_RB = torch.full((count + 1, table_blocks), padding_block, dtype=torch.int32, device=device)
        kv_length_R, last_token_R = (torch.zeros(count + 1, dtype=torch.int32, device=device) for _ in range(2))
        self.state = RowState(block_table_RB, kv_length_R, last_token_R, block_size)
        """Row state that a decode step reads and updates."""
        self._resident_rows: dict[Sequence, _ResidentRow] = {}
        self._free = list(range(count))

    def is_resident(self, sequence: Sequence) -> bool:
        """Whether the sequence has a row."""
        return sequence in self._resident_rows

    def can_sample(self, request: Request) -> bool:
        """Whether a row can hold the request's parameters, so that the device samples."""
        return fits(request, self.table.vocab_size)

    def assign_rows(self, chunks: Items[Chunk]) -> tuple[list[int], ResidentUpdates]:
        """Returns the row of each chunk's sequence, and the updates to upload before the step."""
        updates = ResidentUpdates()
        missing = sum(chunk.sequence not in self._resident_rows for chunk in chunks)
        if missing > len(self._free):
            self._evict_rows(missing, {chunk.sequence for chunk in chunks})
        rows = [self._assign_row(chunk, updates) for chunk in chunks]
        return rows, updates

    def release_rows(self, sequences: Iterable[Sequence]) -> None:
        """Frees the rows of sequences whose device state is stale, for example after sampling on the host."""
        for sequence in sequences:
            if resident := self._resident_rows.pop(sequence, None):
                self._free.append(resident.row)

    def apply(self, numbers_X: Tensor, sections: list[slice]) -> None:
        """Applies the uploaded updates on the device."""
        loaded_rows, words, history, owners, generated, *pairs = (numbers_X[section] for section in sections)
        if len(loaded_rows):
            self.table.load(loaded_rows, words.view(len(loaded_rows), -1), history, owners, generated)
        targets = (self.state.block_table_RB.view(-1), self.state.kv_length_R, self.state.last_token_R)
        for target_X, index_N, values_N in zip(targets, pairs[::2], pairs[1::2], strict=True):
            if len(index_N):
                target_X.index_copy_(0, index_N.long(), values_N)

    def _evict_rows(self, count: int, present: set[Sequence]) -> None:
        """Frees rows for `count` new sequences: first those of sequences that do not run, then any not in this step.

        The latter happens only when the trial sequence of app/engine/execution/engine.py runs in addition to the
        maximum: no step is in flight then, and a sequence that lost its row is uploaded again.
        """
        others = [old for old in self._resident_rows if old not in present]
        self.release_rows(old for old in others if old.ended or not old.blocks)
        self.release_rows([old for old in others if old in self._resident_rows][: max(0, count - len(self._free))])

    def _assign_row(self, chunk: Chunk, updates: ResidentUpdates) -> int:
        sequence = chunk.sequence
        resident = self._resident_rows.get(sequence)
        if resident is None or resident.blocks is not sequence.blocks or resident.length != chunk.start:
            resident = self._load(sequence, resident, updates)
            updates.lengths[resident.row] = chunk.start
        if len(sequence.blocks) > resident.n_blocks:
            first = resident.row * self.state.block_table_RB.shape[1]
            updates.blocks.update(enumerate(sequence.blocks[resident.n_blocks :], first + resident.n_blocks))
            resident.n_blocks = len(sequence.blocks)
        if not chunk.samples:
            updates.lengths[resident.row] = chunk.stop  # otherwise the device advances the length when it samples
        elif resident.last_token_position != chunk.start and chunk.stop == chunk.start + 1:
            updates.tokens[resident.row] = sequence.tokens[chunk.start]
        resident.length = chunk.stop
        resident.last_token_position = chunk.stop if chunk.samples else -1
        return resident.row

    def _load(self, sequence: Sequence, resident: _ResidentRow | None, updates: ResidentUpdates) -> _ResidentRow:
        request, row = sequence.request, resident.row if resident else self._free.pop()
        if not sequence.blocks:  # without blocks, the sequence writes to the padding block
            size = self.state.block_table_RB.shape[1]
            updates.blocks.update(dict.fromkeys(range(row * size, (row + 1) * size), self._padding_block))
        if self.can_sample(request):  # otherwise the host samples
            updates.loaded_rows.append(row)
            updates.words.extend(pack_request(request, self.table.vocab_size))
        if self.can_sample(request) and is_counted(request.params):
            prompt, length = len(request.prompt), len(sequence.tokens)
            updates.history.extend(sequence.tokens.tolist())
            updates.history_rows.extend([row] * length)
            updates.history_generated.extend([0] * prompt + [1] * (length - prompt))
        resident = self._resident_rows[sequence] = _ResidentRow(row=row, blocks=sequence.blocks)
        return resident
