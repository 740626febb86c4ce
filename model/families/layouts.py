"""Orders in which files store matrices, other than the Decoder's: for `layout` of a FamilySpec."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from model.config import ModelConfig
from model.families.spec import Conversion, Tensor, TensorMapping

PACKED_BLOCKS = "_blocks"
"""End of the names of MXFP4 matrices."""


def transposed(_config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """Matrices of blocks are stored as [columns, rows]."""
    if not re.search(r"(attention|mlp)\.\w+\.weight$", mapping.target):
        return mapping
    ((name, (rows, columns)),) = mapping.source
    return TensorMapping(mapping.target, ((name, (columns, rows)),), (Conversion(_transpose, _transpose),))


def _transpose(matrix: Tensor) -> Tensor:
    return matrix.T


def heads_interleaved(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """The rows of qkv are ordered by key head: its query heads, k, v of head 0, then of head 1, ..."""
    n_heads, kv_heads = config.n_heads, config.n_kv_heads
    if ".attention.qkv." not in mapping.target or kv_heads == 1:
        return mapping
    queries = [range(first, first + n_heads // kv_heads) for first in range(0, n_heads, n_heads // kv_heads)]
    stored = [head for kv in range(kv_heads) for head in (*queries[kv], n_heads + kv, n_heads + kv_heads + kv)]
    back = sorted(range(len(stored)), key=stored.__getitem__)
    conversion = Conversion(partial(_heads, order=back), partial(_heads, order=stored))
    return TensorMapping(mapping.target, mapping.source, (conversion,))


def _heads(tensor: Tensor, *, order: list[int]) -> Tensor:
    """The rows of all heads, which have one size, in this order of heads."""
    return tensor.reshape(len(order), -1, *tensor.shape[1:])[order].reshape(tensor.shape)


def rotation_interleaved(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """Number 2 i of a head is rotated with number 2 i + 1, where the Decoder rotates i with i + half."""
    dim = max(map(config.rotated_dim, config.ropes), default=0)
    return _with_head_order(config, mapping, [*range(0, dim, 2), *range(1, dim, 2), *range(dim, config.head_dim)])


def rotation_reversed(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """Heads are rotated the other way round, as if their halves were exchanged."""
    half = config.head_dim // 2
    return _with_head_order(config, mapping, [*range(half, config.head_dim), *range(half)])


def _with_head_order(config: ModelConfig, mapping: TensorMapping, order: list[int]) -> TensorMapping:
    """The rows of each query and key head in this order: attention does not depend on it.

    q, k and v must be three tensors.
    """
    if ".attention.qkv." not in mapping.target:
        return mapping

    def conversion(n_heads: int) -> Conversion:
        rows = [head * config.head_dim + row for head in range(n_heads) for row in order]
        back = sorted(range(len(rows)), key=rows.__getitem__)
        return Conversion(partial(_rows, rows=rows), partial(_rows, rows=back))

    conversions = (conversion(config.n_heads), conversion(config.n_kv_heads), Conversion())
    return TensorMapping(mapping.target, mapping.source, conversions)


def _rows(tensor: Tensor, *, rows: list[int]) -> Tensor:
    return tensor[rows]


def positions_from(first: int) -> Callable[[ModelConfig, TensorMapping], TensorMapping]:
    """The position table has `first` more rows before position 0."""

    def layout(_config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
        if mapping.target != "position_embedding":
            return mapping
        ((name, (rows, width)),) = mapping.source
        conversion = Conversion(lambda table: table[first:], partial(_with_rows_before, count=first))
        return TensorMapping(mapping.target, ((name, (rows + first, width)),), (conversion,))

    return layout


def _with_rows_before(table: Tensor, *, count: int) -> Tensor:
    """A table of torch, which alone saves tensors, with rows of zeros before its first one."""
    whole = table.new_zeros(count + len(table), table.shape[1])
    whole[count:] = table
    return whole


def with_leading_axis(mapping: TensorMapping, name: str) -> TensorMapping:
    """The file stores the vector with this name as a matrix of one row."""
    if mapping.target.rpartition(".")[2] != name:
        return mapping
    ((source, (size,)),) = mapping.source
    conversion = Conversion(lambda row: row.reshape(size), lambda vector: vector.reshape(1, size))
    return TensorMapping(mapping.target, ((source, (1, size)),), (conversion,))


def experts_interleaved(_config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """Each row of gate is followed by the same row of up; matrices that are not packed are [expert, columns, rows]."""
    module, _, name = mapping.target.rpartition(".")
    if not module.endswith(".experts"):
        return mapping
    ((source, (count, *sizes)),) = mapping.source
    is_matrix = len(sizes) == 2 and not source.endswith(PACKED_BLOCKS)
    order = [*range(0, sizes[0], 2), *range(1, sizes[0], 2)] if name in ("up", "up_bias") else []
    back = sorted(range(len(order)), key=order.__getitem__)

    def load(tensor: Tensor) -> Tensor:
        rows = tensor.swapaxes(1, 2) if is_matrix else tensor
        return rows[:, order] if order else rows

    def save(tensor: Tensor) -> Tensor:
        rows = tensor[:, back] if order else tensor
        return rows.swapaxes(1, 2) if is_matrix else rows

    shape = (count, *(reversed(sizes) if is_matrix else sizes))
    return TensorMapping(mapping.target, ((source, shape),), (Conversion(load, save),))
