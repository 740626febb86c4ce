"""Writes checkpoints of transformers as GGUF files, as llama.cpp's converter does, from its rules and not from ours.

The gguf package knows the names of the tensors. What the converter does besides: it reorders rows of queries and keys
for rotations of neighboring numbers, transposes and splits matrices, stacks experts, adds 1 to norms, and writes the
numbers of xIELU as arrays of the metadata.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from model.number_formats import Array
from tests.support.model.gguf_files import add_value, write_whole

Tensors = Iterator[tuple[str, Array]]
ARCHITECTURE_OF = {
    **dict.fromkeys(("llama", "mistral"), "llama"),
    "ministral3": "mistral3",
    "apertus": "apertus",
    **{name: name for name in ("qwen2", "qwen3", "gemma", "gemma2", "gpt2", "phi3", "starcoder2", "stablelm")},
    **{name: name for name in ("olmo", "olmo2", "olmoe", "falcon", "granite", "granitemoe", "smollm3", "arcee")},
    **{name: name for name in ("cohere2", "nemotron", "exaone4", "glm4", "ernie4_5", "seed_oss", "jais2")},
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "olmo3": "olmo2",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""model_type -> general.architecture."""
_PERMUTED = ("llama", "mistral", "ministral3", "olmo", "granite", "granitemoe", "granitemoeshared", "smollm3", "arcee")
_ONE_ADDED = ("gemma", "gemma2", "gemma3_text", "nemotron")


def write_converted(
    directory: Path,
    path: Path,
    kind: str = "F32",
    *,
    is_unpacked: bool = False,
    rounds_to_bfloat16: bool = False,
    tokenizer: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """The checkpoint of a directory as a GGUF file.

    kind: type of matrices whose rows it fits. is_unpacked: writes the numbers of that type as F32.
    rounds_to_bfloat16: all numbers of the checkpoint. tokenizer: its metadata. architecture: in place of the family's.
    """
    config = json.loads((directory / "config.json").read_text())
    name = architecture or ARCHITECTURE_OF[config["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, config)
    _add_xielu(writer, directory)
    for key, value in (tokenizer or {"tokenizer.ggml.tokens": ["a"]}).items():
        add_value(writer, key, value)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(number, layers)
    for source, array in _rope_tensors(config):
        writer.add_tensor(source, array)
    for source, array in _converted(directory, config, rounds_to_bfloat16=rounds_to_bfloat16):
        target = source if source.startswith("blk.") else names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target, f"the package knows no name for {source}"
        quantized = gguf.GGMLQuantizationType[kind]
        block = gguf.GGML_QUANT_SIZES[quantized][0]
        if kind == "F32" or array.ndim < 2 or array.shape[-1] % block or "bias" in target:
            writer.add_tensor(target, array)
            continue
        rows = gguf.quants.quantize(array, quantized)
        if is_unpacked:
            writer.add_tensor(target, gguf.quants.dequantize(rows, quantized))
        else:
            writer.add_tensor(target, rows, raw_dtype=quantized)
    write_whole(writer)
    return path


def _converted(directory: Path, config: dict[str, Any], *, rounds_to_bfloat16: bool) -> Tensors:
    tensors = {name: tensor for name, tensor in _tensors(directory).items() if ".act_fn." not in name}
    if rounds_to_bfloat16:
        tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    family = config["model_type"]
    if config.get("tie_word_embeddings") is not False:
        tensors.pop("lm_head.weight", None)
    experts = {name for name in tensors if re.search(r"\.experts\.\d+\.", name)}
    yield from _stacked({name: tensors.pop(name) for name in sorted(experts)})
    for name, tensor in tensors.items():
        for target, part in _changed(family, config, name, tensor):
            if family in _PERMUTED and re.search(r"(q|k)_proj\.(weight|bias)$", target):
                part = _permuted(part, config, is_query="q_proj" in target)
            if family in _ONE_ADDED and target.endswith("norm.weight"):
                part = part + 1
            yield target, part.contiguous().numpy()


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def _add_xielu(writer: gguf.GGUFWriter, directory: Path) -> None:
    of_layers: dict[str, dict[int, float]] = {}
    for name, tensor in _tensors(directory).items():
        if found := re.search(r"layers\.(\d+)\.mlp\.act_fn\.(\w+)$", name):
            of_layers.setdefault(found[2], {})[int(found[1])] = tensor.item()
    for name, numbers in of_layers.items():
        add = getattr(writer, f"add_xielu_{name}")
        add([numbers[layer] for layer in range(len(numbers))])


def _stacked(tensors: dict[str, torch.Tensor]) -> Tensors:
    """The experts of a layer as one tensor."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        assert found
        groups.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
    for name, parts in groups.items():
        yield name, torch.stack([parts[i] for i in range(len(parts))]).numpy()


def _permuted(rows: torch.Tensor, config: dict[str, Any], *, is_query: bool) -> torch.Tensor:
    heads = config["num_attention_heads"]
    count = heads if is_query else config.get("num_key_value_heads") or heads
    return rows.reshape(count, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _changed(
    family: str, config: dict[str, Any], name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    if family == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
        yield name, tensor.T
    elif family == "gpt_neox" and "query_key_value" in name:
        heads = config["num_attention_heads"]
        yield name, tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    elif family == "falcon" and "query_key_value" in name:
        yield name, _falcon_qkv(config, tensor)
    elif family in ("granitemoe", "granitemoeshared"):
        yield from _granite_experts(name, tensor)
    elif family == "gpt_oss" and ".experts." in name:
        yield from _gpt_oss_experts(name, tensor)
    elif name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif family == "ernie4_5_moe" and "e_score_correction_bias" in name:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor.squeeze()
    elif name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        base = name.removesuffix("gate_up_proj")
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _falcon_qkv(config: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    heads = config["num_attention_heads"]
    is_new = config.get("new_decoder_architecture")
    kv_heads = config["num_kv_heads"] if is_new else 1 if config.get("multi_query", True) else heads
    size = config["hidden_size"] // heads
    parts = tensor.reshape(kv_heads, heads // kv_heads + 2, size, *tensor.shape[1:])
    q, k, v = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)])


def _granite_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    found = re.search(r"layers\.(\d+)\.", name)
    layer = f"blk.{found[1]}" if found else ""
    if name.endswith(("block_sparse_moe.input_linear.weight", "experts.gate_up_proj")):
        gate, up = tensor.chunk(2, dim=1)
        yield f"{layer}.ffn_gate_exps.weight", gate
        yield f"{layer}.ffn_up_exps.weight", up
    elif "shared_mlp.input_linear" in name:
        gate, up = tensor.chunk(2)
        yield f"{layer}.ffn_gate_shexp.weight", gate
        yield f"{layer}.ffn_up_shexp.weight", up
    else:
        yield name, tensor


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of gate and up alternate, and matrices are transposed."""
    ending = "bias" if name.endswith("_bias") else "weight"
    name = name.removesuffix("_bias")
    tensor = tensor if ending == "bias" else tensor.transpose(1, 2)
    if "gate_up_proj" in name:
        yield f"{name.replace('gate_up_proj', 'gate_proj')}.{ending}", tensor[:, ::2]
        yield f"{name.replace('gate_up_proj', 'up_proj')}.{ending}", tensor[:, 1::2]
    else:
        yield f"{name}.{ending}", tensor


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope) if "full_attention" in rope else rope


def _head_dim(config: dict[str, Any]) -> int:
    width = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    size: int = config.get("head_dim") or width // heads
    return size


def _rope_tensors(config: dict[str, Any]) -> Tensors:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
    if rope.get("rope_type") != "llama3":
        return
    dim = _head_dim(config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for wavelength in (2 * math.pi / frequencies).tolist():
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", np.array(factors, np.float32)


def _first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family, width = config["model_type"], _first(config, "hidden_size", "n_embd")
    heads = _first(config, "num_attention_heads", "n_head")
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", default=2048))
    writer.add_embedding_length(width)
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer"))
    mlp = _first(config, "intermediate_size", "ffn_hidden_size", "n_inner", default=4 * width)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    kv_heads = _first(config, "num_key_value_heads", default=heads)
    if family == "falcon":
        kv_heads = _first(config, "num_kv_heads", default=heads) if config.get("new_decoder_architecture") else 1
    writer.add_head_count_kv(1 if family == "gpt_bigcode" else kv_heads)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    eps = _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(eps or 1e-5)
    _add_rope(writer, config)
    _add_experts(writer, config)
    if family in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    for key, add in {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }.items():
        if config.get(key):
            add(config[key])
    if family in ("gemma2", "gemma3_text", "cohere2", "exaone4", "olmo3", "gpt_oss", "phi3"):
        if (window := config.get("sliding_window")) or family == "phi3":
            writer.add_sliding_window(window or 0)
        if window and family != "phi3" and config.get("layer_types"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, types = _rope(config), gguf.RopeScalingType
    if not rope and config["model_type"] in ("gpt2", "gpt_bigcode"):
        return
    theta, dim = rope.get("rope_theta", 10_000.0), _head_dim(config)
    if alpha := rope.get("alpha"):
        theta *= alpha ** (dim / (dim - 2))
        writer.add_rope_scaling_type(types.NONE)
        writer.add_rope_scaling_factor(1)
    writer.add_rope_freq_base(theta)
    share = _first(rope, "partial_rotary_factor", default=config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(_head_dim(config) * share))
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(types.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(types.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if rope.get("beta_fast") is not None:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            if rope.get("beta_slow") is not None:
                writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        case "longrope":
            writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
            scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
            usual = math.sqrt(1 + math.log(scale) / math.log(config["original_max_position_embeddings"]))
            writer.add_rope_scaling_attn_factors(rope.get("attention_factor") or (usual if scale > 1 else 1.0))
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if config["model_type"] == "gemma3_text" and local:
        writer.add_float32("gemma3.rope.freq_base_swa", local["rope_theta"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    count = _first(config, "num_local_experts", "num_experts", "moe_num_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(_first(config, "num_experts_per_tok", "moe_k"))
    if width := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if shared := config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
