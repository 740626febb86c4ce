"""Short texts drawn from a decoder, to be looked at after training. Serving samples with app/engine/sampler.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.reference import generate
from model.tokenizer import Tokenizer
from model.transformer import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a text is to be drawn for."""

    text: str
    """The start of the text, or the source of one."""
    tokens: list[int]
    source: list[int] | None = None
    """What the encoder reads, where there is one."""

    def joined(self, text: str) -> str:
        """The prompt and what came of it."""
        return self.text + text if self.source is None else f"{self.text} -> {text.lstrip()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How tokens are chosen; temperature 0 takes the likeliest."""

    temperature: float
    top_p: float = 1.0


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: Prompt, max_tokens: int, *, seed: int, drawing: Drawing
) -> str:
    """The text that follows `prompt`, up to the context or the end of the document."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits_V: Tensor, _position: int) -> int:
        ordered_V, ids_V = (logits_V.cpu() / drawing.temperature).softmax(-1).sort(descending=True)
        ordered_V[ordered_V.cumsum(-1) - ordered_V >= drawing.top_p] = 0.0
        return int(ids_V[torch.multinomial(ordered_V, 1, generator=generator)])

    room = min(max_tokens, decoder.config.context - len(prompt.tokens))
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    chosen = choose if drawing.temperature else None
    ids = generate(decoder, prompt.tokens, room, source=prompt.source, choose=chosen, eos_ids=eos)
    return tokenizer.decode(ids)
