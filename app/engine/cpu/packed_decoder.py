"""Translates a decoder into a list of native operations, and packs its matrices.

Registers are numbered as in source/steps.h, kinds as in source/interface.h, norms as in source/elementwise.h, which
numbers activations as model/config.py lists them, and scores as in source/experts.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, get_args

import numpy as np

from app.engine.cpu.huge_pages import HugepageAllocator
from app.engine.cpu.library import Cache, Groups, Matrix, NativeOperation, Shape, address_of
from app.engine.memory.cache_groups import cache_dtype, cache_groups, cache_places
from model.cache_formats import KvCache
from model.config import Activation, ExpertScore, ModelConfig
from model.decoder_program import Kind, Operation, Register, Weight, decoder_program
from model.number_formats import Array, as_float32
from model.packed_matrix import PackedFormat, PackedMatrix, ScaleKind, common_format, concatenate
from model.positions import query_scale_table, rope_table, sinusoid_table
from model.quantize import PackedWeights

StoredFormat = Callable[[str, str], str]
"""The number format in which a parameter is packed: name, float32 or bfloat16, in which products compute. It changes
no number."""


def as_computed(_name: str, dtype: str) -> str:
    """The StoredFormat of parameters that are packed as products compute with them."""
    return dtype


class _Part(NamedTuple):
    """Consecutive rows of a weight's parts in one format."""

    format: PackedFormat
    rows: int
    parts: slice
    """Of read_packed()."""


LANES = 16
PANEL = 2 * LANES
BLOCK = 16
"""Tokens of a cache block, as many as a vector has lanes."""
_FLOATS = (Register.RESIDUAL, Register.QKV, Register.BRANCH)
_NORMS = {"none": 0, "rmsnorm": 1, "layernorm": 2}
_ACTIVATIONS = {name: number for number, name in enumerate(get_args(Activation), 1)}
_SCORES = {name: number for number, name in enumerate(get_args(ExpertScore))}
_SCALE_KINDS = {name: number for number, name in enumerate(get_args(ScaleKind))}


def padded_head_dim(config: ModelConfig) -> int:
    """Numbers of a head in the native cache: head_dim, rounded up to whole vectors."""
    return _round_up(config.head_dim, LANES)


class PackedDecoder:
    """Packed weights and operations of one decoder. Keep it alive: the kernels hold pointers into it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: PackedWeights,
        pool: int,
        *,
        dtype: str,
        stored_format: StoredFormat = as_computed,
        kv_cache: KvCache = "auto",
        restored: HugepageAllocator | None = None,
    ) -> None:
        """weights: asked once for each tensor, which is packed before the next one. pool: threads that pack.

        stored_format: of dense matrices.
        restored: one region with what an equal decoder left in `memory`; then nothing but formats is read.
        Raises ValueError if a packed matrix cannot be computed with.
        """
        self.config, self._library, self._pool = config, library, pool
        self._dtype, self._is_bf16 = dtype, dtype == "bfloat16"
        self._weights, self._stored_format = weights, stored_format
        self._is_restored = restored is not None
        self.memory = restored or HugepageAllocator()
        """All that depends on the weights; tables of positions are elsewhere."""
        self._keepalive: list[Any] = []
        self._operations: list[NativeOperation] = []
        self.groups = cache_groups(config, cache_dtype(dtype, kv_cache))
        self._has_codes = self.groups[0].format.has_codes
        self._places = cache_places(self.groups)
        self._rope_tables = {rope: self._kept(rope_table(config, rope)) for rope in config.ropes}
        self._query_scale = self._kept(query_scale_table(config)) if config.query_scale else 0
        embed, *self._body, final_norm, head = decoder_program(config)
        self.head = self._matrix(*head.weights)
        self.embedding = self.head if config.tied_head else self._matrix(embed.weights[0])
        for operation in self._body:
            self._operations.append(self._native(operation))
        self._shape = self._make_shape(embed, final_norm)

    @property
    def cache_dtype(self) -> np.dtype[Any]:
        """Type of the cache's numbers; bytes if it has codes and scales."""
        return np.dtype(np.uint8 if self._has_codes else np.uint16 if self._is_bf16 else np.float32)

    @property
    def names(self) -> list[str]:
        """Human-readable name of each operation."""
        names: dict[Kind | str, str] = {
            Kind.ROPE_CACHE: "rotate, cache",
            "qkv": "q, k, v",
            "up": "gate, up" if self.config.gated else "up",
        }
        keys = [op.module.rpartition(".")[2] if op.kind == Kind.LINEAR else op.kind for op in self._body]
        return [names.get(key) or (key if isinstance(key, str) else key.name.lower()) for key in keys]

    @property
    def logits_columns(self) -> int:
        """Numbers of a row of logits: the vocabulary size, rounded up to whole panels."""
        return _round_up(self.config.vocab_size, PANEL)

    def shape(self, caches: Items[Array]) -> Shape:
        """The decoder's shape with a cache [layer of the group, 2, block, kv head, numbers of a block] per group."""
        table = (Cache * len(caches))(*(Cache(address_of(cache), cache.shape[2]) for cache in caches))
        self._keepalive.append(table)
        self._shape.caches = ctypes.addressof(table)
        return self._shape

    def _make_shape(self, embed: Operation, final_norm: Operation) -> Shape:
        c, columns = self.config, self._columns()
        weight, bias = self._norm_vectors(final_norm)
        operations = (NativeOperation * len(self._operations))(*self._operations)
        self._keepalive += [operations, columns]
        return Shape(
            is_bf16=self._is_bf16,
            n_registers=len(columns),
            query_heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_width=c.head_dim,
            width=c.width,
            n_operations=len(operations),
            final_norm=_NORMS[final_norm.norm],
            n_groups=len(self.groups),
            padded_head=padded_head_dim(c),
            embedding_scale=c.embedding_scale,
            logit_scale=c.logit_scale,
            soft_cap=c.logit_soft_cap or 0.0,
            eps=c.norm_eps,
            has_coded_cache=self._has_codes,
            position_embeddings=self._kept(sinusoid_table(c))
            if c.positions == "sinusoidal"
            else sum(map(self._vector, embed.weights[1:])),
            embedding=ctypes.pointer(self.embedding),
            head=ctypes.pointer(self.head),
            final_weight=weight,
            final_bias=bias,
            register_columns=ctypes.addressof(columns),
            operations=ctypes.addressof(operations),
        )

    def _columns(self) -> Any:
        c = self.config
        heads = c.n_heads * c.head_dim
        qkv = heads + 2 * c.n_kv_heads * c.head_dim
        hidden = max(c.mlp_width, c.experts.shared_width if c.experts else 0)
        sizes = (c.width, qkv, max(c.width, heads), hidden, c.n_heads * padded_head_dim(c), c.width, c.width)
        return (ctypes.c_int32 * len(sizes))(*(_round_up(size, PANEL) for size in sizes))

    def _native(self, operation: Operation) -> NativeOperation:
        """The operation as the kernels read it, with its weights packed."""
        kind, config = operation.kind, self.config
        fields: dict[str, Any] = {}
        match kind:
            case Kind.NORM:
                weight, bias = self._norm_vectors(operation)
                fields = {"flag": _NORMS[operation.norm], "columns": config.width, "weight": weight, "bias": bias}
            case Kind.LINEAR:
                is_float = operation.target in _FLOATS
                assert not (operation.activation if is_float else operation.accumulates), "not in source/steps.h"
                gate_rows = operation.weights[0].shape[0] // 2 if operation.gated else 0
                matrix = self._matrix(*operation.weights, gate_rows=gate_rows, factor=operation.factor)
                flag = _ACTIVATIONS[operation.activation] if operation.activation else 0
                fields = {"flag": flag, "gated": operation.gated, "matrix": ctypes.pointer(matrix)}
                if operation.parameters:
                    fields["weight"] = self._stored(LANES, partial(self._xielu, *operation.parameters))
            case Kind.ROPE_CACHE:
                weight, bias = self._head_norms(operation)
                fields = {"weight": weight, "bias": bias, "query_scale": self._query_scale}
                fields |= {"norms_width": config.qk_norm == "width", "norms_after": config.qk_norm_after_rope}
                if rope := config.layer_kind(operation.layer).rope:
                    fields |= {"rotary_half": config.rotated_dim(rope) // 2, "rope_table": self._rope_tables[rope]}
            case Kind.ATTENTION:
                window, cap = config.layer_kind(operation.layer).window, config.attention_soft_cap
                fields = {"window": window or 0, "attention_scale": config.score_factor, "attention_cap": cap or 0.0}
                fields["weight"] = sum(map(self._vector, operation.weights))  # sinks, if it has them
            case Kind.ADD:
                fields = {"columns": config.width}
            case Kind.ROUTE:
                fields = self._router(operation)
            case Kind.EXPERTS:
                fields = self._experts(operation)
            case _:
                raise AssertionError(f"the kernels have no {kind.name}")
        group, layer = self._places[operation.layer]
        return NativeOperation(
            kind=kind,
            source=operation.source,
            target=operation.target,
            group=group,
            layer=layer,
            accumulates=operation.accumulates,
            eps=config.norm_eps,
            **fields,
        )

    def _router(self, operation: Operation) -> dict[str, Any]:
        experts = self.config.experts
        assert experts
        weight, *others = operation.weights
        bias = others.pop(0) if experts.router_bias else None
        matrix = self._matrix(weight, bias)
        return {
            "matrix": ctypes.pointer(matrix),
            "weight": sum(map(self._vector, others)),  # addends of scores, if it has them
            "experts": experts.count,
            "chosen": experts.chosen,
            "score": _SCORES[experts.score],
            "normalized": experts.normalized,
            "expert_factor": experts.factor,
        }

    def _experts(self, operation: Operation) -> dict[str, Any]:
        experts, activation = self.config.experts, operation.activation
        assert experts
        up, down, *biases = operation.weights
        up_bias, down_bias = biases or (None, None)
        gate_rows = up.shape[1] // 2 if operation.gated else 0
        return {
            "flag": _ACTIVATIONS[activation] if activation else 0,
            "gated": operation.gated,
            "matrix": self._matrices(up, up_bias, gate_rows=gate_rows),
            "down": self._matrices(down, down_bias, factor=operation.factor),
            "experts": experts.count,
            "chosen": experts.chosen,
        }

    def _norm_vectors(self, operation: Operation) -> tuple[int, int]:
        """Addresses of a norm's factors and bias; 0 without."""
        if operation.norm == "none":
            return 0, 0
        weight, bias, *_ = *operation.weights, None, None
        return self._factors(weight, self.config.width), self._vector(bias) if bias else 0

    def _head_norms(self, operation: Operation) -> tuple[int, int]:
        """Addresses of the factors of queries and of keys; 0 without norms."""
        config = self.config
        if config.qk_norm == "none":
            return 0, 0
        weights = operation.weights or (None, None)
        query, key = map(self._factors, weights, config.head_norm_sizes)
        return query, key

    def _factors(self, weight: Weight | None, size: int) -> int:
        """Address of what a norm multiplies by: its weight, 1 + weight, or ones."""
        if weight is None:
            return self._stored(_round_up(size, LANES), lambda: _padded(np.ones(size, np.float32), LANES))
        return self._vector(weight, offset=float(self.config.norm_offset))

    def _xielu(self, parameters: Weight) -> Array:
        """What the kernels read: the curvature right and left of 0."""
        right, left = np.logaddexp(0.0, as_float32(self._weights.read(parameters.name, self._dtype)).astype(np.float64))
        return _padded(np.array([right, 0.5 + left]), LANES)

    def _matrix(self, weight: Weight, bias: Weight | None = None, **options: Any) -> Matrix:
        """The only matrix of a weight [rows, columns]: see _matrices()."""
        matrix: Matrix = self._matrices(weight, bias, **options)[0]
        return matrix

    def _matrices(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        gate_rows: int = 0,
        factor: float = 1.0,
    ) -> ctypes.Array[Matrix]:
        """The matrices of a weight [experts, rows, columns].

        factor: of the product and of the bias.
        """
        *experts, n_rows, k = weight.shape
        if formats := self._weights.packed_formats(weight.name):
            return self._grouped_matrices(weight, bias, formats, gate_rows, factor)
        count, kind = math.prod(experts), self._stored_format(weight.name, self._dtype)
        rows = _packed_rows(n_rows, gate_rows)
        outputs, panels = len(rows), len(rows) // PANEL
        number = self._library.ink_format(kind.encode(), self._is_bf16)
        assert number >= 0, f"the kernels multiply {self._dtype} with no {kind}"
        n_bytes = self._library.ink_packed_bytes(panels, k, self._is_bf16, number)
        start = self.memory.allocate(count * n_bytes)
        addresses = [start + expert * n_bytes for expert in range(count)]
        if not self._is_restored:
            tensor = self._weights.read(weight.name, kind).reshape(-1, n_rows, k)
            for numbers, address in zip(tensor, addresses, strict=True):
                self._library.ink_pack(
                    self._pool, address_of(numbers), n_rows, k, gate_rows, panels, self._is_bf16, number, address
                )
        size = count * outputs
        scale = self._scale(factor, size)
        addend = self._vector(bias, size, rows, factor=factor) if bias else 0
        steps = self._library.ink_steps(k, self._is_bf16, number)
        return (Matrix * count)(
            *(
                Matrix(address, *vectors, outputs=outputs, steps=steps, format=number)
                for address, vectors in zip(addresses, _of_each([outputs] * count, addend, scale), strict=True)
            )
        )

    def _grouped_matrices(
        self,
        weight: Weight,
        bias: Weight | None,
        formats: tuple[tuple[PackedFormat, int], ...],
        gate_rows: int,
        factor: float,
    ) -> ctypes.Array[Matrix]:
        """As _matrices(), of a weight whose parts are packed. Raises ValueError.

        Parts in different formats are a chain if each begins with a panel, and else become one in their common format.
        """
        *experts, n_rows, k = weight.shape
        count = math.prod(experts)
        assert sum(rows for _, rows in formats) == count * n_rows, f"{weight.name} has other rows"
        parts = _parts(formats, is_whole=bool(experts or gate_rows))
        assert len(parts) == 1 or count == 1
        sizes = [len(_packed_rows(part.rows // count, gate_rows)) for part in parts]
        read = () if self._is_restored else self._weights.read_packed(weight.name)
        matrices = [
            matrix
            for part, outputs in zip(parts, sizes, strict=True)
            for matrix in self._pack_groups(weight, part, read, count, outputs, k, gate_rows)
        ]
        rows, size = _packed_rows(n_rows, gate_rows), count * sum(sizes)
        scale = self._scale(factor, size)
        addend = self._vector(bias, size, rows, factor=factor) if bias else 0
        chained = (Matrix * len(matrices))(*matrices)
        for matrix, vectors in zip(chained, _of_each([each.outputs for each in matrices], addend, scale), strict=True):
            matrix.bias, matrix.scale = vectors
        if len(parts) > 1:
            self._keepalive.append(chained)
            for index, matrix in enumerate(chained[:-1]):
                chained[index].next = ctypes.addressof(chained) + (index + 1) * ctypes.sizeof(matrix)
        return chained

    def _pack_groups(
        self,
        weight: Weight,
        part: _Part,
        read: tuple[PackedMatrix, ...],
        count: int,
        outputs: int,
        k: int,
        gate_rows: int,
    ) -> list[Matrix]:
        """Packs the matrices of a part, whose rows follow each other. Raises ValueError."""
        stored = part.format
        if k % stored.group:
            raise ValueError(f"{weight.name} has {k} columns, no multiple of the {stored.group} that share a scale")
        number = self._library.ink_format(f"packed{stored.bits}".encode(), self._is_bf16)
        described = Matrix(
            outputs=outputs,
            steps=self._library.ink_steps(k, self._is_bf16, number),
            format=number,
            group=stored.group,
            scales=_SCALE_KINDS[stored.scales],
            has_offsets=stored.has_offsets,
            table=(ctypes.c_int8 * 16)(*stored.table),
        )
        n_bytes = self._library.ink_grouped_bytes(described, self._is_bf16)
        start = self.memory.allocate(count * n_bytes)
        whole = None if self._is_restored else _checked(weight, concatenate(read[part.parts]), stored, (part.rows, k))
        described.have_sign = self._stored(LANES, lambda: _signs(whole)) if stored.scales == "multiples" else 0
        matrices = []
        for index in range(count):
            matrix = Matrix.from_buffer_copy(described)
            matrix.packed = start + index * n_bytes
            if whole is not None:
                rows = part.rows // count
                self._copy_groups(whole.take(slice(index * rows, (index + 1) * rows)), gate_rows, matrix)
            matrices.append(matrix)
        return matrices

    def _copy_groups(self, source: PackedMatrix, gate_rows: int, to: Matrix) -> None:
        arrays = [source.codes, source.scales.values, source.offsets and source.offsets.values]
        arrays += [source.scales.units, source.offsets and source.offsets.units]
        whole = [None if array is None else np.ascontiguousarray(array) for array in arrays]
        groups = Groups(*(None if array is None else address_of(array) for array in whole))
        self._library.ink_pack_groups(self._pool, groups, source.shape[0], gate_rows, self._is_bf16, to)

    def _scale(self, factor: float, size: int) -> int:
        """Address of a factor of sums for so many outputs; 0 if it is 1."""
        return self._stored(size, lambda: np.full(size, factor, np.float32)) if factor != 1.0 else 0

    def _vector(
        self,
        weight: Weight,
        size: int = 0,
        rows: list[int] | None = None,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
    ) -> int:
        """Address of a parameter * factor + offset in float32, padded to whole vectors, or arranged as `rows` says.

        size: numbers of the result, if they are arranged.
        """
        size = size or _round_up(math.prod(weight.shape), LANES)

        def numbers() -> Array:
            array = as_float32(self._weights.read(weight.name, self._dtype)).reshape(-1)
            if (factor, offset) != (1.0, 0.0):
                array = array * np.float32(factor) + np.float32(offset)
            return _rearranged(array.reshape(-1, weight.shape[-1]), rows) if rows else _padded(array, LANES)

        return self._stored(size, numbers)

    def _stored(self, size: int, numbers: Callable[[], Array]) -> int:
        """Address of `size` float32 numbers in `memory`."""
        address = self.memory.allocate(4 * size)
        if not self._is_restored:
            array = np.ascontiguousarray(numbers(), np.float32)
            assert array.size == size
            ctypes.memmove(address, address_of(array), array.nbytes)
        return address

    def _kept(self, numbers: Array) -> int:
        """Returns the address of a float32 copy that lives as long as the decoder."""
        self._keepalive.append(np.array(numbers, np.float32))
        return address_of(self._keepalive[-1])


def _padded(numbers: Array, unit: int) -> Array:
    """Followed by zeros, up to a multiple of `unit`."""
    return np.pad(numbers, (0, -numbers.size % unit))


def _rearranged(numbers: Array | None, rows: list[int] | None) -> Array:
    """The numbers of these rows of each matrix; 0 for padding."""
    assert numbers is not None
    array: Array = np.pad(numbers, ((0, 0), (0, 1)))[:, rows]
    return array


def _packed_rows(n_rows: int, gate_rows: int) -> list[int]:
    """The row of each output of the packed matrix, in whole panels; -1 for padding."""
    if not gate_rows:
        return [*range(n_rows), *[-1] * (-n_rows % PANEL)]
    blocks, halves = range(0, gate_rows, LANES), (0, gate_rows)
    rows = [(first + lane, half) for first in blocks for half in halves for lane in range(LANES)]
    return [row + half if row < gate_rows else -1 for row, half in rows]


def _of_each(sizes: Items[int], *addresses: int) -> list[list[int]]:
    """Where the numbers of each matrix are in vectors of all of them; 0 stays 0."""
    starts = accumulate(sizes[:-1], initial=0)
    return [[address and address + 4 * start for address in addresses] for start in starts]


def _parts(formats: tuple[tuple[PackedFormat, int], ...], *, is_whole: bool) -> list[_Part]:
    """Parts in the same format as one; all of them, if they are to be whole or one does not begin with a panel."""
    runs, first = list[_Part](), 0
    for each, members in groupby(formats, key=lambda part: part[0]):
        rows = [n_rows for _, n_rows in members]
        runs.append(_Part(each, sum(rows), slice(first, first + len(rows))))
        first += len(rows)
    if len(runs) == 1 or not (is_whole or any(part.rows % PANEL for part in runs[:-1])):
        return runs
    return [_Part(common_format([each for each, _ in formats]), sum(n_rows for _, n_rows in formats), slice(None))]


def _checked(weight: Weight, matrix: PackedMatrix, stored: PackedFormat, shape: tuple[int, int]) -> PackedMatrix:
    """The matrix, whose scales products can compute with. Raises ValueError."""
    assert (matrix.format, matrix.shape) == (stored, shape), f"{weight.name} has other numbers than its header says"
    try:
        matrix.check()
        for numbers in (matrix.scales, matrix.offsets):
            if stored.scales == "multiples" and numbers and numbers.values.dtype not in (np.int8, np.uint8):
                raise ValueError(f"holds multiples of {numbers.values.dtype}, only those of a byte are computed with")
    except ValueError as error:
        raise ValueError(f"{weight.name} {error}") from None
    return matrix


def _signs(matrix: PackedMatrix | None) -> Array:
    """Whether multiples have a sign, of scales and of offsets: 1 or 0."""
    assert matrix
    have_sign = [numbers is not None and numbers.values.dtype == np.int8 for numbers in (matrix.scales, matrix.offsets)]
    return _padded(np.array(have_sign, np.float32), LANES)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
