"""The list of operations describes the network that Block.forward computes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig, NormPosition
from model.decoder_program import Kind, decoder_program
from model.nn.attention import CausalAttend, EncoderAttend, MemoryAttend
from model.nn.interpreter import Interpreter
from model.nn.transformer import Decoder
from tests.support.model.random_configs import random_config
from tests.support.model.tiny_models import tiny_config, tiny_decoder

_LENGTH = 12


def _attend(config: ModelConfig) -> CausalAttend:
    return CausalAttend(_LENGTH, config.windows, config.attention_soft_cap)


def _inputs(config: ModelConfig, sequences: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(config.vocab_size, (sequences * _LENGTH,), generator=generator)
    return tokens_T, torch.arange(_LENGTH).repeat(sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(60))
def test_interpreted_operations_have_the_bits_of_the_network(seed: int, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(random_config(seed), seed=seed, dtype=dtype)
    attend = _attend(decoder.config)
    with torch.inference_mode():
        inputs = _inputs(decoder.config, 2)
        wanted_TD, computed_TD = decoder(*inputs, attend), Interpreter(decoder)(*inputs, attend)
    assert torch.equal(wanted_TD, computed_TD) and wanted_TD.isfinite().all(), (seed, decoder.config)


@pytest.mark.parametrize("norm_position", get_args(NormPosition))
def test_interpreter_attends_to_an_encoder(norm_position: str) -> None:
    config = tiny_config(n_encoder_layers=2, norm_position=norm_position, qkv_bias=True, out_bias=True)
    decoder = tiny_decoder(config)
    attend = _attend(config)
    tokens_T, positions_T = _inputs(config, 1)
    real_1S = torch.ones(1, _LENGTH, dtype=torch.bool)
    with torch.inference_mode():
        cross = MemoryAttend(decoder.encode(tokens_T.flip(0), positions_T, EncoderAttend(real_1S)), real_1S)
        wanted_TD = decoder(tokens_T, positions_T, attend, cross)
        computed_TD = Interpreter(decoder)(tokens_T, positions_T, attend, cross)
    assert torch.equal(wanted_TD, computed_TD)


def test_a_missing_addition_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the comparisons above."""
    decoder = tiny_decoder(tiny_config())

    def without_last_addition(config: ModelConfig) -> list[object]:
        operations = decoder_program(config)
        last = max(i for i, operation in enumerate(operations) if operation.accumulates)
        return [op._replace(accumulates=i != last and op.accumulates) for i, op in enumerate(operations)]

    attend, inputs = (
        _attend(decoder.config),
        _inputs(decoder.config, 1),
    )
    monkeypatch.setattr("model.nn.interpreter.decoder_program", without_last_addition)
    with torch.inference_mode():
        assert not torch.equal(Interpreter(decoder)(*inputs, attend), decoder(*inputs, attend))


def test_every_operation_reads_what_an_earlier_one_wrote() -> None:
    for seed in range(60):
        written = {decoder_program(random_config(seed))[0].source}
        for operation in decoder_program(random_config(seed)):
            assert operation.source in written, (seed, operation)
            assert not operation.accumulates or operation.target in written, (seed, operation)
            written.add(operation.target)


def test_weights_of_a_decoder_are_used_once() -> None:
    for seed in range(60):
        decoder = Decoder(random_config(seed))
        operations = [op for op in decoder_program(decoder.config) if op.kind != Kind.HEAD]
        names = [weight.name for op in operations for weight in (*op.weights, *op.parameters)]
        twice = {name for name in names if names.count(name) > 1}
        assert all("norm_attention." in name for name in twice) and bool(twice) <= decoder.config.shared_norm, seed
        heads = {name for name in decoder.state_dict() if name in ("untied_head", "head_bias")}
        assert set(names) | heads == {*decoder.state_dict()}, seed
