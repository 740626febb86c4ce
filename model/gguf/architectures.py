"""Architectures of GGUF files: the config.json of their Hugging Face family, and the names of their tensors.

Facts: gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py of https://github.com/ggml-org/llama.cpp. Its converter
reorders the rows of queries and keys of some architectures for a rotation of neighboring numbers, takes fused tensors
apart, and adds 1 to norms that multiply by 1 + weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.config import ConfigError
from model.families.layouts import rotation_interleaved
from model.families.spec import FamilySpec, TensorMapping
from model.gguf.metadata_reader import MetadataReader
from model.gguf.rotations import read_rotation, rotated_share

Config = dict[str, Any]
Names = Mapping[str, str | tuple[str, ...]]
_LAYER = "blk.N"
_NAMES: Names = {
    "embedding": "token_embd.weight",
    "position_embedding": "position_embd.weight",
    "untied_head": "output.weight",
    "head_bias": "output.bias",
    "norm": "output_norm",
    "blocks.N.norm_attention": f"{_LAYER}.attn_norm",
    "blocks.N.norm_attention_output": f"{_LAYER}.post_attention_norm",
    "blocks.N.norm_mlp": f"{_LAYER}.ffn_norm",
    "blocks.N.norm_mlp_output": f"{_LAYER}.post_ffw_norm",
    "blocks.N.attention.qkv": (f"{_LAYER}.attn_q", f"{_LAYER}.attn_k", f"{_LAYER}.attn_v"),
    "blocks.N.attention.q_norm": f"{_LAYER}.attn_q_norm",
    "blocks.N.attention.k_norm": f"{_LAYER}.attn_k_norm",
    "blocks.N.attention.out": f"{_LAYER}.attn_output",
    "blocks.N.attention.sinks": f"{_LAYER}.attn_sinks.weight",
    "blocks.N.mlp.up": (f"{_LAYER}.ffn_gate", f"{_LAYER}.ffn_up"),
    "blocks.N.mlp.down": f"{_LAYER}.ffn_down",
    "blocks.N.mlp.router": f"{_LAYER}.ffn_gate_inp",
    "blocks.N.mlp.choice_bias": f"{_LAYER}.exp_probs_b.bias",
    "blocks.N.mlp.experts.up": (f"{_LAYER}.ffn_gate_exps.E.weight", f"{_LAYER}.ffn_up_exps.E.weight"),
    "blocks.N.mlp.experts.up_bias": (f"{_LAYER}.ffn_gate_exps.E.bias", f"{_LAYER}.ffn_up_exps.E.bias"),
    "blocks.N.mlp.experts.down": f"{_LAYER}.ffn_down_exps.E.weight",
    "blocks.N.mlp.experts.down_bias": f"{_LAYER}.ffn_down_exps.E.bias",
    "blocks.N.mlp.shared.up": (f"{_LAYER}.ffn_gate_shexp", f"{_LAYER}.ffn_up_shexp"),
    "blocks.N.mlp.shared.down": f"{_LAYER}.ffn_down_shexp",
}
"""Modules (or whole tensors) of the Decoder -> names in the files; E is the number of an expert of a stacked tensor."""
_NORM_BEFORE_MLP = {"blocks.N.norm_mlp": f"{_LAYER}.post_attention_norm"}
_TWO_NORMS = {"blocks.N.norm_attention": f"{_LAYER}.attn_norm_2", "blocks.N.norm_mlp": f"{_LAYER}.attn_norm"}
"""Of falcon, where a parallel residual has two."""
EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)")
"""Names of tensors that stack those of all experts of a layer."""
UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?|rope_(freqs|factors_long|factors_short)\.weight")
"""Names of tensors that hold no parameter: a rotation's numbers are in the config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is special about the files of one general.architecture."""

    family: str
    """model_type of its Hugging Face family."""
    read: Callable[[MetadataReader], Config]
    """The keys of its config.json. Raises ConfigError."""
    names: Names = field(default_factory=dict)
    """Changes of the names of tensors."""
    reorders_heads: bool = False
    """Whether the converter reorders the rows of queries and keys."""
    adds_one: bool = False
    """Whether it adds 1 to the weights of norms."""
    layer_arrays: tuple[str, ...] = ()
    """Keys of arrays in the metadata that hold a parameter or a constant of each layer; see layer_tensors()."""

    def family_of_files(self, family: FamilySpec, tensors: Collection[str]) -> FamilySpec:
        """The family with the names and the layout of files that have these tensors."""
        found = {**_NAMES, **self.names}
        if "blk.0.attn_qkv.weight" in tensors:
            found["blocks.N.attention.qkv"] = f"{_LAYER}.attn_qkv"
        if "blk.0.attn_norm_2.weight" in tensors:
            found |= _TWO_NORMS
        if isinstance(family.names.get("blocks.N.mlp.up"), str):
            found["blocks.N.mlp.up"] = f"{_LAYER}.ffn_up"
        layout = family.layout if self.layer_arrays else _unchanged  # which checks the constants
        is_interleaved = self.reorders_heads or family.name in _INTERLEAVED
        return replace(
            family,
            names={module: found[module] for module in family.names if module in found},
            layout=rotation_interleaved if is_interleaved else layout,
            fused={},
            prefix="",
            ignored=UNUSED,
            wrapper=None,
        )


_INTERLEAVED = ("cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4")
"""Families that rotate neighboring numbers; the converter keeps their row order."""


def _unchanged(_config: Any, mapping: TensorMapping) -> TensorMapping:
    return mapping


_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "eps": "layer_norm_epsilon",
}


def _sizes(keys: MetadataReader, eps: str = "rms_norm_eps", renamed: Mapping[str, str] | None = None) -> Config:
    """The sizes of all architectures, by the names that most families give them."""
    width, heads = keys.require("embedding_length"), keys.require("attention.head_count")
    if type(width) is not int or type(heads) is not int or not 0 < heads <= width:
        raise ConfigError(f"embedding_length {width!r:.40} and attention.head_count {heads!r:.40} are no sizes")
    head_dim = keys.get("attention.key_length", width // heads)
    if (of_values := keys.get("attention.value_length", head_dim)) != head_dim:
        raise ConfigError(f"attention.value_length {of_values!r:.40} is not supported, only key_length ({head_dim})")
    sizes = {
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": width,
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.get("feed_forward_length", 0),
        "max_position_embeddings": keys.require("context_length"),
        "eps": keys.require("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }
    if type(head_dim) is not int or head_dim < 1:
        raise ConfigError(f"attention.key_length {head_dim!r:.40} is no size")
    return {{"eps": eps, **(renamed or {})}.get(name, name): value for name, value in sizes.items()}


def _whole_rotation(keys: MetadataReader, sizes: Config) -> Config:
    """rope_parameters of architectures that rotate whole heads."""
    if rotated_share(keys, sizes["head_dim"]) != 1.0:
        raise ConfigError(f"{keys.architecture}.rope.dimension_count must be {sizes['head_dim']}, as the heads are")
    return {"rope_parameters": read_rotation(keys, sizes["head_dim"])}


def _partial_rotation(keys: MetadataReader, sizes: Config) -> Config:
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    share = rotated_share(keys, head_dim)
    return {"partial_rotary_factor": share, "rope_parameters": read_rotation(keys, head_dim)}


def _attention_bias(keys: MetadataReader, name: str = "attention_bias") -> Config:
    return {name: keys.has("blk.0.attn_q.bias") or keys.has("blk.0.attn_qkv.bias")}


def _read_llama(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    return {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def _read_mistral3(keys: MetadataReader) -> Config:
    """Ministral 3. Mistral Small 3 shares the name: its files are llama's, since its queries have no scale."""
    if not (beta := keys.get("attention.temperature_scale")):
        return {**_read_llama(keys), "model_type": "llama"}
    sizes = _sizes(keys)
    rope = _whole_rotation(keys, sizes)["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise ConfigError(f"{keys.architecture}.attention.temperature_scale is only supported with yarn")
    return {**sizes, "rope_parameters": {**rope, "llama_4_scaling_beta": beta}, "sliding_window": None}


def _read_qwen(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    return {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys)}


def _read_qwen3_moe(keys: MetadataReader) -> Config:
    """The program normalizes the weights of the chosen experts."""
    return {**_read_qwen(keys), **_experts(keys), "norm_topk_prob": True}


def _experts(keys: MetadataReader, count: str = "num_experts", width: str = "moe_intermediate_size") -> Config:
    width_of_one = keys.get("expert_feed_forward_length") or keys.require("feed_forward_length")
    chosen = keys.require("expert_used_count")
    return {count: keys.require("expert_count"), "num_experts_per_tok": chosen, width: width_of_one}


def _read_gemma(keys: MetadataReader) -> Config:
    """The models were trained in bfloat16, to which their scale of embeddings is rounded."""
    sizes = _sizes(keys)
    return {**sizes, **_whole_rotation(keys, sizes), "dtype": "bfloat16"}


def _read_sandwich(keys: MetadataReader, n_layers_of_27b: int) -> Config:
    """Files do not have the scale of attention scores, which differs in the largest model."""
    config = _read_gemma(keys)
    is_largest = config["num_hidden_layers"] == n_layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    config |= {"query_pre_attn_scalar": scalar, "sliding_window": keys.require("attention.sliding_window")}
    config |= {
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }
    return config | _layer_types(keys, config["num_hidden_layers"])


def _read_gemma3(keys: MetadataReader) -> Config:
    config = _read_sandwich(keys, 62)
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    rope = config["rope_parameters"]
    return config | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _layer_types(keys: MetadataReader, n_layers: int) -> Config:
    """layer_types, if the file says which layers have a window, or in which period all but the last have one."""
    name = "attention.sliding_window_pattern"
    if flags := keys.items(name):
        if len(flags) < n_layers:
            raise ConfigError(f"{keys.architecture}.{name} has {len(flags)} values for {n_layers} layers")
        has_window = [bool(flag) for flag in flags[:n_layers]]
    elif period := keys.get(name):
        if type(period) is not int or period < 1:
            raise ConfigError(f"{keys.architecture}.{name} cannot be {period!r:.40}")
        has_window = [(layer + 1) % period > 0 for layer in range(n_layers)]
    else:
        return {}
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in has_window]}


def _read_gpt2(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, renamed=_GPT2_KEYS)
    return {name: value for name, value in sizes.items() if name not in ("num_key_value_heads", "head_dim")}


def _read_starcoder(keys: MetadataReader) -> Config:
    if (count := keys.get("attention.head_count_kv", 1)) != 1:
        raise ConfigError(f"starcoder.attention.head_count_kv {count!r:.40} is not supported, only 1")
    return {**_read_gpt2(keys), "multi_query": True}


def _read_gptneox(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_eps")
    rotation = _partial_rotation(keys, sizes)
    rotation["rotary_pct"] = rotation.pop("partial_rotary_factor")
    is_parallel = keys.get("use_parallel_residual", True)
    del sizes["head_dim"], sizes["num_key_value_heads"]
    return {**sizes, **rotation, **_attention_bias(keys), "use_parallel_residual": is_parallel}


def _read_falcon(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_epsilon", {"intermediate_size": "ffn_hidden_size"})
    config = {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys, "bias"), "parallel_attn": True}
    count = config.pop("num_key_value_heads")
    del config["head_dim"]
    if count == 1 and not keys.has("blk.0.attn_norm_2.weight"):
        return {**config, "multi_query": True, "new_decoder_architecture": False}
    n_norms = 2 if keys.has("blk.0.attn_norm_2.weight") else 1
    return {**config, "new_decoder_architecture": True, "num_kv_heads": count, "num_ln_in_parallel_attn": n_norms}


def _read_phi2(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_eps")
    return {**sizes, **_partial_rotation(keys, sizes)}


def _read_phi3(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    config = {**sizes, **_partial_rotation(keys, sizes), "sliding_window": keys.get("attention.sliding_window") or None}
    original = config["rope_parameters"].get("original_max_position_embeddings")
    return config | ({"original_max_position_embeddings": original} if original else {})


def _read_starcoder2(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "norm_epsilon")
    return {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys, "use_bias")}


def _read_stablelm(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_eps")
    is_parallel = keys.get("use_parallel_residual", False)
    biases = _attention_bias(keys, "use_qkv_bias")
    return {**sizes, **_partial_rotation(keys, sizes), **biases, "use_parallel_residual": is_parallel}


def _read_olmo(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "unused_eps")
    clip = keys.get("attention.clamp_kqv")
    config = {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys), "clip_qkv": clip}
    del config["unused_eps"]
    return config


def _read_olmo2(keys: MetadataReader) -> Config:
    """olmo3 shares the name: its files have a window, and scale the rotation of the other layers only."""
    sizes = _sizes(keys)
    config = {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys)}
    if (window := keys.get("attention.sliding_window")) is None:
        return config
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    config |= {"rope_parameters": {"full_attention": rope, "sliding_attention": local}, "sliding_window": window}
    return {**config, **_layer_types(keys, config["num_hidden_layers"]), "model_type": "olmo3"}


def _read_olmoe(keys: MetadataReader) -> Config:
    return {**_read_qwen(keys), **_experts(keys, width="intermediate_size"), "norm_topk_prob": False}


def _read_granite(keys: MetadataReader) -> Config:
    names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    names |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
    scales = {key: keys.get(name) or 1.0 for name, key in names.items()}
    return {**_read_llama(keys), **scales}


def _read_granitemoe(keys: MetadataReader) -> Config:
    config = {**_read_granite(keys), **_experts(keys, "num_local_experts", "intermediate_size")}
    if shared := keys.get("expert_shared_feed_forward_length"):
        config |= {"shared_intermediate_size": shared, "model_type": "granitemoeshared"}
    return config


def _read_cohere2(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_eps")
    config = {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys)}
    config |= {"logit_scale": keys.require("logit_scale"), "sliding_window": keys.require("attention.sliding_window")}
    return config | _layer_types(keys, config["num_hidden_layers"])


def _read_nemotron(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "norm_eps")
    biases = {**_attention_bias(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    return {**sizes, **_partial_rotation(keys, sizes), **biases}


def _read_exaone4(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    config = {**sizes, **_whole_rotation(keys, sizes), "sliding_window": keys.get("attention.sliding_window")}
    count = config["num_hidden_layers"]
    if config["sliding_window"] is None:  # transformers divides by the period of windows without this list
        return {**config, "layer_types": ["full_attention"] * count}
    return config | _layer_types(keys, count)


def _read_glm(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    return {**sizes, **_partial_rotation(keys, sizes), **_attention_bias(keys)}


def _read_gpt_oss(keys: MetadataReader) -> Config:
    """Its rotation interpolates between dimensions that are no whole numbers, which files do not say."""
    config = {**_read_qwen(keys), **_experts(keys, "num_local_experts", "intermediate_size")}
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    config["sliding_window"] = keys.require("attention.sliding_window")
    return config | _layer_types(keys, config["num_hidden_layers"])


def _read_ernie(keys: MetadataReader) -> Config:
    sizes = _sizes(keys)
    return {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys, "use_bias")}


def _read_ernie_moe(keys: MetadataReader) -> Config:
    config = {**_read_ernie(keys), **_experts(keys)}
    config["moe_layer_interval"] = keys.get("interleave_moe_layer_step", 1)
    config["moe_layer_start_index"] = keys.get("leading_dense_block_count", 0)
    width = keys.get("expert_shared_feed_forward_length")
    shared = keys.get("expert_shared_count", 0)
    if type(shared) is not int or type(config["moe_intermediate_size"]) is not int:
        raise ConfigError(f"expert_shared_count {shared!r:.40} or expert_feed_forward_length is no size")
    if width and width != shared * config["moe_intermediate_size"]:
        raise ConfigError(f"expert_shared_feed_forward_length {width!r:.40} is not supported")
    return {**config, "moe_num_shared_experts": shared}


def _read_hunyuan(keys: MetadataReader) -> Config:
    """The converter has put the scaling into the base of the rotation, and calls the rest of it none."""
    sizes = _sizes(keys)
    return {**sizes, **_whole_rotation(keys, sizes), **_attention_bias(keys)}


def _read_seed_oss(keys: MetadataReader) -> Config:
    return {**_read_qwen(keys), "attention_out_bias": keys.has("blk.0.attn_output.bias")}


def _read_jais2(keys: MetadataReader) -> Config:
    sizes = _sizes(keys, "layer_norm_eps")
    biases = {**_attention_bias(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    return {**sizes, **_whole_rotation(keys, sizes), **biases}


_XIELU = tuple(f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(family="llama", read=_read_llama, reorders_heads=True),
    "qwen2": Architecture(family="qwen2", read=_read_qwen),
    "qwen3": Architecture(family="qwen3", read=_read_qwen),
    "qwen3moe": Architecture(family="qwen3_moe", read=_read_qwen3_moe),
    "gemma": Architecture(family="gemma", read=_read_gemma, adds_one=True),
    "gemma2": Architecture(family="gemma2", read=lambda keys: _read_sandwich(keys, 46), adds_one=True),
    "gemma3": Architecture(family="gemma3_text", read=_read_gemma3, adds_one=True),
    "phi2": Architecture(family="phi", read=_read_phi2),
    "phi3": Architecture(family="phi3", read=_read_phi3),
    "gpt2": Architecture(family="gpt2", read=_read_gpt2),
    "gptneox": Architecture(family="gpt_neox", read=_read_gptneox),
    "starcoder": Architecture(family="gpt_bigcode", read=_read_starcoder),
    "starcoder2": Architecture(family="starcoder2", read=_read_starcoder2),
    "stablelm": Architecture(family="stablelm", read=_read_stablelm),
    "falcon": Architecture(family="falcon", read=_read_falcon),
    "olmo": Architecture(family="olmo", read=_read_olmo, reorders_heads=True),
    "olmo2": Architecture(family="olmo2", read=_read_olmo2),
    "olmoe": Architecture(family="olmoe", read=_read_olmoe),
    "granite": Architecture(family="granite", read=_read_granite, reorders_heads=True),
    "granitemoe": Architecture(family="granitemoe", read=_read_granitemoe, reorders_heads=True),
    "smollm3": Architecture(family="smollm3", read=_read_llama, reorders_heads=True),
    "arcee": Architecture(family="arcee", read=_read_llama, reorders_heads=True),
    "mistral3": Architecture(family="ministral3", read=_read_mistral3, reorders_heads=True),
    "cohere2": Architecture(family="cohere2", read=_read_cohere2),
    "nemotron": Architecture(family="nemotron", read=_read_nemotron, adds_one=True),
    "exaone4": Architecture(family="exaone4", read=_read_exaone4),
    "glm4": Architecture(family="glm4", read=_read_glm),
    "gpt-oss": Architecture(family="gpt_oss", read=_read_gpt_oss, names=_NORM_BEFORE_MLP),
    "ernie4_5": Architecture(family="ernie4_5", read=_read_ernie),
    "ernie4_5-moe": Architecture(family="ernie4_5_moe", read=_read_ernie_moe),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense", read=_read_hunyuan),
    "seed_oss": Architecture(family="seed_oss", read=_read_seed_oss, names=_NORM_BEFORE_MLP),
    "jais2": Architecture(family="jais2", read=_read_jais2),
    "apertus": Architecture(
        family="apertus",
        read=_read_qwen,
        names={"blocks.N.mlp.activation": (f"{_LAYER}.xielu.alpha_p", f"{_LAYER}.xielu.alpha_n")},
        layer_arrays=_XIELU,
    ),
}
"""By general.architecture."""
