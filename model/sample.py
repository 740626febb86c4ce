"""Short texts drawn from a decoder, to be looked at after training. Serving samples with app/engine/sampler.py."""

from __future__ import annotations

import torch
from torch import Tensor

from model.reference import generate
from model.tokenizer import Tokenizer
from model.transformer import Decoder


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, max_tokens: int, *, seed: int, temperature: float, top_p: float
) -> str:
    """The text that follows `prompt`, up to the context or the end of the document."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits_V: Tensor, _position: int) -> int:
        ordered_V, ids_V = (logits_V.cpu() / temperature).softmax(-1).sort(descending=True)
        ordered_V[ordered_V.cumsum(-1) - ordered_V >= top_p] = 0.0
        return int(ids_V[torch.multinomial(ordered_V, 1, generator=generator)])

    ids = tokenizer.encode(prompt)
    room = min(max_tokens, decoder.config.context - len(ids))
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return tokenizer.decode(generate(decoder, ids, room, choose=choose, eos_ids=eos))
