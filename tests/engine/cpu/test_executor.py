"""The native kernels against the model they compute: numbers, cache blocks, levels. test_parity*.py has the rest."""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.common.types import SamplingParams
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.huge_pages import HugepageAllocator, zeros
from app.engine.cpu.library import LibraryError, address_of, load_library
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.builder import build, need_cache_directory
from app.engine.cpu.toolchain.cpu_target import AMX, X86_LEVELS, this_level
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from app.engine.sampling.parameters import SamplingInput
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from model.cache_formats import KvCache
from model.checkpoint.checkpoint import load, weights_files
from model.checkpoint.stored_weights import find_weights
from model.config import Activation, Experts, LayerKind, Rope
from model.files import CheckpointError, write_files
from model.nn.attention import CausalAttend
from model.nn.int8_cache import encode
from model.nn.transformer import Decoder
from model.quantize import packed_kind, quantized_formats
from model.weight_formats import Quantize
from tests.support.engine.native_sequences import random_sequence
from tests.support.model.tiny_models import (
    CPU_QUANTIZE,
    GPT2,
    ROPE,
    kernels,
    native_executor,
    native_executor_of,
    round_weights,
    tiny_config,
    tiny_decoder,
)

pytestmark = pytest.mark.usefixtures("native_library", "one_thread")
LENGTH = 70
STORED = ("bfloat16", "float16")
"""Formats of files that products in float32 read as they are."""
KV_CACHES: tuple[KvCache, ...] = get_args(KvCache)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "gpt_neox": {**GPT2, "positions": "none", "rope": Rope(dim=4), "parallel_residual": True, "activation": "gelu"},
    "qwen3": {"qk_norm": "head", "head_dim": 32},
    "wide heads": {"head_dim": 128, "width": 256, "n_heads": 3, "n_kv_heads": 1},
    "odd sizes": {"head_dim": 20, "width": 50, "mlp_width": 33, "n_heads": 6, "vocab_size": 99},
    "post-norm": {"norm": "layernorm", "norm_position": "post", "final_norm": False, "activation": "relu"},
    "window and cap": {"window": 20, "logit_soft_cap": 5.0, "tied_head": False, "head_bias": True},
    "layers of several kinds": {
        "n_layers": 4,
        "layer_kinds": (
            LayerKind(window=20, rope=Rope()),
            LayerKind(),
            LayerKind(window=7, rope=Rope(theta=50, dim=6)),
        ),
        "layer_types": (0, 1, 2, 0),
    },
    "experts": {
        "layer_kinds": (LayerKind(rope=Rope(), mlp="experts"),),
        "mlp_width": 0,
        "width": 50,
        "experts": Experts(count=9, chosen=3, width=33, normalized=True, factor=1.5, shared_width=20),
        "sinks": True,
    },
    "experts of gpt-oss": {
        "layer_kinds": (LayerKind(rope=Rope(), mlp="experts", window=20), LayerKind(rope=Rope(), mlp="experts")),
        "layer_types": (0, 1),
        "mlp_width": 0,
        "experts": Experts(count=16, chosen=4, width=40, score="softmax_of_chosen", router_bias=True, bias=True),
        "activation": "swiglu_clamped",
        "sinks": True,
    },
    **{name: {"activation": name} for name in get_args(Activation)},
}

FORMS = list(
    itertools.product(
        ("odd sizes", "gpt_neox", "experts", "experts of gpt-oss", *get_args(Activation)),
        (torch.float32, torch.bfloat16),
        CPU_QUANTIZE,
    )
)
"""Shapes, number formats, and values of --quantize."""


def _logits(executor: NativeExecutor, sequence: Sequence) -> Tensor:
    """Logits [T, V] of the whole sequence in one chunk, with the same blocks in every cache group."""
    sequence.blocks = sequence.blocks[:1] * len(executor.decoder.groups)
    executor.run(BatchPlan((Chunk(sequence, 0, len(sequence.tokens)),)))
    return torch.from_numpy(executor.logits(range(len(sequence.tokens))).copy())


def _expected(decoder: Decoder, sequence: Sequence) -> Tensor:
    """The same logits computed by torch."""
    tokens_T = torch.tensor(sequence.tokens)
    attend = CausalAttend(len(tokens_T), decoder.config.windows, decoder.config.attention_soft_cap)
    with torch.inference_mode():
        return decoder.head(decoder(tokens_T, torch.arange(len(tokens_T)), attend)).float()


def _exact(decoder: Decoder) -> Decoder:
    """The same weights, bit for bit, computed in float32."""
    copy = Decoder(decoder.config)
    copy.load_state_dict({name: tensor.float() for name, tensor in decoder.state_dict().items()})
    return copy.requires_grad_(False)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_the_decoder(shape: str) -> None:
    decoder = tiny_decoder(tiny_config(**SHAPES[shape]))
    sequence = random_sequence(LENGTH, decoder.config.vocab_size)
    assert torch.allclose(_logits(native_executor(decoder, 8), sequence), _expected(decoder, sequence), atol=5e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_close_to_float32_as_torch(shape: str) -> None:
    decoder = tiny_decoder(tiny_config(**SHAPES[shape]), dtype=torch.bfloat16)
    sequence = random_sequence(LENGTH, decoder.config.vocab_size)
    exact_TV = _expected(_exact(decoder), sequence)
    ours, torchs = _logits(native_executor(decoder, 8), sequence), _expected(decoder, sequence)
    assert (ours - exact_TV).square().mean() < 1.2 * (torchs - exact_TV).square().mean()


@pytest.mark.parametrize("shape", ["llama", "gpt2", "odd sizes", "window and cap"])
@pytest.mark.parametrize("quantize", CPU_QUANTIZE[1:])
def test_kernels_compute_with_the_weights_that_torch_rounds(shape: str, quantize: Quantize) -> None:
    decoder = tiny_decoder(tiny_config(**SHAPES[shape]))
    sequence = random_sequence(LENGTH, decoder.config.vocab_size)
    ours = _logits(native_executor(decoder, 8, quantize=quantize), sequence)
    kind = packed_kind(quantize)
    assert kind
    has_packed = any(quantized_formats(decoder.config, kind).values())  # no group divides odd sizes
    assert has_packed == (shape != "odd sizes")
    assert torch.allclose(ours, _expected(decoder, sequence), atol=0.05) != has_packed, "no weight was rounded"
    round_weights(decoder, kind)
    assert torch.allclose(ours, _expected(decoder, sequence), atol=5e-4)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", ["llama", "gpt2", "odd sizes", "experts", "experts of gpt-oss"])
def test_numbers_that_a_file_stores_in_16_bits_have_the_bits_of_float32(shape: str, stored: str) -> None:
    decoder = _rounded(tiny_decoder(tiny_config(**SHAPES[shape])), stored)
    sequence, wide = random_sequence(LENGTH, decoder.config.vocab_size), native_executor(decoder, 8)
    narrow = native_executor(decoder, 8, stored_format=lambda *_: stored)
    expected = _logits(wide, sequence)
    assert torch.equal(_logits(narrow, sequence), expected)
    _check_batch_invariance(narrow, sequence, expected, sizes=(1, 2, 3, 5, 6, 7, 13, 40))
    least = sum(weight.numel() for weight in decoder.parameters() if weight.dim() > 1)
    assert narrow.decoder.memory.used_bytes < wide.decoder.memory.used_bytes - 1.5 * least, "they take less memory"


def _rounded(decoder: Decoder, stored: str) -> Decoder:
    """The decoder with numbers of this format; some are subnormal."""
    for tensor in decoder.state_dict().values():
        tensor.copy_(tensor.to(getattr(torch, stored)))
    decoder.embedding[0, :2] = torch.tensor([2**-24, -(2**-20)])
    return decoder


def test_non_finite_values_stay_in_their_sequence() -> None:
    decoder = tiny_decoder()
    decoder.embedding[7] = torch.nan  # tied: also a column of the logits
    sick, sound = random_sequence(40, 320), random_sequence(33, 320, first_block=4)
    sick.tokens[20] = 7
    sound.tokens[:] = array("q", (token if token != 7 else 8 for token in sound.tokens))
    executor = native_executor(decoder, 16)
    executor.run(BatchPlan((Chunk(sick, 0, 40), Chunk(sound, 0, 33))))
    logits_TV = torch.from_numpy(executor.logits(range(73)))[:, torch.arange(320) != 7]
    assert logits_TV[40:].isfinite().all() and logits_TV[20:40].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, {**GPT2, "width": 52, "head_dim": 13}), (torch.bfloat16, {"width": 51, "head_dim": 20})],
)
def test_non_finite_values_do_not_outlive_their_step(dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """Also in the padding behind a row whose width is no whole number of vectors; the next step's row lies there."""
    decoder = tiny_decoder(tiny_config(**shape), dtype=dtype)
    sound, sick = random_sequence(20, 320), random_sequence(20, 320, first_block=8)
    sound.tokens[:] = array("q", (token if token != 7 else 8 for token in sound.tokens))
    expected = _logits(native_executor(decoder, 16), sound)
    decoder.embedding[7] = torch.nan
    sick.tokens[3] = 7
    executor, others = native_executor(decoder, 16), torch.arange(320) != 7
    assert _logits(executor, sick)[3:, others].isnan().all(), "positive control"
    assert torch.equal(_logits(executor, sound)[:, others], expected[:, others])


def test_sequence_without_enough_blocks_is_an_assertion_error() -> None:
    sequence = random_sequence(40, 320)
    sequence.blocks[0].pop()
    with pytest.raises(AssertionError, match="blocks"):
        _logits(native_executor(tiny_decoder(), 8), sequence)


def test_blocks_are_cleared_and_copied_before_a_step() -> None:
    decoder = tiny_decoder()
    executor, first = native_executor(decoder, 16), random_sequence(20, 320)
    expected = _logits(executor, first)
    executor._caches[0][:, :, 5] = np.nan
    second = random_sequence(20, 320, first_block=4)
    plan = BatchPlan((Chunk(second, 16, 20),), clear=((0, 5),), copies=((0, 0, 4),))
    executor.run(plan)
    assert torch.equal(torch.from_numpy(executor.logits(range(4))), expected[16:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_packed_from_the_files_one_tensor_at_a_time(
    tmp_path: Path, dtype: torch.dtype, file_dtype: torch.dtype
) -> None:
    """The packed bits equal a decoder's in memory; non-finite numbers are found during packing."""
    write_files(tmp_path, weights_files(tiny_decoder(seed=3), dtype=file_dtype, eos_id=None, generation={}))
    whole = load(tmp_path, device=torch.device("cpu"), dtype=dtype).decoder
    stored, name = find_weights(tmp_path), str(dtype).removeprefix("torch.")
    sequence, pool = random_sequence(LENGTH, whole.config.vocab_size), ThreadPool(kernels(), 2)
    options: dict[str, Any] = {"dtype": name, "blocks": 8, "stored_format": stored.stored_format}
    executor = NativeExecutor(kernels(), stored.config, stored, pool, **options)
    assert torch.equal(_logits(executor, sequence), _logits(native_executor(whole, 8), sequence))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight holds numbers that are not finite"):
        NativeExecutor(kernels(), stored.config, stored, pool, **options)


def test_every_level_computes_the_same_bits() -> None:
    """avx2 is the variant for machines without AVX-512: two registers per vector, pairs of bfloat16 split."""
    assert this_level() in X86_LEVELS, "the test covers levels of x86-64 only"
    library = load_library(build(BuildRecipe(level=X86_LEVELS[-1]), need_cache_directory(None)))
    differ: list[object] = []
    forms = [(form, kv_cache) for form in FORMS for kv_cache in KV_CACHES if kv_cache == "auto" or form[2] == "none"]
    for form, kv_cache in forms:
        shape, dtype, quantize = form
        decoder = tiny_decoder(tiny_config(**SHAPES[shape]), dtype=dtype)
        options: dict[str, Any] = {"blocks": 8, "quantize": quantize, "kv_cache": kv_cache}
        executor = native_executor_of(library, decoder, ThreadPool(library, 2), **options)
        sequence = random_sequence(LENGTH, decoder.config.vocab_size)
        whole, here = _logits(executor, sequence), _logits(native_executor(decoder, **options), sequence)
        if not torch.equal(whole, here):
            differ.append((form, kv_cache))
        _check_batch_invariance(executor, sequence, whole, sizes=(1,))
    for shape, stored in itertools.product(("odd sizes", "gpt_neox", "experts of gpt-oss"), STORED):
        decoder = _rounded(tiny_decoder(tiny_config(**SHAPES[shape])), stored)
        options = {"blocks": 8, "stored_format": lambda *_, stored=stored: stored}
        executor = native_executor_of(library, decoder, ThreadPool(library, 2), **options)
        sequence = random_sequence(LENGTH, decoder.config.vocab_size)
        if not torch.equal(_logits(executor, sequence), _logits(native_executor(decoder, **options), sequence)):
            differ.append((shape, stored))
    tiles = [(form, kv_cache) for form, kv_cache in forms if form[1] == torch.bfloat16]
    assert differ == (tiles if this_level() == AMX else []), "tiles round differently"


INT8_CASES = {"alike": 1.0, "below the smallest scale": 2.0**-126, "not finite": 2.0**126}
"""Factors of the weights of keys and values."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", INT8_CASES)
def test_int8_cache_has_the_codes_and_scales_of_the_definition(case: str, dtype: torch.dtype) -> None:
    """Of the numbers that a cache without codes has, after rotation and rounding."""
    decoder = tiny_decoder(tiny_config(n_layers=1, rope=ROPE if case == "alike" else None), dtype=dtype)
    decoder.blocks[0].attention.qkv.weight[64:] *= INT8_CASES[case]
    (numbers,), (codes, scales) = _cached(decoder, "auto"), _cached(decoder, "int8")
    expected_codes, expected_scales = encode(numbers)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales.view(torch.int16), expected_scales.view(torch.int16))
    if case == "not finite":
        assert 0 < scales.isnan().float().mean() < 1 and not scales.isinf().any(), "a score of -inf has no weight"
    else:
        assert codes.any() == (case == "alike") and numbers.abs().max() > 0


def _cached(decoder: Decoder, kv_cache: KvCache) -> list[Tensor]:
    """[2, blocks, kv head, slot, head_dim] of the first layer after one prompt: numbers; or codes, and their scales."""
    native, sequence = (
        native_executor(decoder, 8, kv_cache=kv_cache),
        random_sequence(LENGTH, decoder.config.vocab_size),
    )
    native.run(BatchPlan((Chunk(sequence, 0, LENGTH),)))
    (cache,), step = native._caches, 2 if decoder.embedding.dtype == torch.bfloat16 else 1
    blocks, scales = torch.from_numpy(cache[0, :, : LENGTH // 16]), []
    if kv_cache == "int8":
        scales = [blocks[..., -32:].contiguous().view(torch.bfloat16)]
        blocks = blocks[..., :-32].view(torch.int8)
        blocks = blocks.unflatten(-1, (-1, step, 16)).transpose(-1, -2).flatten(-3)  # as pairs of numbers
    elif step == 2:
        blocks = blocks.view(torch.bfloat16)
    keys = blocks[0].unflatten(-1, (-1, 16, step)).transpose(-3, -2).flatten(-2)
    values = blocks[1].unflatten(-1, (16 // step, -1, step)).transpose(-2, -1).flatten(-3, -2)
    return [torch.stack([keys, values]), *scales]


@pytest.mark.parametrize("shape", ["odd sizes", "gpt_neox", "wide heads", "window and cap", "experts"])
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_row_has_the_same_bits_in_chunks_of_every_size(shape: str, quantize: Quantize) -> None:
    """Up to 16 rows are one tile, more than 32 are several; includes numbers that are subnormal in float32."""
    check_chunks(shape, quantize, "auto")


@pytest.mark.parametrize("shape", ["odd sizes", "wide heads"])
def test_row_has_the_same_bits_in_chunks_of_every_size_with_an_int8_cache(shape: str) -> None:
    """More query rows than the kernels take at once decode the codes first, fewer read codes; with tiles all decode."""
    check_chunks(shape, "none", "int8")


def check_chunks(shape: str, quantize: Quantize, kv_cache: KvCache) -> None:
    """Compares rows of chunks of 1 to 48 tokens with those of the whole sequence."""
    config = tiny_config(**SHAPES[shape])
    decoder = tiny_decoder(config, dtype=torch.bfloat16)
    decoder.embedding[::7] *= 2.0**-131
    executor = native_executor(decoder, 8, quantize=quantize, kv_cache=kv_cache)
    sequence = random_sequence(LENGTH, config.vocab_size)
    _check_batch_invariance(
        executor, sequence, _logits(executor, sequence), sizes=(1, 2, 5, 15, 16, 17, 31, 32, 33, 48)
    )


def _check_batch_invariance(executor: NativeExecutor, sequence: Sequence, whole: Tensor, *, sizes: Items[int]) -> None:
    length = len(sequence.tokens)
    for size in sizes:
        for start in range(0, length, size):
            stop = min(start + size, length)
            executor.run(BatchPlan((Chunk(sequence, start, stop),)))
            rows = torch.from_numpy(executor.logits(range(stop - start)))
            assert torch.equal(rows, whole[start:stop]), f"{size} rows at once"
            assert torch.equal(torch.from_numpy(executor.logits([0])), whole[start : start + 1]), "head of one row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_step_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """Other numbers of threads read the cache that one thread wrote, in the same decoder."""
    decoder = tiny_decoder(dtype=dtype)
    alone, shared = native_executor(decoder, 64, threads=1), native_executor(decoder, 64, threads=1)
    sessions = [shared.session_on(ThreadPool(kernels(), threads)) for threads in (2, 3, 5)]
    rows = [random_sequence(40, decoder.config.vocab_size, first_block=3 * row) for row in range(9)]
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        plan = BatchPlan(tuple(Chunk(row, start, stop) for row in rows))
        shared.session = sessions[start % 3]
        assert shared.session.pool.count > 1
        results = []
        for executor in (alone, shared):
            executor.run(plan)
            results.append(executor.logits(range(9 * (stop - start))).copy())
        assert np.array_equal(*results)


def test_sampler_keeps_its_thread_pool_alive() -> None:
    logits_SV = torch.randn(4, 20_000).numpy()  # enough for the threads to be woken
    rows = [SamplingInput(SamplingParams(seed=seed), [1], 1) for seed in range(4)]
    shared = NativeSampler(kernels(), 20_000, pool=ThreadPool(kernels(), 2))
    assert shared.sample(logits_SV, rows) == NativeSampler(kernels(), 20_000).sample(logits_SV, rows)


def test_file_other_than_a_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "not.so"
    path.write_bytes(b"nothing")
    with pytest.raises(LibraryError, match=r"not\.so: cannot be loaded"):
        load_library(path)


def test_memory_is_zeroed_private_and_in_cache_lines_that_do_not_overlap() -> None:
    """Shared memory would not get huge pages."""
    allocator, tensor = HugepageAllocator(), zeros((7, 33), np.dtype(np.uint16))
    assert address_of(tensor) % (2 << 20) == 0 and tensor.shape == (7, 33) and not tensor.any()
    pieces = sorted((allocator.allocate(size), size) for size in (1, 64, 65, 40 << 20, 3))
    assert all(address % 64 == 0 for address, _ in pieces)
    assert all(address + size <= after for (address, size), (after, _) in itertools.pairwise(pieces))
    maps = Path("/proc/self/maps").read_text()
    ranges = [(int(a, 16), int(b, 16), rights) for a, b, rights in re.findall(r"^(\w+)-(\w+) (\S+)", maps, re.M)]
    addresses = {address_of(tensor), *(address for address, _ in pieces)}
    assert {rights for a, b, rights in ranges if any(a <= address < b for address in addresses)} == {"rw-p"}
