"""Laws of the decoder over concatenated sequences; tests/model/families compares it with transformers."""

from __future__ import annotations

import torch

from model.nn.attention import CausalAttend
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import tiny_decoder


def _logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.head(decoder(tokens, torch.arange(len(tokens)), CausalAttend(len(tokens))))


def test_sequences_behind_one_another_do_not_see_one_another() -> None:
    decoder, tokens = tiny_decoder(), torch.randint(0, 320, (3, 200))
    positions = torch.arange(200).repeat(3)
    with torch.inference_mode():
        together = decoder(tokens.flatten(), positions, CausalAttend(200)).unflatten(0, (3, 200))
        for row in range(3):
            alone = decoder(tokens[row], positions[:200], CausalAttend(200))
            assert torch.allclose(together[row], alone, atol=1e-4)


def test_the_future_never_changes_the_past() -> None:
    decoder, tokens = tiny_decoder(), torch.randint(0, 320, (150,))
    changed = tokens.clone()
    changed[100:] = 5
    assert torch.equal(_logits(decoder, tokens)[:100], _logits(decoder, changed)[:100])
