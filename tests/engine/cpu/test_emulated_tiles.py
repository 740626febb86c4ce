"""The kernels of the level amx, with tiles in software on a machine that has none.

Real tiles run all other tests on a machine that has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from app.engine.cpu.library import load_library
from app.engine.cpu.toolchain.builder import build
from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, CpuTarget, runs_here
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from model.cache_formats import KvCache
from model.packed_matrix import PackedFormat
from model.weight_formats import Quantize
from tests.engine.cpu.test_executor import check_chunks
from tests.engine.cpu.test_packed_matrices import check_packed_bits
from tests.engine.execution import test_parity_spans
from tests.support import ROOT
from tests.support.model import tiny_models
from tests.support.model.packed_decoders import KINDS
from tests.support.model.packed_matrices import FORMATS

_AMX, _AVX512_BF16 = X86_LEVELS[:2]
_TILES = ROOT / "tests/support/engine/emulated_tiles.h"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("native_library", "one_thread"),
    pytest.mark.skipif(not runs_here(_AVX512_BF16), reason="needs AVX-512 with bfloat16"),
    pytest.mark.skipif(runs_here(_AMX), reason="has tiles"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """The kernels as for AMX, with tiles in software."""
    flags = (*_AVX512_BF16.flags, "-D__AMX_BF16__", "-include", str(_TILES))
    level = CpuTarget(name="emulated", machine=_AVX512_BF16.machine, flags=flags)
    directory: Path = tmp_path_factory.mktemp("kernels")
    return load_library(build(BuildRecipe(level=level), directory))


@pytest.fixture(autouse=True)
def _with_tiles(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiny_models, "kernels", lambda: library)
    before = tiny_models.WAY.set("native")
    yield
    tiny_models.WAY.reset(before)


@pytest.mark.parametrize("shape", ["odd sizes", "gpt_neox", "wide heads", "window and cap", "experts"])
@pytest.mark.parametrize("quantize", tiny_models.CPU_QUANTIZE)
def test_row_has_the_same_bits_in_chunks_of_every_size(shape: str, quantize: Quantize) -> None:
    check_chunks(shape, quantize, "auto")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_packed_matrices_compute_the_bits_of_dense_ones(library: CDLL, packed_format: PackedFormat, kind: str) -> None:
    check_packed_bits(library, kind, packed_format, "bfloat16")


@pytest.mark.parametrize("case", test_parity_spans.CONFIGS)
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_row_has_the_same_bits_in_spans(case: str, kv_cache: KvCache) -> None:
    """Rows with keys in one span take a shorter path than those of a chunk with keys in several."""
    before = tiny_models.KV_CACHE.set(kv_cache)
    try:
        test_parity_spans.test_rows_have_the_same_bits_in_chunks_of_every_size(case, torch.bfloat16)
    finally:
        tiny_models.KV_CACHE.reset(before)


def test_tiles_are_used_and_compute_the_logits() -> None:
    """They round differently from other levels, so other bits prove that they computed."""
    config = test_parity_spans.CONFIGS["all positions"]
    decoder = tiny_models.tiny_decoder(config, dtype=torch.bfloat16)
    in_tiles_TV = test_parity_spans.chunked_logits(decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "kernels", lambda: load_library(tiny_models.find_or_build()))
        in_vectors_TV = test_parity_spans.chunked_logits(decoder)
    assert not torch.equal(in_tiles_TV, in_vectors_TV)
    assert (in_tiles_TV - in_vectors_TV).abs().max() < 0.05 * in_vectors_TV.std()
