"""The table of weight formats: complete, and as the C++ kernels list them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from app.common.ipc import WorkerConfig
from app.engine.backends import full_numerics, matrix_kinds, packed_bytes, packed_name
from app.engine.cpu.packed_decoder import as_computed
from app.engine.memory.memory_plan import CacheShape
from model.checkpoint.stored_numbers import NUMBER_FORMATS
from model.checkpoint.stored_weights import find_weights
from model.parameter_shapes import parameter_shapes
from model.quantize import QuantizedKind, packed_format, packed_kind
from model.weight_formats import KINDS, QUANTIZE, Quantize, WeightFormat, needs_gpu, weight_format
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.quantized_checkpoints import LAYOUTS, quantize_checkpoint
from tests.support.model.tiny_models import kernels, tiny_config

DTYPES = ("float32", "bfloat16")
KINDS_OF: dict[Quantize, list[str]] = {"none": [], "int8": ["int8-g32"], "int4": ["int4-g32", "int8-g32"], "fp8": []}
"""What packed matrices add to `numerics`."""


def test_quantize_offers_each_format_that_is_not_a_number_format() -> None:
    assert {*QUANTIZE} == {"none"} | {kind for kind, facts in KINDS.items() if facts.codes != "numbers"}
    assert {kind for kind, facts in KINDS.items() if facts.codes == "numbers"} == {*NUMBER_FORMATS.values()}
    assert {*NUMBER_FORMATS.values()} > {*DTYPES}, "nothing computes in float16"
    assert [each for each in QUANTIZE if needs_gpu(each)] == ["fp8"]
    packed = [kind for kind, facts in KINDS.items() if facts.codes == "packed"]
    assert [each for each in QUANTIZE if packed_kind(each)] == sorted(packed) == sorted(get_args(QuantizedKind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_format_of_steps_is_the_first_format_of_kernels(dtype: str) -> None:
    assert kernels().ink_format(weight_format(dtype, "none").kind.encode(), dtype == "bfloat16") == 0


def test_products_of_float32_read_the_numbers_of_files_and_others_round_them() -> None:
    formats = {kind: kernels().ink_format(kind.encode(), False) for kind in NUMBER_FORMATS.values()}
    assert len({*formats.values()}) == 3 and min(formats.values()) == formats["float32"] == 0
    for kind, number in formats.items():
        assert kernels().ink_packed_bytes(2, 640, False, number) == WeightFormat(kind=kind).n_bytes(64 * 640)
    assert kernels().ink_format(b"float32", True) == kernels().ink_format(b"float16", True) == -1


def test_bytes_of_weights_are_whole() -> None:
    sizes = {kind: WeightFormat(kind=kind).n_bytes(1001) for kind in KINDS}
    assert sizes == {kind: math.ceil(1001 * facts.bits / 8) for kind, facts in KINDS.items()}
    assert [sizes[kind] for kind in ("float32", "bfloat16", "int8", "int4", "fp8")] == [4004, 2002, 1064, 579, 1001]


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
def test_bits_of_packed_kinds_are_those_of_their_matrices(kind: QuantizedKind) -> None:
    stored = packed_format(1024, kind)
    assert stored and stored.n_bytes(3, 1024) == WeightFormat(kind=kind).n_bytes(3 * 1024)
    assert packed_name(stored) == f"{kind}-g32"


def test_codes_of_formats_that_receipts_name_stay() -> None:
    """Another largest code would be other bits under the same name."""
    assert (KINDS["fp8"].codes, KINDS["fp8"].largest) == ("e4m3", 448.0)


def test_a_format_that_nothing_computes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be stored as int7"):
        WeightFormat(kind="int7")


@pytest.mark.parametrize("quantize", QUANTIZE)
def test_numerics_end_in_the_formats_of_numbers_and_weights(quantize: Quantize) -> None:
    """Receipts name these: another name would refuse to repeat them."""
    sizes = {"context": 256, "block_size": 16, "max_running": 1, "tokens_per_step": 64}
    shape = CacheShape(shape=tiny_config(), dtype="bfloat16", **sizes)
    config = WorkerConfig(weights="", quantize=quantize)
    kinds, suffix = (
        KINDS_OF[quantize],
        {"fp8": "-fp8", "int8": "-int8-g32", "int4": "-int4-g32-int8-g32"}.get(quantize, ""),
    )
    assert full_numerics("native3-amx", shape, config, kinds=kinds) == f"native3-amx-bfloat16{suffix}"
    assert (
        full_numerics("torch2", shape, config, "deterministic", kinds=kinds) == f"torch2-bfloat16{suffix}-deterministic"
    )
    wide = replace(shape, dtype="float32")
    assert full_numerics("native3-avx2", wide, config, kinds=["float32"]) == "native3-avx2-float32"
    assert full_numerics("native3-avx2", wide, config, kinds=["bfloat16", "float32"]) == "native3-avx2-float32-bfloat16"
    coded = replace(shape, kv_cache="int8")
    assert full_numerics("native3-amx", coded, config, kinds=kinds) == f"native3-amx-bfloat16{suffix}-kv_int8", (
        "other bits"
    )


def test_numerics_name_bits_and_group_of_packed_matrices_once(tmp_path: Path) -> None:
    """Beside the format of dense matrices; --quantize rounds only those."""
    save_reference("llama-b", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    quantize_checkpoint(tmp_path, *LAYOUTS["gptq v2 g32"])
    weights = find_weights(tmp_path)
    choices: tuple[Quantize, ...] = ("none", "int8")
    kinds = {quantize: matrix_kinds(weights, "bfloat16", quantize, as_computed) for quantize in choices}
    assert kinds == {"none": ["bfloat16", "int4-g32"], "int8": ["int4-g32", "int8-g32"]}
    sizes = {"context": 256, "block_size": 16, "max_running": 1, "tokens_per_step": 64}
    shape, config = CacheShape(shape=tiny_config(), dtype="bfloat16", **sizes), WorkerConfig(weights="")
    assert full_numerics("native3-amx", shape, config, kinds=kinds["none"]) == "native3-amx-bfloat16-int4-g32"
    shapes = {name: shape for name, shape in parameter_shapes(weights.config).items() if len(shape) > 1}
    n_dense = sum(math.prod(shape) for name, shape in shapes.items() if not weights.packed_formats(name))
    quantized = packed_bytes(weights, "bfloat16", WorkerConfig(weights="", quantize="int8"))
    saved = weights.stored_bytes("bfloat16") - quantized
    assert n_dense and saved == 2 * n_dense - WeightFormat(kind="int8").n_bytes(n_dense), "16 bits become 8.5"
