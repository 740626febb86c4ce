"""Translates a decoder into a list of native operations, and packs its matrices.

Registers are numbered as in source/steps.h, kinds as in source/interface.h, norms as in source/elementwise.h, which
numbers activations as model/config.py lists them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from app.engine.cpu.library import HugepageAllocator, Matrix, Operation, Shape, address_of
from model.config import Activation, ModelConfig
from model.nn.decoder_program import BlockOperation, Kind, Register, decoder_program
from model.number_formats import Array, as_float32
from model.parameter_shapes import parameter_shapes
from model.positions import rope_table, sinusoid_table

ReadTensor = Callable[[str, str], Array]
"""Reads a parameter of the decoder in a number format: name, float32 or bfloat16 (as uint16)."""
LANES = 16
PANEL = 2 * LANES
BLOCK = 16
"""Tokens of a cache block, as many as a vector has lanes."""
_NORMS = {"none": 0, "rmsnorm": 1, "layernorm": 2}
_ACTIVATIONS = {name: number for number, name in enumerate(get_args(Activation), 1)}


def padded_head_dim(config: ModelConfig) -> int:
    """Numbers of a head in the native cache: head_dim, rounded up to whole vectors."""
    return _round_up(config.head_dim, LANES)


class Program:
    """Packed weights and operations of one decoder. Keep it alive: the kernels hold pointers into it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        read: ReadTensor,
        pool: int,
        *,
        dtype: str,
        int8: bool = False,
        restored: HugepageAllocator | None = None,
    ) -> None:
        """read: called once for each tensor, which is packed before the next one. pool: threads that pack.

        restored: one region with what an equal program left in `memory`; then nothing is read or packed.
        """
        self.config, self._library, self._pool, self._int8 = config, library, pool, int8
        self._dtype, self._is_bf16 = dtype, dtype == "bfloat16"
        self._shapes = parameter_shapes(config)
        self._read, self._is_restored = read, restored is not None
        self.memory = restored or HugepageAllocator()
        """All that depends on the weights; tables of positions are elsewhere."""
        self._keepalive: list[Any] = []
        self._operations: list[Operation] = []
        self._rope_tables = {rope: self._kept(rope_table(config, rope)) for rope in config.ropes}
        self.embedding = self._matrix("embedding", "head_bias" if config.tied_head else "")
        self.head = self.embedding if config.tied_head else self._matrix("untied_head", "head_bias")
        for operation in decoder_program(config):
            self._pack(operation)
        self._shape = self._make_shape()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the cache's numbers."""
        return np.dtype(np.uint16 if self._is_bf16 else np.float32)

    @property
    def names(self) -> list[str]:
        """Human-readable name of each operation."""
        names = {Kind.NORM: "norm", Kind.ROPE_CACHE: "rotate, cache", Kind.ATTENTION: "attention", Kind.ADD: "add"}
        targets = {Register.QKV: "q, k, v", Register.HIDDEN: "gate, up" if self.config.gated else "up"}
        out = {Register.NORMED: "out", Register.HIDDEN: "down"}
        return [names.get(op.kind) or targets.get(op.target) or out[op.source] for op in self._operations]

    @property
    def logits_columns(self) -> int:
        """Numbers of a row of logits: the vocabulary size, rounded up to whole panels."""
        return _round_up(self.config.vocab_size, PANEL)

    def shape(self, cache: Array) -> Shape:
        """The decoder's shape with this cache [layer, 2, block, kv head, 16 * padded_head_dim]."""
        self._shape.cache, self._shape.n_blocks = address_of(cache), cache.shape[2]
        return self._shape

    def _make_shape(self) -> Shape:
        c = self.config
        weight, bias = self._norm_addresses("norm") if c.final_norm else (0, 0)
        operations = (Operation * len(self._operations))(*self._operations)
        columns = self._columns()
        self._keepalive += [operations, columns]
        return Shape(
            is_bf16=self._is_bf16,
            n_registers=len(Register),
            query_heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_width=c.head_dim,
            width=c.width,
            n_operations=len(operations),
            final_norm=_NORMS[c.norm] if c.final_norm else 0,
            padded_head=padded_head_dim(c),
            embedding_scale=c.embedding_scale,
            soft_cap=c.logit_soft_cap or 0.0,
            eps=c.norm_eps,
            position_embeddings=self._kept(sinusoid_table(c))
            if c.positions == "sinusoidal"
            else self._vector("position_embedding"),
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
        sizes = (c.width, qkv, max(c.width, heads), c.mlp_width, c.n_heads * padded_head_dim(c), c.width)
        return (ctypes.c_int32 * len(Register))(*(_round_up(size, PANEL) for size in sizes))

    def _pack(self, operation: BlockOperation) -> None:
        """Appends the operation; a norm that does nothing is left out, or copies the residual stream."""
        kind, source, target, module, layer = operation
        fields: dict[str, Any] = {}
        match kind:
            case Kind.NORM:
                norm = _NORMS[self.config.norm] if module else 0
                if target == Register.RESIDUAL and not norm:
                    return
                weight, bias = self._norm_addresses(module) if norm else (0, 0)
                fields = {"flag": norm, "columns": self.config.width, "weight": weight, "bias": bias}
            case Kind.LINEAR:
                gate_rows = 0
                if target == Register.HIDDEN:
                    gate_rows = self.config.mlp_width if self.config.gated else 0
                    fields = {"flag": _ACTIVATIONS[self.config.activation], "gated": self.config.gated}
                matrix = self._matrix(f"{module}.weight", f"{module}.bias", gate_rows=gate_rows)
                fields["matrix"] = ctypes.pointer(matrix)
            case Kind.ROPE_CACHE:
                norms = (self._vector(f"{module}.{name}.weight") for name in ("q_norm", "k_norm"))
                fields = {"layer": layer} | dict(zip(("weight", "bias"), norms, strict=True))
                if rope := self.config.layers[layer].rope:
                    fields |= {
                        "rotary_half": self.config.rotated_dim(rope) // 2,
                        "rope_table": self._rope_tables[rope],
                    }
            case Kind.ATTENTION:
                scaled_by = self.config.head_dim if self.config.attention_scale == "head_dim" else self.config.width
                window = self.config.layers[layer].window
                fields = {"layer": layer, "window": window or 0, "attention_scale": scaled_by**-0.5}
            case Kind.ADD:
                fields = {"columns": self.config.width}
        eps = self.config.norm_eps if kind in (Kind.NORM, Kind.ROPE_CACHE) else 0.0
        self._operations.append(Operation(kind=kind, source=source, target=target, eps=eps, **fields))

    def _norm_addresses(self, norm: str) -> tuple[int, int]:
        return self._vector(f"{norm}.weight"), self._vector(f"{norm}.bias")

    def _matrix(self, weight: str, bias: str, *, gate_rows: int = 0) -> Matrix:
        n_rows, k = self._shapes[weight]
        panels = -(-gate_rows // LANES) if gate_rows else -(-n_rows // PANEL)
        rows = None if self._is_restored else _packed_rows(n_rows, gate_rows, panels)
        address = self.memory.allocate(self._library.ink_packed_bytes(panels, k, self._is_bf16, self._int8))
        scales = None if self._is_restored else self._pack_matrix(weight, gate_rows, panels, address)
        scale_address = self._stored(panels * PANEL, lambda: _rearranged(scales, rows)) if self._int8 else 0
        bias_address = self._vector(bias, panels * PANEL, rows)
        steps = -(-k // (2 if self._is_bf16 else 1))
        return Matrix(address, bias_address, scale_address, panels * PANEL, steps, self._int8)

    def _pack_matrix(self, weight: str, gate_rows: int, panels: int, address: int) -> Array | None:
        """Packs the tensor to `address`; returns the scales of its rows, if they are int8."""
        numbers, scales = self._read(weight, self._dtype), None
        n_rows, k = numbers.shape
        if self._int8:
            wide, numbers, scales = numbers, np.empty((n_rows, k), np.int8), np.empty(n_rows, np.float32)
            addresses = (address_of(numbers), address_of(scales))
            self._library.ink_quantize(self._pool, address_of(wide), n_rows, k, self._is_bf16, *addresses)
        self._library.ink_pack(
            self._pool, address_of(numbers), n_rows, k, gate_rows, panels, self._is_bf16, self._int8, address
        )
        return scales

    def _vector(self, name: str, size: int = 0, rows: list[int] | None = None) -> int:
        """Address of a parameter in float32, padded to whole vectors, or arranged as `rows` says; 0 if there is none.

        size: numbers of the result, if they are arranged.
        """
        if name not in self._shapes:
            return 0
        size = size or _round_up(math.prod(self._shapes[name]), LANES)

        def numbers() -> Array:
            array = as_float32(self._read(name, self._dtype)).reshape(-1)
            return _rearranged(array, rows) if rows else np.pad(array, (0, size - array.size))

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
        """Returns the address of a float32 copy that lives as long as the program."""
        self._keepalive.append(np.array(numbers, np.float32))
        return address_of(self._keepalive[-1])


def _rearranged(numbers: Array | None, rows: list[int] | None) -> Array:
    """The numbers of these rows; 0 for padding."""
    assert numbers is not None
    array: Array = np.append(numbers, np.float32(0))[rows]
    return array


def _packed_rows(n_rows: int, gate_rows: int, panels: int) -> list[int]:
    """The row of each output of the packed matrix, -1 for padding."""
    if not gate_rows:
        return [row if row < n_rows else -1 for row in range(panels * PANEL)]
    outputs = [(panel * LANES + lane, half) for panel in range(panels) for half in (0, 1) for lane in range(LANES)]
    return [row + half * gate_rows if row < gate_rows else -1 for row, half in outputs]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
