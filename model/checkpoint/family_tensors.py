"""Tensors of a family by its own names and in its own layout, read from files that have other ones, such as GGUF's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from model.checkpoint.stored_weights import StoredWeights
from model.checkpoint.tensor_index import PackedSource, StoredTensor
from model.families.spec import Conversion, TensorMapping
from model.number_formats import Array, as_float32
from model.weights_version import File


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTensor:
    """One tensor that is made from those of the files."""

    weights: StoredWeights
    stored: TensorMapping
    """The Decoder's tensor, from the files."""
    written: TensorMapping
    """The same tensor as the family stores it."""
    index: int
    """Of this tensor among the sources of `written`."""

    @property
    def name(self) -> str:
        """Name of the first tensor that it is made from."""
        return self.weights.stored(self.stored.source[0][0]).name

    @property
    def path(self) -> File:
        """File of the first tensor that it is made from."""
        return self.weights.stored(self.stored.source[0][0]).path

    def same(self) -> StoredTensor | PackedSource | None:
        """The tensor of the files that holds the same numbers in the same order; None if there is none."""
        if not self._has_counterpart() or self._conversions() != (Conversion(), Conversion()):
            return None
        return self.weights.stored(self.stored.source[self.index][0])

    def read(self, dtype: str) -> Array:
        """Its numbers as the files have them; packed ones as in StoredWeights.numbers(). Raises CheckpointError."""
        if self._has_counterpart():
            stored, written = self._conversions()
            array: Array = written.save(stored.load(self._numbers(self.index, dtype)))
            return array
        parts = [self.stored.load(i, self._numbers(i, dtype)) for i in range(len(self.stored.source))]
        is_mixed = len({part.dtype for part in parts}) > 1
        whole = np.concatenate([as_float32(part) for part in parts] if is_mixed else parts)
        part: Array = self.written.save_part(self.index, whole.reshape(self.stored.shape or whole.shape))
        return part

    def _has_counterpart(self) -> bool:
        """Whether one tensor of the files holds all of its numbers and no others."""
        stored, written = self.stored, self.written
        return len(stored.source) == len(written.source) and (stored.shape is None) == (written.shape is None)

    def _conversions(self) -> tuple[Conversion, Conversion]:
        return self.stored.conversion(self.index), self.written.conversion(self.index)

    def _numbers(self, index: int, dtype: str) -> Array:
        return self.weights.numbers(self.weights.stored(self.stored.source[index][0]), dtype)


def family_tensors(weights: StoredWeights, mappings: Mapping[str, TensorMapping]) -> dict[str, FamilyTensor]:
    """The tensors of these mappings of the family, by its names."""
    return {
        name: FamilyTensor(weights=weights, stored=weights.mappings[target], written=mapping, index=index)
        for target, mapping in mappings.items()
        for index, (name, _) in enumerate(mapping.source)
    }


def family_constants(weights: StoredWeights, mappings: Mapping[str, TensorMapping]) -> dict[str, StoredTensor]:
    """The constants of these mappings of the family, by its names: the files have as many for each tensor."""
    return {
        name: weights.tensors[stored]
        for target, mapping in mappings.items()
        for (name, _), (stored, _) in zip(mapping.constants, weights.mappings[target].constants, strict=True)
    }
