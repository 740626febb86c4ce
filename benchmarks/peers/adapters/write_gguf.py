"""Converts a weights directory to GGUF: `python -m benchmarks.peers.adapters.write_gguf DIR FILE bf16|f32|int8`.

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
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from numpy.typing import NDArray

from benchmarks.peers.adapters.gguf_names import convert_layout, gguf_name

_FORMATS = {
    "bf16": GGMLQuantizationType.BF16,
    "f32": GGMLQuantizationType.F32,
    "int8": GGMLQuantizationType.Q8_0,
}


def main(directory: Path, target: Path, precision: str) -> None:
    """Norms, biases and positions stay in float32, as in llama.cpp's own converter."""
    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(target, config["model_type"])
    (_write_gpt2 if config["model_type"] == "gpt2" else _write_llama)(writer, config)
    _write_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()))
    heads = config.get("num_attention_heads", config.get("n_head"))
    for name, values in _tensors(directory / "model.safetensors"):
        values = convert_layout(name, values, heads=heads, kv_heads=config.get("num_key_value_heads", heads))
        kind = _FORMATS[precision] if values.ndim == 2 and "wpe" not in name else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_llama(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_gpt2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _write_tokenizer(writer: GGUFWriter, raw: dict[str, Any]) -> None:
    """Byte-level BPE; the pre-tokenizer is nearly that of Llama 3."""
    ids: dict[str, int] = raw["model"]["vocab"]
    special = {token["content"] for token in raw["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
