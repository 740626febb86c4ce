"""Quantizing a decoder changes its results little; layers that stay unquantized are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.engine.gpu.linears import Quantize, describe_unquantized, quantize_decoder
from app.engine.quantization.int8_weights import round_weights
from app.engine.startup_checks import check_golden
from model.checkpoint.golden import GOLDEN_FILE, golden_file
from model.config import ModelConfig
from model.files import CheckpointError
from model.nn.reference import logits
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import tiny_config, tiny_decoder, tiny_engine

PROMPT = [(7 * i) % 319 + 1 for i in range(40)]
UNTIED = tiny_config(tied_head=False, head_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, logit_soft_cap=30.0)
pytestmark = pytest.mark.usefixtures("one_thread")


def _installed(shape: ModelConfig, quantize: Quantize, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = tiny_decoder(shape, dtype=dtype)
    quantize_decoder(decoder, quantize)
    return decoder


@pytest.mark.parametrize("shape", [tiny_config(), UNTIED, tiny_config(n_encoder_layers=1)])
def test_int8_products_are_those_of_rounded_weights(shape: ModelConfig) -> None:
    rounded = tiny_decoder(shape)
    embedding = rounded.embedding
    round_weights(rounded)
    rounded.embedding = embedding  # on a GPU it stays
    source = PROMPT if shape.n_encoder_layers else None
    ours = logits(_installed(shape, "int8"), PROMPT, source=source)
    assert torch.allclose(ours, logits(rounded, PROMPT, source=source), rtol=1e-3, atol=2e-3)
    assert not torch.allclose(ours, logits(tiny_decoder(shape), PROMPT, source=source), rtol=1e-3, atol=2e-3)


def test_a_head_of_its_own_is_rounded_and_a_shared_one_is_not() -> None:
    hidden_SD = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for shape, is_rounded in ((tiny_config(), False), (UNTIED, True)):
        before, after = tiny_decoder(shape).head(hidden_SD), _installed(shape, "fp8").head(hidden_SD)
        assert (not torch.equal(before, after)) == is_rounded
        assert torch.allclose(before, after, atol=3.0)


def test_what_was_rounded_is_freed_and_still_counted() -> None:
    decoder = _installed(UNTIED, "fp8")
    kept = {name: each for name, each in decoder.named_parameters() if each.untyped_storage().nbytes() > 4}
    assert [name for name, each in kept.items() if each.ndim == 2] == ["embedding"]
    assert decoder.n_params == tiny_decoder(UNTIED).n_params


def test_the_log_hears_of_matrices_that_fp8_cannot_take() -> None:
    odd = tiny_decoder(tiny_config(mlp_width=168))
    assert describe_unquantized(odd, "fp8") == (
        "2 of 8 matrices are not quantized: fp8 requires multiples of 16, and their sizes are 64 x 168"
    )
    assert describe_unquantized(odd, "int8") is None and describe_unquantized(tiny_decoder(), "fp8") is None


def _prove(directory: Path, shape: ModelConfig) -> str:
    (directory / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    engine = tiny_engine(_installed(shape, "fp8", torch.bfloat16))
    return check_golden(engine, directory, tiny_config(), context=256, number_format="fp8")


def test_fp8_meets_the_golden_file_and_another_model_does_not(tmp_path: Path) -> None:
    assert _prove(tmp_path, tiny_config()).startswith(f"{GOLDEN_FILE} passed, mean difference")
    with pytest.raises(CheckpointError, match=r"golden\.json: the log-probabilities differ by a mean of \d"):
        _prove(tmp_path, tiny_config(norm_eps=5.0))
