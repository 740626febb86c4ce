"""Every kernel compiles for an H200 without one, and the compiled code stays batch invariant."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.engine.gpu.kernels.interface import attention_bytes, attention_fits, attention_launch, padded_dim
from tests.support import ROOT
from tests.support.gpu.kernel_backends import needs_triton

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on sm_90."""

pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Facts of each kernel."""
    facts: dict[str, Any] = _output_of("compile_kernels", tmp_path_factory.mktemp("triton"))
    return facts


def _output_of(program: str, cache: Path) -> Any:
    """In a process of its own: in this one kernels are interpreted."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", f"tests.support.gpu.{program}"]
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_compiles_and_fits(compiled: dict[str, Any]) -> None:
    assert len(compiled) > 10
    for name, facts in compiled.items():
        assert facts["binary"] and facts["shared"] <= SHARED_MEMORY, name


def test_no_request_needs_a_kernel_that_the_start_did_not_compile(tmp_path: Path) -> None:
    """By Triton's own rule of what is a variant: which pointers are aligned, which integers are whole, which is 1."""
    output = _output_of("launch_kernels", tmp_path)
    assert output["tokens"] > 50 and {"attention_kernel", "int8_product_kernel", "sample_kernel"} <= {
        name.split()[0] for name in output["early"]
    }
    assert not output["late"]


def test_attention_takes_no_more_memory_than_is_reckoned_with(compiled: dict[str, Any]) -> None:
    for name, head_dim, item_size, stages in (("prefill", 128, 2, 3), ("window", 256, 2, 2), ("float32", 80, 4, 1)):
        took = compiled[f"{name} attention_kernel"]["shared"]
        assert took <= attention_bytes(padded_dim(head_dim), item_size, stages), name


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, SHARED_MEMORY])
def test_attention_is_launched_with_as_many_stages_as_fit(shared_bytes: int) -> None:
    """99 KiB: Ada, and Ampere's small ones; 163: A100. What fits nowhere is not for these kernels."""
    for head_dim, item_size in itertools.product((12, 64, 128, 192, 256, 512), (2, 4)):
        stages = attention_launch(padded_dim(head_dim), item_size, shared_bytes)["num_stages"]
        fits = attention_bytes(padded_dim(head_dim), item_size, stages) <= shared_bytes
        assert fits == attention_fits(head_dim, item_size, shared_bytes)
    assert attention_launch(128, 2)["num_stages"] == 3 and attention_launch(256, 2)["num_stages"] == 2
    assert attention_fits(128, 2, shared_bytes) and not attention_fits(512, 4, shared_bytes)


def test_prompts_and_single_tokens_go_through_the_same_matrix_instructions(compiled: dict[str, Any]) -> None:
    """Instructions of other shapes add in another order, and another layout sums rows in another one.

    async_wait num = 2: the keys and values of one more tile may be on their way. 0 would wait for all loads.
    """
    prefill, *decode = (compiled[f"{name} attention_kernel"] for name in ("prefill", "decode", "short"))
    assert prefill["units"] and {max(facts["waits"]) for facts in (prefill, *decode)} == {2}
    for facts in decode:
        assert [facts[name] for name in ("units", "layouts", "threads")] == [
            prefill[name] for name in ("units", "layouts", "threads")
        ]


def test_nothing_is_fused_where_two_variants_of_a_kernel_must_agree(compiled: dict[str, Any]) -> None:
    names = [name for name in compiled if name.endswith((" attention_kernel", " merge_kernel"))]
    assert [name for name in names if compiled[name]["fused"]] == ["float32 attention_kernel"]


def test_int8_goes_through_one_kind_of_matrix_unit(compiled: dict[str, Any]) -> None:
    """Of 16 tokens as of 64: 64 rows of the weight, 16 columns at a time, so that sums should be made in one order."""
    for name, tokens in (("int8 decode", 16), ("int8 prefill", 64)):
        facts = compiled[f"{name} int8_product_kernel"]
        assert facts["apart"] == ["n_rows", "x_stride"], "a number of tokens would be compiled while serving"
        assert facts["units"] == [f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"]
        assert facts["copies"], "loads wait for one another"
        assert facts["shared"] <= SHARED_MEMORY // 2, "two programs fit on a multiprocessor"


def test_rows_are_rounded_to_fp8_as_the_twin_rounds(compiled: dict[str, Any]) -> None:
    """Not by div.full.f32: nearly is not to the bit."""
    assert set(compiled["fp8 quantize_row_kernel"]["rounding"]) == {"cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"}
