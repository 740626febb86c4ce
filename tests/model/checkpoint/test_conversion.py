"""Conversions keep what they do not round: names, numbers, logits; packed matrices are what other programs read."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.__main__ import main
from model.checkpoint.checkpoint import load
from model.checkpoint.converted_directory import open_directory, prepare
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError
from model.packed_matrix import PackedFormat
from tests.support.model.convertible import (
    LLAMA_SIZES,
    config_of,
    convert,
    logits_of,
    names,
    save_convertible,
)
from tests.support.model.quantized_checkpoints import FILE, LAYOUTS, quantize_checkpoint
from tests.support.model.tiny_models import tiny_decoder, tiny_files, tiny_weights

CASES = ["llama-b", "qwen2-a", "gpt2-a", "gpt_oss-a", "gemma2-a", "qwen3_moe-a", "apertus-a", "cohere2-a", "opt-a"]
"""Separate and tied heads, biases, transposed matrices, experts, constants, two orders of rows, an offset table."""
CPU = torch.device("cpu")


def check(directory: Path) -> int:
    return main(["check", str(directory)])


@pytest.mark.parametrize("case", CASES)
def test_a_dense_model_keeps_its_numbers_and_its_logits_bit_for_bit(tmp_path: Path, weights: Path, case: str) -> None:
    source = save_convertible(case, tmp_path / "source", weights)
    convert(source, tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / FILE), load_file(source / FILE)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))
    assert config_of(tmp_path / "out") == config_of(source)
    assert check(tmp_path / "out") == 0


def test_what_a_text_does_not_need_is_kept(tmp_path: Path, weights: Path) -> None:
    """So that programs that show pictures to the model can load it."""
    source = save_convertible("gemma-a", tmp_path / "text", weights)
    text = {"text_config": config_of(save_convertible("gemma3_text-a", tmp_path / "gemma3", weights))}
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **text, "dtype": "float32"}
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "gemma3" / FILE).items()
    }
    tensors["model.vision_tower.layer.weight"] = torch.rand(8, 16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "gemma3" / name)
    save_file(tensors, tmp_path / "gemma3" / FILE)
    (tmp_path / "gemma3/config.json").write_text(json.dumps(raw))
    convert(tmp_path / "gemma3", tmp_path / "out", bits=8)
    after = load_file(tmp_path / "out" / FILE)
    assert torch.equal(after["model.vision_tower.layer.weight"], tensors["model.vision_tower.layer.weight"])
    quantization: Any = config_of(tmp_path / "out")["quantization_config"]
    patterns = [each.removeprefix("re:") for each in quantization["ignore"] if each.startswith("re:")]
    assert any(re.match(pattern, "model.vision_tower.layer") for pattern in patterns)
    assert not any(re.match(pattern, "model.language_model.layers.0.mlp.up_proj") for pattern in patterns)
    assert check(tmp_path / "out") == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_another_dtype_rounds_each_number_once(tmp_path: Path, weights: Path, case: str, dtype: Any) -> None:
    source = save_convertible(case, tmp_path / "source", weights)
    convert(source, tmp_path / "out", dtype=dtype)
    ours, theirs = load_file(tmp_path / "out" / FILE), load_file(source / FILE)
    kind = getattr(torch, dtype)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name].to(kind)) for name in theirs)
    if dtype == "bfloat16":
        assert torch.equal(logits_of(tmp_path / "out", kind), logits_of(source, kind))
    # The embedding of a gemma is scaled by a number that is rounded to the dtype of its config.json.
    assert config_of(tmp_path / "out")["dtype"] == ("float32" if case == "gemma2-a" else dtype)
    assert check(tmp_path / "out") == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama-b", "qwen2-a"])
def test_a_quantized_model_becomes_the_dense_one_that_it_stands_for(
    tmp_path: Path, weights: Path, case: str, layout: str
) -> None:
    source = save_convertible(case, tmp_path / "source", weights, **LLAMA_SIZES)
    expected = quantize_checkpoint(source, *LAYOUTS[layout])
    for dtype in ("float32", None):
        out = tmp_path / f"out-{dtype}"
        convert(source, out, dtype=dtype)
        kind = getattr(torch, dtype or "bfloat16")
        ours = load_file(out / FILE)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name].to(kind)) for name in expected)
        assert torch.equal(logits_of(out, kind), logits_of(source, kind))
        assert "quantization_config" not in config_of(out) and config_of(out)["dtype"] == (dtype or "bfloat16")
    assert check(out) == 0


def test_packed_experts_become_dense_under_the_dense_names(tmp_path: Path, weights: Path) -> None:
    """transformers reads them, too."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dense = save_convertible("gpt_oss-a", tmp_path / "dense", weights, hidden_size=64, intermediate_size=96)
    source, random = Path(shutil.copytree(dense, tmp_path / "source")), torch.Generator().manual_seed(3)
    tensors, expected = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(source / FILE).items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = expected[key] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, source / FILE)
    raw = config_of(source) | {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(raw))
    convert(source, tmp_path / "out")
    ours = load_file(tmp_path / "out" / FILE)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name].bfloat16()) for name in expected)
    assert torch.equal(logits_of(tmp_path / "out", torch.bfloat16), logits_of(source, torch.bfloat16))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert check(tmp_path / "out") == 0


def test_a_stored_copy_of_a_tied_head_is_left_out(tmp_path: Path, weights: Path) -> None:
    source = save_convertible("llama-b", tmp_path / "source", weights, tie_word_embeddings=True)
    tensors = load_file(source / FILE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / FILE)
    convert(source, tmp_path / "out")
    assert load_file(tmp_path / "out" / FILE).keys() == tensors.keys()
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", ["llama-b", "qwen2-a", "cohere2-a", "qwen3_moe-a", "opt-a", "gemma2-a"])
def test_packed_matrices_are_near_and_all_else_is_the_same(tmp_path: Path, weights: Path, case: str, bits: int) -> None:
    source = save_convertible(case, tmp_path / "source", weights)
    done = convert(source, tmp_path / "out", bits=bits)
    before, after = find_weights(source), find_weights(tmp_path / "out")
    packed = after.packed
    assert packed and all(matrix.format.scales == "float16" for matrix in packed.values())
    for name, matrix in packed.items():
        wide = torch.from_numpy(matrix.read().dequantized("float32"))
        own = load_file(source / FILE)[name].float()
        step = own.reshape(-1, matrix.format.group).abs().amax(1) / (2 ** (bits - 1) - 1)
        errors = (wide - own).reshape(-1, matrix.format.group).abs().amax(1)
        assert (errors <= 0.51 * step).float().mean() > (0.2 if bits == 4 else 0.99), "least squares may clip"
        assert (errors <= 1.3 * step).all()
    for name in before.tensors.keys() - packed.keys():
        assert np.array_equal(load_file(source / FILE)[name].numpy(), load_file(tmp_path / "out" / FILE)[name].numpy())
    for name in before.mappings:
        is_linear = any(word in name for word in (".qkv.", ".out.", ".up", ".down")) and "bias" not in name
        columns = {shape[-1] for _, shape in before.mappings[name].source}
        assert bool(after.packed_formats(name)) == (is_linear and not any(size % 16 for size in columns)), name
    assert done.conversion.n_bytes == (tmp_path / "out" / FILE).stat().st_size
    assert check(tmp_path / "out") == 0


def test_rows_of_odd_lengths_get_small_groups_or_stay_dense(tmp_path: Path, weights: Path) -> None:
    changes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    source = save_convertible("llama-b", tmp_path / "source", weights, intermediate_size=72, **changes)
    convert(source, tmp_path / "out", bits=4)
    after = find_weights(tmp_path / "out")
    assert {matrix.format.group for name, matrix in after.packed.items() if "gate_proj" in name} == {16}
    assert {matrix.format.group for name, matrix in after.packed.items() if "o_proj" in name} == {32}
    assert not [name for name in after.packed if "down_proj" in name], "72 columns"
    quantization: Any = config_of(tmp_path / "out")["quantization_config"]
    groups = quantization["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear"] and groups["group_0"]["weights"]["group_size"] == 32
    assert set(groups["group_1"]["targets"]) == {
        f"model.layers.{layer}.{name}"
        for layer in range(after.config.n_layers)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert set(quantization["ignore"]) == {
        "lm_head", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(after.config.n_layers))
    }  # fmt: skip


def test_routers_and_heads_are_listed_as_ignored(tmp_path: Path, weights: Path) -> None:
    source = save_convertible("qwen3_moe-a", tmp_path / "source", weights)
    convert(source, tmp_path / "out", bits=8)
    quantization: Any = config_of(tmp_path / "out")["quantization_config"]
    routers = {name.removesuffix(".weight") for name in load_file(source / FILE) if name.endswith(".mlp.gate.weight")}
    assert routers and set(quantization["ignore"]) >= {"lm_head", *routers}
    source = save_convertible("gpt_neox-a", tmp_path / "neox", weights)
    convert(source, tmp_path / "neox-out", bits=8)
    quantization = config_of(tmp_path / "neox-out")["quantization_config"]
    assert set(quantization["ignore"]) >= {"lm_head", "embed_out"}, "in memory, in the file"


def test_transposed_and_fused_matrices_are_not_packed(tmp_path: Path, weights: Path) -> None:
    source = save_convertible("gpt2-a", tmp_path / "gpt2", weights)
    with pytest.raises(CheckpointError, match="no matrix of a gpt2 can be packed: they are stored transposed"):
        prepare(open_directory(source), tmp_path / "out", dtype=None, bits=4)
    source = save_convertible("gpt_oss-a", tmp_path / "gpt_oss", weights, head_dim=32)
    convert(source, tmp_path / "out", bits=4)
    after = find_weights(tmp_path / "out")
    assert after.packed and not [name for name in after.packed if "experts" in name]
    quantization: Any = config_of(tmp_path / "out")["quantization_config"]
    assert {f"model.layers.{layer}.mlp.router" for layer in range(2)} <= set(quantization["ignore"])


def test_packed_weights_are_not_rounded_again(tmp_path: Path, weights: Path) -> None:
    source = save_convertible("llama-b", tmp_path / "source", weights, **LLAMA_SIZES)
    quantize_checkpoint(source, *LAYOUTS["gptq"])
    with pytest.raises(
        CheckpointError, match=r"packed already \(4 bits in groups of 128\).*lose more.*without --quant"
    ):
        prepare(open_directory(source), tmp_path / "out", dtype=None, bits=4)
    convert(source, tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "out", bits=4)
    assert find_weights(tmp_path / "out").packed


def test_scales_are_numbers_of_float16_and_of_bfloat16(tmp_path: Path, weights: Path) -> None:
    """So a program that loads them in the model's dtype computes with the same numbers."""
    tensors = load_file(weights / FILE)
    source = Path(shutil.copytree(weights, tmp_path / "source"))
    for power in range(-30, 10):
        tensors["model.layers.0.mlp.up_proj.weight"][power + 30] *= 2.0**power
    tensors["model.layers.0.mlp.up_proj.weight"][50] = 0
    save_file(tensors, source / FILE, metadata={"format": "pt"})
    convert(source, tmp_path / "out", bits=4)
    scales = load_file(tmp_path / "out" / FILE)["model.layers.0.mlp.up_proj.weight_scale"]
    assert scales.dtype == torch.float16 and torch.equal(scales.bfloat16().half(), scales) and (scales > 0).all()
    packed = find_weights(tmp_path / "out").packed["model.layers.0.mlp.up_proj.weight"]
    assert packed.format == PackedFormat(
        bits=4, group=32, scales="float16", has_offsets=False, table=packed.format.table
    )
    assert not packed.read().dequantized("float32")[50].any()


def test_least_squares_beats_the_largest_magnitude(tmp_path: Path, weights: Path) -> None:
    convert(weights, tmp_path / "out", bits=4)
    own = load_file(weights / FILE)["model.layers.0.mlp.down_proj.weight"].float()
    packed = find_weights(tmp_path / "out").packed["model.layers.0.mlp.down_proj.weight"]
    ours = torch.from_numpy(packed.read().dequantized("float32"))
    groups = own.reshape(-1, packed.format.group)
    scale = groups.abs().amax(1, keepdim=True) / 7
    plain = ((groups / scale).round().clamp(-8, 7) * scale).reshape(own.shape)
    assert ((ours - own) ** 2).sum() < 0.95 * ((plain - own) ** 2).sum()


def test_golden_answers_and_the_manifest_follow_the_numbers(tmp_path: Path) -> None:
    from model.files import write_files

    source = tmp_path / "source"
    write_files(source, tiny_files(tiny_decoder(), [1, 5, 9]))
    assert "golden.json" in names(source)
    for dtype in (None, "float32"):
        assert not convert(source, tmp_path / f"{dtype}", dtype=dtype).leaves_out_golden
        assert (tmp_path / f"{dtype}/golden.json").read_bytes() == (source / "golden.json").read_bytes()
    assert convert(source, tmp_path / "rounded", dtype="bfloat16").leaves_out_golden
    assert "golden.json" not in names(tmp_path / "rounded")
    manifest = json.loads((tmp_path / "rounded/manifest.json").read_text())["sha256"]
    assert set(manifest) == names(tmp_path / "rounded") - {"manifest.json"}
    for each in ("None", "float32", "rounded"):
        assert check(tmp_path / each) == 0


def test_numbers_that_the_format_cannot_hold_are_one_line(tmp_path: Path, weights: Path) -> None:
    for number, dtype, words in (
        (1e6, "float16", "numbers too large for float16; convert with --dtype bfloat16"),
        (3.4e38, "bfloat16", "numbers too large for bfloat16; convert with --dtype float32"),
        (float("nan"), None, "numbers that are not finite"),
        (float("inf"), "float32", "numbers that are not finite"),
    ):
        source = Path(shutil.copytree(weights, tmp_path / f"{number}"))
        tensors = load_file(source / FILE)
        tensors["model.norm.weight"][3] = number
        save_file(tensors, source / FILE)
        with pytest.raises(CheckpointError, match=words) as caught:
            convert(source, tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
        assert "model.norm.weight" in str(caught.value) and str(source / FILE) in str(caught.value)
        assert not [name for name in names(tmp_path) if "out" in name]
    source = Path(shutil.copytree(weights, tmp_path / "large"))
    tensors = load_file(source / FILE)
    tensors["model.layers.0.mlp.down_proj.weight"][3] = 1e6
    save_file(tensors, source / FILE)
    with pytest.raises(CheckpointError, match=r"down_proj.weight holds numbers too large for float16 scales"):
        convert(source, tmp_path / "out", bits=4)


def test_shards_become_one_file_that_the_library_reads_aligned(tmp_path: Path, weights: Path) -> None:
    source = Path(shutil.copytree(weights, tmp_path / "source"))
    tensors = load_file(source / FILE)
    shards = {"a.safetensors": dict(list(tensors.items())[::2]), "b.safetensors": dict(list(tensors.items())[1::2])}
    for name, part in shards.items():
        save_file(part, source / name)
    index = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / FILE).unlink()
    convert(source, tmp_path / "out", bits=8)
    assert not [name for name in names(tmp_path / "out") if "index" in name]
    items = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}
    with safe_open(tmp_path / "out" / FILE, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    for stored in find_weights(tmp_path / "out").tensors.values():
        assert stored.start % items[stored.dtype] == 0


def _peak(source: Path, out: Path, **options: Any) -> int:
    tracemalloc.start()
    try:
        convert(source, out, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"bits": 4}, {"bits": 8}])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, options: dict[str, Any]) -> None:
    """Matrices of 32 and 16 MiB, of which pieces of 4 MiB exist, with a few copies. Reading two is the control."""
    source = tiny_weights(tmp_path / "source", width=512, mlp_width=8192)
    size = (source / FILE).stat().st_size
    assert size > 90 << 20
    peak = _peak(source, tmp_path / "out", **options)
    assert peak < 48 << 20
    tracemalloc.start()
    whole = np.concatenate([find_weights(source).read("blocks.0.mlp.up.weight", "float32")] * 2)
    control = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole.nbytes == 64 << 20 and control > 64 << 20
    assert load(tmp_path / "out", device=CPU, dtype=torch.float32).weights.n_params == find_weights(source).n_params
