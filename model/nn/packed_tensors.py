"""Packed matrices as tensors on any device, and their numbers in torch. model/packed_matrix.py defines them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.packed_matrix import UNIT_COLUMNS, GroupNumbers, PackedFormat, PackedMatrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTensors:
    """See GroupNumbers."""

    values: Tensor
    """[R, G]."""
    units: Tensor | None = None
    """[R, U]."""

    def numbers(self, rows: slice, group: int) -> Tensor:
        """float32 [R, G] of some rows."""
        values = self.values[rows].float()
        if self.units is None:
            return values
        units = self.units[rows].float().repeat_interleave(UNIT_COLUMNS // group, dim=1)
        return values * units[:, : values.shape[1]]

    @classmethod
    def of(cls, numbers: GroupNumbers, device: torch.device) -> GroupTensors:
        """A copy on a device."""
        return cls(
            values=_copy(numbers.values, device), units=None if numbers.units is None else _copy(numbers.units, device)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensors:
    """A packed matrix, or one of each expert, whose R = E N rows follow one another."""

    format: PackedFormat
    shape: tuple[int, ...]
    """[N, C] or [E, N, C]."""
    codes: Tensor
    """int8 [R, C], or uint8 [R, C / 2]."""
    scales: GroupTensors
    offsets: GroupTensors | None = None

    @classmethod
    def of(cls, matrix: PackedMatrix, shape: tuple[int, ...], device: torch.device) -> PackedTensors:
        """A copy on a device. shape: of the weight, whose leading sizes are all rows of the matrix."""
        rows, columns = matrix.shape
        assert (math.prod(shape[:-1]), shape[-1]) == (rows, columns)
        return cls(
            format=matrix.format,
            shape=shape,
            codes=_copy(matrix.codes, device),
            scales=GroupTensors.of(matrix.scales, device),
            offsets=None if matrix.offsets is None else GroupTensors.of(matrix.offsets, device),
        )

    def dequantized(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """The numbers [R, C] of some rows: rounded to float32, and then to `dtype`."""
        group, integers = self.format.group, self._integers(rows)
        wide = integers.view(len(integers), -1, group).double() * self.scales.numbers(rows, group).double()[..., None]
        if self.offsets is not None:
            wide += self.offsets.numbers(rows, group).double()[..., None]
        return wide.view(integers.shape).float().to(dtype)

    def _integers(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        if self.format.bits == 8:
            return codes
        table = torch.tensor(self.format.table, dtype=torch.int8, device=codes.device)
        return table[torch.stack((codes & 15, codes >> 4), dim=-1).int()].view(len(codes), -1)


def _copy(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array.copy()).to(device)
