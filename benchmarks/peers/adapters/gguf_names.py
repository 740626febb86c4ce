"""Maps tensor names and layouts of Hugging Face checkpoints to llama.cpp's. NumPy arrays only."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_BLOCK_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_BLOCK = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor. Raises KeyError for other families."""
    prefix, _, kind = name.rpartition(".")
    if match := _BLOCK.fullmatch(prefix):
        return f"blk.{match[1]}.{_BLOCK_TENSORS[match[2]]}.{kind}"
    return f"{_MODEL_TENSORS[prefix]}.{kind}"


def convert_layout(name: str, values: NDArray[Any], *, heads: int, kv_heads: int) -> NDArray[Any]:
    """Transposes GPT-2's matrices, and reorders rows: llama.cpp's RoPE pairs neighbors, Hugging Face's halves."""
    if values.ndim == 2 and (".attn.c_" in name or ".mlp.c_" in name):
        return np.ascontiguousarray(values.T)
    if name.endswith("self_attn.q_proj.weight"):
        return _interleaved(values, heads)
    if name.endswith("self_attn.k_proj.weight"):
        return _interleaved(values, kv_heads)
    return values


def _interleaved(values: NDArray[Any], heads: int) -> NDArray[Any]:
    rows, columns = values.shape
    pairs = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
