"""The padded LM head, for any vocabulary size, gives the logits of the model from aligned rows."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from app.engine.gpu.linears import VOCAB_MULTIPLE, Quantize, padded_lm_head, quantize_decoder
from model.config import ModelConfig
from model.nn.layers import product
from tests.engine.execution.test_parity import _requests
from tests.support.gpu.emulated_engine import tiny_device_engine
from tests.support.model.tiny_models import run_all, tiny_config, tiny_decoder, tiny_engine

ODD = 333
TIED = tiny_config(vocab_size=ODD)
UNTIED = tiny_config(vocab_size=ODD, tied_head=False, head_bias=True, logit_soft_cap=30.0)


@pytest.mark.parametrize("shape", [TIED, UNTIED], ids=["tied", "untied"])
def test_logits_are_those_of_the_model_in_rows_that_begin_at_whole_numbers(shape: ModelConfig) -> None:
    decoder = tiny_decoder(shape)
    hidden_SD = torch.randn(3, decoder.config.width, generator=torch.Generator().manual_seed(0))
    wanted_SV = decoder.head(hidden_SD)
    logits_SV = padded_lm_head(decoder)(hidden_SD)
    assert logits_SV.shape == (3, ODD) and torch.allclose(logits_SV, wanted_SV, rtol=1e-5, atol=1e-5)
    assert shape is UNTIED or logits_SV.stride() == (384, 1)
    assert torch.allclose(decoder.head(hidden_SD), wanted_SV, rtol=1e-5, atol=1e-5), "it is the same decoder"


@pytest.mark.parametrize("shape", [TIED, UNTIED], ids=["tied", "untied"])
def test_the_matrix_is_there_once(shape: ModelConfig) -> None:
    decoder = tiny_decoder(shape)
    before = decoder.embedding.detach().clone()
    head = padded_lm_head(decoder)
    matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
    assert matrix.shape == (ODD, decoder.config.width) and matrix.is_contiguous()
    assert matrix.untyped_storage().nbytes() == 384 * decoder.config.width * 4
    matrix.data.zero_()
    bias_V = torch.zeros(ODD) if decoder.head_bias is None else decoder.head_bias
    assert torch.equal(head(torch.ones(1, decoder.config.width)), decoder.cap_logits(bias_V)[None]), (
        "it is the one used"
    )
    assert decoder.untied_head is None or torch.equal(decoder.embedding, before)


def test_a_head_that_is_whole_or_rounded_stays_where_it_is() -> None:
    whole = tiny_decoder()
    assert whole.config.vocab_size % VOCAB_MULTIPLE == 0
    address = whole.embedding.data_ptr()
    assert padded_lm_head(whole) == whole.head and whole.embedding.data_ptr() == address
    kinds: dict[Quantize, bool] = {"int8": True, "fp8": False}  # fp8 takes no odd number of rows
    for quantize, is_rounded in kinds.items():
        decoder = tiny_decoder(UNTIED)
        quantize_decoder(decoder, quantize)
        assert (decoder.head_product is not product) == is_rounded
        assert (padded_lm_head(decoder) == decoder.head) == is_rounded


def test_a_device_draws_the_tokens_of_the_torch_way_from_an_odd_vocabulary() -> None:
    requests = [replace(request, max_tokens=min(6, request.max_tokens)) for request in _requests(6, seed=1)]
    wanted = run_all(tiny_engine(tiny_decoder(TIED), blocks=200), requests)
    drawn = run_all(tiny_device_engine(tiny_decoder(TIED), blocks=200), requests)
    assert {n: [e.token for e in es] for n, es in drawn.items()} == {
        n: [e.token for e in es] for n, es in wanted.items()
    }
