"""The decoder against transformers' own llama, over weights that each side saved for the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from app.common.types import Request, SamplingParams
from model.checkpoint.checkpoint import load
from model.nn.attention import CausalAttend
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import tiny_decoder, tiny_engine, tiny_weights

SHAPES = [(4, 2, 16), (6, 6, 8), (3, 1, 32)]


def _logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.head(decoder(tokens, torch.arange(len(tokens)), CausalAttend(len(tokens))))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_weights_saved_by_transformers_give_equal_logits_and_greedy_text(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int, tied: bool
) -> None:
    torch.manual_seed(heads)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=80,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, device=torch.device("cpu"), dtype=torch.float32).decoder
    tokens = torch.randint(0, 99, (60,))
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert torch.allclose(_logits(ours, tokens), expected, atol=1e-4)
    assert _greedy_text_of_engine(ours, tokens[:20].tolist()) == _greedy_text_of_transformers(theirs, tokens[:20])


def _greedy_text_of_engine(decoder: Decoder, prompt: list[int]) -> list[int | None]:
    engine = tiny_engine(decoder, tokens_per_step=32)
    engine.add(Request(id="r", prompt=tuple(prompt), max_tokens=64, params=SamplingParams(temperature=0)))
    tokens = []
    while engine.has_work:
        tokens += [event.token for event in engine.step().events]
    return tokens


def _greedy_text_of_transformers(model: LlamaForCausalLM, prompt: torch.Tensor) -> list[int]:
    # Without a mask, generate() would guess one from the padding token in the prompt.
    mask = torch.ones_like(prompt)[None]
    out = model.generate(prompt[None], attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None)
    return list(out[0, len(prompt) :].tolist())


def test_weights_saved_here_load_in_transformers_with_equal_logits_and_tokens(tmp_path: Path) -> None:
    tiny_weights(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
    checkpoint = load(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    text = "Once upon a time \u201cthere\u201d was caf\u00e9 \U0001f98a"
    ids = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    tokens = torch.tensor(ids)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert torch.allclose(_logits(checkpoint.decoder, tokens), expected, atol=1e-4)
    assert checkpoint.eos_ids == (0,)


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
