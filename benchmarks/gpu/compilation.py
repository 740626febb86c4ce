"""Variants of the Triton kernels by model, compiled without a GPU in parallel processes, and facts of their code.

`python -m benchmarks.gpu.compilation --arch 90` prints the facts as JSON; with TRITON_INTERPRET=1 nothing is compiled.
Triton's cache (TRITON_CACHE_DIR) keeps the code, so engines and checks that start later find it there.

Shape legend: as in app/engine/gpu/kernels/interface.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from app.common.operating_system import die_with_parent
from app.engine.gpu.kernels.interface import (
    SPLIT,
    AttentionBatch,
    ExpertMatrices,
    ExpertsSpec,
    HeadsSpec,
    NormSpec,
    RouterSpec,
    RowState,
)
from app.engine.gpu.kernels.sample_out import SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.kernels.triton.operations import TritonKernels
from app.engine.gpu.kernels.triton.quantized_products import packed_product, quantize_fp8_rows
from app.engine.gpu.padded_lm_head import VOCAB_MULTIPLE
from benchmarks.gpu.conformance import attention as attention_checks
from benchmarks.gpu.conformance import experts as expert_checks
from benchmarks.gpu.conformance import packed as packed_checks
from benchmarks.gpu.conformance import rows as row_checks
from benchmarks.gpu.parity import LAYOUTS
from benchmarks.gpu.results import Finding, StageContext, shortened
from benchmarks.shapes import SHAPES
from model.config import Activation, Experts, LayerKind, ModelConfig, Norm, QueryScale, Rope
from model.decoder_program import ACTIVATION_PARAMETERS
from model.nn.feed_forward import Routes
from model.nn.packed_tensors import GroupTensors, PackedTensors
from model.packed_matrix import UNIT_COLUMNS, PackedFormat
from model.quantize import QuantizedKind

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have, by compute capability."""
BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
_ENGINE_BLOCK, _FP8_CAPABILITY = 64, 89
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\d+ +)?(.+?) *;")
Launch = Callable[[TritonKernels], object]
Launches = dict[str, Launch]
"""Calls of the kernels' Python functions, by a name. What a call compiles depends on shapes and formats only."""


def engine_launches(
    name: str, config: ModelConfig, dtype: torch.dtype = BF16, block: int = _ENGINE_BLOCK, max_running: int = 256
) -> Launches:
    """Everything that an engine with this model launches, except 8-bit products."""
    tile = max(16, 64 // (config.n_heads // config.n_kv_heads))  # as DeviceExecutor does
    table = -(-config.context // block)
    found: Launches = {}
    for kind in config.layer_kinds:
        shape = attention_checks.Shape(
            n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, head_dim=config.head_dim, block_size=block,
            lengths=(), window=kind.window, soft_cap=config.attention_soft_cap, sinks=config.sinks,
        )  # fmt: skip
        label = name if len(config.layer_kinds) == 1 else f"{name}, window {kind.window}"
        found |= {
            f"{label}: {what}, {splits}": partial(_attention, shape, dtype, table, tokens, splits)
            for (what, tokens), splits in itertools.product((("decode", 1), ("prompt", tile)), (1, 2))
            if splits == 1 or config.context > SPLIT
        }
        rotated = config.rotated_dim(kind.rope)
        heads = partial(_heads, config, rotated, dtype, block, kind.rope is not None)
        found[f"{label}: heads"] = heads
    for has_delta in (False, True):
        found[f"{name}: norm, {has_delta=}"] = partial(
            _norm, dtype, config.norm, config.width, has_delta, config.norm_bias,
            has_weight=config.norm_weight, is_wide=config.norm_offset,
        )  # fmt: skip
    if config.mlp_width:
        found[f"{name}: gate"] = partial(_gate, dtype, config.activation, config.mlp_width, config.gated)
    if config.experts:
        shared = config.experts.shared_width
        found |= (
            {f"{name}: shared gate": partial(_gate, dtype, config.activation, shared, config.gated)} if shared else {}
        )
        found[f"{name}: route"] = partial(_route, dtype, config)
        found |= {f"{name}: {what} experts": partial(_experts, dtype, config, n) for what, n in _expert_steps(config)}
    found[f"{name}: sampler"] = partial(_sample, dtype, config.vocab_size)
    found[f"{name}: rows"] = partial(_rows, max_running, table, block)
    return found


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Kernels are compiled for the shape and the format of a tensor; there are no numbers."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _empty(*shape, dtype=INT32)


def _attention(
    shape: attention_checks.Shape, dtype: torch.dtype, table: int, tile: int, splits: int, kernels: TritonKernels
) -> None:
    """With more than one split, also the merge."""
    batch = AttentionBatch(
        block_table_RB=_ints(9, table),
        tile_row_X=_ints(8),
        tile_start_X=_ints(8),
        tile_position_X=_ints(8),
        tile_length_X=_ints(8),
        tile_tokens=tile,
        max_splits=splits,
    )
    cache = _empty(2, 16, shape.block_size, shape.n_kv_heads, shape.head_dim, dtype=dtype)
    batch = kernels.divide_attention(batch, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.window)
    q_THC = _empty(8 * tile, shape.n_heads, shape.head_dim, dtype=dtype)
    sinks_H = _empty(shape.n_heads, dtype=dtype) if shape.sinks else None
    kernels.attention(q_THC, cache, batch, shape.window, shape.soft_cap, sinks_H)


def _heads(
    config: ModelConfig, rotated: int, dtype: torch.dtype, block: int, has_rope: bool, kernels: TritonKernels
) -> None:
    """With wide norms of queries and keys, these are kernels of their own."""
    heads, kv_heads, head_dim = config.n_heads, config.n_kv_heads, config.head_dim
    norm = _empty(head_dim, dtype=FP32 if config.norm_offset else dtype) if config.qk_norm == "head" else None
    spec = HeadsSpec(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        turned_dim=rotated,
        q_norm=norm,
        k_norm=norm,
        norms_after=config.qk_norm_after_rope,
        query_scale_P=_empty(99, dtype=FP32) if config.query_scale else None,
    )
    qkv_TX = _empty(8, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cache = _empty(2, 16, block, kv_heads, head_dim, dtype=dtype)
    kernels.split_heads(qkv_TX, spec, _ints(8), _empty(99, rotated, dtype=FP32) if has_rope else None, cache, _ints(8))
    if config.qk_norm == "width":
        for count in (heads, kv_heads):
            _norm(dtype, "rmsnorm", count * head_dim, False, False, kernels, has_weight=config.norm_weight)


def _norm(
    dtype: torch.dtype, kind: Norm, width: int, has_delta: bool, has_bias: bool, kernels: TritonKernels,
    has_weight: bool = True, is_wide: bool = False,
) -> None:  # fmt: skip
    x_TD, weight_D = _empty(8, width, dtype=dtype), _empty(width, dtype=FP32 if is_wide else dtype)
    bias_D = _empty(width, dtype=dtype) if has_bias else None
    norm = NormSpec(kind=kind, weight=weight_D if has_weight else None, bias=bias_D)
    kernels.add_norm(x_TD, x_TD if has_delta else None, norm)


def _gate(dtype: torch.dtype, kind: Activation, width: int, is_gated: bool, kernels: TritonKernels) -> None:
    parameters = _empty(2, dtype=FP32) if kind in ACTIVATION_PARAMETERS else None
    kernels.gate(_empty(8, width * (1 + is_gated), dtype=dtype), kind, is_gated, parameters)


def _expert_steps(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Numbers of tokens with items of 16 and of 64 tokens."""
    assert config.experts
    yield from (("few", 1), ("many", 17 * config.experts.count))


def _route(dtype: torch.dtype, config: ModelConfig, kernels: TritonKernels) -> None:
    experts, width = config.experts, config.width
    assert experts
    bias_E = _empty(experts.count, dtype=dtype)
    router = RouterSpec(
        experts=experts,
        weight_ED=_empty(experts.count, width, dtype=dtype),
        bias_E=bias_E if experts.router_bias else None,
        choice_bias_E=bias_E if experts.choice_bias else None,
    )
    kernels.route(_empty(8, width, dtype=dtype), router, _ints(8))


def _experts(
    dtype: torch.dtype,
    config: ModelConfig,
    n_tokens: int,
    kernels: TritonKernels,
    format_of: Callable[[int], PackedFormat] | None = None,
) -> None:
    """Six kernels; what a count or a grouping compiles depends on the sizes of the step alone.

    format_of: of packed matrices with so many columns.
    """
    experts, width = config.experts, config.width
    assert experts

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        shape, bias_EN = (experts.count, rows, columns), _empty(experts.count, rows, dtype=dtype)
        numbers = _packed(format_of(columns), shape) if format_of else _empty(*shape, dtype=dtype)
        return ExpertMatrices(numbers, bias_EN if experts.bias else None)

    spec = ExpertsSpec(
        up=matrices(experts.width * (1 + config.gated), width),
        down=matrices(width, experts.width),
        activation=config.activation,
        gated=config.gated,
    )
    routes = Routes(_ints(n_tokens, experts.chosen), _empty(n_tokens, experts.chosen, dtype=FP32))
    kernels.experts(_empty(n_tokens, width, dtype=dtype), routes, spec)


def _sample(dtype: torch.dtype, vocab: int, kernels: TritonKernels) -> None:
    """Three kernels, of logits as padded_lm_head() lays them out."""
    logits_SV = _empty(8, -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, dtype=dtype)[:, :vocab]
    kernels.sample(logits_SV, _ints(8), _ints(8), SamplingTable(9, vocab, "meta"), SampleOut.empty(8, "meta"))


def _rows(max_running: int, table: int, block: int, kernels: TritonKernels) -> None:
    state = RowState(_ints(max_running + 1, table), _ints(max_running + 1), block)
    kernels.look_up(_ints(8), _ints(8), None, state)
    kernels.look_up(_ints(8), _ints(8), _ints(8), state)


def _packed(packed_format: PackedFormat, shape: tuple[int, ...]) -> PackedTensors:
    (*_, columns), rows = shape, math.prod(shape[:-1])

    def numbers(values: torch.dtype) -> GroupTensors:
        has_units = packed_format.scales == "multiples"
        units = _empty(rows, -(-columns // UNIT_COLUMNS), dtype=FP16) if has_units else None
        return GroupTensors(values=_empty(rows, columns // packed_format.group, dtype=values), units=units)

    is_int4 = packed_format.bits == 4
    scales, offsets = {"float16": (FP16, FP16), "float32": (FP32, FP32)}.get(
        packed_format.scales, (torch.uint8 if is_int4 else torch.int8, torch.int8)
    )
    return PackedTensors(
        format=packed_format,
        shape=shape,
        codes=_empty(rows, columns * packed_format.bits // 8, dtype=torch.uint8 if is_int4 else torch.int8),
        scales=numbers(scales),
        offsets=numbers(offsets) if packed_format.has_offsets else None,
    )


def _product(packed_format: PackedFormat, n_tokens: int, has_bias: bool, _kernels: TritonKernels) -> None:
    weight = _packed(packed_format, (4096, 4096))
    packed_product(_empty(n_tokens, 4096), weight, _empty(4096) if has_bias else None)


def _fp8(_kernels: TritonKernels) -> None:
    quantize_fp8_rows(_empty(8, 4096))


QWEN3 = SHAPES["qwen3-8b"]
_ROUTED = LayerKind(rope=Rope(theta=1e6), mlp="experts")
QWEN3_MOE = replace(
    QWEN3, width=2048, n_kv_heads=4, layer_kinds=(_ROUTED,), mlp_width=0,
    experts=Experts(count=128, chosen=8, width=768, normalized=True),
)  # fmt: skip
"""Qwen3-30B-A3B."""
_GPT_OSS = replace(
    QWEN3, width=2880, n_heads=64, head_dim=64, layer_kinds=(replace(_ROUTED, window=128), _ROUTED),
    layer_types=(0, 1) * 18, mlp_width=0, qk_norm="none", sinks=True, activation="swiglu_clamped", vocab_size=201_088,
    experts=Experts(count=32, chosen=4, width=2880, score="softmax_of_chosen", router_bias=True, bias=True),
)  # fmt: skip
_SIGMOID = replace(
    QWEN3_MOE, width=520, n_heads=8, gated=False, activation="relu2",
    experts=Experts(count=9, chosen=3, width=200, score="sigmoid", choice_bias=True, factor=2.5, shared_width=96),
)  # fmt: skip
QUANTIZED: Launches = {
    **{
        f"{name}, {tokens} token{'s' * (tokens > 1)}": partial(_product, each, tokens, tokens > 1)
        for name, each in packed_checks.FORMATS.items()
        for tokens in (1, 64, 65)
    },
    "fp8": _fp8,
}
PACKED_EXPERTS: Launches = {
    f"{kind} {model}, {what} experts": partial(
        _experts, BF16, config, n, format_of=partial(packed_checks.format_of, kind)
    )
    for kind in get_args(QuantizedKind)
    for model, config in (("qwen3-moe", QWEN3_MOE), ("gpt-oss", _GPT_OSS))
    for what, n in _expert_steps(config)
}
_WIDE = replace(
    QWEN3, n_heads=16, n_kv_heads=2, head_dim=256, layer_kinds=(LayerKind(window=4096, rope=Rope()),), qk_norm="none"
)
_ODD = replace(
    QWEN3, n_heads=6, n_kv_heads=2, head_dim=80, norm="layernorm", norm_bias=True, layer_kinds=(LayerKind(),)
)
_CAPPED = replace(_WIDE, norm_offset=True, attention_soft_cap=50.0, norm_position="sandwich", qk_norm="head")
_CURVED = replace(
    QWEN3, norm_weight=False, qk_norm_after_rope=True, gated=False, activation="xielu",
    query_scale=QueryScale(beta=0.1, original_context=8192),
)  # fmt: skip
_ALL: Launches = {
    **engine_launches("qwen3", QWEN3),
    **engine_launches("gpt2", SHAPES["A"]),
    **engine_launches("wide", _WIDE, FP16, block=16),
    **engine_launches("float32", replace(_ODD, qk_norm="none", gated=False, activation="gelu"), FP32, block=48),
    **engine_launches("large blocks", replace(QWEN3, gated=False, activation="relu"), FP16, block=128),
    **engine_launches("capped", _CAPPED),
    **engine_launches("squared", replace(_ODD, n_heads=8, qk_norm="width", gated=False, activation="relu2")),
    **engine_launches("curved", _CURVED),
    **engine_launches("qwen3-moe", QWEN3_MOE),
    **engine_launches("gpt-oss", _GPT_OSS),
    **engine_launches("sigmoid", _SIGMOID, FP16),
    **engine_launches("sigmoid32", _SIGMOID, FP32),
    **QUANTIZED,
    **PACKED_EXPERTS,
}
_EXPERTS = tuple(f"{model}: {what} experts" for model in ("qwen3-moe", "gpt-oss") for what in ("few", "many"))
_QWEN3, _GPT2 = (tuple(f"{model}: {what}" for what in ("decode, 2", "prompt, 1")) for model in ("qwen3", "gpt2"))
_FEW = {
    80: (*_QWEN3, *_EXPERTS),
    89: (*_GPT2, *_EXPERTS, "fp8"),
    90: (
        *(*_QWEN3, "qwen3: decode, 1", "qwen3: prompt, 2", "qwen3: sampler", "qwen3: heads", "qwen3: rows"),
        *("qwen3: gate", "qwen3: norm, has_delta=True", *_GPT2, "gpt2: heads", "gpt2: gate"),
        *("gpt2: norm, has_delta=True", "gpt2: norm, has_delta=False", "wide: decode, 2", "wide: prompt, 1"),
        *("float32: decode, 1", "float32: norm, has_delta=True", "float32: gate"),
        *("large blocks: decode, 2", "large blocks: prompt, 1", "large blocks: gate", *QUANTIZED),
        *("capped: decode, 2", "capped: prompt, 1", "capped: heads", "capped: norm, has_delta=True"),
        *("squared: gate", "squared: heads", "curved: gate", "curved: heads", "curved: norm, has_delta=False"),
        *("qwen3-moe: route", "gpt-oss: route", "sigmoid: route", *_EXPERTS, "sigmoid: few experts", *PACKED_EXPERTS),
        *("sigmoid32: few experts", "sigmoid32: many experts", "sigmoid32: shared gate"),
        *(f"gpt-oss, window {window}: decode, 2" for window in (128, None)),
        *("gpt-oss, window None: decode, 1", "gpt-oss, window None: prompt, 1", "gpt-oss, window None: prompt, 2"),
    ),
    100: (*_QWEN3, *_EXPERTS, *PACKED_EXPERTS, "fp8"),
}


def law_launches(capability: int, *, is_full: bool) -> Launches:
    """Launches that tests compile: on Hopper every branch of every kernel, elsewhere attention; is_full: all."""
    return _ALL if is_full else {name: _ALL[name] for name in _FEW[capability]}


def report_launches() -> Launches:
    """The launches of the stages of `make gpu-check`: engines, and the checks of conformance/."""
    found = dict(QUANTIZED)
    for routed, dtype in itertools.product(expert_checks.LARGE, expert_checks.FORMATS):
        config = replace(
            QWEN3_MOE, width=routed.width, experts=routed.experts, activation=routed.activation, gated=routed.gated
        )
        found[f"{routed}, {dtype}: route"] = partial(_route, dtype, config)
        for what, n in _expert_steps(config):
            format_of = partial(packed_checks.format_of, routed.quantize) if routed.quantize else None
            experts = partial(_experts, dtype, config, n, format_of=format_of)
            found[f"{routed}, {dtype}: {what} experts"] = experts
    for name in ("A", "1b", "8b", "qwen3-8b"):
        found |= engine_launches(name, SHAPES[name])
    for (name, config), dtype in itertools.product(LAYOUTS.items(), (FP32, BF16)):
        found |= engine_launches(f"{name}, {dtype}", config, dtype)
    for shape in attention_checks.LARGE:
        table = max(-(-length // shape.block_size) for length in shape.lengths) + 2
        for dtype, tile, splits in itertools.product(attention_checks.formats(shape), (1, 16, 64), (1, 2)):
            found[f"{shape}, {dtype}, {tile}, {splits}"] = partial(_attention, shape, dtype, table, tile, splits)
    for dtype, (_, width) in itertools.product(row_checks.FORMATS, row_checks.LARGE_WIDTHS):
        for kind, (delta, weight) in itertools.product(get_args(Norm), ((True, True), (False, True), (True, False))):
            has_bias = kind == "layernorm" and not delta
            norm = partial(_norm, dtype, kind, width, delta, has_bias, has_weight=weight)
            found[f"{kind}, {width}, {dtype}, {delta}, {weight}"] = norm
        for kind, gated in itertools.product(get_args(Activation), (True, False)):
            found[f"{kind}, {width}, {dtype}, {gated}"] = partial(_gate, dtype, kind, width * (2 - gated), gated)
    for vocab, dtype in itertools.product((16, 50_257, 128_256, 152_064), (FP32, BF16)):
        found[f"sampler, {vocab}, {dtype}"] = partial(_sample, dtype, vocab)
    return found


def _facts(kernel: Any) -> dict[str, Any]:
    """Facts of one compiled kernel."""
    code, types = kernel.asm["ptx"], kernel.src.signature
    # Of these integers, Triton compiles 1, multiples of 16 and all others apart.
    apart = [p.name for p in kernel.src.fn.params if types[p.name] in ("i32", "i64") and not p.do_not_specialize]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        dump = partial(subprocess.run, capture_output=True, text=True, check=True)
        registers, stack, local = map(int, _USAGE.findall(dump([tool, "-res-usage", file.name]).stdout)[-1])
        machine_code = dump([tool, "-sass", file.name]).stdout if stack + local else ""
    return {
        "apart": apart,
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": registers,
        "stack": stack + local,
        "stack_in_loops": stack_accesses_in_loops(machine_code),
        "fused": fused_products(code),
        "dequantized": dequantizations(code),
        "units": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S+", code))),
        "layouts": sorted(set(re.findall(r"#ttg\.nvidia_mma<\{[^}]*\}>", kernel.asm["ttgir"]))),
        "copies": code.count("cp.async.c"),
        "waits": [int(most) for most in re.findall(r"async_wait.*?num = (\d+)", kernel.asm["ttgir"])],
        "rounding": sorted(set(re.findall(r"cvt\.\S*e4m3\S*|div\.\S+f32", code))),
    }


def fused_products(code: str) -> int:
    """How many multiplications of PTX are fused with an addition.

    One whose addend is -0 is a product alone: bfloat16 has no other instruction for it.
    """
    minus_zeros = {*re.findall(r"\bmov\.b\d+\s+(%\w+), 0x8000(?:8000)?;", code)}
    return sum(addend not in minus_zeros for addend in re.findall(r"\bfma\.[^;]*,\s*([^,;]+);", code))


def dequantizations(code: str) -> int:
    """How many of the fused_products() multiply an integer, as scale * integer + offset does."""
    integers = {*re.findall(r"\bcvt\.rn\.f32\.[su]\d+\s+(%\w+),", code)}
    factors = re.findall(r"\bfma\.rn\.f32\s+%\w+,\s*([^,]+),\s*([^,]+),", code)
    return sum(not integers.isdisjoint(pair) for pair in factors)


def stack_accesses_in_loops(machine_code: str) -> list[int]:
    """Reads and writes of the stack in each innermost loop with a matrix product, in what `cuobjdump -sass` prints."""
    found = [(int(address, 16), text.split()) for address, text in _INSTRUCTION.findall(machine_code)]
    loops = [
        range(target, address)
        for address, words in found
        if words[0].startswith("BRA") and words[-1].startswith("0x") and (target := int(words[-1], 16)) < address
    ]
    counts = []
    for loop in loops:
        inside = [words[0] for address, words in found if address in loop]
        is_innermost = not any(other.start in loop and other.stop in loop for other in loops)
        if is_innermost and any("MMA" in name for name in inside):
            counts.append(sum(name.startswith(("LDL", "STL")) for name in inside))
    return counts


class Driver:
    """A GPU, as far as Triton queries it before a kernel is compiled."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def _compile(launch: Launch, capability: int, shared_bytes: int, with_facts: bool) -> dict[str, Any]:
    """Compiles what one call launches, in this process. Returns the facts of its kernels, by their names."""
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        del warmup
        compiled = run(kernel, *args, warmup=True, **options)
        found[kernel.__name__] = _facts(compiled) if with_facts else {}

    triton.runtime.driver.set_active(Driver(capability))
    JITFunction.run = compile_only
    try:
        launch(TritonKernels(shared_bytes=shared_bytes))
    finally:
        JITFunction.run = run
    return found


def compile_all(
    launches: Launches, capability: int, workers: int, *, shared_bytes: int = 0, with_facts: bool = True
) -> Iterator[tuple[str, dict[str, Any] | BaseException]]:
    """The facts of each launch, in order, or what its compiler raised; compiled by `workers` forked processes."""
    shared_bytes = shared_bytes or SHARED_BYTES[capability]
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=die_with_parent) as pool:
        tasks = {
            name: pool.submit(_compile, launch, capability, shared_bytes, with_facts)
            for name, launch in launches.items()
            if launch is not _fp8 or capability >= _FP8_CAPABILITY
        }
        for name, task in tasks.items():
            yield name, task.exception() or task.result()


def kernels(_context: StageContext) -> Iterator[Finding]:
    """Stage: compiles what later stages launch, one process for each core, and states what the code takes."""
    started, launches = time.monotonic(), report_launches()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, get_context("fork")) as pool:  # this process must not start CUDA: it forks others
        capability, shared_bytes = pool.submit(_device_limits).result()
    most, count = dict[str, tuple[int, int]](), 0
    for name, compiled in compile_all(launches, capability, workers, shared_bytes=shared_bytes):
        if isinstance(compiled, BaseException):
            yield Finding(what=name, value="does not compile", ok=False, note=shortened(str(compiled)))
            continue
        for kernel, facts in compiled.items():
            count += 1
            before = most.get(kernel, (0, 0))
            most[kernel] = max(before[0], facts["registers"]), max(before[1], facts["stack"])
    seconds = time.monotonic() - started
    note = f"{len(launches)} launches for sm_{capability} by {workers} processes, {seconds:.1f} s"
    yield Finding(what="compiled", value=count, unit="kernels", note=note)
    for kernel, (registers, stack) in most.items():
        yield Finding(what=kernel, value=registers, unit="registers at most", note=f"{stack} bytes of stack at most")


def _device_limits() -> tuple[int, int]:
    """Compute capability, and bytes of shared memory that a program may have."""
    major, minor = torch.cuda.get_device_capability()
    properties: Any = torch.cuda.get_device_properties(0)
    return 10 * major + minor, properties.shared_memory_per_block_optin


def main() -> int:
    """Prints the facts by capability, launch and kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=SHARED_BYTES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="every variant for every architecture")
    options = parser.parse_args()
    found: dict[int, dict[str, Any]] = {
        arch: dict(compile_all(law_launches(arch, is_full=options.full), arch, options.workers))
        for arch in options.arch
    }
    for error in (each for facts in found.values() for each in facts.values() if isinstance(each, BaseException)):
        raise error
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
