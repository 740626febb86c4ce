"""The table of weight formats: complete, and as the C++ kernels list them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from app.common.ipc import WorkerConfig
from app.engine.backends import _matrix_kinds, full_numerics, packed_bytes
from app.engine.memory.memory_plan import CacheShape
from model.checkpoint.stored_numbers import NUMBER_FORMATS
from model.checkpoint.stored_weights import find_weights
from model.parameter_shapes import parameter_shapes
from model.weight_formats import KINDS, QUANTIZE, Quantize, WeightFormat, needs_gpu, weight_format
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.quantized_checkpoints import LAYOUTS, quantize_checkpoint
from tests.support.model.tiny_models import kernels, tiny_config

DTYPES = ("float32", "bfloat16")


def test_quantize_offers_each_format_that_is_not_a_number_format() -> None:
    assert {*QUANTIZE} == {"none"} | {kind for kind, facts in KINDS.items() if facts.codes != "numbers"}
    assert {kind for kind, facts in KINDS.items() if facts.codes == "numbers"} == {*NUMBER_FORMATS.values()}
    assert {*NUMBER_FORMATS.values()} > {*DTYPES}, "nothing computes in float16"
    assert needs_gpu("fp8") and not needs_gpu("int8") and not needs_gpu("none")


@pytest.mark.parametrize("quantize", QUANTIZE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_have_each_format_that_needs_no_gpu(dtype: str, quantize: Quantize) -> None:
    stored = weight_format(dtype, quantize)
    number = kernels().ink_format(stored.kind.encode(), dtype == "bfloat16")
    assert (number < 0) == needs_gpu(quantize) and (number == 0) == (quantize == "none")


def test_products_of_float32_read_the_numbers_of_files_and_others_round_them() -> None:
    formats = {kind: kernels().ink_format(kind.encode(), False) for kind in NUMBER_FORMATS.values()}
    assert len({*formats.values()}) == 3 and min(formats.values()) == formats["float32"] == 0
    for kind, number in formats.items():
        assert kernels().ink_packed_bytes(2, 640, False, number) == WeightFormat(kind=kind).n_bytes(64 * 640)
    assert kernels().ink_format(b"float32", True) == kernels().ink_format(b"float16", True) == -1


def test_bytes_of_weights_are_whole() -> None:
    sizes = {kind: WeightFormat(kind=kind).n_bytes(1001) for kind in KINDS}
    assert sizes == {kind: math.ceil(1001 * facts.bits / 8) for kind, facts in KINDS.items()}
    assert (sizes["float32"], sizes["bfloat16"], sizes["int8"], sizes["fp8"]) == (4004, 2002, 1001, 1001)


@pytest.mark.parametrize("kind", [kind for kind, facts in KINDS.items() if facts.codes == "integers"])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_kernels_pack_as_many_bits_as_the_table_says(kind: str, is_bf16: bool) -> None:
    """Of two panels of 32 rows, whose columns need no padding."""
    number = kernels().ink_format(kind.encode(), is_bf16)
    assert kernels().ink_packed_bytes(2, 640, is_bf16, number) == WeightFormat(kind=kind).n_bytes(64 * 640)


def test_codes_of_formats_that_receipts_name_stay() -> None:
    """Another largest code would be other bits under the same name."""
    facts = {kind: (KINDS[kind].codes, KINDS[kind].largest) for kind in ("int8", "fp8")}
    assert facts == {"int8": ("integers", 127.0), "fp8": ("e4m3", 448.0)}


@pytest.mark.parametrize(("kind", "group"), [("int8", 32), ("int7", None)])
def test_a_format_that_nothing_computes_is_refused(kind: str, group: int | None) -> None:
    with pytest.raises(ValueError, match=f"{kind} in groups of"):
        WeightFormat(kind=kind, group=group)


@pytest.mark.parametrize(("quantize", "suffix"), [(each, "" if each == "none" else f"-{each}") for each in QUANTIZE])
def test_numerics_end_in_the_number_format_and_the_value_of_quantize(quantize: Quantize, suffix: str) -> None:
    """Receipts name these: another name would refuse to repeat them."""
    sizes = {"context": 256, "block_size": 16, "max_running": 1, "tokens_per_step": 64}
    shape = CacheShape(shape=tiny_config(), dtype="bfloat16", **sizes)
    config = WorkerConfig(weights="", quantize=quantize)
    assert full_numerics("native3-amx", shape, config) == f"native3-amx-bfloat16{suffix}"
    assert full_numerics("torch2", shape, config, "deterministic") == f"torch2-bfloat16{suffix}-deterministic"
    wide = replace(shape, dtype="float32")
    assert full_numerics("native3-avx2", wide, config, kinds=["float32"]) == "native3-avx2-float32"
    assert full_numerics("native3-avx2", wide, config, kinds=["bfloat16", "float32"]) == "native3-avx2-float32-bfloat16"
    coded = replace(shape, kv_cache="int8")
    assert full_numerics("native3-amx", coded, config) == f"native3-amx-bfloat16{suffix}-kv_int8", "other bits"


def test_numerics_name_bits_and_group_of_packed_matrices_once(tmp_path: Path) -> None:
    """Beside the format of dense matrices; --quantize rounds only those."""
    save_reference("llama-b", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    quantize_checkpoint(tmp_path, *LAYOUTS["gptq v2 g32"])
    weights = find_weights(tmp_path)
    kinds = {
        quantize: _matrix_kinds(weights, "bfloat16", WorkerConfig(weights="", quantize=quantize))
        for quantize in ("none", "int8")
    }
    assert kinds == {"none": ["bfloat16", "int4-g32"], "int8": ["int4-g32", "int8"]}
    sizes = {"context": 256, "block_size": 16, "max_running": 1, "tokens_per_step": 64}
    shape, config = CacheShape(shape=tiny_config(), dtype="bfloat16", **sizes), WorkerConfig(weights="")
    assert full_numerics("native3-amx", shape, config, kinds=kinds["none"]) == "native3-amx-bfloat16-int4-g32"
    sizes_of = {name: math.prod(shape) for name, shape in parameter_shapes(weights.config).items()}
    n_dense = sum(size for name, size in sizes_of.items() if not weights.packed_formats(name))
    quantized = packed_bytes(weights, "bfloat16", WorkerConfig(weights="", quantize="int8"))
    assert 0 < n_dense < weights.n_params / 2
    assert packed_bytes(weights, "bfloat16", config) - quantized == n_dense, "a byte less for each dense number"
