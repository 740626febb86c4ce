"""Every kernel compiles for every GPU that Triton knows, without one, and the compiled code keeps its limits.

`--nightly` compiles every variant for every architecture; otherwise three of them get the attention of one model.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.engine.gpu.kernels.interface import SPLIT, attention_bytes, attention_fits, attention_launch, padded_dim
from benchmarks.gpu.conformance.packed import FORMATS
from tests.support import ROOT
from tests.support.gpu.kernel_backends import needs_triton

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have, by compute capability: A100, Ada, Hopper, Blackwell."""
MATRIX_UNITS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
CACHE = ROOT / "build/triton"
"""Triton's code of earlier runs, which it finds by a hash of the sources, the options and its own version."""
MAX_STACK = 64
"""Bytes of a thread. Registers that do not fit lie there, in memory."""
MAX_BLACKWELL_STACK = 216
"""The same on Blackwell for attention that adds split after split: outside the loops over tiles, as everywhere."""
WEIGHTS_PER_THREAD = 64
"""Of a tile of a packed matrix: with an offset, each is one multiplication that is fused with an addition."""
LAUNCHES_PER_LAYER = 10
LAUNCHES_PER_ROUTED_LAYER = 14
Facts = dict[str, Any]

pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, dict[str, Facts]]:
    """Properties of each kernel, by compute capability and `launch kernel`."""
    arguments = ["--arch", *map(str, SHARED_BYTES), *["--full"] * bool(request.config.getoption("--nightly"))]
    found = _output_of("benchmarks.gpu.compilation", *arguments)
    return {
        int(capability): {f"{name} {kernel}": facts for name, by in launches.items() for kernel, facts in by.items()}
        for capability, launches in found.items()
    }


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    """The variants that an engine needs, by Triton's own specialization: alignment, divisibility by 16, equal to 1."""
    facts: dict[str, Any] = _output_of("tests.support.gpu.launch_kernels")
    return facts


def _output_of(program: str, *arguments: str) -> Any:
    """Compiles in a new process, because kernels are interpreted in this one."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(CACHE)
    command = [sys.executable, "-m", program, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3000, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def _all(compiled: dict[int, dict[str, Facts]], kernel: str = "") -> Iterator[tuple[int, str, Facts]]:
    for capability, kernels in compiled.items():
        yield from ((capability, name, facts) for name, facts in kernels.items() if name.endswith(kernel))


def test_every_kernel_in_the_folder_is_compiled(compiled: dict[int, dict[str, Facts]]) -> None:
    """Functions that kernels call are compiled with them; their names have other suffixes."""
    sources = [path.read_text() for path in (ROOT / "app/engine/gpu/kernels/triton").glob("*.py")]
    written = {name for source in sources for name in re.findall(r"@triton\.jit.*\ndef (\w+_kernel)\(", source)}
    assert len(written) > 10 and written == {name.split()[-1] for name in compiled[90]}


def test_every_kernel_compiles_and_fits_on_every_gpu(compiled: dict[int, dict[str, Facts]]) -> None:
    """A thread may have at most 255 registers."""
    assert compiled.keys() == SHARED_BYTES.keys() and all(len(kernels) > 4 for kernels in compiled.values())
    assert len(compiled[90]) > 30
    for capability, name, facts in _all(compiled):
        assert facts["shared"] <= SHARED_BYTES[capability], (capability, name)
        assert 0 < facts["registers"] <= min(255, 65_536 // facts["threads"]), (capability, name)
        has_splits = capability == 100 and name.endswith(", 2 attention_kernel")
        most = MAX_BLACKWELL_STACK if has_splits else MAX_STACK
        assert facts["stack"] <= most, (capability, name, facts["stack"])


def test_loops_over_keys_and_values_do_not_access_the_stack(compiled: dict[int, dict[str, Facts]]) -> None:
    """Values on the stack cost one access for each split of 512 positions, not for each tile."""
    with_stack = [(capability, name, facts) for capability, name, facts in _all(compiled) if facts["stack"]]
    assert any(capability == 100 for capability, _, _ in with_stack)
    for capability, name, facts in with_stack:
        assert not any(facts["stack_in_loops"]), (capability, name, facts["stack_in_loops"])
        assert facts["stack_in_loops"] or not facts["waits"], (capability, name, "no loop was found")


def test_stack_accesses_are_counted_in_innermost_loops_only() -> None:
    compilation = pytest.importorskip("benchmarks.gpu.compilation", reason="imports Triton")
    lines = [
        "STL [R1+0x8], R4",
        "LDL R4, [R1+0x8]",  # 0x10: the outer loop
        "@!P0 BRA 0x80",
        "LDL R36, [R1+0x54]",  # 0x30: the inner loop
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT",
        "STL.64 [R1+0x78], R104",
        "@P0 BRA 0x30",
        "@P1 BRA 0x10",
        "BRA 0x80",
    ]
    code = "".join(f"        /*{16 * index:04x}*/    {line} ;    /* 0x0000 */\n" for index, line in enumerate(lines))
    assert compilation.stack_accesses_in_loops(code) == [2]


def test_two_attention_programs_fit_on_a_multiprocessor(compiled: dict[int, dict[str, Facts]]) -> None:
    """16-bit heads of up to 128, on Ada of up to 64: three stages of larger ones take half of the shared memory and 3
    KiB.

    Each program takes 1 KiB more than its own use.
    """
    for capability, name, facts in _all(compiled, " attention_kernel"):
        if facts["stages"] == 3 and (capability != 89 or name.startswith("gpt2")):
            assert 2 * facts["threads"] * facts["registers"] <= 65_536, (capability, name)
            assert 2 * (facts["shared"] + 1024) <= SHARED_BYTES[capability] + 1024, (capability, name)


def test_keys_and_values_are_prefetched_while_a_tile_is_computed(compiled: dict[int, dict[str, Facts]]) -> None:
    """async_wait num = 2: the keys and values of one more tile may be in flight. 0 would wait for all loads."""
    seen = set()
    for capability, name, facts in _all(compiled, " attention_kernel"):
        if name.startswith(("qwen3", "gpt2", "large blocks")):
            seen.add((capability, name[:4]))
            assert facts["stages"] == 3 and max(facts["waits"]) >= 2, (capability, name, facts["waits"])
    assert {(90, "qwen"), (90, "gpt2"), (80, "qwen"), (89, "gpt2"), (100, "qwen")} <= seen


def test_prompts_and_single_tokens_use_the_same_matrix_instructions(
    compiled: dict[int, dict[str, Facts]],
) -> None:
    """Instructions of other shapes add in another order, and another layout sums rows in another order."""
    for capability, kernels in compiled.items():
        attention = [name for name in kernels if name.endswith(" attention_kernel")]
        models = [
            [name for name in attention if name.startswith(model)]
            for model in ("qwen3", "gpt2", "gpt-oss, window None")
        ]
        assert any(models)
        for names in filter(None, models):
            assert len(names) >= 2
            first, *others = ([kernels[name][fact] for fact in ("units", "layouts", "threads")] for name in names)
            assert first[0] and all(unit.startswith(MATRIX_UNITS[capability]) for unit in first[0]), first
            assert all(other == first for other in others), (capability, names)


def test_kernels_whose_variants_must_agree_do_not_fuse_multiply_add(compiled: dict[int, dict[str, Facts]]) -> None:
    names = {name for _, name, facts in _all(compiled) if facts["fused"] and name.endswith(("on_kernel", "ge_kernel"))}
    assert all(name.startswith("float32") and name.endswith("attention_kernel") for name in names), names


@pytest.mark.parametrize("weight", FORMATS)
def test_packed_products_use_one_kind_of_matrix_unit(compiled: dict[int, dict[str, Facts]], weight: str) -> None:
    """For 16 tokens as for 64: 64 rows of the weight, 16 columns at a time, so that the order of sums is the same."""
    for name, tokens in ((f"{weight}, 1 token", 16), (f"{weight}, 64 tokens", 64)):
        facts = compiled[90][f"{name} packed_product_kernel"]
        assert facts["apart"] == ["n_rows", "x_stride"], "a token count would need a compilation while serving"
        assert facts["units"] == [f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"]
        assert facts["copies"], "loads wait for one another"
        assert facts["shared"] <= SHARED_BYTES[90] // 2, "two programs must fit on a multiprocessor"
        assert facts["fused"] == (WEIGHTS_PER_THREAD if FORMATS[weight].has_offsets else 0), "no sum is fused"


def test_product_is_fused_unless_its_addend_is_minus_zero() -> None:
    fused_products = pytest.importorskip("benchmarks.gpu.compilation").fused_products
    code = "mov.b16 \t%rs33, 0x8000;\nmov.b16 %rs34, 0x0000;\nfma.rn.bf16 \t%rs1, %rs2, %rs3, "
    addends = {"%rs33": 0, "%rs34": 1, "%rs4": 1}
    assert {addend: fused_products(f"{code}{addend};") for addend in addends} == addends
    assert fused_products("fma.rn.f32 %r1, %r2, %r3, 0f3F800000;\nmul.rn.f32 %r1, %r2, %r3;") == 1


def test_fused_product_is_a_dequantization_if_it_multiplies_an_integer() -> None:
    dequantizations = pytest.importorskip("benchmarks.gpu.compilation").dequantizations
    code = "cvt.rn.f32.u16 \t%r1, %rs1;\nmul.rn.f32 %r4, %r1, %r2;\nfma.rn.f32 \t%r9, "
    products = {"%r1, %r2, %r3": 1, "%r2, %r1, %r3": 1, "%r2, %r3, %r1": 0, "%r4, %r2, %r3": 0}
    assert {product: dequantizations(f"{code}{product};") for product in products} == products


def test_few_and_many_tokens_of_an_expert_use_one_kind_of_matrix_unit(compiled: dict[int, dict[str, Facts]]) -> None:
    """64 rows of the matrix, 16 or 64 tokens: the order of sums is the same, and no product is fused with a sum."""
    seen = set()
    for capability, kernels in compiled.items():
        for name, facts in kernels.items():
            model, _, rest = name.partition(" few experts ")
            if not rest.startswith("expert_"):
                continue
            seen.add((capability, model, rest))
            many = kernels.get(f"{model} many experts {rest}", facts)
            assert facts["apart"] == many["apart"] == [], "a token count would need a compilation while serving"
            assert facts["copies"] and many["copies"], "loads wait for one another"
            assert 2 * (many["shared"] + 1024) <= 227 << 10, "two programs must fit on a multiprocessor of Hopper"
            units, more = (
                [re.sub(r"\.m64n(16|64)k", ".m64k", unit) for unit in each["units"]] for each in (facts, many)
            )
            assert units == more, (capability, name)
            if not model.startswith("sigmoid32"):
                assert len(units) == 1 and units[0].startswith(MATRIX_UNITS[capability]), (capability, name)
                n_products = 1 + (rest == "expert_up_kernel") if model.startswith("int4") else 0
                n_products *= 1 + (capability == 100)  # where Triton computes a weight in two threads, not to move it
                for each in (facts, many):
                    assert each["fused"] == each["dequantized"] == n_products * WEIGHTS_PER_THREAD, (capability, name)
    both = {f"expert_{what}_kernel" for what in ("up", "down")}
    assert {
        (capability, f"{model}:", kernel)
        for capability in SHARED_BYTES
        for model in ("qwen3-moe", "gpt-oss")
        for kernel in both
    } <= seen
    assert {(90, f"{kind} qwen3-moe,", kernel) for kind in ("int8", "int4") for kernel in both} <= seen


def test_pieces_of_a_weight_share_one_variant(compiled: dict[int, dict[str, Facts]]) -> None:
    """The first row of a piece is a number that would otherwise need a compilation while serving."""
    for weight in FORMATS:
        facts = compiled[90][f"{weight}, 65 tokens dequantize_kernel"]
        assert facts["apart"] == [] and facts["registers"] <= 64, facts


def test_fp8_rounding_matches_the_reference(compiled: dict[int, dict[str, Facts]]) -> None:
    """Not by div.full.f32, which is not exact to the bit. For Ada, Triton rounds to float16 first."""
    rounding = {capability: facts["rounding"] for capability, _, facts in _all(compiled, " quantize_row_kernel")}
    direct, twice = ["cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"], ["cvt.rn.satfinite.e4m3x2.f16x2", "div.rn.f32"]
    assert rounding == {89: twice, 90: direct, 100: direct}


_STAGE = """
from benchmarks.gpu import compilation
from benchmarks.gpu.compilation import QUANTIZED, kernels
few = {"fp8": QUANTIZED["fp8"], "wrong": QUANTIZED["fp8"].__class__}
compilation.report_launches.__code__ = (lambda: few).__code__
compilation._device_limits.__code__ = (lambda: (90, 232448)).__code__
compilation.few = few
print(*((found.what, found.value, found.ok) for found in kernels(None)), sep="\\n")
"""


def test_stage_compiles_all_it_can_and_names_failures(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _STAGE]
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3000, check=True)
    wrong, compiled, kernel = run.stdout.splitlines()
    assert wrong == "('wrong', 'does not compile', False)" and compiled == "('compiled', 1, None)"
    assert kernel.startswith("('quantize_row_kernel', ") and list(tmp_path.iterdir())


def test_no_request_needs_a_kernel_not_compiled_at_startup(launched: dict[str, Any]) -> None:
    assert launched["tokens"] > 50 and {"attention_kernel", "packed_product_kernel", "sample_kernel"} <= {
        name.split()[0] for name in launched["early"]
    }
    assert not launched["late"]


def test_variant_table_has_all_kernels_of_an_engine(launched: dict[str, Any]) -> None:
    """So `make gpu-check` compiles them in parallel before its engines start."""
    assert not launched["missing"]


def test_captured_step_launches_few_kernels_per_layer(launched: dict[str, Any]) -> None:
    """The merge of attention's splits is one of them."""
    assert launched["layer"].count("linear") == 4 and "attention_kernel" in launched["layer"]
    assert len(launched["layer"]) <= LAUNCHES_PER_LAYER, launched["layer"]
    routed = launched["mixture"]["layer"]
    assert routed.count("linear") == 2 and "expert_up_kernel" in routed
    assert len(routed) <= LAUNCHES_PER_ROUTED_LAYER, routed


def test_mixture_needs_no_kernel_that_startup_or_the_variant_table_lacks(launched: dict[str, Any]) -> None:
    """With as few tokens as an expert's items have places, and with more."""
    mixture = launched["mixture"]
    assert mixture["tokens"] > 50 and {"expert_up_kernel", "choose_kernel", "group_kernel"} <= {
        name.split()[0] for name in mixture["early"]
    }
    assert not mixture["late"] and not mixture["missing"]


@pytest.mark.parametrize("shared_bytes", sorted(set(SHARED_BYTES.values())))
def test_attention_is_launched_with_as_many_stages_as_fit(shared_bytes: int) -> None:
    """99 KiB: Ada and small Ampere GPUs; 163 KiB: A100. What fits on none of them does not use these kernels."""
    for head_dim, item_size in itertools.product((12, 64, 128, 192, 256, 512), (2, 4)):
        launch = attention_launch(padded_dim(head_dim), item_size, shared_bytes)
        assert SPLIT % launch["POSITIONS"] == 0
        took = attention_bytes(padded_dim(head_dim), item_size, launch["POSITIONS"], launch["num_stages"])
        assert (took <= shared_bytes) == attention_fits(head_dim, item_size, shared_bytes)
    assert attention_launch(128, 2, shared_bytes)["num_stages"] == 3
    assert attention_launch(256, 2, shared_bytes)["num_stages"] == 2
    assert attention_fits(256, 2, shared_bytes) and not attention_fits(512, 4, shared_bytes)


def test_heads_of_128_have_tiles_of_64_positions_where_two_programs_share_a_multiprocessor() -> None:
    """Measured on an H100."""
    positions = {each: attention_launch(128, 2, shared)["POSITIONS"] for each, shared in SHARED_BYTES.items()}
    assert positions == {80: 32, 89: 32, 90: 64, 100: 64}
    assert attention_launch(64, 2, SHARED_BYTES[80])["POSITIONS"] == 64
    assert attention_launch(256, 2)["POSITIONS"] == attention_launch(128, 4)["POSITIONS"] == 32


def test_attention_takes_no_more_memory_than_estimated(compiled: dict[int, dict[str, Facts]]) -> None:
    launches = (("qwen3: prompt, 1", (128, 2, 64, 3)), ("wide: prompt, 1", (256, 2, 32, 2)))
    for name, sizes in (*launches, ("float32: decode, 1", (128, 4, 32, 1))):
        assert compiled[90][f"{name} attention_kernel"]["shared"] <= attention_bytes(*sizes), name
