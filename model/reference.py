"""Generation that recomputes everything for every token: slow, obviously right, the oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import Attend, CausalAttend
from model.transformer import Decoder


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompt: list[int],
    max_tokens: int,
    *,
    choose: Callable[[Tensor, int], int] | None = None,
    eos_ids: tuple[int, ...] = (),
    attend_for: Callable[[int], Attend] = CausalAttend,
) -> list[int]:
    """The tokens that follow `prompt`, up to and with the first of `eos_ids`.

    choose: (logits [V], position of the new token) -> its id; greedy with ties to the lowest id by default.
    attend_for: length -> how to attend over a sequence of that length.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        logits_V = next_logits(decoder, tokens, attend_for(len(tokens)))
        tokens.append(choose(logits_V, len(tokens)) if choose else int(logits_V.argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(prompt) :]


def next_logits(decoder: Decoder, tokens: list[int], attend: Attend) -> Tensor:
    """Logits [V] of the token after `tokens`."""
    device = decoder.embedding.device
    hidden_TD = decoder(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), attend)
    logits_1V = decoder.head(hidden_TD[-1:])
    return logits_1V[0].float()
