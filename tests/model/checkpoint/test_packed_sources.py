"""Weights in AWQ, GPTQ, compressed-tensors and MXFP4: the numbers that each format's own code makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint.checkpoint import load
from model.checkpoint.stored_weights import StoredWeights, find_weights
from model.config import ConfigError
from model.families.quantization import Quantization, read_quantization
from model.files import CheckpointError
from model.packed_matrix import concatenate
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.quantized_checkpoints import FILE, LAYOUTS, gptq, pack_quantized, quantize_checkpoint

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
CPU = torch.device("cpu")


def _expected_state(weights: StoredWeights, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.cat([mapping.load(index, tensors[source]) for index, (source, _) in enumerate(mapping.source)])
        for name, mapping in weights.mappings.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama-b", "qwen2-a"])
def test_a_matrix_has_the_numbers_of_its_format(tmp_path: Path, case: str, layout: str) -> None:
    """qwen2 has biases."""
    save_reference(case, tmp_path, **_SIZES)
    expected = quantize_checkpoint(tmp_path, *LAYOUTS[layout])
    weights = find_weights(tmp_path)
    assert len(weights.packed) == 7 * weights.config.n_layers and not weights.left_out
    for dtype in (torch.float32, torch.bfloat16):
        state = load(tmp_path, device=CPU, dtype=dtype).decoder.state_dict()
        for name, tensor in _expected_state(weights, expected).items():
            assert torch.equal(state[name], tensor.to(dtype)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_matrices_are_the_dense_ones_stored_smaller(tmp_path: Path, layout: str) -> None:
    save_reference("llama-b", tmp_path, **_SIZES)
    quantize_checkpoint(tmp_path, *LAYOUTS[layout])
    weights, n_bytes = find_weights(tmp_path), 0
    for name, mapping in weights.mappings.items():
        parts = weights.packed_formats(name)
        assert bool(parts) == (mapping.source[0][0] in weights.packed)
        if not parts:
            n_bytes += 4 * int(np.prod([shape for _, shape in mapping.source], axis=1).sum())
            continue
        matrices = weights.read_packed(name)
        assert [(matrix.format, matrix.shape[0]) for matrix in matrices] == list(parts)
        assert np.array_equal(concatenate(matrices).dequantized("float32"), weights.read(name, "float32"))
        n_bytes += sum(packed.n_bytes(rows, matrices[0].shape[1]) for packed, rows in parts)
    assert weights.stored_bytes("float32") == n_bytes


def test_rows_in_another_order_stay_packed(tmp_path: Path) -> None:
    """cohere2 rotates neighbors, so the Decoder's rows of q and k are in another order than the file's."""
    save_reference("cohere2-a", tmp_path, **_SIZES)
    quantize_checkpoint(tmp_path, *LAYOUTS["gptq"])
    weights = find_weights(tmp_path)
    name = "blocks.0.attention.qkv.weight"
    assert len(weights.packed_formats(name)) == 3
    read = concatenate(weights.read_packed(name)).dequantized("float32")
    assert np.array_equal(read, weights.read(name, "float32"))
    plain = np.concatenate(
        [weights.packed[source].read().dequantized("float32") for source, _ in weights.mappings[name].source]
    )
    assert not np.array_equal(read, plain)


def test_columns_in_another_order_are_dequantized(tmp_path: Path) -> None:
    """gpt2 stores matrices as [columns, rows]."""
    save_reference("gpt2-a", tmp_path, n_embd=64)
    expected = quantize_checkpoint(tmp_path, *LAYOUTS["pack-quantized g32 f16"], ends=("mlp.c_fc.weight",))
    weights = find_weights(tmp_path)
    name = "blocks.0.mlp.up.weight"
    assert weights.mappings[name].source[0][0] in weights.packed and not weights.packed_formats(name)
    assert np.array_equal(weights.read(name, "float32"), expected[weights.mappings[name].source[0][0]].numpy().T)


def test_a_weight_of_which_a_part_is_not_packed_is_dequantized(tmp_path: Path) -> None:
    """As with the lists of modules that exporters leave out."""
    save_reference("llama-b", tmp_path, **_SIZES)
    expected = quantize_checkpoint(tmp_path, *LAYOUTS["awq"], ends=("gate_proj.weight", "down_proj.weight"))
    weights = find_weights(tmp_path)
    assert not weights.packed_formats("blocks.0.mlp.up.weight") and weights.packed_formats("blocks.0.mlp.down.weight")
    read = weights.read("blocks.0.mlp.up.weight", "float32")
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert np.array_equal(read, torch.cat([expected[name] for name in names]).numpy())


@pytest.mark.parametrize("least", [110, 90])
def test_mxfp4_experts_have_the_numbers_of_transformers(tmp_path: Path, least: int) -> None:
    """least: of the exponents; float16 has no powers of 2 below 2^-24."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_reference("gpt_oss-a", tmp_path, hidden_size=64, intermediate_size=96)
    random, tensors, expected = torch.Generator().manual_seed(3), {}, {}
    for key, tensor in load_file(tmp_path / FILE).items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(least, 130, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[f"{key}_blocks"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    save_file(tensors, tmp_path / FILE)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    weights = find_weights(tmp_path)
    for name in ("blocks.1.mlp.experts.up", "blocks.1.mlp.experts.down"):
        source = weights.mappings[name].source[0][0]
        numbers = expected[source].numpy()
        in_order = np.concatenate([numbers[:, ::2], numbers[:, 1::2]], axis=1) if name.endswith("up") else numbers
        assert np.array_equal(weights.read(name, "float32"), in_order)
        ((packed_format, rows),) = weights.packed_formats(name)
        assert packed_format.scales == ("float16" if least > 103 else "float32")
        (matrix,) = weights.read_packed(name)
        assert (
            np.array_equal(matrix.dequantized("float32").reshape(in_order.shape), in_order) and rows == matrix.shape[0]
        )


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        del tensors[f"model.layers.0.mlp.down_proj.{name}"]

    return apply


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        key = f"model.layers.0.mlp.down_proj.{name}"
        tensors[key] = change(tensors[key]).contiguous()

    return apply


def _added(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.0.mlp.down_proj.{name}"] = tensor

    return apply


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("gptq", _without("qzeros"), "has no qzeros"),
        ("gptq", _without("scales"), "has no scales"),
        ("awq", _without("qzeros"), "has no qzeros"),
        ("pack-quantized", _without("weight_scale"), "has no weight_scale"),
        ("pack-quantized", _without("weight_shape"), "has no weight_shape"),
        ("int-quantized", _without("weight_scale"), "has no weight_scale"),
        ("gptq", _changed("qweight", lambda x: x[:-1]), "scales for 504 columns"),
        ("gptq", _changed("qweight", lambda x: x[:-16]), "has a g_idx of"),
        ("gptq", _changed("qweight", lambda x: x.float()), "qweight of F32"),
        ("gptq", _changed("qzeros", lambda x: x[:, :-1]), "zero points of"),
        ("gptq", _changed("scales", lambda x: x.float()), "scales in F32 and zero points"),
        ("gptq", _changed("scales", lambda x: x[0]), "has a scales of F16"),
        ("gptq", _changed("scales", lambda x: x * torch.nan), "holds a scale that is not finite"),
        ("gptq", _changed("g_idx", lambda x: x.flip(0)), "act-order"),
        ("gptq", _changed("g_idx", lambda x: x + 1000), "act-order"),
        ("gptq", _changed("bias", lambda x: x + 1), "not part of the model"),
        ("awq", _changed("qweight", lambda x: x[:, :-1]), "qweight of I32"),
        ("awq", _changed("scales", lambda x: x[:, :-1]), "multiple of 8"),
        ("pack-quantized", _changed("weight_shape", lambda x: x * 0), "weight_shape"),
        ("pack-quantized", _changed("weight_shape", lambda x: -x), "weight_shape"),
        ("pack-quantized", _changed("weight_shape", lambda x: x * 2), "weight_packed of I32"),
        ("pack-quantized", _changed("weight_packed", lambda x: x[:, :-1]), "bits for each of"),
        ("pack-quantized", _changed("weight_packed", lambda x: torch.cat([x, x[:, :1]], 1)), "bits for each of"),
        ("awq", _added("g_idx", torch.arange(512).flip(0).int()), "act-order"),
        ("awq", _added("weight", torch.ones(256, 512)), "has both a qweight and a weight"),
        ("gptq", _added("weight", torch.ones(256, 512)), "has both a qweight and a weight"),
        ("pack-quantized", _added("weight", torch.ones(256, 512)), "has both a weight_packed and a weight"),
        ("pack-quantized", _changed("weight_scale", lambda x: x[:, :-1]), "scales for"),
        ("pack-quantized", _changed("weight_scale", lambda x: x * 2.0**-120), "neither 0 nor"),
        (
            "pack-quantized with zero points",
            _changed("weight_zero_point", lambda x: x[:-1]),
            "weight_zero_point of I32",
        ),
        ("int-quantized", _changed("weight_scale", lambda x: x[:-1]), "weight_scale of BF16"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(
    tmp_path: Path, layout: str, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    save_reference("llama-b", tmp_path, **_SIZES, mlp_bias=False)
    quantize_checkpoint(tmp_path, *LAYOUTS[layout])
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value) and "down_proj" in str(caught.value)


def test_biases_of_zeros_stay_where_the_family_has_them(tmp_path: Path) -> None:
    save_reference("qwen2-a", tmp_path, **_SIZES)
    tensors = load_file(tmp_path / FILE)
    tensors["model.layers.0.self_attn.k_proj.bias"].zero_()
    save_file(tensors, tmp_path / FILE)
    quantize_checkpoint(tmp_path, *LAYOUTS["gptq"])
    weights = find_weights(tmp_path)
    assert weights.packed and not weights.read("blocks.0.attention.qkv.bias", "float32")[256:].all()


def test_mxfp4_groups_of_zeros_may_have_any_scale(tmp_path: Path) -> None:
    save_reference("gpt_oss-a", tmp_path, hidden_size=64, intermediate_size=96)
    tensors = load_file(tmp_path / FILE)
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        blocks = torch.full((experts, rows, columns // 32, 16), 0x19, dtype=torch.uint8)
        scales = torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8)
        blocks[0, 0, 0], scales[0, 0, 0] = 0x80, 0
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(tensors, tmp_path / FILE)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    weights = find_weights(tmp_path)
    ((packed_format, _),) = weights.packed_formats("blocks.0.mlp.experts.down")
    numbers = weights.read("blocks.0.mlp.experts.down", "float32")
    assert packed_format.scales == "float16" and not numbers[0, 0, :32].any() and numbers[0, 0, 32:].all()


def test_groups_that_no_product_has_are_one_line(tmp_path: Path) -> None:
    save_reference("llama-b", tmp_path, **_SIZES)
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    quantize_checkpoint(tmp_path, pack_quantized(8), config)
    with pytest.raises(CheckpointError, match="groups must be multiples of 16 columns"):
        find_weights(tmp_path)


def test_the_order_of_activations_is_refused_by_name(tmp_path: Path) -> None:
    save_reference("llama-b", tmp_path, **_SIZES)
    quantize_checkpoint(tmp_path, gptq(64, act_order=True), {"quant_method": "gptq", "desc_act": True})
    with pytest.raises(CheckpointError, match=r"act-order, desc_act.*quantized without it"):
        find_weights(tmp_path)


def test_words_without_a_configuration_are_one_line(tmp_path: Path) -> None:
    save_reference("llama-b", tmp_path, **_SIZES)
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"][0], {})
    with pytest.raises(CheckpointError, match="no quantization_config of AWQ or GPTQ"):
        find_weights(tmp_path)


def test_other_quantizations_are_refused_by_name() -> None:
    fine: list[tuple[Any, str]] = [(None, "none"), ({}, "none"), ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8")]
    fine += [(config, config["quant_method"]) for _, config in LAYOUTS.values()]
    fine.append(({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"))
    for raw, method in fine:
        assert read_quantization(raw).method == method
    assert read_quantization({"quant_method": "gptq"}) == Quantization(method="gptq", stores_zero_points=False)
    for raw in (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"bits": 4},
    ):
        with pytest.raises(
            ConfigError, match=r"quant_method .* not supported, only fp8 in e4m3, AWQ.*; use the float32"
        ):
            read_quantization(raw)
    with pytest.raises(ConfigError, match=r"AWQ weights of version 'gemv' are not supported, only gemm"):
        read_quantization({"quant_method": "awq", "version": "gemv"})
    with pytest.raises(ConfigError, match=r"checkpoint_format 'marlin'.*only gptq, gptq_v2"):
        read_quantization({"quant_method": "gptq", "checkpoint_format": "marlin"})
    with pytest.raises(ConfigError, match="must be an object"):
        read_quantization("fp8")
