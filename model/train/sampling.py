"""Short sample texts from a decoder for reports. Serving samples with app/engine/sampling/sampler.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.nn.reference import generate
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer
from model.train.data.examples import Prompt
from model.train.reporting.samples import Sample
from model.train.step.thread_pool import run_each

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Sampling parameters, named as in generation_config.json; temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """As in CTRL (Keskar et al., 2019), over prompt and text."""

    def __str__(self) -> str:
        """Description for the model card."""
        if not self.temperature:
            return "The likeliest token each time"
        how = f"temperature {self.temperature:g}, top_p {self.top_p:g}"
        return f"Drawn with {how} and repetition_penalty {self.repetition_penalty:g}"


DEFAULT_SAMPLING = SamplingSettings(temperature=0.8, top_p=0.95, repetition_penalty=1.05)
GREEDY_SAMPLING = SamplingSettings(temperature=0.0)


def generate_samples(
    decoder: Decoder, tokenizer: Tokenizer, prompts: Sequence[Prompt], max_tokens: int, sampling: SamplingSettings
) -> list[Sample]:
    """One sample per prompt, from a fixed seed: the same weights give the same texts. On a CPU, one per thread."""

    def draw(prompt: Prompt) -> Sample:
        text = sample_text(decoder, tokenizer, prompt, max_tokens, sampling)
        full_text = prompt.text + text if prompt.source is None else f"{prompt.text} -> {text.lstrip()}"
        return Sample(prompt=prompt.text, full_text=full_text)

    return run_each(draw, prompts) if decoder.embedding.is_cpu else list(map(draw, prompts))


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: Prompt, max_tokens: int, sampling: SamplingSettings
) -> str:
    """The text that follows `prompt`, up to the context or the end of the document."""
    generator, seen = torch.Generator().manual_seed(_SEED), list(prompt.tokens)

    def choose(logits_V: Tensor, _position: int) -> int:
        penalised_V = _penalised(logits_V.cpu(), seen, sampling.repetition_penalty)
        ordered_V, ids_V = (penalised_V / sampling.temperature).softmax(-1).sort(descending=True)
        ordered_V[ordered_V.cumsum(-1) - ordered_V >= sampling.top_p] = 0.0
        seen.append(int(ids_V[torch.multinomial(ordered_V, 1, generator=generator)]))
        return seen[-1]

    max_new_tokens = min(max_tokens, decoder.config.context - len(prompt.tokens))
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    chosen = choose if sampling.temperature else None
    ids = generate(decoder, prompt.tokens, max_new_tokens, source=prompt.source, choose=chosen, eos_ids=eos)
    return tokenizer.decode(ids)


def _penalised(logits_V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    ids = torch.tensor(sorted(set(seen)), dtype=torch.long)
    repeated = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(repeated > 0, repeated / penalty, repeated * penalty))
