"""State of running sequences on the device, the upload of a step, and the layout of its tokens and attention tiles.

A sequence keeps its row from its first step until another sequence needs the row. Between two steps the host uploads
only changes: new sequences, added blocks, the last token of a sequence that was away. One stream orders all work of the
device, so that a row may be reassigned while a step that uses it still runs.

Shape legend: G cache groups, R rows, B blocks of a row's table, S rows of a step, N rows of an update, W words, X
flattened.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import SPLIT, RowState
from app.engine.gpu.kernels.sampling_state import ALIGNED, SamplingTable
from app.engine.sampling.parameters import is_counted, pack_request, token_mask
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


def splits(length: int) -> int:
    """Number of attention splits for a sequence of this length."""
    return -(-length // SPLIT)


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts that steps are padded to, up to `most`: small ones close together, then every 16."""
    return (*(n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most), most)


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts that captured steps with prompts are padded to, up to `most` and 512."""
    return (*(n for n in (16, 32, *range(64, 512, 64)) if n < most), min(most, 512))


def round_up(count: int) -> int:
    """To a multiple of 8: tokens and tiles of a step with prompts."""
    return -(-count // 8) * 8


def bucket(count: int, buckets: Items[int]) -> int:
    """The smallest bucket that holds `count`."""
    return buckets[bisect_left(buckets, count)]


EMPTY = slice(0, 0)


class Upload:
    """Concatenated sections of int32, copied to the device asynchronously.

    Each section starts at a multiple of 16 bytes, which the kernels require of their pointers. The host side is pinned
    memory from torch's caching allocator, which does not reuse it before the copy has finished.
    """

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, numbers: Collection[int], size: int = 0) -> slice:
        """Appends a section of at least `size` numbers and returns its range in the result of send()."""
        if not numbers and not size:
            return EMPTY
        self._numbers.extend([0] * (-len(self._numbers) % ALIGNED))
        start = len(self._numbers)
        self._numbers.extend(numbers if isinstance(numbers, array) else array("i", numbers))  # an array's is fast
        self._numbers.extend([0] * (start + size - len(self._numbers)))
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
        if not numbers.is_cuda:
            self._numbers = numbers.clone()
        else:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Waits for the copy. Nothing else makes the host wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


@dataclass(slots=True, kw_only=True, eq=False)
class _ResidentRow:
    """The host's view of a row, as it will be after the launched steps. Owned by ResidentBatch."""

    row: int
    blocks: tuple[array[int], ...]
    """The tuple object of the sequence, which is replaced if the sequence is preempted and readmitted."""
    first_blocks: array[int]
    """Its blocks of the first cache group; it has as many of every other one."""
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
        self, *, count: int, context: int, block_size: int, padding_block: int, table: SamplingTable, n_groups: int = 1
    ) -> None:
        self.padding_row = count
        self.context = context
        self.table = table
        device, table_blocks = table.words_RW.device, -(-context // block_size)
        self._padding_block = padding_block
        size = (count + 1) * table_blocks
        shape = (n_groups, -(-size // ALIGNED) * ALIGNED)
        self._block_tables_GX = torch.full(shape, padding_block, dtype=torch.int32, device=device)
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
            if len(resident.first_blocks) > resident.n_blocks:
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
            first = self._first_entry(group, resident.row) + resident.n_blocks
            updates.blocks.update(enumerate(blocks[resident.n_blocks :], first))
        resident.n_blocks = len(resident.first_blocks)

    def _first_entry(self, group: int, row: int) -> int:
        """Index of a row's first block in the flattened block tables."""
        return group * self._block_tables_GX.shape[1] + row * self.states[group].block_table_RB.shape[1]

    def _load(self, sequence: Sequence, resident: _ResidentRow | None, updates: ResidentUpdates) -> _ResidentRow:
        request, row = sequence.request, resident.row if resident else self._free.pop()
        if not sequence.blocks:  # without blocks, the sequence writes to the padding block
            for group in range(len(self.states)):
                first, size = self._first_entry(group, row), self.states[group].block_table_RB.shape[1]
                updates.blocks.update(dict.fromkeys(range(first, first + size), self._padding_block))
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
        blocks = sequence.blocks
        first_blocks = blocks[0] if blocks else array("i")
        resident = self._resident_rows[sequence] = _ResidentRow(row=row, blocks=blocks, first_blocks=first_blocks)
        return resident
