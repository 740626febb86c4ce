"""Tensors of GGUF files as a TensorIndex: dense ones, and quantized ones as packed matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.checkpoint.tensor_index import PackedSource, StoredTensor, TensorIndex
from model.files import CheckpointError
from model.gguf.architectures import EXPERTS, UNUSED
from model.gguf.blocks import PACKED_FORMATS, read_blocks
from model.gguf.gguf_file import GgufFile, GgufTensor
from model.gguf.gguf_model import GgufModel
from model.packed_matrix import PackedMatrix

_DENSE = ("F32", "F16", "BF16")
_MAX_EXPERT_TENSORS = 1 << 17
_REMEDY = (
    "download the model with Q4_K_M or a larger quantization, or the original model with safetensors; supported are "
    f"{', '.join((*_DENSE, *PACKED_FORMATS))}"
)


def index_gguf(model: GgufModel) -> TensorIndex:
    """Indexes all tensors that hold parameters; those that stack experts are one for each. Raises CheckpointError."""
    dense: dict[str, StoredTensor] = {}
    packed: dict[str, PackedSource] = {}
    for file, tensor in (found for name, found in model.tensors.items() if not UNUSED.fullmatch(name)):
        for name, part in _parts(file, tensor):
            adds_one = model.architecture.adds_one and name.endswith("norm.weight")
            if part.type.name in _DENSE:
                dense[name] = _dense(file, part, name, -1.0 if adds_one else 0.0)
            else:
                packed[name] = _packed(file, part, name)
        if len(dense) + len(packed) > _MAX_EXPERT_TENSORS:
            raise CheckpointError(f"{file.path}: has more than {_MAX_EXPERT_TENSORS} matrices of experts")
    return TensorIndex(model.files[0].path, dense, packed)


def _parts(file: GgufFile, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yields the tensor, or one tensor for each expert, with its number before weight or bias.

    Raises CheckpointError.
    """
    if not EXPERTS.fullmatch(tensor.name):
        yield tensor.name, tensor
        return
    count, *sizes = tensor.shape or (0,)
    if not sizes or count > _MAX_EXPERT_TENSORS:
        raise CheckpointError(f"{file.path}: {tensor.name} has shape {list(tensor.shape)}, which stacks no experts")
    module, _, kind = tensor.name.rpartition(".")
    n_bytes = tensor.n_bytes // count
    for expert in range(count):
        name = f"{module}.{expert}.{kind}"
        yield name, GgufTensor(name, tensor.type, tuple(sizes), tensor.start + expert * n_bytes)


def _dense(file: GgufFile, tensor: GgufTensor, name: str, plus: float) -> StoredTensor:
    if plus and tensor.type.name != "F32":
        raise CheckpointError(f"{file.path}: {name} is {tensor.type.name}; norms must be F32")
    return StoredTensor(name, file.path, tensor.type.name, tensor.shape, tensor.start, file.beginning, plus=plus)


def _packed(file: GgufFile, tensor: GgufTensor, name: str) -> PackedSource:
    kind = tensor.type.name
    if kind not in PACKED_FORMATS:
        raise CheckpointError(f"{file.path}: {name} is {kind}, which is not supported: {_REMEDY}")
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{file.path}: {name} is {kind} with shape {list(tensor.shape)}; only matrices may be")

    def load() -> PackedMatrix:
        blocks = np.frombuffer(file.mapped(tensor), np.uint8, tensor.n_bytes, tensor.start)
        return read_blocks(kind, blocks.reshape(tensor.shape[0], -1, tensor.type.n_bytes))

    return PackedSource(name=name, path=file.path, format=PACKED_FORMATS[kind], shape=tensor.shape, load=load)
