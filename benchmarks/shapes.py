"""The measured models: shapes, random weights in memory or in a directory, and the default weights.

Every matrix preserves the scale of its input, so that the output depends on all of them, and logits are as far apart as
those of a trained model: with flat ones the next token would depend on the last bit of a sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import smollm2
from benchmarks.prompts import pseudo_prose
from model.checkpoint.checkpoint import TorchFormat
from model.checkpoint.config_file import load_config
from model.checkpoint.stored_weights import StoredWeights
from model.config import LayerKind, ModelConfig, Rope
from model.families.registry import NATIVE, read_config, write_config
from model.nn.transformer import Decoder
from model.number_formats import Array
from model.packed_matrix import UNIT_COLUMNS, GroupNumbers, PackedFormat, PackedMatrix
from model.parameter_shapes import parameter_shapes
from model.quantize import QuantizedKind, quantized_formats
from model.tokenizer.tokenizer import Tokenizer

ReadTensor = Callable[[str, str], Array]
"""Reads a parameter in a number format: name, float32, float16 or bfloat16 (as uint16)."""
SMOLLM2 = "smollm2"
"""A real model among them: SmolLM2-135M-Instruct, from a package (benchmarks/smollm2.py)."""
_SYLLABLES = [
    consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in ("a", "e", "i", "o", "u", "ai", "ou")
]
_PROSE_PROMPTS = 200
_MAX_TOKENS = 65_536
"""Of a trained tokenizer: a larger vocabulary takes minutes, and a model's may be padded."""
_SPREAD = 2.5
"""Approximate standard deviation of the logits."""


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any) -> ModelConfig:
    heads_and_mlp = {"n_heads": heads, "n_kv_heads": kv_heads, "mlp_width": mlp}
    sizes: dict[str, Any] = {"n_layers": layers, "width": width, **heads_and_mlp, "vocab_size": vocab}
    return ModelConfig(**{**sizes, "head_dim": 64, "context": 1024, **more})


def _rope(theta: float) -> dict[str, Any]:
    return {"layer_kinds": (LayerKind(rope=Rope(theta=theta)),)}


SHAPES = {
    # GPT-2 small: 124 M parameters.
    "A": replace(
        _llama(12, 768, 12, 12, 3072, 50_257),
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        layer_kinds=(LayerKind(),),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    # 135 M parameters: bound by memory bandwidth.
    "B": _llama(30, 576, 9, 3, 1536, 49_152),
    # 15.7 M parameters: fits in the last-level cache; bound by arithmetic.
    "C": _llama(8, 384, 6, 2, 1024, 8192),
    # 1.1 B.
    "1b": _llama(22, 2048, 32, 4, 5632, 32_000, context=4096, tied_head=False),
    # 8.0 B: 16 GB in bfloat16.
    "8b": _llama(32, 4096, 32, 8, 14_336, 128_256, head_dim=128, context=8192, **_rope(500_000.0), tied_head=False),
    # 8.2 B: Qwen3-8B.
    "qwen3-8b": replace(
        _llama(36, 4096, 32, 8, 12_288, 151_936, head_dim=128, context=8192, **_rope(1e6), tied_head=False),
        qk_norm="head",
    ),
}

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    # 1.0 B parameters, 302 M of them in the embedding; 4,096 tokens of its 32,768.
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    },
    # OLMoE 1B-7B with 4 of its 16 layers: 1.9 B parameters, 0.5 B of them for a token.
    "olmoe": {
        "model_type": "olmoe",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    },
}
"""Models of other families by their config.json, in the published sizes."""


def smaller(config: ModelConfig) -> ModelConfig:
    """The same layout in a size for a CPU."""
    kv_heads = 4 if config.n_kv_heads == config.n_heads else 2
    config = replace(config, n_layers=2, n_heads=4, n_kv_heads=kv_heads, head_dim=16)
    return replace(config, width=64, mlp_width=96, vocab_size=320, context=192)


def transformers_config(config: ModelConfig, dtype: str) -> Any:
    """The same shape as transformers' configuration."""
    raw = write_config(config, dtype, None)
    return import_module("transformers").AutoConfig.for_model(raw.pop("model_type"), **raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A weights directory that all engines can convert."""

    name: str
    directory: Path
    config: ModelConfig


def find_model(name: str, *, weights: Path, folder: Path) -> Model:
    """The model called `name`; models other than the default are first written into `folder`. Raises NotAvailable."""
    directory = weights if name == "default" else folder / name
    if name == SMOLLM2:
        smollm2.make(directory)
    elif name != "default" and not (directory / "config.json").exists():
        write_random(FAMILY_SHAPES.get(name) or SHAPES[name], directory)
    return Model(name=name, directory=directory.resolve(), config=load_config(directory))


def write_random(shape: ModelConfig | Mapping[str, Any], directory: Path) -> None:
    """Always the same weights. Writes config.json last: a directory that has it is complete.

    shape: a config.json is written as it is, with the tensors of its family.
    """
    raw = write_config(shape, "bfloat16", 0) if isinstance(shape, ModelConfig) else dict(shape)
    family, config = read_config(raw)
    directory.mkdir(parents=True, exist_ok=True)
    size = min(config.vocab_size, _MAX_TOKENS)
    tokenizer = Tokenizer.train(_texts(size), size)
    state = random_state(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    save_file(family.save(config, state), directory / "model.safetensors", metadata={"format": "pt"})
    for name, text in tokenizer.files().items():
        (directory / name).write_text(text)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _texts(vocab_size: int) -> Iterator[str]:
    """The prompts' prose, often enough to be merged first, then made-up words for the rest of the vocabulary."""
    yield from (pseudo_prose(index=index, words=100, seed=9) for index in range(_PROSE_PROMPTS))
    random = Random(0)
    for _ in range(vocab_size // 8):
        yield " ".join("".join(random.choices(_SYLLABLES, k=random.randint(2, 5))) for _ in range(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInMemory(StoredWeights):
    """Weights for build_engine() that torch reads: these tensors, or else random ones."""

    given: Mapping[str, Tensor] | None = None

    def state(self, target: Any, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """See StoredWeights; `target` is a TorchFormat."""
        if self.given is None:
            return random_state(self.config, device=target.device, dtype=target.dtype, names=names)
        chosen = self.given if names is None else {name: self.given[name] for name in names}
        return {name: tensor.to(target.device, target.dtype) for name, tensor in chosen.items()}

    def read(self, name: str, dtype: str) -> Array:
        """See StoredWeights. Quantization reads; on a GPU, random numbers are others than those of state()."""
        (tensor,) = self.state(TorchFormat(torch.device("cpu"), getattr(torch, dtype)), (name,)).values()
        array: Array = (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()
        return array

    def packed_formats(self, _name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See StoredWeights: none is packed."""
        return ()

    def stored_format(self, _name: str, dtype: str) -> str:
        """See StoredWeights: the tensors have the format that is asked for."""
        return dtype


def weights_in_memory(config: ModelConfig, tensors: Mapping[str, Tensor] | None = None) -> WeightsInMemory:
    """Weights of this shape: these tensors, or else random ones."""
    return WeightsInMemory(
        family=NATIVE,
        config=config,
        bos_id=0,
        hashes={Path("model.safetensors"): f"{0:064x}"},
        given=tensors,
    )


def decoder_of(config: ModelConfig, state: Mapping[str, Tensor]) -> Decoder:
    """A decoder that holds these tensors, without copies."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(dict(state), assign=True)
    decoder.make_tables()
    return decoder.requires_grad_(False).eval()


def parameter_reader(decoder: Decoder) -> ReadTensor:
    """Reads the decoder's parameters for the C++ kernels: name, number format."""
    state = decoder.state_dict()

    def read(name: str, dtype: str) -> Array:
        tensor = state[name].to(getattr(torch, dtype)).contiguous()
        array: Array = (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()
        return array

    return read


class DenseWeights:
    """PackedWeights of which none is packed."""

    def __init__(self, read: ReadTensor) -> None:
        self.read = read

    def packed_formats(self, _name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        return ()

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """See PackedWeights."""
        raise AssertionError(f"{name} is not packed")


class RandomPacked:
    """Random matrices in the formats of --quantize, which preserve the scale of their input; others are dense."""

    def __init__(self, config: ModelConfig, kind: QuantizedKind, read: ReadTensor) -> None:
        """read: of dense parameters."""
        self.read, self._shapes = read, parameter_shapes(config)
        self._formats = {name: stored for name, stored in quantized_formats(config, kind).items() if stored}

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        stored = self._formats.get(name)
        return ((stored, math.prod(self._shapes[name][:-1])),) if stored else ()

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """See PackedWeights."""
        random, stored = np.random.default_rng(0), self._formats[name]
        *experts, columns = self._shapes[name]
        rows = math.prod(experts)
        shape, units = (rows, columns // stored.group), -(-columns // UNIT_COLUMNS)
        codes = np.frombuffer(random.bytes(rows * columns * stored.bits // 8), np.uint8 if stored.table else np.int8)
        size = columns**-0.5 / max(map(abs, stored.table or (127,)))
        if stored.scales == "float16":
            scales = GroupNumbers(values=(random.uniform(0.5, 1.5, shape) * size).astype(np.float16))
            return (PackedMatrix(format=stored, codes=codes.reshape(rows, -1), scales=scales),)
        unit = np.full((rows, units), size / 255, np.float16)
        scales = GroupNumbers(values=random.integers(128, 256, shape, np.uint8), units=unit)
        offsets = GroupNumbers(values=random.integers(-127, 128, shape, np.int8), units=unit)
        return (PackedMatrix(format=stored, codes=codes.reshape(rows, -1), scales=scales, offsets=offsets),)


def random_state(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Always the same on the same device; takes no more memory than the tensors themselves. names: all by default."""
    wanted = None if names is None else {*names}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).named_parameters()}
    state = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        if wanted is not None and name not in wanted:
            continue
        generator = torch.Generator(device).manual_seed(seed)
        mean, deviation = 0.0, 0.1
        if len(shape) > 1:
            deviation = _SPREAD * config.width**-0.5 if "embedding" in name or "head" in name else shape[-1] ** -0.5
        elif not name.endswith("bias"):
            mean = 0.0 if config.norm_offset else 1.0
        state[name] = torch.empty(shape, device=device, dtype=dtype).normal_(mean, deviation, generator=generator)
    return state
