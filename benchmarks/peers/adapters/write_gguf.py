"""Converts a weights directory to GGUF: `python -m benchmarks.peers.adapters.write_gguf DIR bf16|f32|int8 FILE`.

llama.cpp's own converter recognizes tokenizers by their checksum, and rejects one that was trained here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from numpy.typing import NDArray

_FORMATS = {
    "bf16": GGMLQuantizationType.BF16,
    "f32": GGMLQuantizationType.F32,
    "int8": GGMLQuantizationType.Q8_0,
}


_ARCHITECTURES = {
    "gpt2": MODEL_ARCH.GPT2,
    "llama": MODEL_ARCH.LLAMA,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "olmoe": MODEL_ARCH.OLMOE,
}


def main(directory: Path, precision: str, target: Path) -> None:
    """Norms, biases and positions stay in float32, as in llama.cpp's own converter, and so do routers."""
    config = json.loads((directory / "config.json").read_text())
    family = config["model_type"]
    architecture, is_gpt2 = _ARCHITECTURES[family], family == "gpt2"
    writer = GGUFWriter(target, MODEL_ARCH_NAMES[architecture])
    (_write_gpt2 if is_gpt2 else _write_llama)(writer, config)
    heads = config["n_head"] if is_gpt2 else config["num_attention_heads"]
    kv_heads = heads if is_gpt2 else config["num_key_value_heads"]
    layers = config["n_layer"] if is_gpt2 else config["num_hidden_layers"]
    names = get_tensor_name_map(architecture, layers)
    tensors = dict(_stacked(_tensors(directory / "model.safetensors")))
    rows = next(len(values) for name, values in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    _write_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()), rows)
    for name, values in tensors.items():
        values = convert_layout(family, name, values, heads=heads, kv_heads=kv_heads)
        is_matrix = values.ndim > 1 and "wpe" not in name and not name.endswith("mlp.gate.weight")
        kind = _FORMATS[precision] if is_matrix else GGMLQuantizationType.F32
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, f"llama.cpp has no tensor like {name}"
        writer.add_tensor(gguf_name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stacked(tensors: Iterator[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """One tensor [experts, rows, columns] instead of one for each expert."""
    experts: dict[str, dict[int, NDArray[Any]]] = {}
    for name, values in tensors:
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
        else:
            yield name, values
    for name, each in experts.items():
        yield name, np.stack([each[number] for number in sorted(each)])


def convert_layout(family: str, name: str, values: NDArray[Any], *, heads: int, kv_heads: int) -> NDArray[Any]:
    """Transposes GPT-2's matrices, adds Gemma's 1 to norms, and reorders Llama's rows: llama.cpp's RoPE pairs neighbors
    there, Hugging Face's halves.
    """
    if family == "gpt2" and values.ndim == 2 and (".attn.c_" in name or ".mlp.c_" in name):
        return np.ascontiguousarray(values.T)
    if family == "gemma3_text" and name.endswith("norm.weight"):
        return values + 1
    if family == "llama" and name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
        halves = values.reshape(heads if "q_proj" in name else kv_heads, 2, -1, values.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def _write_llama(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base({**config, **config.get("rope_parameters", {})}["rope_theta"])  # transformers 4 and 5
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _write_gpt2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _write_tokenizer(writer: GGUFWriter, raw: dict[str, Any], rows: int) -> None:
    """Byte-level BPE, with a pre-tokenizer like Llama 3. llama.cpp wants a token for each row of the embedding."""
    ids: dict[str, int] = raw["model"]["vocab"]
    special = {token["content"] for token in raw["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    tokens += [f"[unused {number}]" for number in range(rows - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """NumPy has no bfloat16: its bits are the upper half of a float32."""
    for name, entry in safetensors.deserialize(path.read_bytes()):
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(entry["data"], dtype=np.uint16).astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(entry["shape"])
        else:
            yield name, np.frombuffer(entry["data"], dtype=np.float32).reshape(entry["shape"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
