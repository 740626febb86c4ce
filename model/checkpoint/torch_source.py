"""Weights of torch.save() as conversion sources: pytorch_model.bin, its shards, and the checkpoints of nanoGPT.

The pickles are read elsewhere (model/checkpoint/torch_file.py); here only the numbers are, at the offsets that a
confined process found, after they are checked against the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from model.checkpoint.converted_directory import CONFIG_FILE, ConversionSource, companion_files
from model.checkpoint.stored_weights import are_equal, match_weights
from model.checkpoint.tensor_index import StoredTensor, TensorIndex, adapter_problem
from model.checkpoint.torch_file import Argument, TorchFile, TorchTensor
from model.config import Activation, ConfigError
from model.families.registry import read_config, text_keys
from model.files import CheckpointError, entry_exists, read_json, read_struct, regular_file
from model.tokenizer.character_tokenizer import character_tokenizer

BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
Read = Callable[[Path], TorchFile]
"""Reads a file's pickle in a confined process. Raises CheckpointError."""
_MAX_RATIO = 4
"""Bytes of all tensors to bytes of their file: tensors may share numbers, such as a tied head."""
_HEADER_BYTES = 64
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MASK = ".attn.bias"
"""End of the names of causal masks, which older versions of nanoGPT stored."""
_NANOGPT_NAMES = {
    "_orig_mod.": "",  # torch.compile was on
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "position_embedding",
    "transformer.h.": "blocks.",
    "transformer.ln_f.": "norm.",
    ".ln_1.": ".norm_attention.",
    ".attn.c_attn.": ".attention.qkv.",
    ".attn.c_proj.": ".attention.out.",
    ".ln_2.": ".norm_mlp.",
    ".mlp.c_fc.": ".mlp.up.",
    ".mlp.c_proj.": ".mlp.down.",
    "lm_head.weight": "untied_head",
}
_GPT2_END = 50256
"""<|endoftext|> of GPT-2's tokens."""


class _BinIndex(Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.bin\Z")]]


def has_torch_weights(directory: Path) -> bool:
    """Whether the directory's weights are pytorch_model.bin or its shards."""
    return any(entry_exists(directory / name) for name in (BIN_FILE, BIN_INDEX))


def open_bin_directory(directory: Path, read: Read) -> ConversionSource:
    """A Hugging Face directory with pytorch_model.bin or its shards. Raises CheckpointError."""
    names = {path.name for path in directory.iterdir()}
    if problem := adapter_problem(names | {"model.safetensors"}):
        raise CheckpointError(f"{directory / 'adapter_config.json'}: {problem}")
    raw = read_json(directory / CONFIG_FILE)
    if entry_exists(directory / BIN_FILE):
        index = TensorIndex(directory / BIN_FILE, _tensors(directory / BIN_FILE, read(directory / BIN_FILE).tensors))
    else:
        index = _shards(directory, read)
    return _source(directory, raw, index, companion_files(directory))


def _shards(directory: Path, read: Read) -> TensorIndex:
    found: dict[str, StoredTensor] = {}
    shard_of = read_struct(directory / BIN_INDEX, _BinIndex).weight_map
    for shard in sorted(set(shard_of.values())):
        for name, stored in _tensors(directory / shard, read(directory / shard).tensors).items():
            if shard_of.get(name) != shard:
                raise CheckpointError(f"{directory / shard}: holds {name}, which {BIN_INDEX} does not list there")
            found[name] = stored
    if missing := sorted(shard_of.keys() - found.keys()):
        raise CheckpointError(f"{directory / shard_of[missing[0]]}: {missing[0]} is missing, but {BIN_INDEX} lists it")
    return TensorIndex(directory / BIN_INDEX, found)


def open_nanogpt(
    path: Path, read: Read, *, activation: Activation, characters: Mapping[str, int] | None
) -> ConversionSource:
    """A ckpt.pt of nanoGPT in the layout `inkstream`. Raises CheckpointError.

    activation: which GELU the version had. characters: ids of the characters that are its tokens, if they are.
    """
    file = read(path)
    if file.arguments is None:
        raise CheckpointError(
            f"{path}: holds a state dict without the model_args of a nanoGPT; for other models name a directory with "
            f"config.json, {BIN_FILE} and tokenizer.json"
        )
    tensors = [tensor for tensor in file.tensors if not tensor.name.endswith(_MASK)]
    found = _tensors(path, tensors, rename=_native_name)
    head, embedding = found.get("untied_head"), found.get("embedding")
    if is_tied := head is not None and embedding is not None and _are_same(head, embedding):
        del found["untied_head"]
    raw = _nanogpt_config(path, file.arguments, found, is_tied=is_tied, activation=activation)
    files = {}
    if characters is not None:
        if beyond := [number for number in characters.values() if not 0 <= number < raw["vocab_size"]]:
            raise CheckpointError(f"{path}: has {raw['vocab_size']} tokens, and the characters have the id {beyond[0]}")
        files["tokenizer.json"] = character_tokenizer(characters)
    return _source(path, raw, TensorIndex(path, found), files)


def _are_same(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    return (one.start, one.dtype, one.strides) == (other.start, other.dtype, other.strides) or are_equal(one, other)


def _native_name(name: str) -> str:
    for theirs, ours in _NANOGPT_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _nanogpt_config(
    path: Path,
    arguments: Mapping[str, Argument],
    found: Mapping[str, StoredTensor],
    *,
    is_tied: bool,
    activation: Activation,
) -> dict[str, Any]:
    def size(name: str) -> int:
        value = arguments.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{path}: model_args has the {name} {value!r:.40}; it must be a positive number")
        return value

    bias = arguments.get("bias", any(name.endswith(".bias") for name in found))
    if not isinstance(bias, bool):
        raise CheckpointError(f"{path}: model_args has the bias {bias!r:.40}; it must be True or False")
    width, heads = size("n_embd"), size("n_head")
    if width % heads:
        raise CheckpointError(f"{path}: model_args has {heads} heads, which do not divide n_embd {width}")
    return {
        "model_type": "inkstream",
        "vocab_size": size("vocab_size"),
        "context": size("block_size"),
        "width": width,
        "n_layers": size("n_layer"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": width // heads,
        "mlp_width": 4 * width,
        "norm": "layernorm",
        "positions": "learned",
        "activation": activation,
        "gated": False,
        "tied_head": is_tied,
        **dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), bias),
        "eos_token_id": _GPT2_END if size("vocab_size") > _GPT2_END else None,
    }


def _source(place: Path, raw: Mapping[str, Any], index: TensorIndex, files: Mapping[str, bytes]) -> ConversionSource:
    """place: the directory, or the file of a nanoGPT."""
    try:
        text = dict(text_keys(raw))
        family, config = read_config(raw)
    except ConfigError as error:
        where = place / CONFIG_FILE if place.is_dir() else place
        raise CheckpointError(f"{where}: {error}") from None
    return ConversionSource(weights=match_weights(place, text, family, config, index), config=raw, files=files)


def _tensors(
    path: Path, tensors: Sequence[TorchTensor], rename: Callable[[str], str] = lambda name: name
) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, whose numbers all lie in it. Raises CheckpointError."""
    try:
        with regular_file(path).open("rb") as opened:
            header = opened.read(_HEADER_BYTES)
            size = opened.seek(0, 2)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    found: dict[str, StoredTensor] = {}
    n_bytes = 0
    for tensor in tensors:
        _check_place(path, tensor, size)
        n_bytes += math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
        if (name := rename(tensor.name)) in found:
            raise CheckpointError(f"{path}: holds {name} twice")
        strides = None if _is_in_order(tensor) else tensor.strides
        found[name] = StoredTensor(name, path, tensor.dtype, tensor.shape, tensor.start, header, strides)
    if n_bytes > _MAX_RATIO * size:
        raise CheckpointError(f"{path}: has {size} bytes, and its tensors have {n_bytes}: too many share their numbers")
    return found


def _check_place(path: Path, tensor: TorchTensor, size: int) -> None:
    """The confined process has checked the same; but what it read could have taken it over."""
    steps = [(count - 1) * stride for count, stride in zip(tensor.shape, tensor.strides, strict=False)]
    is_sound = len(tensor.shape) == len(tensor.strides) and tensor.dtype in _ITEM_BYTES and tensor.start >= 0
    is_sound = is_sound and min((*tensor.shape, *tensor.strides), default=0) >= 0
    if not is_sound or tensor.start + (1 + sum(steps)) * _ITEM_BYTES[tensor.dtype] > size:
        raise CheckpointError(f"{path}: {tensor.name} does not lie in the file")


def _is_in_order(tensor: TorchTensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
