"""The padded LM head gives the logits of the unpadded one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.engine.gpu.linears import pack_decoder, quantize_decoder
from app.engine.gpu.padded_lm_head import padded_lm_head
from model.config import ModelConfig
from model.nn.layers import product
from tests.support.model.tiny_models import quantized_weights, tiny_config, tiny_decoder

ODD = 333
UNTIED = tiny_config(tied_head=False, head_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, logit_soft_cap=30.0)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "shape", [tiny_config(vocab_size=ODD), replace(UNTIED, vocab_size=ODD)], ids=["tied", "untied"]
)
def test_padded_head_gives_the_same_logits_in_aligned_rows_of_one_matrix(shape: ModelConfig) -> None:
    decoder = tiny_decoder(shape)
    hidden_SD = torch.randn(3, decoder.config.width, generator=torch.Generator().manual_seed(0))
    wanted_SV, embedding = decoder.head(hidden_SD), decoder.embedding.detach().clone()
    head = padded_lm_head(decoder)
    for logits_SV in (head(hidden_SD), decoder.head(hidden_SD)):
        assert logits_SV.shape == (3, ODD) and torch.allclose(logits_SV, wanted_SV, rtol=1e-5, atol=1e-5)
    assert shape is UNTIED or not shape.tied_head or head(hidden_SD).stride() == (384, 1)
    assert torch.equal(decoder.embedding, embedding)
    matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
    assert matrix.shape == (ODD, decoder.config.width) and matrix.is_contiguous()
    assert matrix.untyped_storage().nbytes() == 384 * decoder.config.width * 4
    matrix.data.zero_()
    bias_V = torch.zeros(ODD) if decoder.head_bias is None else decoder.head_bias
    assert torch.equal(head(hidden_SD[:1]), decoder.cap_logits(bias_V)[None]), "the padded matrix must be in use"


def test_aligned_or_quantized_head_is_not_padded() -> None:
    aligned = tiny_decoder()
    address = aligned.embedding.data_ptr()
    assert padded_lm_head(aligned) == aligned.head and aligned.embedding.data_ptr() == address
    for is_quantized in (True, False):  # fp8 does not support an odd number of rows
        decoder = tiny_decoder(replace(UNTIED, vocab_size=ODD))
        if is_quantized:
            pack_decoder(decoder, quantized_weights(decoder, "int8"))
        else:
            quantize_decoder(decoder)
        assert (padded_lm_head(decoder) == decoder.head) == is_quantized == (decoder.head_product is not product)
