"""Translates a decoder into a list of native operations, and packs its matrices.

Registers are numbered as in source/steps.h, kinds as in source/interface.h, norms as in source/elementwise.h, which
numbers activations as model/config.py lists them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import torch
from torch import Tensor

from app.engine.cpu.library import HugepageAllocator, Matrix, Operation, Shape
from app.engine.quantization.int8_weights import quantize
from model.config import Activation, ModelConfig
from model.nn.decoder_program import BlockOperation, Kind, Register, decoder_program
from model.nn.transformer import Decoder

ReadTensor = Callable[[str], Mapping[str, Tensor]]
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
        decoder: Decoder,
        pool: int,
        *,
        int8: bool = False,
        read: ReadTensor | None = None,
    ) -> None:
        """pool: threads that pack. read: reads a tensor of a decoder on the meta device, one at a time."""
        self.config, self._library, self._pool, self._read = decoder.config, library, pool, read
        self._names = {id(parameter): name for name, parameter in decoder.named_parameters()}
        self.dtype = decoder.embedding.dtype
        self._int8 = int8
        self._allocator = HugepageAllocator()
        self._keepalive: list[Any] = []
        self._operations: list[Operation] = []
        self.embedding = self._matrix(decoder.embedding, None if decoder.untied_head is not None else decoder.head_bias)
        head = decoder.untied_head
        self.head = self.embedding if head is None else self._matrix(head, decoder.head_bias)
        for operation in decoder_program(decoder):
            self._pack(operation)
        self._shape = self._make_shape(decoder)

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

    def shape(self, cache: Tensor) -> Shape:
        """The decoder's shape with this cache [layer, 2, block, kv head, 16 * padded_head_dim]."""
        self._shape.cache, self._shape.n_blocks = cache.data_ptr(), cache.shape[2]
        return self._shape

    def _make_shape(self, decoder: Decoder) -> Shape:
        c = self.config
        weight, bias = self._norm_addresses(decoder.norm) if c.final_norm else (0, 0)
        operations = (Operation * len(self._operations))(*self._operations)
        columns = self._columns()
        self._keepalive += [operations, columns]
        return Shape(
            is_bf16=self.dtype == torch.bfloat16,
            n_registers=len(Register),
            query_heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_width=c.head_dim,
            window=c.sliding_window or 0,
            rotary_half=c.effective_rotary_dim // 2 if c.positions == "rotary" else 0,
            width=c.width,
            n_operations=len(operations),
            final_norm=_NORMS[c.norm] if c.final_norm else 0,
            padded_head=padded_head_dim(c),
            attention_scale=(c.head_dim if c.attention_scale == "head_dim" else c.width) ** -0.5,
            embedding_scale=c.embedding_scale,
            soft_cap=c.logit_soft_cap or 0.0,
            eps=c.norm_eps,
            rope_table=self._float32_address(decoder._buffers["rope_PC"]),
            position_embeddings=self._float32_address(
                decoder._buffers["sinusoids_PD"] if decoder.position_embedding is None else decoder.position_embedding
            ),
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
        kind, source, target, module = operation
        fields: dict[str, Any] = {}
        match kind:
            case Kind.NORM:
                norm = 0 if module is None else _NORMS[self.config.norm]
                if target == Register.RESIDUAL and not norm:
                    return
                weight, bias = self._norm_addresses(module) if norm else (0, 0)
                fields = {"flag": norm, "columns": self.config.width, "weight": weight, "bias": bias}
            case Kind.LINEAR:
                gate_rows = 0
                if target == Register.HIDDEN:
                    gate_rows = self.config.mlp_width if self.config.gated else 0
                    fields = {"flag": _ACTIVATIONS[self.config.activation], "gated": self.config.gated}
                fields["matrix"] = ctypes.pointer(self._matrix(module.weight, module.bias, gate_rows=gate_rows))
            case Kind.ROPE_CACHE:
                norms = (self._float32_address(getattr(x, "weight", None)) for x in (module.q_norm, module.k_norm))
                fields = {"layer": module.layer} | dict(zip(("weight", "bias"), norms, strict=True))
            case Kind.ATTENTION:
                fields = {"layer": module.layer}
            case Kind.ADD:
                fields = {"columns": self.config.width}
        eps = self.config.norm_eps if kind in (Kind.NORM, Kind.ROPE_CACHE) else 0.0
        self._operations.append(Operation(kind=kind, source=source, target=target, eps=eps, **fields))

    def _tensor(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter's numbers, read now if it is on the meta device."""
        if parameter is None or not parameter.is_meta:
            return parameter
        assert self._read, "a decoder on the meta device needs its tensors"
        name = self._names[id(parameter)]
        return self._read(name)[name]

    def _norm_addresses(self, norm: Any) -> tuple[int, int]:
        weight, bias = (
            None if numbers is None else torch.nn.functional.pad(numbers, (0, -len(numbers) % LANES))
            for numbers in map(self._tensor, (norm.weight, getattr(norm, "bias", None)))
        )
        return self._float32_address(weight), self._float32_address(bias)

    def _matrix(self, weight: Tensor, bias: Tensor | None, *, gate_rows: int = 0) -> Matrix:
        weight, bias = cast(Tensor, self._tensor(weight)), self._tensor(bias)
        n_rows, k = weight.shape
        numbers, scales = quantize(weight) if self._int8 else (weight.detach().contiguous(), None)
        panels = -(-gate_rows // LANES) if gate_rows else -(-n_rows // PANEL)
        is_bf16 = self.dtype == torch.bfloat16
        address = self._allocator.allocate(self._library.ink_packed_bytes(panels, k, is_bf16, self._int8))
        self._library.ink_pack(
            self._pool, numbers.data_ptr(), n_rows, k, gate_rows, panels, is_bf16, self._int8, address
        )
        packed_rows, zero = _packed_rows(n_rows, gate_rows, panels), torch.zeros(1)
        bias_address, scale_address = (
            self._float32_address(None if each is None else torch.cat((each.detach().float(), zero))[packed_rows])
            for each in (bias, scales)
        )
        steps = -(-k // (2 if is_bf16 else 1))
        return Matrix(address, bias_address, scale_address, panels * PANEL, steps, self._int8)

    def _float32_address(self, numbers: Tensor | None) -> int:
        """Returns the address of a float32 copy that lives as long as the program; 0 for None."""
        if (numbers := self._tensor(numbers)) is None:
            return 0
        self._keepalive.append(numbers.detach().to(torch.float32, copy=True).contiguous())  # not the file, mapped
        address: int = self._keepalive[-1].data_ptr()
        return address


def _packed_rows(n_rows: int, gate_rows: int, panels: int) -> list[int]:
    """The row of each output of the packed matrix, -1 for padding."""
    if not gate_rows:
        return [row if row < n_rows else -1 for row in range(panels * PANEL)]
    outputs = [(panel * LANES + lane, half) for panel in range(panels) for half in (0, 1) for lane in range(LANES)]
    return [row + half * gate_rows if row < gate_rows else -1 for row, half in outputs]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
