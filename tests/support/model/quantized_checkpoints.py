"""Checkpoints whose matrices are quantized as exporters write them, beside the numbers that each format's code makes.

Written from the formats' descriptions: words are filled code by code, numbers are (code - zero point) * scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
Tensors = dict[str, Tensor]
Layout = Callable[[str, int, int, torch.Generator], tuple[Tensors, Tensor]]
"""(module, rows, columns, random) -> its tensors, and its numbers [rows, columns] in float32."""


def _words(codes: Tensor, bits: int) -> Tensor:
    """[..., n] -> int32 [..., n * bits / 32], from the low bits on."""
    count = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, count).long()
    total = torch.zeros(parts.shape[:-1], dtype=torch.long)
    for index in range(count):
        total |= parts[..., index] << (bits * index)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def _random(rows: int, columns: int, group: int, bits: int, dtype: torch.dtype, random: torch.Generator) -> Any:
    codes = torch.randint(0, 2**bits, (rows, columns), generator=random)
    scales = (torch.rand(rows, columns // group, generator=random) * 0.02 + 0.001).to(dtype)
    zeros = torch.randint(1, 2**bits, (rows, columns // group), generator=random)
    return codes, scales, zeros


def _numbers(codes: Tensor, zeros: Tensor | int, scales: Tensor, group: int) -> Tensor:
    wide = scales.float().repeat_interleave(group, 1)
    points = zeros.repeat_interleave(group, 1) if isinstance(zeros, Tensor) else zeros
    return (codes - points).float() * wide


def awq(group: int = 128, dtype: torch.dtype = torch.float16) -> Layout:
    """AutoAWQ's gemm."""

    def made(module: str, rows: int, columns: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _random(rows, columns, group, 4, dtype, random)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def words(matrix: Tensor) -> Tensor:
            by_eight = matrix.T.reshape(matrix.shape[1], -1, 8)[:, :, order]
            return _words(by_eight.reshape(matrix.shape[1], -1), 4)

        tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.contiguous()}
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, _numbers(codes, zeros, scales, group)

    return made


def gptq(
    group: int = 128, *, bits: int = 4, version: int = 1, dtype: torch.dtype = torch.float16, act_order: bool = False
) -> Layout:
    """GPTQModel's, or AutoGPTQ's: its first version stores zero points less 1, and biases of zeros."""

    def made(module: str, rows: int, columns: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _random(rows, columns, group, bits, dtype, random)
        order = torch.arange(columns) // group
        tensors = {
            "qweight": _words(codes, bits).T.contiguous(),
            "qzeros": _words(zeros.T - int(version == 1), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (order.flip(0) if act_order else order).int(),
            "bias": torch.zeros(rows, dtype=dtype),
        }
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, _numbers(codes, zeros, scales, group)

    return made


def pack_quantized(
    group: int = 128, *, bits: int = 4, dtype: torch.dtype = torch.bfloat16, has_zeros: bool = False
) -> Layout:
    """compressed-tensors."""

    def made(module: str, rows: int, columns: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = _random(rows, columns, group, bits, dtype, random)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if has_zeros:
            padded = torch.nn.functional.pad(zeros.T, (0, -rows % (32 // bits)))
            tensors["weight_zero_point"] = _words(padded, bits).T.contiguous()
        numbers = _numbers(codes, zeros if has_zeros else 2 ** (bits - 1), scales, group)
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, numbers

    return made


def int_quantized(module: str, rows: int, columns: int, random: torch.Generator) -> tuple[Tensors, Tensor]:
    """compressed-tensors of 8 bits, one scale for each row."""
    codes = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
    scales = (torch.rand(rows, 1, generator=random) * 0.002 + 0.0001).bfloat16()
    tensors = {f"{module}.weight": codes, f"{module}.weight_scale": scales}
    return tensors, codes.float() * scales.float()


LAYOUTS: Mapping[str, tuple[Layout, dict[str, Any]]] = {
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "awq g32": (awq(32, torch.bfloat16), {"quant_method": "awq", "version": "GEMM"}),
    "gptq": (gptq(), {"quant_method": "gptq", "bits": 4, "desc_act": False}),
    "gptq v2 g32": (gptq(32, version=2), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "gptq of 8 bits": (gptq(64, bits=8), {"quant_method": "gptq", "bits": 8}),
    "gptq of whole rows": (gptq(256), {"quant_method": "gptq", "group_size": -1}),
    "pack-quantized": (pack_quantized(), {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "pack-quantized g32 f16": (
        pack_quantized(32, dtype=torch.float16),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "pack-quantized with zero points": (
        pack_quantized(64, has_zeros=True),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "pack-quantized of 8 bits": (
        pack_quantized(bits=8, dtype=torch.float32),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "pack-quantized of 8 bits with zero points": (
        pack_quantized(bits=8, has_zeros=True),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "int-quantized": (int_quantized, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}
"""By name: the layout, and its quantization_config."""


def quantize_checkpoint(
    directory: Path, layout: Layout, config: Mapping[str, Any], ends: tuple[str, ...] = ("proj.weight",)
) -> Tensors:
    """Replaces the matrices whose names end so; returns what each tensor is then, in float32."""
    random, path = torch.Generator().manual_seed(7), directory / FILE
    tensors, expected = Tensors(), Tensors()
    for key, tensor in load_file(path).items():
        expected[key] = tensor
        if key.endswith(ends):
            made, expected[key] = layout(key.removesuffix(".weight"), *tensor.shape, random)
            tensors |= made
            if (bias := f"{key.removesuffix('weight')}bias") in expected:
                tensors[bias] = expected[bias]
        elif key not in tensors:
            tensors[key] = tensor
    save_file(tensors, path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": dict(config)}))
    return expected
